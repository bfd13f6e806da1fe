"""Items of OpenAI's Responses API, and their translation into messages of a chat."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from pd.proxy.requests.fields import describe_value, make_mismatch, make_problem
from pd.proxy.requests.messages import MAX_MESSAGES

Message = dict[str, Any]
Path = tuple[str | int, ...]

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# Parts for which a model would need more than text.
_MEDIA_PARTS = ("input_image", "input_file", "input_audio")
_ROLES = ("user", "assistant", "system", "developer")
_ITEMS = "'message', 'function_call', 'function_call_output' or 'reasoning'"
# Begins reasoning that we hid in ``encrypted_content``.
_OWN_REASONING = "pd1."


def hide_reasoning(text: str) -> str:
    """Make ``encrypted_content`` of a reasoning. It is opaque, and no secret to the client."""
    return _OWN_REASONING + base64.b64encode(text.encode(errors="replace")).decode()


def _reveal_reasoning(content: str) -> str:
    """Return the reasoning of ``encrypted_content``; empty if it is another server's."""
    if not content.startswith(_OWN_REASONING):
        return ""
    try:
        data = base64.b64decode(content.removeprefix(_OWN_REASONING), validate=True)
    except (binascii.Error, ValueError):
        return ""
    return data.decode(errors="replace")


def read_input(value: object) -> list[Message]:
    """Translate ``input``. Raises the error of the first wrong item."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise make_mismatch("a string or a list of at least one item", value)
    if len(value) > MAX_MESSAGES:
        raise make_problem(f"has {len(value)} items; at most {MAX_MESSAGES} are allowed")
    reader = _ItemReader()
    for number, item in enumerate(value):
        reader.read_item(item, (number,))
    reader.close_turn()
    messages = reader.messages
    if not messages:
        raise make_problem("has nothing but reasoning; send a message, too")
    if "tool_calls" in messages[-1]:
        raise make_problem(
            "ends with a function_call; send the function_call_output of each call after it"
        )
    return messages


def read_output(items: list[Message]) -> list[Message]:
    """Translate the items of our own response."""
    reader = _ItemReader()
    for number, item in enumerate(items):
        reader.read_item(item, (number,))
    reader.close_turn()
    return reader.messages


def name_results(messages: list[Message]) -> list[Message]:
    """Add the names of the functions to the results of calls, because some templates show them."""
    called: dict[str, str] = {}
    named = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            called[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in called:
            message = message | {"name": called[message["tool_call_id"]]}
        named.append(message)
    return named


class _ItemReader:
    """Translates items. Adjacent items of the assistant become one message, its turn."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts: list[str] = []
        self._text: str | None = None
        self._calls: list[Message] = []

    def close_turn(self) -> None:
        """End the assistant's turn. Reasoning without an answer is dropped."""
        if self._text is not None or self._calls:
            message: Message = {"role": "assistant", "content": self._text or ""}
            if self._thoughts:
                message["reasoning_content"] = "\n".join(self._thoughts)
            if self._calls:
                message["tool_calls"] = self._calls
            self.messages.append(message)
        self._thoughts, self._text, self._calls = [], None, []

    def read_item(self, item: object, path: Path) -> None:
        if not isinstance(item, dict):
            raise make_mismatch("an object", item, *path)
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        match kind:
            case "message":
                self._read_message(item, path)
            case "reasoning":
                self._continue_turn()
                self._thoughts.append(_read_reasoning(item, path))
            case "function_call":
                self._calls.append(_read_call(item, path))
            case "function_call_output":
                self.close_turn()
                self.messages.append(_read_result(item, path))
            case "item_reference":
                raise make_problem(
                    "is an item_reference; send the item itself, or previous_response_id", *path
                )
            case _:
                raise make_problem(
                    f"must be an item of the type {_ITEMS}, not {describe_value(kind)}",
                    *path,
                    "type",
                )

    def _continue_turn(self) -> None:
        """Begin a new turn if the open one has more than reasoning."""
        if self._text is not None or self._calls:
            self.close_turn()

    def _read_message(self, item: Message, path: Path) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise make_mismatch(f"one of {', '.join(_ROLES)}", role, *path, "role")
        text = _read_content(item.get("content"), (*path, "content"))
        if role == "assistant":
            self._continue_turn()
            self._text = text
        else:
            self.close_turn()
            self.messages.append({"role": role, "content": text})


def _read_content(content: object, path: Path) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise make_mismatch("a string or a list of parts", content, *path)
    return "\n".join(_read_part(part, (*path, number)) for number, part in enumerate(content))


def _read_part(part: object, path: Path) -> str:
    if not isinstance(part, dict):
        raise make_mismatch("an object", part, *path)
    kind = part.get("type")
    if kind in _MEDIA_PARTS:
        raise make_problem(f"is {kind!r}; this server takes text only", *path, "type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise make_mismatch(f"one of {', '.join(_TEXT_PARTS)}", kind, *path, "type")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise make_mismatch("a string", text, *path, _TEXT_PARTS[kind])
    return text


def _read_call(item: Message, path: Path) -> Message:
    call, name, arguments = item.get("call_id"), item.get("name"), item.get("arguments")
    if not isinstance(call, str):
        raise make_mismatch("a string", call, *path, "call_id")
    if not isinstance(name, str) or not name:
        raise make_mismatch("the name of a function", name, *path, "name")
    if not isinstance(arguments, str):
        raise make_mismatch("a string with JSON", arguments, *path, "arguments")
    return {"id": call, "function": {"name": name, "arguments": arguments}}


def _read_result(item: Message, path: Path) -> Message:
    call = item.get("call_id")
    if not isinstance(call, str):
        raise make_mismatch("a string", call, *path, "call_id")
    text = _read_content(item.get("output"), (*path, "output"))
    return {"role": "tool", "tool_call_id": call, "content": text}


def _read_reasoning(item: Message, path: Path) -> str:
    """Return the text of a reasoning item: its content, or else what we hid, or its summary."""
    texts: dict[str, str] = {}
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(field)
        if parts is None:
            continue
        if not isinstance(parts, list):
            raise make_mismatch("a list of parts", parts, *path, field)
        found = []
        for number, part in enumerate(parts):
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                raise make_mismatch(
                    f'{{"type": "{kind}", "text": "…"}}', part, *path, field, number
                )
            found.append(text)
        texts[field] = "\n".join(found)
    hidden = item.get("encrypted_content")
    if not isinstance(hidden, str | None):
        raise make_mismatch("a string", hidden, *path, "encrypted_content")
    return texts.get("content") or _reveal_reasoning(hidden or "") or texts.get("summary", "")
