"""Runs one forward pass over a mixed batch of prefill chunks and decode steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.engine.device_copy import to_device
from pd.kernels.attention import AttentionBatch, PlannedAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pd.engine.chunk_graphs import ChunkGraphs
    from pd.engine.draft_tree import DraftTree
    from pd.engine.eagle import EagleWriter
    from pd.engine.kv_pool import KVPool
    from pd.engine.step_graphs import DecodeGraphs, MixedGraphs, VerifyGraphs
    from pd.engine.step_outcome import StepOutcome
    from pd.kernels.attention import AttentionBackend
    from pd.models.causal_lm import CausalLM

    IntArray = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]


# Wanted tokens are few if a step has at least this many times as many tokens.
_FEW = 8


@dataclass
class ForwardItem:
    """One sequence's part of a step.

    Attributes:
        token_ids: new tokens to compute, int32, at least one. ``-1 - row`` stands for a token that
            only the device has (see :meth:`ModelRunner.forward`).
        start: tokens whose KV is in the pool already; the position of ``token_ids[0]``.
        pages: page table, int32, covering ``start + len(token_ids)`` tokens at least.
        num_logits: number of the last new tokens whose logits are wanted; 0 for a chunk that does
            not end the prompt.
        tree: shape of the drafted tokens, which are the last of ``token_ids``; None without any.
        reread: the first token is in the pool already and is computed for its hidden state alone:
            its K and V go to the pool's extra page.
        carried: row of :attr:`pd.engine.eagle.EagleWriter.carried` with the state of the token
            before the first one.
        unread: guesses of the step before that may have been accepted, which only the device knows;
            ``start`` is as if none were. ``pages`` cover so many tokens more.
        work: index of their work in that step.
    """

    token_ids: IntArray
    start: int
    pages: IntArray
    num_logits: int = 1
    tree: DraftTree | None = None
    reread: bool = False
    carried: int = 0
    unread: int = 0
    work: int = -1

    @property
    def branches(self) -> bool:
        """Whether some new token does not follow the one before it."""
        return self.tree is not None and not self.tree.is_chain

    def visible(self) -> BoolArray | None:
        """Mask of attention among the new tokens, as
        :class:`pd.kernels.attention.AttentionBatch` wants it; None if it is causal."""
        if self.tree is None or self.tree.is_chain:
            return None
        root = len(self.token_ids) - self.tree.size - 1
        seen = np.tri(len(self.token_ids), dtype=np.bool_)
        seen[root:, root:] = self.tree.visible
        return seen


def _with_known_starts(items: Sequence[ForwardItem], outcome: StepOutcome) -> list[ForwardItem]:
    """Wait for the outcome of the step before, and put the items where they begin."""
    (copied,) = outcome.counts_on_host.wait()
    counts = copied.tolist()
    return [
        dataclasses.replace(item, start=item.start + counts[item.work], unread=0)
        if item.unread
        else item
        for item in items
    ]


def token_positions(
    items: Sequence[ForwardItem], starts: Int64Array, lengths: Int64Array
) -> Int64Array:
    """Positions of the tokens of a step in the sequences that they continue, int64 ``[tokens]``."""
    ends = np.cumsum(lengths)
    positions: Int64Array = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
    for item, end in zip(items, ends.tolist(), strict=True):
        if item.tree is not None and not item.tree.is_chain:
            root = end - item.tree.size - 1
            positions[root + 1 : end] = positions[root] + item.tree.depths
    return positions


class PlannedLate(PlannedAttention):
    """Attention that is planned when the model first needs ``slots``: after the launch of the first
    layer's product, so that an idle GPU already computes.

    Args:
        backend, batch: for all tokens of the step.
        hidden: tokens whose K and V go to the pool's extra page, int64 ``[n]``, or None.
        last: another backend, and the batch of the tokens that are wanted after the last layer.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        batch: AttentionBatch,
        hidden: torch.Tensor | None,
        last: tuple[AttentionBackend, AttentionBatch] | None,
    ) -> None:
        self.pool = backend.pool
        self.last = None if last is None else last[0]
        self._backend, self._batch, self._hidden, self._last = backend, batch, hidden, last

    # The base class has an attribute; here its first use plans.
    @cached_property
    def slots(self) -> torch.Tensor:  # type: ignore[override]
        self._backend.plan(self._batch)
        if self._hidden is not None:
            hide_tokens(self._backend, self._hidden)
        if self._last is not None:
            backend, batch = self._last
            backend.plan(batch)
        return self._backend.slots

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._backend.attend(layer, q, k, v)


