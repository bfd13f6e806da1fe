"""Messages of a chat, checked and with their content as one text."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

import msgspec
from pydantic import ConfigDict, Field, PlainValidator, with_config
from typing_extensions import TypedDict

from pd.proxy.requests.fields import describe_value, make_mismatch, make_problem
from pd.proxy.text.shown_calls import REASONING_FIELDS

# The template, which is a program, spends some time on each message.
MAX_MESSAGES = 16_384
MAX_CALLS = 128
# Limit for the arguments of all calls together, because we parse them. The limit on a body's
# values does not cover them: in the body each is a single text.
MAX_ARGUMENT_CHARACTERS = 1 << 20
# We accept roles outside OpenAI's list, because a template may know more.
MAX_ROLE_CHARACTERS = 64

# Maps the type of a part to the field with its text.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Parts with reasoning of the assistant. The field with the text has the name of the type.
_REASONING_PARTS = ("thinking", "reasoning")
# Encrypted reasoning. Only its author can read it.
_DROPPED_PARTS = ("redacted_thinking",)


class TextPart(TypedDict):
    """A part with text. Parts whose text is null are dropped."""

    type: Literal["text", "input_text", "output_text"]
    text: str | None


class RefusalPart(TypedDict):
    """A refusal of the assistant. It counts as text."""

    type: Literal["refusal"]
    refusal: str | None


class ThinkingPart(TypedDict):
    """Reasoning of the assistant. It becomes the message's `reasoning_content`."""

    type: Literal["thinking"]
    thinking: str | None


class ReasoningPart(TypedDict):
    """The same as `thinking`, under another name."""

    type: Literal["reasoning"]
    reasoning: str | None


class RedactedPart(TypedDict):
    """Encrypted reasoning of the assistant. It is dropped."""

    type: Literal["redacted_thinking"]


_Part = TextPart | RefusalPart | ThinkingPart | ReasoningPart | RedactedPart


class CalledFunction(TypedDict):
    """A called function and its arguments."""

    name: str
    arguments: NotRequired[
        Annotated[
            str | dict[str, object] | None,
            Field(description="JSON of an object. Any other text counts as `{}`."),
        ]
    ]


class InputCall(TypedDict):
    """A call that the assistant made."""

    id: NotRequired[str | None]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


@with_config(ConfigDict(extra="allow"))
class InputMessage(TypedDict):
    """A message as clients write it. Templates also see fields that are not listed here."""

    role: Annotated[
        str,
        Field(
            description="The author: `system`, `developer`, `user`, `assistant`, `tool`, or "
            "another role of the chat template."
        ),
    ]
    content: NotRequired[
        Annotated[
            str | list[_Part | str] | None,
            Field(
                description="A text or parts of one. Null is the empty text. Only the "
                "assistant's messages may have parts with reasoning."
            ),
        ]
    ]
    tool_calls: NotRequired[
        Annotated[list[InputCall] | None, Field(description="The assistant's calls.")]
    ]
    tool_call_id: NotRequired[
        Annotated[str | None, Field(description="The call that a tool's message answers.")]
    ]
    reasoning_content: NotRequired[
        Annotated[str | None, Field(description="The assistant's reasoning; also `reasoning`.")]
    ]


# A message with its content as one text. All other fields are as the client sent them.
ReadMessage = dict[str, object]


def read_messages(messages: object) -> list[ReadMessage]:
    """Check messages, and turn their content into text. Raises the error of the first wrong one."""
    if not isinstance(messages, list) or not messages:
        raise make_mismatch("a list of at least one message", messages)
    if len(messages) > MAX_MESSAGES:
        raise make_problem(f"has {len(messages)} messages; at most {MAX_MESSAGES} are allowed")
    size = sum(map(_count_argument_characters, messages))
    if size > MAX_ARGUMENT_CHARACTERS:
        raise make_problem(
            f"has calls with {size} characters of arguments; at most {MAX_ARGUMENT_CHARACTERS} are "
            "taken"
        )
    return [_read_message(message, number) for number, message in enumerate(messages)]


Messages = Annotated[
    list[ReadMessage], PlainValidator(read_messages, json_schema_input_type=list[InputMessage])
]


