"""Counts the tokens of an answer's reasoning for ``usage``."""

from __future__ import annotations

import re
from bisect import bisect_left
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


class _Span(NamedTuple):
    """Tokens of reasoning, from ``start`` on and before ``end``; ``earlier`` are in other spans."""

    start: int
    end: int
    earlier: int


class ReasoningCounter:
    """A :class:`pd.proxy.text.detokenizer.Detokenizer` that counts the tokens of the reasoning.

    It finds the same end as the parser of :mod:`pd.proxy.text.reasoning`. Of an answer in channels
    it counts every message of reasoning, without its header.
    """

    __slots__ = (
        "_begin",
        "_detokenizer",
        "_is_inside",
        "_is_reading",
        "_spans",
        "_tags",
        "_tail",
        "_tokens",
    )

    def __init__(self, detokenizer: Detokenizer, start: ReasoningStart) -> None:
        self._detokenizer = detokenizer
        self._tags = start.tags
        self._is_inside = start.stage == "inside"
        self._is_reading = start.stage != "after"
        # End of the text, as far as it may belong to the next tag.
        self._tail = ""
        self._tokens = 0
        # First token of the reasoning that is open.
        self._begin = 0
        self._spans: list[_Span] = []

    def count_tokens(self, total: int) -> int:
        """Count the tokens of reasoning among the first ``total`` ones.

        The closing tag counts. Without one, all tokens count. May be called from any thread.
        """
        spans = self._spans
        if self._is_inside and total > self._begin:
            return self._count_closed() + total - self._begin
        last = bisect_left(spans, total, key=lambda span: span.start) - 1
        if last < 0:
            return 0
        start, end, earlier = spans[last]
        return earlier + min(end, total) - start

    def _count_closed(self) -> int:
        if not self._spans:
            return 0
        start, end, earlier = self._spans[-1]
        return earlier + end - start

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
        if tags.in_channels:
            self._find_messages(text)
            return
        if not self._is_inside:
            space = _SPACE.match(text)
            assert space is not None
            begin = text[space.end() :]
            if not begin.startswith(tags.open):
                self._tail, self._is_reading = text, tags.open.startswith(begin)
                return
            self._is_inside, text = True, begin[len(tags.open) :]
        if tags.close in text:
            self._end_span(self._tokens)
            self._is_reading = False
        elif any(tag in text for tag in tags.interrupts):
            # Such a tag is one token.
            self._end_span(self._tokens - 1)
            self._is_reading = False
        self._tail = text[1 - max(map(len, tags.ends)) :]

    def _find_messages(self, text: str) -> None:
        while True:
            tag = self._tags.close if self._is_inside else self._tags.open
            before, found, rest = text.partition(tag)
            if not found:
                self._tail = before[1 - len(tag) :]
                return
            text = rest
            if self._is_inside:
                self._end_span(self._tokens)
            else:
                self._begin = self._tokens
                self._is_inside = True

    def _end_span(self, end: int) -> None:
        self._spans.append(_Span(self._begin, end, self._count_closed()))
        self._is_inside = False
