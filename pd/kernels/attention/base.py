"""The interface of attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pd.kernels.kv_store import KVScales
    from pd.kernels.latent import LatentHeads

IntArray = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class PagedKV(Protocol):
    """The part of the KV pool that attention needs.

    :mod:`pd.kernels.paging` defines the slot of each token. Every layer has one page more than
    callers may use, page ``num_pages``, at its end. Padding is written there, and only padding
    reads it.

    Keys and values may be in fp8, see :mod:`pd.kernels.kv_store`. Then they are read from the pool
    even for new tokens.
    """

    page_size: int
    num_pages: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of queries, new keys and new values, and of results."""

    def get_keys(self, layer: int) -> torch.Tensor:
        """Return the keys of a layer, contiguous ``[slots, kv_heads, head_dim]``."""

    def get_values(self, layer: int) -> torch.Tensor:
        """Return the values of a layer, contiguous ``[slots, kv_heads, head_dim]``."""

    def get_scales(self, layer: int) -> KVScales:
        """Return the scales of a layer's keys and values."""


class LatentShape(NamedTuple):
    """Attention to rows of latents (:mod:`pd.kernels.latent`). The pool has one row per token: the
    key of its single head. The beginning of the row is the value.

    Attributes:
        value_dim: values of a row that are the value.
        scale: factor of the scores.
        key_dim, head_value_dim: sizes of K and V of a head, to which rows can be expanded.
    """

    value_dim: int
    scale: float
    key_dim: int
    head_value_dim: int


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of one step. Their new tokens are concatenated in this order.

    Attributes:
        starts: number of tokens of each sequence with KV in the pool; int64 ``[sequences]``.
        lengths: number of new tokens of each sequence, at least 1; int64 ``[sequences]``.
        pages: page table of each sequence, int32, covering at least ``starts[i] + lengths[i]``
            tokens. For :class:`~pd.kernels.attention.tables.TablesAttention` it is int32
            ``[tables, n]``.
        trees: visibility among the new tokens of each sequence, bool ``[lengths[i], lengths[i]]``:
            column b of row a is set if token a sees token b, either a itself or a token before it.
            A tree has at most :data:`~pd.kernels.attention.trees.MAX_TREE` tokens. None for a
            sequence, or for all of them, is a chain: every token sees those before it. All new
            tokens see everything before ``starts[i]``. The KV of new token j lies at position
            ``starts[i] + j``, whatever its depth in the tree.
    """

    starts: Int64Array
    lengths: Int64Array
    pages: Sequence[IntArray]
    trees: Sequence[BoolArray | None] | None = None


@dataclass(frozen=True)
class UnreadStarts:
    """How much later the sequences of a step start than the host knows.

    Attributes:
        limits: the maximum for each sequence; int64 ``[sequences]``.
        by_row: the actual number for each row of the graph, int64 ``[rows]`` on the device. Rows of
            a sequence are equal, and rows of padding are 0.
    """

    limits: Int64Array
    by_row: torch.Tensor


class PlannedAttention(ABC):
    """Grouped-query attention of one planned step, an argument of a model's forward pass. It is
    causal, or follows the branches of trees.

    For each layer, write the step's new keys and values into ``pool`` at ``slots``, then call
    :meth:`attend`. Layers may come in any order.

    Attributes:
        slots: slots of the new tokens' K and V, int64 ``[tokens]`` on the pool's device.
        last: attention of only the tokens that are wanted after the last layer, in their order;
            None if only attention of all tokens is planned.
    """

    pool: PagedKV
    slots: torch.Tensor
    last: PlannedAttention | None = None

    def get_slots(self, layer: int) -> torch.Tensor:
        """Return the slots of the new tokens in a layer. They are :attr:`slots`, unless sequences
        have several page tables."""
        return self.slots

    def list_slots(self) -> list[torch.Tensor]:
        """List the slots of the new tokens in each page table."""
        return [self.slots]

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to everything that each token sees.

        Args:
            q: ``[tokens, heads, head_dim]``, rotated, in ``pool.dtype`` and on its device. The
                last two dimensions are contiguous, so you can pass a slice of fused projections.
            k, v: keys and values of the new tokens, ``[tokens, kv_heads, head_dim]``, likewise;
                already in the pool.
            sinks: scores without values that join the softmax, one for each head: float32
                ``[heads]``; None for none.

        Returns:
            ``[tokens, heads, head_dim]``, contiguous: softmax(q·kᵀ / √head_dim)·v. With a
            :class:`LatentShape` it has its ``value_dim`` instead of ``head_dim``, and its scale.
        """

    def attend_latents(
        self, layer: int, q: torch.Tensor, rows: torch.Tensor, heads: LatentHeads
    ) -> torch.Tensor:
        """Attend to the rows of latents that each token sees, in the absorbed form.

        Args:
            q: ``[tokens, heads, nope_dim + rope_dim]``, rotated.
            rows: rows of the new tokens, contiguous ``[tokens, 1, row_dim]``; already in the pool.
            heads: the layer's weights.

        Returns:
            ``[tokens, heads, value_dim]`` with the value of each head.
        """
        latents = rows[..., : heads.kv_rank]
        return heads.expand_values(self.attend(layer, heads.absorb_queries(q), rows, latents))


