"""Token and layer ranges: how we divide them, and the slots they fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pd.kernels.paging import count_needed_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from pd.transfer.kv_buffer import IntArray


@dataclass(frozen=True, slots=True)
class Block:
    """A half-open token range of a half-open layer range. All its layers are of one plane."""

    token_start: int
    token_stop: int
    layer_start: int
    layer_stop: int

    @property
    def cells(self) -> int:
        """Tokens times layers."""
        return (self.token_stop - self.token_start) * (self.layer_stop - self.layer_start)

    def split(self, max_cells: int) -> Iterator[Block]:
        """Yield parts of at most ``max_cells`` cells that cover the block once, layer by layer.

        We keep tokens together before layers, because adjacent pages turn a long run of tokens in
        one layer into one stretch of memory.
        """
        if not self.cells:
            return
        tokens = max(1, min(self.token_stop - self.token_start, max_cells))
        layers = max(1, max_cells // tokens)
        for layer in range(self.layer_start, self.layer_stop, layers):
            layer_stop = min(layer + layers, self.layer_stop)
            for token in range(self.token_start, self.token_stop, tokens):
                yield Block(token, min(token + tokens, self.token_stop), layer, layer_stop)


def find_slot_runs(
    pages: IntArray, page_size: int, token_start: int, token_stop: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return first and last-plus-one slots of the runs that hold a token range, in token order.

    Adjacent pages become one run. The range must not be empty.
    """
    first, last = token_start // page_size, (token_stop - 1) // page_size
    used = pages[first : last + 1].astype(np.int64)
    breaks = np.flatnonzero(np.diff(used) != 1) + 1
    starts = used[np.concatenate(([0], breaks))] * page_size
    stops = (used[np.concatenate((breaks - 1, [len(used) - 1]))] + 1) * page_size
    starts[0] += token_start - first * page_size
    stops[-1] -= (last + 1) * page_size - token_stop
    return starts, stops


def check_pages(
    pages: IntArray, page_size: int, num_slots: int, token_start: int, token_stop: int
) -> None:
    """Raise ValueError unless the page table covers the tokens and lies inside the pool."""
    if not 0 <= token_start <= token_stop:
        raise ValueError(f"tokens [{token_start}, {token_stop}) are not a range")
    if token_start == token_stop:
        return
    used = pages[token_start // page_size : count_needed_pages(token_stop, page_size)]
    if len(pages) * page_size < token_stop:
        raise ValueError(f"{len(pages)} pages of {page_size} cannot hold tokens up to {token_stop}")
    if used.min() < 0 or (int(used.max()) + 1) * page_size > num_slots:
        raise ValueError(
            f"pages {int(used.min())} to {int(used.max())} of {page_size} slots lie outside a "
            f"pool of {num_slots} slots"
        )
