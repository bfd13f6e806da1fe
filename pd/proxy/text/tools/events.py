"""Events in the text of an answer."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote before its answer."""

    text: str


class CallStart(NamedTuple):
    """The beginning of a call, before its arguments."""

    id: str
    name: str


class Arguments(NamedTuple):
    """A part of the last call's arguments, which are JSON."""

    text: str


Event = Content | Reasoning | CallStart | Arguments


class OutputParser(Protocol):
    """Reads the text of one answer, which arrives in pieces.

    The events do not depend on how the text is cut. The parser holds back as little as possible: a
    possible part of a tag or of a call's beginning, or a value that is converted as a whole. For
    Python it also holds the first ``MAX_UNDECIDED`` characters of a call. No text makes it raise.
    Every call has arguments, but if a call is cut off, they are never valid JSON.
    """

    @property
    def call_is_open(self) -> bool:
        """Whether the arguments of the last call are incomplete."""

    def add_text(self, text: str) -> list[Event]:
        """Read another piece."""

    def close(self) -> list[Event]:
        """End the text, and return the events of everything held back."""
