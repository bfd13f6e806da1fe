"""Token and layer ranges: their checks, their division into frames, and the slots they fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pd.kernels.paging import page_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from pd.transfer.base import IntArray
    from pd.transfer.pool_shape import MissingTokens, PoolShape


@dataclass(frozen=True, slots=True)
class Block:
    """A half-open token range of a half-open layer range, whose layers are of one plane."""

    token_start: int
    token_stop: int
    layer_start: int
    layer_stop: int

    @property
    def cells(self) -> int:
        """Tokens times layers."""
        return (self.token_stop - self.token_start) * (self.layer_stop - self.layer_start)

    def split(self, max_cells: int) -> Iterator[Block]:
        """Parts of at most ``max_cells`` that cover the block once, layer by layer.

        Tokens are kept together before layers are: a long run of tokens in one layer is what
        adjacent pages turn into one stretch of memory.
        """
        if not self.cells:
            return
        tokens = max(1, min(self.token_stop - self.token_start, max_cells))
        layers = max(1, max_cells // tokens)
        for layer in range(self.layer_start, self.layer_stop, layers):
            layer_stop = min(layer + layers, self.layer_stop)
            for token in range(self.token_start, self.token_stop, tokens):
                yield Block(token, min(token + tokens, self.token_stop), layer, layer_stop)


def checked_blocks(
    shape: PoolShape,
    tokens: MissingTokens,
    token_start: int,
    token_stop: int,
    layer_start: int,
    layer_stop: int,
) -> list[Block]:
    """The blocks that :meth:`pd.transfer.base.Sender.send` is asked to send: one for each plane of
    which something is wanted, since a block never crosses a plane, without the tokens that D holds
    in the planes of its group. Raises ValueError unless the range lies inside the room's tokens and
    the pool's layers."""
    if not tokens.start <= token_start <= token_stop <= tokens.stop:
        raise ValueError(
            f"tokens [{token_start}, {token_stop}) are not in [{tokens.start}, {tokens.stop})"
        )
    if not 0 <= layer_start <= layer_stop <= shape.num_layers:
        raise ValueError(f"layers [{layer_start}, {layer_stop}) are not in the pool")
    blocks = []
    for plane in shape.planes:
        first, stop = max(layer_start, plane.layers.start), min(layer_stop, plane.layers.stop)
        start = max(token_start, tokens.cached[plane.group])
        if first < stop and start < token_stop:
            blocks.append(Block(start, token_stop, first, stop))
    return blocks


def slot_runs(
    pages: IntArray, page_size: int, token_start: int, token_stop: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First and last-plus-one slots of the runs that hold tokens ``[token_start, token_stop)``, a
    range that is not empty, in token order. Adjacent pages become one run.
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
    used = pages[token_start // page_size : page_count(token_stop, page_size)]
    if len(pages) * page_size < token_stop:
        raise ValueError(f"{len(pages)} pages of {page_size} cannot hold tokens up to {token_stop}")
    if used.min() < 0 or (int(used.max()) + 1) * page_size > num_slots:
        raise ValueError(
            f"pages {int(used.min())} to {int(used.max())} of {page_size} slots lie outside a "
            f"pool of {num_slots} slots"
        )
