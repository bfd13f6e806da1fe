"""Pages and slots of tokens in a paged KV pool.

A pool has a slot for each token that it can hold. ``page_size`` adjacent slots are a page, so page
``p`` is slots ``[p * page_size, (p + 1) * page_size)``. The page table of a sequence lists the
pages that its tokens fill one after another. A sequence may have a second table for layers with a
sliding window, because their pages are freed once no token sees them any more. A freed page is
:data:`pd.engine.page_allocator.NO_PAGE` in that table.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Tokens = TypeVar("Tokens", int, Int64Array)
PageT = TypeVar("PageT", bound=np.integer)


def count_needed_pages(num_tokens: Tokens, page_size: int) -> Tokens:
    """Return the number of pages for ``num_tokens`` tokens from the beginning of a page on, for one
    sequence or for several."""
    return -(-num_tokens // page_size)


def select_table(pages: npt.NDArray[PageT], table: int) -> npt.NDArray[PageT]:
    """Return one page table ``[n]`` of a sequence.

    Args:
        pages: ``[tables, n]``, or ``[n]`` for a sequence with one table.
    """
    return pages if pages.ndim == 1 else pages[table]


def find_token_slots(
    pages: npt.NDArray[np.integer], positions: npt.NDArray[np.integer], page_size: int
) -> Int64Array:
    """Return the slots of tokens of a sequence.

    Args:
        pages: page table ``[n]``.
        positions: positions ``[tokens]`` of the tokens in the sequence, each in ``[0, n *
            page_size)``.

    Returns:
        int64 ``[tokens]``.
    """
    slots: Int64Array = pages[positions // page_size].astype(np.int64) * page_size
    slots += positions % page_size
    return slots
