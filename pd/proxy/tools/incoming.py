"""Text that comes in pieces, for parsers that are written as if all of it were there.

A parser is a generator. It yields where it needs more text than there is and goes on when another
piece came, so its state is the place in its code, and it reads every character once.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
Steps = Generator[None, None, T]

# Characters that are held back at most while it is open whether a call begins.
MAX_HELD = 4096
# Characters of a call that are held back at most where only its end tells whether it is one.
MAX_UNDECIDED = 1024
_SPACE = re.compile(r"\s*")


class MalformedError(Exception):
    """The text is not what the parser expects here, or ends too early."""


class Incoming:
    """The part of a text that was not read yet.

    Attributes:
        text, at: what came, and where reading goes on in it.
        ended: nothing more will come.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._held: list[str] | None = None
        self._held_size = 0
        self._call: list[str] | None = None
        self._call_size = 0

    def add(self, piece: str) -> None:
        """Another piece came."""
        self.text = self.text[self.at :] + piece
        self.at = 0

    @property
    def is_over(self) -> bool:
        """Whether the text has ended and all of it was read."""
        return self.ended and self.at == len(self.text)

    # ---- text that is read and may come out as content all the same

    def hold(self, text: str = "") -> None:
        """Keep what is read from here on, after ``text``."""
        self._held, self._held_size = [text], len(text)

    def release(self) -> str:
        """Return the text that was kept since :meth:`hold`, and keep no more."""
        held, self._held = self._held or [], None
        return "".join(held)

    def open_call(self, text: str) -> None:
        """Keep what is read from here on, after ``text``, until the call is known to be one; also
        where a part of it is held."""
        self._call, self._call_size = [text], len(text)

    def close_call(self) -> str:
        """Return the text that was kept since :meth:`open_call`, and keep no more."""
        call, self._call = self._call or [], None
        return "".join(call)

    @property
    def is_undecided(self) -> bool:
        """Whether a call is kept, which is not so any more once it has ``MAX_UNDECIDED``
        characters."""
        return self._call is not None

    def take(self, size: int) -> str:
        """Read characters that are there. Raises MalformedError if too many are held, always at
        the same character."""
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

    # ---- reading

    def fill(self) -> Steps[bool]:
        """Wait for a character; False if the text has ended."""
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def need(self) -> Steps[None]:
        """Wait for a character. Raises MalformedError if the text has ended."""
        if not (yield from self.fill()):
            raise MalformedError

    def peek(self) -> Steps[str]:
        """The next character, not read yet; empty at the end."""
        return self.text[self.at] if (yield from self.fill()) else ""

    def skip_space(self) -> Steps[None]:
        """Read white space."""
        while (yield from self.fill()):
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.take(found.end() - self.at)
            if self.at < len(self.text):
                return

    def expect(self, tag: str) -> Steps[None]:
        """Read a tag. Raises MalformedError where it is not."""
        if not (yield from self.one_of((tag,))):
            raise MalformedError

    def one_of(self, tags: Sequence[str]) -> Steps[str]:
        """Read the one of several tags that comes next; empty, and nothing read, if none does."""
        while True:
            for tag in tags:
                if self.text.startswith(tag, self.at):
                    return self.take(len(tag))
            rest = self.text[self.at : self.at + max(map(len, tags))]
            if self.ended or not any(tag.startswith(rest) for tag in tags):
                return ""
            yield

    def skip_tag(self, tag: str) -> Steps[None]:
        """Read a tag if it comes next, or the part of it with which the text ends."""
        if not (yield from self.one_of((tag,))) and self.ended:
            rest = self.text[self.at : self.at + len(tag)]
            if tag.startswith(rest):
                self.take(len(rest))

    def while_in(self, characters: re.Pattern[str], most: int) -> Steps[str]:
        """Read as long as the characters match, and no more than ``most``.

        Args:
            characters: matches any number of characters.
        """
        parts: list[str] = []
        left = most
        while left and (yield from self.fill()):
            found = characters.match(self.text, self.at, self.at + left)
            if found is None or not found[0]:
                break
            parts.append(self.take(len(found[0])))
            left -= len(found[0])
        return "".join(parts)

    def pass_rest(self, show: Callable[[str], None]) -> Steps[None]:
        """Show everything that comes."""
        while (yield from self.fill()):
            self._show(len(self.text), show)

    def pass_until(self, tags: Sequence[str], show: Callable[[str], None]) -> Steps[str]:
        """Show the text up to the first of several tags, and read that; empty if none came.

        Where several tags begin at one place, the first in the sequence counts.
        """
        pattern = re.compile("|".join(map(re.escape, tags)))
        while True:
            found = pattern.search(self.text, self.at)
            if found is not None:
                self._show(found.start(), show)
                return self.take(len(found[0]))
            self._show(len(self.text) if self.ended else self._certain(tags), show)
            if self.ended:
                return ""
            yield

    def _show(self, end: int, show: Callable[[str], None]) -> None:
        if end > self.at:
            show(self.take(end - self.at))

    def _certain(self, tags: Sequence[str]) -> int:
        """Return the beginning of the longest end of the text that may become a tag."""
        longest = max(map(len, tags)) - 1
        for begin in range(max(self.at, len(self.text) - longest), len(self.text)):
            tail = self.text[begin:]
            if any(tag.startswith(tail) for tag in tags):
                return begin
        return len(self.text)
