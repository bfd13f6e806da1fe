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
BoolArray = npt.NDArray[np.bool_]


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
        trees: what new tokens of each sequence see of one another, at most
            :data:`~pd.kernels.attention.trees.MAX_TREE` tokens a tree; bool
            ``[lengths[i], lengths[i]]``, where row a has column b set if token a sees token b,
            which is a itself or one before it. None for a sequence, or for all of them, is a chain:
            every token sees those before it. All new tokens see everything before ``starts[i]``,
            and the KV of new token j lies at position ``starts[i] + j``, however deep it is in its
            tree.
    """

    starts: Int64Array
    lengths: Int64Array
    pages: Sequence[IntArray]
    trees: Sequence[BoolArray | None] | None = None


@dataclass(frozen=True)
class UnreadStarts:
    """By how much the sequences of a step start later than the host knows.

    Attributes:
        most: of each sequence at most; int64 ``[sequences]``.
        by_row: for each row of the graph, int64 ``[rows]`` on the device: those of a sequence are
            equal, those of padding 0.
    """

    most: Int64Array
    by_row: torch.Tensor


class PlannedAttention(ABC):
    """Grouped-query attention of one planned step, an argument of a model's forward pass: causal,
    or along the branches of trees.

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
        """Attend to everything that each token sees.

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


class VerifyAttention(PlannedAttention):
    """A fixed number of new tokens, divided among sequences in any way, for a CUDA graph.

    Addresses stay the same and a plan is for the replay that follows it, as with
    :class:`DecodeAttention`.

    Attributes:
        takes_unread: whether :meth:`plan` takes ``unread``.
    """

    takes_unread = False

    @abstractmethod
    def plan(
        self,
        starts: Int64Array,
        lengths: Int64Array,
        pages: Sequence[IntArray],
        trees: Sequence[BoolArray | None] | None = None,
        unread: UnreadStarts | None = None,
    ) -> None:
        """Queue the copies that prepare the next replay, waiting no longer than
        :meth:`DecodeAttention.plan`.

        Args:
            starts, pages, trees: as in :class:`AttentionBatch`; there may be no sequence.
            lengths: new tokens of each sequence, 1 to
                :data:`~pd.kernels.attention.trees.MAX_TREE`, int64; together at most as many as the
                graph has. Tokens after them are padding: they are written to the pool's extra page,
                which is all they attend to.
            unread: what is to be added to ``starts`` on the device; ``pages`` cover that, too.
        """


class MixedAttention(PlannedAttention):
    """A fixed number of new tokens, of sequences with one each and of a few chunks, for a CUDA
    graph.

    Addresses stay the same and a plan is for the replay that follows it, as with
    :class:`DecodeAttention`.
    """

    @abstractmethod
    def plan(self, starts: Int64Array, lengths: Int64Array, pages: Sequence[IntArray]) -> None:
        """Queue the copies that prepare the next replay, waiting no longer than
        :meth:`DecodeAttention.plan`.

        Args:
            starts, lengths, pages: as in :class:`AttentionBatch`, with no more tokens, sequences
                and chunks than the graph has; there may be none. Tokens after them are padding:
                they are written to the pool's extra page, and their results are 0.
        """


class DraftAttention(PlannedAttention):
    """One new token for each of a fixed number of rows, whose place only the GPU knows, for CUDA
    graphs of several decode steps.

    :meth:`plan` gives upper bounds. Then for each step the caller's device code fills
    :attr:`places`, :attr:`bases` and :attr:`masks`, calls :meth:`locate`, and per layer writes keys
    and values at :attr:`slots` and calls :meth:`attend`. All of that may be captured, for several
    steps in one graph. Several rows may be tokens of one sequence, each with its page table.

    A plan is for the steps up to the next plan of any graph of the backend, on one stream.

    Attributes:
        places: positions at which the rows' new tokens lie, int64 ``[rows]`` on the pool's device.
            A token outside of its row's limit is written to the pool's extra page.
        bases: int64 ``[rows]`` on the pool's device, not negative. A row sees all keys at positions
            below its base.
        masks: int64 ``[rows]`` on the pool's device. A row sees the key at position
            ``bases[row] + bit`` if that bit is set, for bits 0 to 63; as it must see its own token,
            one of the two has to cover its place. No key that it does not see is read, so it may be
            NaN.
    """

    places: torch.Tensor
    bases: torch.Tensor
    masks: torch.Tensor

    @abstractmethod
    def plan(self, limits: Int64Array, pages: Sequence[IntArray]) -> None:
        """Queue the copies that prepare the next steps, waiting no longer than
        :meth:`DecodeAttention.plan`.

        Args:
            limits: most tokens of each row's sequence in any of the steps, new ones included; int64
                ``[n]``, at least 1, and at most ``rows`` of them. Rows from n on are padding,
                whatever the tensors on the device say of them: their token goes to the pool's extra
                page, which is all they attend to.
            pages: page tables, int32, covering ``limits[i]`` tokens at least.
        """

    @abstractmethod
    def locate(self) -> None:
        """Compute :attr:`slots` of the step from :attr:`places`, on the device."""


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

    def verify_graph(self, rows: int, max_context: int) -> VerifyAttention | None:
        """Attention for a CUDA graph over up to ``rows`` new tokens of several sequences, or None
        if this backend has none; buffers and ``max_context`` as in :meth:`decode_graph`."""
        return None

    def mixed_graph(
        self, tokens: int, singles: int, chunks: int, max_context: int
    ) -> MixedAttention | None:
        """Attention for a CUDA graph over up to ``tokens`` new tokens, or None if this backend has
        none; buffers and ``max_context`` as in :meth:`decode_graph`.

        Args:
            singles: sequences with one new token, at most.
            chunks: sequences with more, at most.
        """
        return None

    def draft_graph(self, rows: int, max_context: int) -> DraftAttention | None:
        """Attention for CUDA graphs of decode steps over ``rows`` rows whose places the GPU knows,
        or None if this backend has none; buffers and ``max_context`` as in :meth:`decode_graph`."""
        return None
