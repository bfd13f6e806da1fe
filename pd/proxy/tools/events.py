"""Events that parsers find in the text of an answer."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote before its answer."""

    text: str


class CallStart(NamedTuple):
    """A call begins; its arguments follow."""

    id: str
    name: str


class Arguments(NamedTuple):
    """More of the arguments, which are JSON, of the call that began last."""

    text: str


Event = Content | Reasoning | CallStart | Arguments


class OutputParser(Protocol):
    """Reads the text of one answer, which comes in pieces.

    What is found does not depend on how the text is cut into pieces. The parser holds back no more
    than may still turn out to be a part of a tag, of the beginning of a call, or of a value that
    is converted as a whole; in Python, the first ``MAX_UNDECIDED`` characters of a call. No text
    makes it raise.
    """

    def push(self, text: str) -> list[Event]:
        """Read another piece."""

    def close(self) -> list[Event]:
        """The text has ended: what was held back comes out."""
