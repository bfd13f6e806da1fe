"""Sizes of a pool, plane by plane, as senders and receivers need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.kernels.kv_copy import count_row_bytes
from pd.kernels.paging import select_table
from pd.transfer.ranges import Block, check_pages

if TYPE_CHECKING:
    from pd.transfer.kv_buffer import IntArray, KVBuffer


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """Sizes of one plane.

    Attributes:
        index: number of the plane in its pool.
        layers: its layers, numbered through all planes.
        cell_bytes: size of one token's vectors in one layer, with all heads.
        group: number of its group; planes of one group are cached together.
        table: number of the page table that says where its tokens are.
    """

    index: int
    layers: range
    cell_bytes: int
    group: int = 0
    table: int = 0


@dataclass(frozen=True, slots=True)
class MissingTokens:
    """Tokens of a prompt that a decode node lacks.

    Attributes:
        cached: for each group of planes, the number of leading tokens the node has already.
        stop: number of tokens of the prompt.
    """

    cached: tuple[int, ...]
    stop: int

    @property
    def start(self) -> int:
        """First token missing in some plane."""
        return min(self.cached)

    def of_group(self, group: int) -> range:
        """Return the tokens missing in the planes of a group."""
        return range(self.cached[group], self.stop)


class PoolShape:
    """Sizes of a pool.

    Attributes:
        page_size: slots of one page.
        num_slots: slots of each layer.
        planes: in the order in which their layers are numbered.
        num_layers: layers of all planes.
        num_tables: page tables of a sequence.
        max_cell_bytes: size of the largest cell.
    """

    def __init__(self, page_size: int, num_slots: int, planes: tuple[PlaneShape, ...]) -> None:
        self.page_size, self.num_slots, self.planes = page_size, num_slots, planes
        self.num_layers = planes[-1].layers.stop
        self.num_tables = 1 + max(plane.table for plane in planes)
        self.max_cell_bytes = max(plane.cell_bytes for plane in planes)
        self._of_layer = tuple(plane for plane in planes for _ in plane.layers)

    @classmethod
    def from_pool(cls, pool: KVBuffer) -> PoolShape:
        """Read the sizes from a pool.

        Raises:
            ValueError: a plane is not one contiguous 5-D tensor.
        """
        planes = []
        for index, plane in enumerate(pool.planes):
            buffer, first = plane.buffer, plane.first_layer
            if not buffer.is_contiguous() or buffer.dim() != 5:
                raise ValueError(f"a plane is one contiguous 5-D tensor, not {tuple(buffer.shape)}")
            layers = range(first, first + buffer.shape[0])
            cell_bytes = buffer.shape[1] * count_row_bytes(buffer) * len(plane.parts)
            planes.append(PlaneShape(index, layers, cell_bytes, plane.spec.group, plane.table))
        return cls(pool.layout.page_size, pool.planes[0].buffer.shape[2], tuple(planes))

    def __str__(self) -> str:
        """Describe the layers for messages, those of each plane if there are several."""
        layers = f"{self.num_layers} layers"
        if len(self.planes) == 1:
            return layers
        planes = ", ".join(f"[{p.layers.start}, {p.layers.stop})" for p in self.planes)
        return f"{layers}, in planes of {planes}"

    def plane_of(self, block: Block) -> PlaneShape:
        """Return the plane of a block."""
        return self._of_layer[block.layer_start]

    def is_in_one_plane(self, block: Block) -> bool:
        """Whether the layers of a block exist, and belong to one plane."""
        if not 0 <= block.layer_start < block.layer_stop <= self.num_layers:
            return False
        return block.layer_stop <= self._of_layer[block.layer_start].layers.stop

    def num_bytes(self, block: Block) -> int:
        """Return the size of a block."""
        return block.cells * self._of_layer[block.layer_start].cell_bytes

    def missing_bytes(self, tokens: MissingTokens) -> int:
        """Return the size of all the KV that a decode node lacks."""
        return sum(
            len(tokens.of_group(plane.group)) * len(plane.layers) * plane.cell_bytes
            for plane in self.planes
        )

    def missing_tokens(self, cached: tuple[int, ...], num_tokens: int) -> MissingTokens:
        """Check the numbers of cached tokens of a prompt of ``num_tokens``.

        Raises:
            ValueError: there is not one number per group of planes, or one exceeds the prompt.
        """
        groups = 1 + max(plane.group for plane in self.planes)
        if len(cached) != groups:
            raise ValueError(f"tokens in {len(cached)} groups of planes; there are {groups}")
        for held in cached:
            if not 0 <= held <= num_tokens:
                raise ValueError(f"{held} tokens of a prompt of {num_tokens}")
        return MissingTokens(tuple(cached), num_tokens)

    def check_pages(self, pages: IntArray, tokens: MissingTokens) -> None:
        """Raise ValueError unless page tables cover the tokens and lie inside the pool."""
        self.check_peer_pages(pages, self.page_size, self.num_slots, tokens)

    def check_peer_pages(
        self, pages: IntArray, page_size: int, num_slots: int, tokens: MissingTokens
    ) -> None:
        """Do :meth:`check_pages` for a pool with other pages of the same planes."""
        if self.num_tables != (1 if pages.ndim == 1 else len(pages)):
            raise ValueError(f"page tables of shape {pages.shape}; there are {self.num_tables}")
        for plane in self.planes:
            missing = tokens.of_group(plane.group)
            table = select_table(pages, plane.table)
            check_pages(table, page_size, num_slots, missing.start, missing.stop)

    def make_blocks(
        self,
        tokens: MissingTokens,
        token_start: int,
        token_stop: int,
        layer_start: int,
        layer_stop: int,
    ) -> list[Block]:
        """Divide the arguments of :meth:`pd.transfer.base.Sender.send` into blocks.

        Returns:
            one block for each plane that needs something, because a block never crosses a plane,
            without the tokens that D holds in the planes of its group.

        Raises:
            ValueError: the range exceeds the room's tokens or the pool's layers.
        """
        if not tokens.start <= token_start <= token_stop <= tokens.stop:
            raise ValueError(
                f"tokens [{token_start}, {token_stop}) are not in [{tokens.start}, {tokens.stop})"
            )
        if not 0 <= layer_start <= layer_stop <= self.num_layers:
            raise ValueError(f"layers [{layer_start}, {layer_stop}) are not in the pool")
        blocks = []
        for plane in self.planes:
            first, stop = max(layer_start, plane.layers.start), min(layer_stop, plane.layers.stop)
            start = max(token_start, tokens.cached[plane.group])
            if first < stop and start < token_stop:
                blocks.append(Block(start, token_stop, first, stop))
        return blocks
