"""What every attention backend offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

IntArray = npt.NDArray[np.int32]


class PagedKV(Protocol):
    """The KV pool as attention sees it.

    Token t of a sequence whose page table is ``pages`` lies in slot
    ``pages[t // page_size] * page_size + t % page_size``. One page more than callers may use lies
    at the end of every layer; what is written there is never read.
    """

    page_size: int
    num_pages: int

    def key(self, layer: int) -> torch.Tensor:
        """Keys of a layer, contiguous ``[slots, kv_heads, head_dim]``."""

    def value(self, layer: int) -> torch.Tensor:
        """Values of a layer, contiguous ``[slots, kv_heads, head_dim]``."""


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of one step, their new tokens concatenated in this order.

    Attributes:
        starts: tokens of each sequence whose KV is in the pool already; int64 ``[sequences]``.
        lengths: new tokens of each, at least 1; int64 ``[sequences]``.
        pages: page table of each, int32, covering ``starts[i] + lengths[i]`` tokens at least.
    """

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    pages: Sequence[IntArray]


class AttentionBackend(ABC):
    """Causal grouped-query attention of one batch at a time over one pool.

    ``plan`` once per step, then ``forward`` once per layer in any order.
    """

    name: str

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare whatever does not depend on the layer."""

    @abstractmethod
    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write the new keys and values into the pool and attend to everything up to each token.

        The page of a sequence's last new token must be that sequence's alone: slots behind the
        token may be cleared.

        Args:
            q: ``[tokens, heads, head_dim]``, rotated, in the pool's dtype and on its device.
            k, v: ``[tokens, kv_heads, head_dim]``; ``heads`` is a multiple of ``kv_heads``.

        Returns:
            ``[tokens, heads, head_dim]``, contiguous: softmax(q·kᵀ / √head_dim)·v.
        """
