"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopMatcher:
    """Passes text on up to a stop string, and holds back what may turn out to be a part of one.

    The stop string that is complete first counts; if several are complete at the same character,
    the longest does. So the result does not depend on how the text is cut into pieces.
    """

    __slots__ = ("_firsts", "_held", "_keeps", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, keeps: bool = False) -> None:
        """``keeps``: the stop string itself is shown."""
        self._stops, self._keeps = stops, keeps
        self._longest = max(map(len, stops), default=0)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Add text and return what may be shown. Once ``matched`` is set nothing more is.

        Args:
            may_match: False passes complete stop strings on (before ``min_tokens``).
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text  # nearly always; also without stop strings
        text = self._held + text
        if may_match and (found := self._first(text)):
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._keeps else text[:start]
        keep = self._open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that was held back; called when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first, the longest of several."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _open_suffix(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        tail = text[max(0, len(text) - self._longest + 1) :]
        for start, char in enumerate(tail):
            if char in self._firsts:
                end = tail[start:]
                if any(stop.startswith(end) and len(stop) > len(end) for stop in self._stops):
                    return len(end)
        return 0
