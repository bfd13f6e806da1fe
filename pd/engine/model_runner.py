"""Runs one forward pass over a mixed batch of prefill chunks and decode steps."""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from pd.core.node_info import MODEL_PLANE
from pd.engine.device_copy import to_device
from pd.engine.forward_item import find_reread_rows, find_token_positions
from pd.engine.kv_pool import LayerOrder
from pd.kernels.attention import AttentionBatch, PlannedAttention
from pd.kernels.attention.tables import TablePart, TablesAttention
from pd.models.config import WINDOW_PLANE
from pd.models.latent_attention import find_latent_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pd.engine.eagle import EagleWriter
    from pd.engine.forward_item import ForwardItem
    from pd.engine.kv_pool import KVPool
    from pd.engine.step_outcome import StepOutcome
    from pd.kernels.attention import AttentionBackend
    from pd.kernels.latent import LatentHeads
    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig

    IntArray = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]


# The wanted tokens of a step are few if the step has at least this many times more tokens.
_FEW = 8


def _apply_outcome(items: Sequence[ForwardItem], outcome: StepOutcome) -> list[ForwardItem]:
    """Wait for the outcome of the previous step, and correct the start of each item."""
    (copied,) = outcome.counts_on_host.wait()
    counts = copied.tolist()
    return [
        dataclasses.replace(item, start=item.start + counts[item.work], unread=0)
        if item.unread
        else item
        for item in items
    ]


def _make_attention(
    config: ModelConfig, pool: KVPool, attention: type[AttentionBackend]
) -> AttentionBackend:
    """Make the attention of a model over its planes of a pool."""
    windows = pool.layout.windows
    if not windows:
        return attention(pool, config.num_heads, find_latent_shape(config), config.windows)
    (window,) = windows
    parts = [
        TablePart(0, 0, attention(pool.view_plane(MODEL_PLANE), config.num_heads)),
        TablePart(
            1,
            window,
            attention(
                pool.view_plane(WINDOW_PLANE),
                config.num_heads,
                windows=[window] * sum(map(bool, config.windows)),
            ),
        ),
    ]
    firsts = (0, pool.layout.model.num_layers)
    tables = [int(window > 0) for window in config.windows]
    layers = [
        (table, layer - firsts[table])
        for table, layer in zip(tables, config.pool_layers, strict=True)
    ]
    return TablesAttention(LayerOrder(pool, config.pool_layers), parts, layers)


