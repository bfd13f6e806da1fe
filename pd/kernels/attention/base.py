"""The interface of attention backends."""

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
Int64Array = npt.NDArray[np.int64]


class PagedKV(Protocol):
    """The part of the KV pool's interface that attention uses.

    :mod:`pd.kernels.paging` defines in which slot a token lies. At the end of every layer lies one
    page more than callers may use, page ``num_pages``: padding is written there, and nothing but
    padding reads it.
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
        lengths: new tokens of each sequence, at least 1; int64 ``[sequences]``.
        pages: page table of each sequence, int32, covering at least ``starts[i] + lengths[i]``
            tokens.
    """

    starts: Int64Array
    lengths: Int64Array
    pages: Sequence[IntArray]


class PlannedAttention(ABC):
    """Causal grouped-query attention of one planned step, an argument of a model's forward pass.

    Per layer, write the step's new keys and values into ``pool`` at ``slots``, then call
    :meth:`attend`; layers in any order.

    Attributes:
        slots: slots of the new tokens' K and V, int64 ``[tokens]`` on the pool's device.
        last: attention of only the tokens whose results are wanted after the last layer, in their
            order; None if only attention of all tokens is planned.
    """

    pool: PagedKV
    slots: torch.Tensor
    last: PlannedAttention | None = None

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend to everything up to each token.

        Args:
            q: ``[tokens, heads, head_dim]``, rotated, in the pool's dtype and on its device; the
                last two dimensions contiguous (so a slice of fused projections will do).
            k, v: keys and values of the new tokens, ``[tokens, kv_heads, head_dim]``, likewise;
                already in the pool.

        Returns:
            ``[tokens, heads, head_dim]``, contiguous: softmax(q·kᵀ / √head_dim)·v.
        """


class DecodeAttention(PlannedAttention):
    """One new token for each of a fixed number of rows, for a CUDA graph.

    Everything :meth:`attend` touches on the device keeps its address, and it neither waits for the
    GPU nor launches differently from one plan to the next: captured once, replayed after every
    :meth:`plan`. All graphs of a backend share memory, so a plan is for the replay that follows it
    on the same stream.
    """

    @abstractmethod
    def plan(self, starts: Int64Array, pages: Sequence[IntArray]) -> None:
        """Queue the copies that prepare the next replay.

        May be called while an earlier step still runs; waits for the GPU only if two plans before
        this one are still to be copied.

        Args:
            starts: tokens in the pool already, int64 ``[n]``, at most ``rows``. Rows from n on are
                padding: their token goes to the pool's extra page, which is all they attend to.
            pages: as in :class:`AttentionBatch`, ``n`` of them.
        """


class ChunkAttention(PlannedAttention):
    """A chunk of up to a fixed number of tokens of one sequence, for a CUDA graph.

    Addresses stay the same and a plan is for the replay that follows it, as with
    :class:`DecodeAttention`; but :meth:`plan` may wait for the GPU.
    """

    @abstractmethod
    def plan(self, start: int, length: int, pages: IntArray) -> None:
        """Prepare the next replay.

        Args:
            start: tokens in the pool already.
            length: new tokens, at least 1. Tokens after them, up to the fixed number, are padding:
                they are written to the pool's extra page, and their results are undefined.
            pages: page table, int32, covering ``start + length`` tokens at least.
        """


class AttentionBackend(PlannedAttention):
    """Attention of batches of any shape over one pool: ``plan`` once per step.

    Attributes:
        scratch_bytes: most memory that a layer may take for sequences with long prefixes.
    """

    name: str
    scratch_bytes = 0

    @abstractmethod
    def __init__(self, pool: PagedKV, num_heads: int) -> None:
        """``num_heads``: query heads of the model, a multiple of the pool's."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare everything that does not depend on the layer.

        The page of a sequence's last new token must belong to that sequence alone: slots after the
        token may be cleared.
        """

    def decode_graph(self, rows: int, max_context: int) -> DecodeAttention | None:
        """Attention for a CUDA graph over ``rows`` sequences, or None if this backend has none.

        Graphs share buffers, which are as large as the largest graph so far needs: make the largest
        first.

        Args:
            max_context: tokens of a sequence, the new one included.
        """
        return None

    def chunk_graph(self, tokens: int, max_context: int) -> ChunkAttention | None:
        """Attention for a CUDA graph over a chunk of up to ``tokens`` tokens of one sequence, or
        None if this backend has none; ``max_context`` as in :meth:`decode_graph`."""
        return None
