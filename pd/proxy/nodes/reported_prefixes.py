"""The cached prefixes reported by a node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.messages import PREFIXES_UNKNOWN
from pd.radix.prefix_hashes import hash_prompt, to_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.core.messages import PrefixEvents

    IntArray = npt.NDArray[np.int32]

# Tokens we sent count as cached for this long, until a report includes them.
_EXPECTED_SECONDS = 5.0
# We do not note tokens again within this time, because many answers begin with the same long
# prompt.
_FRESH_SECONDS = 0.5


class ReportedPrefixes:
    """Hashes of pages reported by a node, and of prompts we just sent there.

    Args:
        max_pages: pages of the node's pool. We never keep more, whatever it reports.

    Attributes:
        number: number of the last batch; ``PREFIXES_UNKNOWN`` requests a snapshot.
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
        """Number of cached tokens."""
        return len(self._held) * self._page_size

    def apply_events(self, events: PrefixEvents) -> None:
        """Apply a batch or a snapshot.

        After a gap we wait for a snapshot. Until then we keep the pages from before the gap,
        because most of them are still cached.
        """
        if events.snapshot:
            self._held = set()
        elif events.number != self.number + 1 or self.number == PREFIXES_UNKNOWN:
            self.number = PREFIXES_UNKNOWN
            return
        for page in to_numbers(events.removed):
            self._held.discard(page)
            self._expected.pop(page, None)
        for page in to_numbers(events.stored):
            if len(self._held) >= self._max_pages:
                break
            self._held.add(page)
            self._expected.pop(page, None)
        self.number = events.number

    def count_cached(self, tokens: IntArray, namespace: str, data: bytes | None = None) -> int:
        """Count leading tokens the node holds or soon will, in whole pages.

        ``data`` is the memory of ``tokens``, from callers asking several nodes.
        """
        pages = self._hash_pages(tokens, namespace, data)
        self._forget_old()
        return self._count_leading(pages) * self._page_size

    def add_tokens(self, tokens: IntArray, namespace: str, data: bytes | None = None) -> None:
        """Note a prompt we sent, or a generated answer. ``data``: the memory of ``tokens``."""
        now = time.monotonic()
        pages = self._hash_pages(tokens, namespace, data)[: self._max_pages]
        for page in pages[self._count_leading(pages, since=now - _FRESH_SECONDS) :]:
            if page not in self._held:
                self._expected.pop(page, None)  # so that the oldest stay first
                self._expected[page] = now
        self._forget_old()

    def _count_leading(self, pages: Sequence[int], since: float = 0.0) -> int:
        """Count the leading pages that are cached, or were sent after ``since``.

        A node removes a page before the pages leading to it, so there are no gaps. No page was sent
        before the first one, so all pages are as fresh as the first.
        """
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

    def _hash_pages(self, tokens: IntArray, namespace: str, data: bytes | None) -> tuple[int, ...]:
        data = tokens.tobytes() if data is None else data
        return hash_prompt(data, namespace, self._page_size)

    def _forget_old(self) -> None:
        limit = time.monotonic() - _EXPECTED_SECONDS
        while self._expected:
            page, sent = next(iter(self._expected.items()))
            if sent > limit and len(self._expected) <= self._max_pages:
                return
            del self._expected[page]
