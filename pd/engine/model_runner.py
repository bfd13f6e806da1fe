"""Runs one forward pass over a mixed batch of prefill chunks and decode steps."""

from __future__ import annotations

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
    from pd.engine.cuda_graphs import DecodeGraphs
    from pd.engine.kv_pool import KVPool
    from pd.kernels.attention import AttentionBackend
    from pd.models.causal_lm import CausalLM

    IntArray = npt.NDArray[np.int32]


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
    """

    token_ids: IntArray
    start: int
    pages: IntArray
    num_logits: int = 1


class PlannedLate(PlannedAttention):
    """Attention that is planned when the model first needs ``slots``: after the launch of the first
    layer's product, so that an idle GPU already computes.

    Args:
        backend, batch: for all tokens of the step.
        last: another backend, and the batch of the tokens that are wanted after the last layer.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        batch: AttentionBatch,
        last: tuple[AttentionBackend, AttentionBatch] | None,
    ) -> None:
        self.pool = backend.pool
        self.last = None if last is None else last[0]
        self._backend, self._batch, self._last = backend, batch, last

    # The base class has an attribute; here its first use plans.
    @cached_property
    def slots(self) -> torch.Tensor:  # type: ignore[override]
        self._backend.plan(self._batch)
        if self._last is not None:
            backend, batch = self._last
            backend.plan(batch)
        return self._backend.slots

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._backend.attend(layer, q, k, v)


class ModelRunner:
    """A model, its pool and an attention backend, stepped together by one thread.

    Args:
        last_attention: another backend of the same class, for the wanted tokens in the last layer.

    Attributes:
        graphs: graphs of decode steps, once captured; None to launch their kernels one by one.
        chunk_graphs: graphs of steps of one short chunk; None without them.
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
    ) -> None:
        self.model = model
        self.pool = pool
        self.attention = attention_backend
        self.last_alone_from = 1 << 24
        self._last_attention = last_attention
        self.graphs: DecodeGraphs | None = None
        self.chunk_graphs: ChunkGraphs | None = None

    @classmethod
    def build(
        cls, model: CausalLM, pool: KVPool, attention: type[AttentionBackend], *, prompts: bool
    ) -> ModelRunner:
        """Make a runner with a backend of this class, and with ``prompts`` a second backend for the
        wanted tokens in the last layer."""
        heads = model.config.num_heads
        last = attention(pool, heads) if prompts else None
        return cls(model, pool, attention(pool, heads), last)

    def drop_graphs(self) -> None:
        """Launch kernels one by one from now on."""
        self.graphs = self.chunk_graphs = None

    @torch.inference_mode()
    def forward(
        self,
        items: Sequence[ForwardItem],
        on_layers_done: Callable[[int, int], None] | None = None,
        previous_tokens: torch.Tensor | None = None,
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

        Returns:
            Logits ``[sum(num_logits), vocab_size]`` in the order of ``items``, in the model's dtype
            and on its device.
        """
        graphs = self.graphs if on_layers_done is None else None
        if graphs is not None and graphs.fits(items):
            return graphs.run(items, previous_tokens)
        short = self.chunk_graphs if previous_tokens is None else None
        if short is not None and short.fits(items):
            logits = short.run(items[0])
            if on_layers_done is not None:
                on_layers_done(0, self.model.config.num_layers)
            return logits
        return self._launch(items, on_layers_done, previous_tokens)

    def _launch(
        self,
        items: Sequence[ForwardItem],
        on_layers_done: Callable[[int, int], None] | None,
        previous_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """:meth:`forward` without graphs."""
        lengths = np.fromiter((len(item.token_ids) for item in items), np.int64, len(items))
        starts = np.fromiter((item.start for item in items), np.int64, len(items))
        batch = AttentionBatch(starts, lengths, [item.pages for item in items])
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
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
        hidden = self.model.forward(
            token_ids,
            self._tensor(positions),
            PlannedLate(self.attention, batch, self._plan_of_last(batch, wanted)),
            _each_layer(on_layers_done),
            chosen,
        )
        if len(hidden) == 0:
            return hidden.new_empty(0, self.model.config.vocab_size)
        return self.model.logits(hidden)

    def _plan_of_last(
        self, batch: AttentionBatch, wanted: npt.NDArray[np.int64]
    ) -> tuple[AttentionBackend, AttentionBatch] | None:
        """Choose backend and batch for the last layer: the last ``wanted[i]`` tokens of each
        sequence. None if that layer attends all tokens."""
        if self._last_attention is None or not 0 < _FEW * wanted.sum() <= batch.lengths.sum():
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