class DecodeAttention(PlannedAttention):
    """One new token for each of a fixed number of rows, for a CUDA graph.

    :meth:`attend` can be captured once and replayed after every :meth:`plan`, because its device
    memory keeps the same addresses, it never waits for the GPU, and it always launches the same
    way. All graphs of a backend share memory, so a plan is valid only for the next replay on the
    same stream.
    """

    @abstractmethod
    def plan(self, starts: Int64Array, pages: Sequence[IntArray]) -> None:
        """Queue the copies that prepare the next replay.

        You may call this while an earlier step still runs. It waits for the GPU only if two earlier
        plans were not copied yet.

        Args:
            starts: number of tokens in the pool, int64 ``[n]``, at most ``rows``. The other rows
                are padding: their token goes to the pool's extra page, and they attend only to it.
            pages: as in :class:`AttentionBatch`, ``n`` of them.
        """


class ChunkAttention(PlannedAttention):
    """A chunk of up to a fixed number of tokens of one sequence, for a CUDA graph.

    Addresses and plans work as for :class:`DecodeAttention`, but :meth:`plan` may wait for the GPU.
    """

    @abstractmethod
    def plan(self, start: int, length: int, pages: IntArray) -> None:
        """Prepare the next replay.

        Args:
            start: number of tokens in the pool.
            length: number of new tokens, at least 1. The other tokens are padding: they are written
                to the pool's extra page, and their results are undefined.
            pages: page table, int32, covering at least ``start + length`` tokens.
        """


