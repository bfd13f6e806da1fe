"""The pool as transfers see it: Protocols that the node's pool fulfils."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from pd.core.node_info import KVLayout, Plane

    IntArray = npt.NDArray[np.int32]


class KVPlane(Protocol):
    """One plane of the pool as transfers see it.

    Attributes:
        buffer: contiguous tensor ``[num_layers, vectors, num_slots, num_heads, head_dim]``; the
            vectors are K then V, or just one. Token t of a sequence with page table ``pages`` lies
            in slot ``pages[t // page_size] * page_size + t % page_size``.
        table: number of that page table, if a sequence has several.
        first_layer: number of its first layer, counted through all planes.
        parts: address of each tensor-parallel rank's buffer, as mapped in this process. Each has
            the shape of ``buffer``, the first of them. Only copies between pages and staging
            buffers know about parts, because KV travels with all heads.
        copies: further ranks' parts with the same content, each in the form of ``parts``. Transfers
            write them, too.
    """

    spec: Plane
    first_layer: int
    buffer: torch.Tensor
    parts: Sequence[int]
    copies: Sequence[Sequence[int]]
    table: int


class KVBuffer(Protocol):
    """The pool as transfers see it. All planes have the same slots and share one allocation.

    Attributes:
        memory: uint8 ``[bytes]``, the allocation. :meth:`pd.core.node_info.KVLayout.plane_extents`
            gives the position of each plane.
    """

    layout: KVLayout
    memory: torch.Tensor

    @property
    def planes(self) -> Sequence[KVPlane]:
        """Planes in the order in which their layers are numbered."""
