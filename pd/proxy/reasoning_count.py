"""Counts the tokens with which an answer reasons, for ``usage``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from pd.proxy.reasoning import MAX_SPACE

if TYPE_CHECKING:
    from pd.proxy.detokenizer import Detokenizer
    from pd.proxy.reasoning import ReasoningTags, Stage

_SPACE = re.compile(rf"\s{{0,{MAX_SPACE}}}")


class ReasoningStart(NamedTuple):
    """The tags of a model's reasoning, and where an answer begins among them."""

    tags: ReasoningTags
    stage: Stage


class ReasoningCounter:
    """A :class:`pd.proxy.detokenizer.Detokenizer` that counts tokens up to the end of the reasoning
    in its text, as :class:`pd.proxy.reasoning.ReasoningParser` finds it."""

    __slots__ = ("_detokenizer", "_end", "_is_inside", "_is_reading", "_tags", "_tail", "_tokens")

    def __init__(self, detokenizer: Detokenizer, start: ReasoningStart) -> None:
        self._detokenizer = detokenizer
        self._tags = start.tags
        self._is_inside = start.stage == "inside"
        self._is_reading = start.stage != "behind"
        # The end of the text, as much of it as may be a part of the next tag.
        self._tail = ""
        self._tokens = 0
        # Tokens up to and including that with the end of the closing tag, once it came.
        self._end: int | None = None

    def count(self, total: int) -> int:
        """Tokens of reasoning among the first ``total`` ones: those up to and including the closing
        tag, or all of them if that did not come. From any thread."""
        if self._end is not None:
            return min(self._end, total)
        return total if self._is_inside else 0

    def push(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        if self._is_reading:
            self._tokens += 1
            self._read(text)
        return text

    def flush(self) -> str:
        text = self._detokenizer.flush()
        if self._is_reading:
            self._read(text)
        return text

    def _read(self, text: str) -> None:
        tags, text = self._tags, self._tail + text
        if not self._is_inside:
            space = _SPACE.match(text)
            assert space is not None
            begin = text[space.end() :]
            if not begin.startswith(tags.open):
                self._tail, self._is_reading = text, tags.open.startswith(begin)
                return
            self._is_inside, text = True, begin[len(tags.open) :]
        if tags.close in text:
            self._end, self._is_reading = self._tokens, False
        self._tail = text[-len(tags.close) + 1 :]
