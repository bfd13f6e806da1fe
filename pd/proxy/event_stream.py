"""Server-sent events of an answer."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd.proxy.generation import Choice, Delta

_encoder = msgspec.json.Encoder()
# JSON allows them in strings and events in lines, but clients that read lines of text (httpx) take
# them for ends of lines.
_LINE_BREAKS = {
    char.encode(): f"\\u{ord(char):04x}".encode() for char in ("\x85", "\u2028", "\u2029")
}


class EventRenderer(Protocol):
    """An API's view of what a choice gained."""

    def events(self, choice: Choice, delta: Delta) -> Iterable[object]:
        """The values of events. From any thread."""

    def is_plain(self, choice: Choice) -> bool:
        """Whether :meth:`events` of each part of the choice, but for the first and that with the
        end, is one event, the same for all of them but for the text."""


class EventWriter:
    """Writes the events of one answer. Nearly all have the same JSON around a text, which is
    encoded once for each choice."""

    __slots__ = ("_around", "_before", "_behind", "_choice", "_renderer")

    def __init__(self, renderer: EventRenderer) -> None:
        self._renderer = renderer
        # What stands before and behind the text; before it is nothing where events are not alike.
        self._around: dict[Choice, tuple[bytes, bytes]] = {}
        # The choice that was written last, with the same.
        self._choice: Choice | None = None
        self._before = self._behind = b""

    def write(self, deltas: Sequence[tuple[Choice, Delta]]) -> bytes:
        """The events of these parts of choices, in their order. From any thread, one at a time."""
        parts: list[bytes] = []
        for choice, delta in deltas:
            if delta.first or delta.finish is not None:
                parts += map(event, self._renderer.events(choice, delta))
                continue
            if choice is not self._choice:
                self._choose(choice, delta)
            if self._before:
                parts += (self._before, _json(delta.text), self._behind)
            else:
                parts += map(event, self._renderer.events(choice, delta))
        return b"".join(parts)

    def _choose(self, choice: Choice, delta: Delta) -> None:
        """Have what stands around the texts of a choice at hand."""
        around = self._around.get(choice)
        if around is None:
            is_plain = self._renderer.is_plain(choice)
            around = self._encode_around(choice, delta) if is_plain else (b"", b"")
            self._around[choice] = around
        self._choice = choice
        self._before, self._behind = around

    def _encode_around(self, choice: Choice, delta: Delta) -> tuple[bytes, bytes]:
        mark = secrets.token_hex(16)  # which nothing else in the event contains
        (only,) = self._renderer.events(choice, delta._replace(text=mark))
        before, _, behind = event(only).partition(_json(mark))
        return before, behind


def event(value: object) -> bytes:
    """One event with a value in JSON."""
    return b"data: " + _json(value) + b"\n\n"


def _json(value: object) -> bytes:
    data = _encoder.encode(value)
    if not data.isascii():
        for char, escape in _LINE_BREAKS.items():
            data = data.replace(char, escape)
    return data