class VerifyAttention(PlannedAttention):
    """A fixed number of new tokens, divided among sequences in any way, for a CUDA graph.

    Addresses and plans work as for :class:`DecodeAttention`.

    Attributes:
        takes_unread: whether :meth:`plan` supports ``unread``.
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
        """Queue the copies that prepare the next replay. Waits no longer than
        :meth:`DecodeAttention.plan`.

        Args:
            starts, pages, trees: as in :class:`AttentionBatch`. There may be no sequence.
            lengths: number of new tokens of each sequence, int64, 1 to
                :data:`~pd.kernels.attention.trees.MAX_TREE` each and in total at most as many as
                the graph has. The other tokens are padding: they are written to the pool's extra
                page, and they attend only to it.
            unread: added to ``starts`` on the device. ``pages`` must cover these tokens, too.
        """


class MixedAttention(PlannedAttention):
    """A fixed number of new tokens, of sequences with one token each and of a few chunks, for a
    CUDA graph.

    Addresses and plans work as for :class:`DecodeAttention`.
    """

    @abstractmethod
    def plan(self, starts: Int64Array, lengths: Int64Array, pages: Sequence[IntArray]) -> None:
        """Queue the copies that prepare the next replay. Waits no longer than
        :meth:`DecodeAttention.plan`.

        Args:
            starts, lengths, pages: as in :class:`AttentionBatch`, with at most as many tokens,
                sequences and chunks as the graph has; there may be none. The other tokens are
                padding: they are written to the pool's extra page, and their results are 0.
        """


class DraftAttention(PlannedAttention):
    """One new token for each of a fixed number of rows, at places that only the GPU knows, for CUDA
    graphs of several decode steps.

    :meth:`plan` gives upper bounds. Then, for each step, your device code fills :attr:`places`,
    :attr:`bases` and :attr:`masks` and calls :meth:`locate_slots`. For each layer it writes keys
    and values at :attr:`slots` and calls :meth:`attend`. You may capture all of that, even several
    steps in one graph. Several rows may be tokens of one sequence, each with its page table.

    A plan is valid until the next plan of any graph of the backend, on one stream.

    Attributes:
        places: positions of the rows' new tokens, int64 ``[rows]`` on the pool's device. A token
            outside of its row's limit is written to the pool's extra page.
        bases: int64 ``[rows]`` on the pool's device, not negative. A row sees all keys at positions
            below its base.
        masks: int64 ``[rows]`` on the pool's device. A row sees the key at position ``bases[row] +
            bit`` if that bit is set, for bits 0 to 63. Base or mask must cover the row's own token.
            Hidden keys are not read, so they may be NaN.
    """

    places: torch.Tensor
    bases: torch.Tensor
    masks: torch.Tensor

    @abstractmethod
    def plan(self, limits: Int64Array, pages: Sequence[IntArray]) -> None:
        """Queue the copies that prepare the next steps. Waits no longer than
        :meth:`DecodeAttention.plan`.

        Args:
            limits: maximum number of tokens of each row's sequence in these steps, including new
                ones; int64 ``[n]``, at least 1, and at most ``rows`` of them. The other rows are
                padding, whatever the tensors on the device say: their token goes to the pool's
                extra page, and they attend only to it.
            pages: page tables, int32, covering at least ``limits[i]`` tokens.
        """

    @abstractmethod
    def locate_slots(self) -> None:
        """Compute :attr:`slots` of the step from :attr:`places`, on the device."""


class AttentionBackend(PlannedAttention):
    """Attention of batches of any shape over one pool. Call ``plan`` once per step.

    Attributes:
        scratch_bytes: memory that a layer may take for sequences with long prefixes.
    """

    name: str
    scratch_bytes = 0

    @abstractmethod
    def __init__(
        self,
        pool: PagedKV,
        num_heads: int,
        latent: LatentShape | None = None,
        windows: Sequence[int] = (),
    ) -> None:
        """Set up the backend.

        Args:
            num_heads: query heads of the model, a multiple of the pool's heads.
            latent: set if the pool has rows of latents instead of K and V.
            windows: as in :class:`pd.kernels.attention.windows.LayerWindows`.
        """

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare everything that does not depend on the layer.

        The page of a sequence's last new token must belong to that sequence alone, because slots
        after the token may be cleared.
        """

    def make_decode_graph(self, rows: int, max_context: int) -> DecodeAttention | None:
        """Make attention for a CUDA graph over ``rows`` sequences; None if this backend has none.

        Graphs share buffers, which are as large as the largest graph so far needs. So make the
        largest graph first.

        Args:
            max_context: longest sequence in tokens, including the new one.
        """
        return None

    def make_chunk_graph(self, tokens: int, max_context: int) -> ChunkAttention | None:
        """Make attention for a CUDA graph over a chunk of up to ``tokens`` tokens of one sequence;
        None if this backend has none. ``max_context`` as in :meth:`make_decode_graph`."""
        return None

    def make_verify_graph(self, rows: int, max_context: int) -> VerifyAttention | None:
        """Make attention for a CUDA graph over up to ``rows`` new tokens of several sequences; None
        if this backend has none. Buffers and ``max_context`` as in :meth:`make_decode_graph`."""
        return None

    def make_mixed_graph(
        self, tokens: int, singles: int, chunks: int, max_context: int
    ) -> MixedAttention | None:
        """Make attention for a CUDA graph over up to ``tokens`` new tokens; None if this backend
        has none. Buffers and ``max_context`` as in :meth:`make_decode_graph`.

        Args:
            singles: maximum number of sequences with one new token.
            chunks: maximum number of sequences with more.
        """
        return None

    def make_draft_graph(
        self, rows: int, max_context: int, first_key: int = 0
    ) -> DraftAttention | None:
        """Make attention for CUDA graphs of decode steps over ``rows`` rows at places that the GPU
        knows; None if this backend has none. Buffers and ``max_context`` as in
        :meth:`make_decode_graph`.

        Args:
            first_key: rows with a larger limit see no key before this position. The result of a
                row that sees none at all is 0.
        """
        return None