class LazyAttention(PlannedAttention):
    """Attention that is planned when the model first needs ``slots``. By then the first layer's
    product is launched, so an idle GPU already computes.

    Args:
        backend, batch: for all tokens of the step.
        hidden: tokens whose K and V go to the pool's extra page, int64 ``[n]``, or None.
        last: another backend, with the batch of the tokens that the last layer must attend.
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

    # The base class has an attribute. Here the first access plans.
    @cached_property
    def slots(self) -> torch.Tensor:  # type: ignore[override]
        self._backend.plan(self._batch)
        if self._hidden is not None:
            hide_tokens(self._backend, self._hidden)
        if self._last is not None:
            backend, batch = self._last
            backend.plan(batch)
        return self._backend.slots

    def get_slots(self, layer: int) -> torch.Tensor:
        _ = self.slots  # plans, if this is the first layer
        return self._backend.get_slots(layer)

    def list_slots(self) -> list[torch.Tensor]:
        _ = self.slots
        return self._backend.list_slots()

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._backend.attend(layer, q, k, v, sinks)

    def attend_latents(
        self, layer: int, q: torch.Tensor, rows: torch.Tensor, heads: LatentHeads
    ) -> torch.Tensor:
        return self._backend.attend_latents(layer, q, rows, heads)


def hide_tokens(attention: PlannedAttention, rows: torch.Tensor) -> None:
    """Redirect K and V of some tokens of a planned step to the pool's extra page.

    Args:
        rows: int64 ``[n]`` on the device.
    """
    pool = attention.pool
    for slots in attention.list_slots():
        slots.index_fill_(0, rows, pool.num_pages * pool.page_size)


class CapturedGraphs(Protocol):
    """CUDA graphs for one kind of steps. This is a protocol, because their modules import ours."""

    @property
    def sizes(self) -> list[int]:
        """Captured sizes in tokens, ascending."""

    def can_run(self, items: Sequence[ForwardItem]) -> bool:
        """Whether :meth:`run` can compute this step."""

    def run(
        self,
        items: Sequence[ForwardItem],
        previous_tokens: torch.Tensor | None,
        outcome: StepOutcome | None = None,
    ) -> torch.Tensor:
        """Do :meth:`ModelRunner.forward`. The next run overwrites the logits."""


class CapturedVerifyGraphs(CapturedGraphs, Protocol):
    """Graphs for steps with a few tokens of each sequence."""

    @property
    def takes_unread(self) -> bool:
        """Whether steps can start at positions that only the device knows."""


class CapturedChunks(Protocol):
    """Graphs for steps with one short chunk."""

    @property
    def sizes(self) -> list[int]:
        """Captured sizes in tokens, ascending."""

    def can_run(self, items: Sequence[ForwardItem]) -> bool:
        """Whether :meth:`run` can compute this step."""

    def run(self, item: ForwardItem) -> torch.Tensor:
        """Compute the chunk. The next run overwrites the logits."""


class ModelRunner:
    """A model, its pool and an attention backend. One thread at a time runs steps.

    Args:
        last_attention: another backend of the same class, for the wanted tokens in the last layer.

    Attributes:
        eagle: writes the KV of an EAGLE head in every pass; None without one.
        graphs: graphs of decode steps, once captured; None to launch kernels one by one.
        verify_graphs: graphs of steps with a few tokens of each sequence; None without them.
        chunk_graphs: graphs of steps with one short chunk; None without them.
        mixed_graphs: graphs of steps with chunks and sequences that continue; None without them.
        takes_unread: whether a step can be launched before the host has read the accepted guesses
            of the previous step.
        last_alone_from: number of query-key pairs from which the last layer attends only the wanted
            tokens, if they are few. With fewer pairs the host spends more time on the plan than the
            GPU saves.
        num_replays: number of steps that a graph computed.
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
        self.num_replays = 0
        self._last_attention = last_attention
        self.graphs: CapturedGraphs | None = None
        self.verify_graphs: CapturedVerifyGraphs | None = None
        self.chunk_graphs: CapturedChunks | None = None
        self.mixed_graphs: CapturedGraphs | None = None

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
        """Make a runner with a backend of this class. With ``prompts`` it gets a second backend,
        for the wanted tokens in the last layer."""
        make = partial(_make_attention, model.config, pool, attention)
        return cls(model, pool, make(), make() if prompts else None, eagle)

    @property
    def takes_unread(self) -> bool:
        if not self.pool.memory.is_cuda:
            return True  # a step is over when its launch returns
        return self.verify_graphs is not None and self.verify_graphs.takes_unread

    def move_tokens(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """See :meth:`pd.engine.kv_pool.KVPool.move_tokens`."""
        self.pool.move_tokens(source, to)

    def drop_graphs(self) -> None:
        """Drop all graphs. Later steps launch their kernels one by one."""
        self.graphs = self.verify_graphs = self.chunk_graphs = self.mixed_graphs = None

    @torch.inference_mode()
    def forward(
        self,
        items: Sequence[ForwardItem],
        on_layers_done: Callable[[int, int], None] | None = None,
        previous_tokens: torch.Tensor | None = None,
        outcome: StepOutcome | None = None,
    ) -> torch.Tensor:
        """Compute new tokens and leave their KV in the pool.

        Args:
            items: at least one. No two may write the same page.
            on_layers_done: called with ``(first, stop)`` when the KV of these layers is in the
                pool, or on a GPU queued on the current stream: for each layer, or for all at once.
                It must return quickly and must not wait for a GPU, because we launch the next
                layers only afterwards.
            previous_tokens: int64 ``[rows]`` on the model's device. Negative token ids refer to it.
            outcome: outcome of the previous step, if some item has unread guesses. Without a graph
                that fits, the host waits for it.

        Returns:
            Logits ``[sum(num_logits), vocab_size]`` in the order of ``items``, in the model's dtype
            and on its device.
        """
        verify = self.verify_graphs
        if outcome is not None and verify is not None and verify.can_run(items):
            logits: torch.Tensor | None = verify.run(items, previous_tokens, outcome)
        else:
            if outcome is not None:
                items = _apply_outcome(items, outcome)
            logits = self._replay_graph(items, previous_tokens)
        if logits is None:
            return self._launch_kernels(items, on_layers_done, previous_tokens)
        self.num_replays += 1
        if on_layers_done is not None:
            on_layers_done(0, self.model.config.num_layers + (self.eagle is not None))
        return logits

    def _replay_graph(
        self, items: Sequence[ForwardItem], previous_tokens: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Do :meth:`forward` with a graph; return None if no graph fits. All ranks must choose the
        same graph, because they sum tensors of its size."""
        for graphs in (self.graphs, self.verify_graphs):
            if graphs is not None and graphs.can_run(items):
                return graphs.run(items, previous_tokens)
        short = self.chunk_graphs if previous_tokens is None else None
        if short is not None and short.can_run(items):
            return short.run(items[0])
        if self.mixed_graphs is not None and self.mixed_graphs.can_run(items):
            return self.mixed_graphs.run(items, previous_tokens)
        return None

    def _launch_kernels(
        self,
        items: Sequence[ForwardItem],
        on_layers_done: Callable[[int, int], None] | None,
        previous_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Do :meth:`forward` without graphs."""
        lengths = np.fromiter((len(item.token_ids) for item in items), np.int64, len(items))
        starts = np.fromiter((item.start for item in items), np.int64, len(items))
        trees = None
        ends = np.cumsum(lengths)
        positions = find_token_positions(items, starts, lengths)
        if any(item.has_branches for item in items):
            trees = [item.make_attention_mask() for item in items]
        batch = AttentionBatch(starts, lengths, [item.pages for item in items], trees)
        wanted = np.fromiter((item.num_logits for item in items), np.int64, len(items))
        assert (wanted <= lengths).all(), "more logits wanted than tokens computed"
        # NOTE: we copy before launching the layers, because a copy to a GPU waits for earlier work.
        rows = np.repeat(ends - np.cumsum(wanted), wanted) + np.arange(wanted.sum())
        chosen = self._to_tensor(rows) if len(rows) < ends[-1] else None
        token_ids = self._to_tensor(np.concatenate([item.token_ids for item in items]))
        if previous_tokens is not None:
            known = previous_tokens[(-1 - token_ids).clamp_(min=0)]
            token_ids = torch.where(token_ids < 0, known, token_ids)
        before = (
            None if self.eagle is None else self._to_tensor(self.eagle.find_places_before(items))
        )
        places = self._to_tensor(positions)
        reread = find_reread_rows(items, self.pool.device)
        attention = LazyAttention(
            self.attention, batch, reread, self._plan_last_layer(batch, wanted)
        )
        features = self.model.allocate_features(len(token_ids))
        hidden = self.model.forward(
            token_ids, places, attention, _each_layer(on_layers_done), chosen, features
        )
        if self.eagle is not None and features is not None and before is not None:
            self.eagle.write_kv(token_ids, places, attention.slots, features, before)
            if on_layers_done is not None:
                layers = self.model.config.num_layers
                on_layers_done(layers, layers + 1)
        if len(hidden) == 0:
            return hidden.new_empty(0, self.model.config.vocab_size)
        return self.model.compute_logits(hidden)

    def _plan_last_layer(
        self, batch: AttentionBatch, wanted: npt.NDArray[np.int64]
    ) -> tuple[AttentionBackend, AttentionBatch] | None:
        """Choose backend and batch for the last layer: the last ``wanted[i]`` tokens of each
        sequence. Returns None if the layer should attend all tokens."""
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

    def _to_tensor(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        return to_device(array, torch.int64, self.pool.device)


def _each_layer(
    on_layers_done: Callable[[int, int], None] | None,
) -> Callable[[int], None] | None:
    """Make a callback for single layers from one for ranges of layers."""
    if on_layers_done is None:
        return None
    return lambda layer: on_layers_done(layer, layer + 1)
