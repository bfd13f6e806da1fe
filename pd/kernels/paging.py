"""Pages and slots of tokens in a paged KV pool.

A pool has a slot for each token that it can hold, and ``page_size`` adjacent slots are a page. Page
``p`` is slots ``[p * page_size, (p + 1) * page_size)``. The page table of a sequence lists the
pages that its tokens fill one after another.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Tokens = TypeVar("Tokens", int, Int64Array)


def page_count(num_tokens: Tokens, page_size: int) -> Tokens:
    """Return the pages that ``num_tokens`` tokens need from the beginning of a page on, for one
    sequence or for several."""
    return -(-num_tokens // page_size)


def token_slots(
    pages: npt.NDArray[np.integer], positions: npt.NDArray[np.integer], page_size: int
) -> Int64Array:
    """Return the slots of tokens of a sequence.

    Args:
        pages: page table ``[n]``.
        positions: positions ``[tokens]`` of the tokens in the sequence, each in
            ``[0, n * page_size)``.

    Returns:
        int64 ``[tokens]``.
    """
    slots: Int64Array = pages[positions // page_size].astype(np.int64) * page_size
    slots += positions % page_size
    return slots
