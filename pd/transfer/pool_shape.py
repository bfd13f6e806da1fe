"""Sizes of a pool, plane by plane, as senders and receivers need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.kernels.kv_copy import row_bytes

if TYPE_CHECKING:
    from pd.core.messages import Reservation
    from pd.transfer.base import KVBuffer
    from pd.transfer.ranges import Block


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """Sizes of one plane.

    Attributes:
        index: number of the plane in its pool.
        layers: its layers, numbered through all planes.
        cell_bytes: size of one token's vectors in one layer, with all heads.
        group: planes of one group are cached together.
    """

    index: int
    layers: range
    cell_bytes: int
    group: int = 0


class PoolShape:
    """Sizes of a pool.

    Attributes:
        page_size: slots of one page.
        num_slots: slots of each layer.
        planes: in the order in which their layers are numbered.
        num_layers: layers of all planes.
        max_cell_bytes: size of the largest cell.
    """

    def __init__(self, page_size: int, num_slots: int, planes: tuple[PlaneShape, ...]) -> None:
        self.page_size, self.num_slots, self.planes = page_size, num_slots, planes
        self.num_layers = planes[-1].layers.stop
        self.max_cell_bytes = max(plane.cell_bytes for plane in planes)
        self._of_layer = tuple(plane for plane in planes for _ in plane.layers)

    @classmethod
    def of(cls, pool: KVBuffer) -> PoolShape:
        """Take the sizes from a pool.

        Raises:
            ValueError: a plane is not one contiguous 5-D tensor.
        """
        planes = []
        for index, plane in enumerate(pool.planes):
            buffer, first = plane.buffer, plane.first_layer
            if not buffer.is_contiguous() or buffer.dim() != 5:
                raise ValueError(f"a plane is one contiguous 5-D tensor, not {tuple(buffer.shape)}")
            layers = range(first, first + buffer.shape[0])
            cell_bytes = buffer.shape[1] * row_bytes(buffer) * len(plane.parts)
            planes.append(PlaneShape(index, layers, cell_bytes, plane.spec.group))
        return cls(pool.layout.page_size, pool.planes[0].buffer.shape[2], tuple(planes))

    def __str__(self) -> str:
        """Name the layers in messages, those of each plane if there are several."""
        layers = f"{self.num_layers} layers"
        if len(self.planes) == 1:
            return layers
        planes = ", ".join(f"[{p.layers.start}, {p.layers.stop})" for p in self.planes)
        return f"{layers}, in planes of {planes}"

    def plane_of(self, block: Block) -> PlaneShape:
        """Return the plane that a block of this pool is of."""
        return self._of_layer[block.layer_start]

    def is_in_one_plane(self, block: Block) -> bool:
        """Whether a block has layers, all of them are the pool's, and of one plane."""
        if not 0 <= block.layer_start < block.layer_stop <= self.num_layers:
            return False
        return block.layer_stop <= self._of_layer[block.layer_start].layers.stop

    def num_bytes(self, block: Block) -> int:
        """Return the bytes of a block, which is in one plane."""
        return block.cells * self._of_layer[block.layer_start].cell_bytes

    def missing_bytes(self, tokens: MissingTokens) -> int:
        """Return the bytes of all that a decode node lacks."""
        return sum(
            len(tokens.of_group(plane.group)) * len(plane.layers) * plane.cell_bytes
            for plane in self.planes
        )


@dataclass(frozen=True, slots=True)
class MissingTokens:
    """Tokens of a prompt that a decode node lacks.

    Attributes:
        cached: leading tokens that it has already, for each group of planes.
        stop: tokens of the prompt.
    """

    cached: tuple[int, ...]
    stop: int

    @property
    def start(self) -> int:
        """First token that is missing in some plane."""
        return min(self.cached)

    def of_group(self, group: int) -> range:
        """Return the tokens that are missing in the planes of a group."""
        return range(self.cached[group], self.stop)


def missing_tokens(shape: PoolShape, cached: tuple[int, ...], num_tokens: int) -> MissingTokens:
    """Check the numbers of cached tokens of a prompt of ``num_tokens``. Raises ValueError unless
    there is one for each group of planes, from 0 to the length of the prompt."""
    groups = 1 + max(plane.group for plane in shape.planes)
    if len(cached) != groups:
        raise ValueError(f"tokens in {len(cached)} groups of planes; there are {groups}")
    for held in cached:
        if not 0 <= held <= num_tokens:
            raise ValueError(f"{held} tokens of a prompt of {num_tokens}")
    return MissingTokens(tuple(cached), num_tokens)


def wanted_tokens(shape: PoolShape, reservation: Reservation, num_tokens: int) -> MissingTokens:
    """Tokens of a prompt of ``num_tokens`` that D does not hold yet. Raises TransferError when the
    reservation claims more tokens than the prompt has, or not a number for each group of planes."""
    try:
        return missing_tokens(shape, reservation.cached, num_tokens)
    except ValueError as error:
        raise TransferError(f"{reservation.sender} says that it holds {error}") from error
