"""Counts the tokens of an answer's reasoning for ``usage``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from pd.proxy.text.reasoning import MAX_SPACE

if TYPE_CHECKING:
    from pd.proxy.text.detokenizer import Detokenizer
    from pd.proxy.text.reasoning import ReasoningTags, Stage

_SPACE = re.compile(rf"\s{{0,{MAX_SPACE}}}")


class ReasoningStart(NamedTuple):
    """The tags of a model's reasoning, and where an answer begins relative to them."""

    tags: ReasoningTags
    stage: Stage


class ReasoningCounter:
    """A :class:`pd.proxy.text.detokenizer.Detokenizer` that counts the tokens of the reasoning.

    It finds the same end as :class:`pd.proxy.text.reasoning.ReasoningParser`.
    """

    __slots__ = ("_detokenizer", "_end", "_is_inside", "_is_reading", "_tags", "_tail", "_tokens")

    def __init__(self, detokenizer: Detokenizer, start: ReasoningStart) -> None:
        self._detokenizer = detokenizer
        self._tags = start.tags
        self._is_inside = start.stage == "inside"
        self._is_reading = start.stage != "after"
        # End of the text, as far as it may belong to the next tag.
        self._tail = ""
        self._tokens = 0
        # Number of tokens up to the end of the closing tag, once it is there.
        self._end: int | None = None

    def count_tokens(self, total: int) -> int:
        """Count the tokens of reasoning among the first ``total`` ones.

        The closing tag counts. Without one, all tokens count. May be called from any thread.
        """
        if self._end is not None:
            return min(self._end, total)
        return total if self._is_inside else 0

    def add_token(self, token_id: int) -> str:
        text = self._detokenizer.add_token(token_id)
        if self._is_reading:
            self._tokens += 1
            self._find_tags(text)
        return text

    def flush(self) -> str:
        text = self._detokenizer.flush()
        if self._is_reading:
            self._find_tags(text)
        return text

    def _find_tags(self, text: str) -> None:
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
        elif any(tag in text for tag in tags.interrupts):
            # Such a tag is one token.
            self._end, self._is_reading = self._tokens - 1, False
        self._tail = text[1 - max(map(len, tags.ends)) :]