def _read_message(message: object, number: int) -> ReadMessage:
    if not isinstance(message, dict):
        raise make_mismatch("an object", message, number)
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE_CHARACTERS:
        raise make_mismatch(
            f"a string of 1 to {MAX_ROLE_CHARACTERS} characters", role, number, "role"
        )
    content = message.get("content")
    # We drop nulls, because a template may print them.
    message = {name: value for name, value in message.items() if value is not None}
    if role == "tool":
        _check_text(message, "tool_call_id", number)
    if role != "assistant":
        return message | {"content": _read_content(content, number, None)}
    thoughts: list[str] = []
    text = _read_content(content, number, thoughts)
    for name in REASONING_FIELDS:
        _check_text(message, name, number)
    reasoning = next((str(message[name]) for name in REASONING_FIELDS if message.get(name)), None)
    if thoughts and not reasoning:
        reasoning = "\n".join(thoughts)
    if reasoning:
        # Most templates read `reasoning_content`, but those of gpt-oss and LFM2.5 read `thinking`.
        message = {"thinking": reasoning} | message | {"reasoning_content": reasoning}
    calls = _read_calls(message.get("tool_calls"), number)
    if calls:
        message = message | {"tool_calls": calls}
    else:
        message.pop("tool_calls", None)
    return message | {"content": text}


def _check_text(message: dict[str, object], name: str, number: int) -> None:
    if not isinstance(message.get(name), str | None):
        raise make_mismatch("a string", message[name], number, name)


def _read_calls(calls: object, number: int) -> list[dict[str, object]]:
    """Check calls, and turn their arguments into objects, because templates loop over them."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise make_mismatch("a list of calls", calls, number, "tool_calls")
    if len(calls) > MAX_CALLS:
        raise make_problem(
            f"has {len(calls)} calls; at most {MAX_CALLS} are allowed", number, "tool_calls"
        )
    return [_read_call(call, (number, "tool_calls", i)) for i, call in enumerate(calls)]


def _count_argument_characters(message: object) -> int:
    """Count the characters of arguments to be parsed, even if the message is invalid."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    calls = calls if isinstance(calls, list) else []
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    given = [each.get("arguments") for each in functions if isinstance(each, dict)]
    return sum(len(text) for text in given if isinstance(text, str))


def _read_call(call: object, path: tuple[str | int, ...]) -> dict[str, object]:
    if not isinstance(call, dict):
        raise make_mismatch("an object", call, *path)
    if not isinstance(call.get("id"), str | None):
        raise make_mismatch("a string", call["id"], *path, "id")
    if call.get("type", "function") != "function":
        raise make_mismatch("'function'", call["type"], *path, "type")
    function = call.get("function")
    if not isinstance(function, dict):
        raise make_mismatch("an object", function, *path, "function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise make_mismatch(
            "the name of a function", function.get("name"), *path, "function", "name"
        )
    given = function.get("arguments")
    if not isinstance(given, str | dict | None):
        raise make_mismatch("an object or a text", given, *path, "function", "arguments")
    arguments = given if isinstance(given, dict) else parse_arguments(given or "")
    return call | {"type": "function", "function": function | {"arguments": arguments}}


def parse_arguments(text: str) -> dict[str, object]:
    """Parse the arguments of a call; anything but a JSON object becomes an empty one.

    We accept invalid JSON, because a client can only send back the call it got, and an answer may
    have ended in the middle of one.
    """
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _read_content(content: object, number: int, thoughts: list[str] | None) -> str:
    """Return a message's content as one text.

    Args:
        thoughts: receives the texts of reasoning parts; None if they are not allowed.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise make_mismatch("a string or a list of text parts", content, number, "content")
    texts: list[str] = []
    for part in content:
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT_PARTS:
            _append_part(part, _TEXT_PARTS[kind], texts, number)
        elif kind in _REASONING_PARTS and thoughts is not None:
            _append_part(part, kind, thoughts, number)
        elif kind not in _DROPPED_PARTS or thoughts is None:
            raise _make_part_error(part, number)
    return "\n".join(texts)


def _append_part(part: dict[str, object], field: str, texts: list[str], number: int) -> None:
    """Append the text of a part, unless it is null."""
    text = part.get(field, ...)
    if isinstance(text, str):
        texts.append(text)
    elif text is not None:
        raise _make_part_error(part, number)


def _make_part_error(part: object, number: int) -> Exception:
    return make_problem(
        f'may contain only parts like {{"type": "text", "text": "…"}}, not {describe_value(part)}',
        number,
        "content",
    )
