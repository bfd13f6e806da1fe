"""Gives chat templates the calls of earlier turns in a form that they show.

Templates disagree about messages with calls. Some show calls only if the content is null or absent,
some take arguments as an object and others as a text, some take one call per message, and some
silently leave calls out. So we try all forms once per template, and check in each request whether
the template has read every call.
"""

from __future__ import annotations

import json
from collections import deque
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Message = dict[str, Any]
# Content of a message without text.
EmptyContent = Literal["", "null", "absent"]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_NAME, _KEY, _VALUE = "pd_probe_call", "pd_probe_key", "pd_probe_value"
# Some templates accept only ids of nine letters and digits.
_ID = "pdprobe01"
PROBE: list[Message] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": _ID,
                "type": "function",
                "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "b"},
]
PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "other",
            "description": "c",
            "parameters": {"type": "object", "properties": {"d": {"type": "string"}}},
        },
    }
]


class WatchedFunction(dict[str, Any]):
    """A called function that notes whether its name and arguments are read."""

    def __init__(self, function: dict[str, Any]) -> None:
        super().__init__(function)
        self._unread = {"name", "arguments"}

    def was_read(self) -> bool:
        return not self._unread

    def __getitem__(self, key: str) -> Any:
        self._unread.discard(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._unread.discard(key)
        return super().get(key, default)

    def _read_all(self) -> None:
        self._unread.clear()

    def __iter__(self) -> Any:
        self._read_all()
        return super().__iter__()

    def __repr__(self) -> str:
        self._read_all()
        return super().__repr__()

    def keys(self) -> Any:
        self._read_all()
        return super().keys()

    def values(self) -> Any:
        self._read_all()
        return super().values()

    def items(self) -> Any:
        self._read_all()
        return super().items()


class HistoryForm(NamedTuple):
    """A form of messages with calls.

    Attributes:
        content: content of a message with calls only.
        as_text: write arguments as JSON in a text, not as an object.
        apart: put a message's text into a message of its own before the calls.
        single: put each call into a message of its own, with its results after it.
    """

    content: EmptyContent
    as_text: bool
    apart: bool = False
    single: bool = False

    def prepare_messages(
        self, messages: list[Message]
    ) -> tuple[list[Message], list[WatchedFunction]]:
        """Convert messages to this form. Also return their functions."""
        prepared: list[Message] = []
        functions: list[WatchedFunction] = []
        for message in _split_calls(messages) if self.single else messages:
            if not has_calls(message):
                prepared.append(message)
                continue
            if self.apart and message["content"]:
                prepared.append(_drop_fields(message, ("tool_calls",)))
                message = _drop_fields(message, REASONING_FIELDS) | {"content": ""}
            mine = []
            for call in message["tool_calls"]:
                function = call["function"]
                if self.as_text:
                    text = json.dumps(function["arguments"], ensure_ascii=False)
                    function = function | {"arguments": text}
                mine.append(WatchedFunction(function))
            functions += mine
            calls = zip(message["tool_calls"], mine, strict=True)
            message = message | {"tool_calls": [call | {"function": f} for call, f in calls]}
            if not message["content"] and self.content == "absent":
                message = _drop_fields(message, ("content",))
            elif not message["content"]:
                message = message | {"content": None if self.content == "null" else ""}
            prepared.append(message)
        return prepared, functions


_CONTENTS: tuple[EmptyContent, ...] = ("", "null", "absent")
_FORMS = [HistoryForm(content, as_text) for as_text, content in product((False, True), _CONTENTS)]


def has_calls(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("tool_calls"))


def has_several_calls(message: Message) -> bool:
    return has_calls(message) and len(message["tool_calls"]) > 1


def has_text_beside_calls(message: Message) -> bool:
    return has_calls(message) and bool(message["content"])


def order_forms(render: Callable[[HistoryForm], str | None]) -> list[HistoryForm]:
    """List all forms. Those that show a call as a model would write it come first.

    Args:
        render: renders ``PROBE`` in a form; returns None if the template refuses it.
    """
    return sorted(_FORMS, key=lambda form: _rank_prompt(render(form)))


def _rank_prompt(prompt: str | None) -> int:
    if prompt is None or any(text not in prompt for text in (_NAME, _KEY, _VALUE)):
        return 2
    # The template printed a Python object, or quoted a text twice.
    return 1 if f"{{'{_KEY}'" in prompt or f'{{\\"{_KEY}' in prompt else 0


def _split_calls(messages: list[Message]) -> list[Message]:
    """Split messages with several calls.

    Each result comes after its call, because templates of models that make one call after the other
    take a result as that of the last call.
    """
    split: list[Message] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        if not has_several_calls(message):
            split.append(message)
            continue
        results: dict[object, list[Message]] = {}
        while rest and rest[0]["role"] == "tool":
            results.setdefault(rest[0].get("tool_call_id"), []).append(rest.popleft())
        for number, call in enumerate(message["tool_calls"]):
            if number == 1:
                message = _drop_fields(message, REASONING_FIELDS) | {"content": ""}
            split.append(message | {"tool_calls": [call]})
            split += results.pop(call.get("id"), ())
        for others in results.values():
            split += others
    return split


def _drop_fields(message: Message, names: Iterable[str]) -> Message:
    return {name: value for name, value in message.items() if name not in names}
