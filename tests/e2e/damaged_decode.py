"""``pd-launch`` whose decode node finds a wrong bit in the KV of prompts of one length."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from pd.cli import launch
from pd.engine.digests import Digests

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from pd.engine.digests import IntArray

DAMAGED_TOKENS = 333
_right = Digests.start_digest


def _start(self: Digests, pages: IntArray, cached: Sequence[int], stop: int) -> Future[bytes]:
    """All has arrived, and its digest is to be computed."""
    if stop == DAMAGED_TOKENS:
        pool, token = self._pool, (min(cached) + stop) // 2
        size = pool.layout.page_size
        cell = pool.get_values(1)[int(pages[token // size]) * size + token % size]
        # Of the exponent: a token computed with it is another.
        cell.view(torch.uint8)[0, cell.element_size() - 1] ^= 0x40
    return _right(self, pages, cached, stop)


if __name__ == "__main__":
    Digests.start_digest = _start
    sys.exit(launch())
