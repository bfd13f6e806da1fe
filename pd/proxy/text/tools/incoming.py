"""Text that arrives in pieces, for parsers written as if they had all of it.

A parser is a generator. It yields when it needs more text, and continues with the next piece. So
its state is its position in the code, and it reads every character once.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
Steps = Generator[None, None, T]

# Limit on the characters held back while it is open whether a call begins.
MAX_HELD = 4096
# Limit on the characters of a call held back if only its end tells whether it is one.
MAX_UNDECIDED = 1024
_SPACE = re.compile(r"\s*")


class MalformedError(Exception):
    """The text is not what the parser expects, or ends too early."""


class Incoming:
    """The unread part of a text.

    Attributes:
        text: the text so far.
        at: position in ``text`` from which to read.
        ended: no more text will come.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._held: list[str] | None = None
        self._held_size = 0
        self._call: list[str] | None = None
        self._call_size = 0

    def add_piece(self, piece: str) -> None:
        """Add another piece."""
        self.text = self.text[self.at :] + piece
        self.at = 0

    @property
    def is_over(self) -> bool:
        """Whether the text has ended and all of it was read."""
        return self.ended and self.at == len(self.text)

    # ---- Holding text that may still become content.

    def start_holding(self, text: str = "") -> None:
        """Hold the text from here on, after ``text``."""
        self._held, self._held_size = [text], len(text)

    def take_held(self) -> str:
        """Stop holding, and return the text since :meth:`start_holding`."""
        held, self._held = self._held or [], None
        return "".join(held)

    def open_call(self, text: str) -> None:
        """Hold ``text`` and the text read from now on until the call is certain.

        This works in addition to :meth:`start_holding`.
        """
        self._call, self._call_size = [text], len(text)

    def close_call(self) -> str:
        """Stop holding a call, and return its text since :meth:`open_call`."""
        call, self._call = self._call or [], None
        return "".join(call)

    @property
    def is_undecided(self) -> bool:
        """Whether a call is held. It no longer is after ``MAX_UNDECIDED`` characters."""
        return self._call is not None

    def read_characters(self, size: int) -> str:
        """Read characters that have arrived.

        Raises MalformedError if too many are held, always at the same character.
        """
        too_many = self._held is not None and self._held_size + size > MAX_HELD
        if too_many:
            size = MAX_HELD - self._held_size
        part = self.text[self.at : self.at + size]
        self.at += size
        if self._held is not None:
            self._held.append(part)
            self._held_size += size
        if self._call is not None:
            self._call.append(part)
            self._call_size += size
            if self._call_size > MAX_UNDECIDED:
                self._call = None
        if too_many:
            raise MalformedError
        return part

    # ---- Reading.

    def wait_for_text(self) -> Steps[bool]:
        """Wait for a character. Return False if the text has ended."""
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def require_text(self) -> Steps[None]:
        """Wait for a character. Raises MalformedError if the text has ended."""
        if not (yield from self.wait_for_text()):
            raise MalformedError

    def peek_character(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end."""
        return self.text[self.at] if (yield from self.wait_for_text()) else ""

    def skip_space(self) -> Steps[None]:
        """Read white space."""
        while (yield from self.wait_for_text()):
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.read_characters(match.end() - self.at)
            if self.at < len(self.text):
                return

    def expect_tag(self, tag: str) -> Steps[None]:
        """Read a tag. Raises MalformedError if something else comes next."""
        if not (yield from self.read_one_of((tag,))):
            raise MalformedError

    def read_one_of(self, tags: Sequence[str]) -> Steps[str]:
        """Read the next tag if it is one of these; else read nothing and return an empty text."""
        while True:
            for tag in tags:
                if self.text.startswith(tag, self.at):
                    return self.read_characters(len(tag))
            rest = self.text[self.at : self.at + max(map(len, tags))]
            if self.ended or not any(tag.startswith(rest) for tag in tags):
                return ""
            yield

    def is_followed_by(self, tags: Sequence[str]) -> Steps[bool]:
        """Tell whether one of the tags comes next after white space. Nothing is read.

        The end of the text counts, too, even inside such a tag. So do more than ``MAX_HELD``
        characters of white space, because we do not wait any longer.
        """
        space, longest = 0, max(map(len, tags))
        while True:
            match = _SPACE.match(self.text, self.at + space)
            assert match is not None
            space = match.end() - self.at
            rest = self.text[match.end() : match.end() + longest]
            if space > MAX_HELD or rest.startswith(tuple(tags)):
                return True
            may_become_one = any(tag.startswith(rest) for tag in tags)
            if self.ended or not may_become_one:
                return may_become_one
            yield

    def skip_tag(self, tag: str) -> Steps[None]:
        """Read a tag if it comes next, even if the text ends inside it."""
        if not (yield from self.read_one_of((tag,))) and self.ended:
            rest = self.text[self.at : self.at + len(tag)]
            if tag.startswith(rest):
                self.read_characters(len(rest))

    def read_while(self, characters: re.Pattern[str], limit: int) -> Steps[str]:
        """Read matching characters, at most ``limit``.

        Args:
            characters: pattern for any number of characters.
        """
        parts: list[str] = []
        left = limit
        while left and (yield from self.wait_for_text()):
            match = characters.match(self.text, self.at, self.at + left)
            if match is None or not match[0]:
                break
            parts.append(self.read_characters(len(match[0])))
            left -= len(match[0])
        return "".join(parts)

    def pass_rest(self, show: Callable[[str], None]) -> Steps[None]:
        """Show the rest of the text."""
        while (yield from self.wait_for_text()):
            self._show(len(self.text), show)

    def pass_until(self, tags: Sequence[str], show: Callable[[str], None]) -> Steps[str]:
        """Show the text up to the first of several tags, and read this tag; empty if none came.

        If several tags begin at the same place, the first one in the sequence wins.
        """
        pattern = re.compile("|".join(map(re.escape, tags)))
        while True:
            match = pattern.search(self.text, self.at)
            if match is not None:
                self._show(match.start(), show)
                return self.read_characters(len(match[0]))
            self._show(len(self.text) if self.ended else self._find_certain_end(tags), show)
            if self.ended:
                return ""
            yield

    def _show(self, end: int, show: Callable[[str], None]) -> None:
        if end > self.at:
            show(self.read_characters(end - self.at))

    def _find_certain_end(self, tags: Sequence[str]) -> int:
        """Find the end of the text that cannot be a part of a tag."""
        longest = max(map(len, tags)) - 1
        for begin in range(max(self.at, len(self.text) - longest), len(self.text)):
            tail = self.text[begin:]
            if any(tag.startswith(tail) for tag in tags):
                return begin
        return len(self.text)