def hide_tokens(attention: PlannedAttention, rows: torch.Tensor) -> None:
    """Have K and V of some tokens of a planned step go to the pool's extra page.

    Args:
        rows: int64 ``[n]`` on the device.
    """
    pool = attention.pool
    attention.slots.index_fill_(0, rows, pool.num_pages * pool.page_size)


def reread_rows(items: Sequence[ForwardItem], device: torch.device) -> torch.Tensor | None:
    """Tokens of a step that are computed once more, int64 on the device; None if there are none."""
    if not any(item.reread for item in items):
        return None
    ends = np.cumsum([len(item.token_ids) for item in items])
    rows = [
        int(end) - len(item.token_ids) for item, end in zip(items, ends, strict=True) if item.reread
    ]
    return to_device(rows, torch.int64, device)


class ModelRunner:
    """A model, its pool and an attention backend, stepped together by one thread.

    Args:
        last_attention: another backend of the same class, for the wanted tokens in the last layer.

    Attributes:
        eagle: writes the KV of an EAGLE head with every pass; None without one.
        graphs: graphs of decode steps, once captured; None to launch their kernels one by one.
        verify_graphs: graphs of steps of a few tokens of each sequence; None without them.
        chunk_graphs: graphs of steps of one short chunk; None without them.
        mixed_graphs: graphs of steps of chunks beside sequences that continue; None without them.
        takes_unread: whether a step may be launched before the host has read what the one before
            it accepted, without waiting for that.
        last_alone_from: from this many pairs of query and key on, the last layer attends only the
            wanted tokens, if they are few. With fewer pairs, planning this takes the host longer
            than it saves the GPU.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        attention_backend: AttentionBackend,
        last_attention: AttentionBackend | None = None,
        eagle: EagleWriter | None = None,
    ) -> None:
        self.model = model
        self.eagle = eagle
        self.pool = pool
        self.attention = attention_backend
        self.last_alone_from = 1 << 24
        self._last_attention = last_attention
        self.graphs: DecodeGraphs | None = None
        self.verify_graphs: VerifyGraphs | None = None
        self.chunk_graphs: ChunkGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None

    @classmethod
    def build(
        cls,
        model: CausalLM,
        pool: KVPool,
        attention: type[AttentionBackend],
        *,
        prompts: bool,
        eagle: EagleWriter | None = None,
    ) -> ModelRunner:
        """Make a runner with a backend of this class, and with ``prompts`` a second backend for the
        wanted tokens in the last layer."""
        heads = model.config.num_heads
        last = attention(pool, heads) if prompts else None
        return cls(model, pool, attention(pool, heads), last, eagle)

    @property
    def takes_unread(self) -> bool:
        if not self.pool.memory.is_cuda:
            return True  # a step is over when its launch returns
        return self.verify_graphs is not None and self.verify_graphs.takes_unread

    def move_tokens(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """See :meth:`pd.engine.kv_pool.KVPool.move_tokens`."""
        self.pool.move_tokens(source, to)

    def drop_graphs(self) -> None:
        """Launch kernels one by one from now on."""
        self.graphs = self.verify_graphs = self.chunk_graphs = self.mixed_graphs = None

    @torch.inference_mode()
    def forward(
        self,
        items: Sequence[ForwardItem],
        on_layers_done: Callable[[int, int], None] | None = None,
        previous_tokens: torch.Tensor | None = None,
        outcome: StepOutcome | None = None,
    ) -> torch.Tensor:
        """Compute new tokens, leaving their KV in the pool.

        Args:
            items: at least one; no two may write the same page.
            on_layers_done: called with ``(first, stop)`` when this step's KV of those layers is in
                the pool (on a GPU: is queued on the current stream): of each layer, or of all at
                once. It must not wait for a GPU nor for long: the layers after it are not launched
                until it returns.
            previous_tokens: int64 ``[rows]`` on the model's device, to which negative token ids
                refer.
            outcome: of the step before, to which ``ForwardItem.work`` refers; None if no item has
                unread guesses. Where no graph fits, the host waits for it.

        Returns:
            Logits ``[sum(num_logits), vocab_size]`` in the order of ``items``, in the model's dtype
            and on its device.
        """
        verify = self.verify_graphs
        if outcome is not None and verify is not None and verify.fits(items):
            logits: torch.Tensor | None = verify.run(items, previous_tokens, outcome)
        else:
            if outcome is not None:
                items = _with_known_starts(items, outcome)
            logits = self._replay(items, previous_tokens)
        if logits is None:
            return self._launch(items, on_layers_done, previous_tokens)
        if on_layers_done is not None:
            on_layers_done(0, self.model.config.num_layers + (self.eagle is not None))
        return logits

    def _replay(
        self, items: Sequence[ForwardItem], previous_tokens: torch.Tensor | None
    ) -> torch.Tensor | None:
        """:meth:`forward` by a graph; None if none fits. All ranks choose the same, since they sum
        tensors of the graph's size."""
        for graphs in (self.graphs, self.verify_graphs):
            if graphs is not None and graphs.fits(items):
                return graphs.run(items, previous_tokens)
        short = self.chunk_graphs if previous_tokens is None else None
        if short is not None and short.fits(items):
            return short.run(items[0])
        if self.mixed_graphs is not None and self.mixed_graphs.fits(items):
            return self.mixed_graphs.run(items, previous_tokens)
        return None

    def _launch(
        self,
        items: Sequence[ForwardItem],
        on_layers_done: Callable[[int, int], None] | None,
        previous_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """:meth:`forward` without graphs."""
        lengths = np.fromiter((len(item.token_ids) for item in items), np.int64, len(items))
        starts = np.fromiter((item.start for item in items), np.int64, len(items))
        trees = None
        ends = np.cumsum(lengths)
        positions = token_positions(items, starts, lengths)
        if any(item.branches for item in items):
            trees = [item.visible() for item in items]
        batch = AttentionBatch(starts, lengths, [item.pages for item in items], trees)
        wanted = np.fromiter((item.num_logits for item in items), np.int64, len(items))
        assert (wanted <= lengths).all(), "more logits wanted than tokens computed"
        # NOTE: copied before the layers are launched, because a copy to a GPU waits for earlier
        # work.
        rows = np.repeat(ends - np.cumsum(wanted), wanted) + np.arange(wanted.sum())
        chosen = self._tensor(rows) if len(rows) < ends[-1] else None
        token_ids = self._tensor(np.concatenate([item.token_ids for item in items]))
        if previous_tokens is not None:
            known = previous_tokens[(-1 - token_ids).clamp_(min=0)]
            token_ids = torch.where(token_ids < 0, known, token_ids)
        before = None if self.eagle is None else self._tensor(self.eagle.places_before(items))
        places = self._tensor(positions)
        reread = reread_rows(items, self.pool.device)
        attention = PlannedLate(self.attention, batch, reread, self._plan_of_last(batch, wanted))
        features = self.model.new_features(len(token_ids))
        hidden = self.model.forward(
            token_ids, places, attention, _each_layer(on_layers_done), chosen, features
        )
        if self.eagle is not None and features is not None and before is not None:
            self.eagle.write(token_ids, places, attention.slots, features, before)
            if on_layers_done is not None:
                layers = self.model.config.num_layers
                on_layers_done(layers, layers + 1)
        if len(hidden) == 0:
            return hidden.new_empty(0, self.model.config.vocab_size)
        return self.model.logits(hidden)

    def _plan_of_last(
        self, batch: AttentionBatch, wanted: npt.NDArray[np.int64]
    ) -> tuple[AttentionBackend, AttentionBatch] | None:
        """Choose backend and batch for the last layer: the last ``wanted[i]`` tokens of each
        sequence. None if that layer attends all tokens."""
        if batch.trees is not None or self._last_attention is None:
            return None
        if not 0 < _FEW * wanted.sum() <= batch.lengths.sum():
            return None
        if (batch.lengths * (batch.starts + batch.lengths // 2)).sum() < self.last_alone_from:
            return None
        some = np.flatnonzero(wanted)
        starts = (batch.starts + batch.lengths - wanted)[some]
        pages = [batch.pages[i] for i in some]
        return self._last_attention, AttentionBatch(starts, wanted[some], pages)

    def _tensor(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        return to_device(array, torch.int64, self.pool.device)


def _each_layer(
    on_layers_done: Callable[[int, int], None] | None,
) -> Callable[[int], None] | None:
    """Make a callback for single layers from one for ranges of layers."""
    if on_layers_done is None:
        return None
    return lambda layer: on_layers_done(layer, layer + 1)
