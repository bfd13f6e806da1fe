"""Prefixes that a node has cached, by its own reports."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.messages import PREFIXES_UNKNOWN
from pd.radix.prefix_hashes import as_numbers, prompt_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.core.messages import PrefixEvents

    IntArray = npt.NDArray[np.int32]

# What was sent to a node counts as cached there for so long, until a report has it.
_EXPECTED_SECONDS = 5.0
# What was sent so lately is not noted again: many answers begin with the same long prompt.
_FRESH_SECONDS = 0.5


class ReportedPrefixes:
    """Hashes of the pages that a node reports, and those of prompts that were just sent there.

    Args:
        max_pages: pages of the node's pool, more than which are not kept whatever it reports.

    Attributes:
        number: of the last batch; ``PREFIXES_UNKNOWN`` asks for a snapshot.
    """

    def __init__(self, page_size: int, max_pages: int) -> None:
        self._page_size = page_size
        self._max_pages = max_pages
        self._held: set[int] = set()
        # When each page was sent, oldest first.
        self._expected: dict[int, float] = {}
        self.number = PREFIXES_UNKNOWN

    @property
    def num_tokens(self) -> int:
        """Tokens that are cached."""
        return len(self._held) * self._page_size

    def apply(self, events: PrefixEvents) -> None:
        """Take a batch or a snapshot. After a gap no batch is taken until a snapshot comes; what
        was held before the gap, most of which still is, counts meanwhile."""
        if events.snapshot:
            self._held = set()
        elif events.number != self.number + 1 or self.number == PREFIXES_UNKNOWN:
            self.number = PREFIXES_UNKNOWN
            return
        for page in as_numbers(events.removed):
            self._held.discard(page)
            self._expected.pop(page, None)
        for page in as_numbers(events.stored):
            if len(self._held) >= self._max_pages:
                break
            self._held.add(page)
            self._expected.pop(page, None)
        self.number = events.number

    def match(self, tokens: IntArray, namespace: str, data: bytes | None = None) -> int:
        """Leading tokens that the node has, or is about to have, in whole pages. ``data``: the
        memory of ``tokens``, from callers that ask several nodes."""
        pages = self._pages(tokens, namespace, data)
        self._forget_old()
        return self._leading(pages) * self._page_size

    def insert(self, tokens: IntArray, namespace: str, data: bytes | None = None) -> None:
        """A prompt was sent there, or an answer was generated there. ``data``: the memory of
        ``tokens``."""
        now = time.monotonic()
        pages = self._pages(tokens, namespace, data)[: self._max_pages]
        for page in pages[self._leading(pages, since=now - _FRESH_SECONDS) :]:
            if page not in self._held:
                self._expected.pop(page, None)  # so that the oldest stay first
                self._expected[page] = now
        self._forget_old()

    def _leading(self, pages: Sequence[int], since: float = 0.0) -> int:
        """How many of a prompt's first pages are cached, or were sent there since a time. A page is
        removed before those that lead to it, so there are no gaps; and none was sent before the
        first one, so that all that are there are as fresh as that."""
        if not pages or not self._is_there(pages[0], since):
            return 0
        low, high = 1, len(pages)
        while low < high:
            middle = (low + high + 1) // 2
            if self._is_there(pages[middle - 1], since):
                low = middle
            else:
                high = middle - 1
        return low

    def _is_there(self, page: int, since: float) -> bool:
        return page in self._held or self._expected.get(page, -1.0) >= since

    def _pages(self, tokens: IntArray, namespace: str, data: bytes | None) -> tuple[int, ...]:
        data = tokens.tobytes() if data is None else data
        return prompt_hashes(data, namespace, self._page_size)

    def _forget_old(self) -> None:
        limit = time.monotonic() - _EXPECTED_SECONDS
        while self._expected:
            page, sent = next(iter(self._expected.items()))
            if sent > limit and len(self._expected) <= self._max_pages:
                return
            del self._expected[page]
