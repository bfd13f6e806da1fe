"""Steps as CUDA graphs: one call launches a few hundred kernels.

A graph computes a fixed number of rows at fixed addresses. So we capture a ladder of sizes, and a
step uses the smallest one with enough rows. The remaining rows are padding: their KV goes to the
pool's extra page, and nobody reads their logits. Only one graph runs at a time, so all of them
share the memory of their intermediate results and logits.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
from abc import ABC, abstractmethod
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from pd.engine.device_copy import to_device
from pd.engine.forward_item import find_reread_rows, find_token_positions
from pd.engine.model_runner import hide_tokens
from pd.kernels.attention.base import UnreadStarts
from pd.util.output import unwrap_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd.engine.forward_item import ForwardItem
    from pd.engine.model_runner import ModelRunner
    from pd.engine.step_outcome import StepOutcome
    from pd.kernels.attention import AttentionBackend
    from pd.kernels.attention.base import Int64Array, IntArray, PlannedAttention

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Captured:
    """One captured size.

    Attributes:
        inputs: int64, three or four fields for each row: the index of its token among all tokens,
            its position, the token if the host knows it, and with an EAGLE head the place of the
            state before it. In mixed steps, the rows whose logits are wanted follow.
        logits: ``[rows, vocab_size]`` or ``[wanted, vocab_size]``, overwritten by each replay.
    """

    attention: PlannedAttention
    inputs: torch.Tensor
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class GraphRecorder:
    """Captures graphs and lets them share the memory of their intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def capture_graph(
        self, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Run ``compute`` once, so that kernels are compiled and chosen, then capture it.

        Returns:
            The graph, and the result of ``compute``, which each replay overwrites.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()
        graph = torch.cuda.CUDAGraph()
        # Calls from other threads, such as NCCL's watchdog, must not abort the capture.
        mode = "thread_local"
        with (
            _pause_garbage_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode),
        ):
            result = compute()
        return graph, result


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector during a capture, because freeing a graph would abort it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StepTokens(NamedTuple):
    """The new tokens of a step.

    Attributes:
        items: one for each sequence.
        starts, lengths: see :class:`pd.kernels.attention.AttentionBatch`.
        unread: how much later the sequences start, if only the device knows; else None.
    """

    items: Sequence[ForwardItem]
    starts: Int64Array
    lengths: Int64Array
    unread: UnreadStarts | None

    @property
    def pages(self) -> list[IntArray]:
        """Page table of each sequence."""
        return [item.pages for item in self.items]


class StepGraphs(ABC):
    """Runs steps with at most as many tokens as the largest graph.

    Args:
        runner: nobody else may use it during the capture.
        recorder: shared by all graphs of the process.
        sizes: numbers of tokens to capture.
        max_tokens: number of tokens of the previous step, or of its drafts, that a step may refer
            to.
        max_context: longest sequence in tokens.
        progress: title of the progress bar on standard error, if that is a terminal; empty for no
            bar.
    """

    def __init__(
        self,
        runner: ModelRunner,
        recorder: GraphRecorder,
        sizes: Sequence[int],
        *,
        max_tokens: int,
        max_context: int,
        progress: str = "",
    ) -> None:
        self._model, self._eagle = runner.model, runner.eagle
        self._fields = 3 if runner.eagle is None else 4
        self._device = runner.model.embedding.device
        self.sizes = sorted(sizes)
        largest = self.sizes[-1]
        # The tokens of the previous step follow the inputs. Only the device has their values.
        self._first_previous = self._num_inputs(largest)
        self._tokens = torch.zeros(
            self._first_previous + max(max_tokens, largest), dtype=torch.int64, device=self._device
        )
        self._previous = self._tokens[self._first_previous :]
        dtype, size = runner.model.embedding.dtype, runner.model.config.vocab_size
        wanted = self._num_wanted(largest) or largest
        self._logits = torch.zeros(wanted, size, dtype=dtype, device=self._device)
        if runner.eagle is not None:
            self._fused = runner.eagle.carried.new_zeros(largest, runner.eagle.carried.shape[1])
        self._graphs: dict[int, _Captured] = {}
        bar = tqdm(
            sorted(sizes, reverse=True),
            desc=progress,
            unit="size",
            disable=not (progress and sys.stderr.isatty()),
            file=unwrap_stream(sys.stderr),
        )
        for rows in bar:  # the largest first, for its memory serves all others
            attention = self._make_attention(runner.attention, rows, max_context)
            inputs = self._tokens[: self._num_inputs(rows)]
            compute = functools.partial(self._compute_rows, rows, inputs, attention)
            self._graphs[rows] = _Captured(attention, inputs, *recorder.capture_graph(compute))
        torch.cuda.empty_cache()

    @abstractmethod
    def can_run(self, items: Sequence[ForwardItem]) -> bool:
        """Whether :meth:`run` can compute this step."""

    @abstractmethod
    def _make_attention(
        self, backend: AttentionBackend, rows: int, max_context: int
    ) -> PlannedAttention:
        """Make attention for a graph of ``rows`` tokens, planned for no sequence yet."""

    @abstractmethod
    def _plan_attention(self, attention: PlannedAttention, step: StepTokens) -> None:
        """Plan the result of :meth:`_make_attention` for the next replay."""

    def _num_wanted(self, rows: int) -> int:
        """Return how many tokens have logits in the graph of ``rows`` tokens; 0 if all have."""
        return 0

    def _num_inputs(self, rows: int) -> int:
        return self._fields * rows + self._num_wanted(rows)

    def _compute_rows(
        self, rows: int, inputs: torch.Tensor, attention: PlannedAttention
    ) -> torch.Tensor:
        ids = self._tokens.index_select(0, inputs[:rows])
        positions = inputs[rows : 2 * rows]
        features = self._model.allocate_features(rows)
        wanted = inputs[self._fields * rows :] if self._num_wanted(rows) else None
        hidden = self._model(ids, positions, attention, rows=wanted, features=features)
        if self._eagle is not None and features is not None:
            before = inputs[3 * rows : 4 * rows]
            self._eagle.write_kv(ids, positions, attention.slots, features, before)
            self._fused[:rows].copy_(self._eagle.fused)
        return self._logits[: len(hidden)].copy_(self._model.compute_logits(hidden))

    def run(
        self,
        items: Sequence[ForwardItem],
        previous_tokens: torch.Tensor | None,
        outcome: StepOutcome | None = None,
    ) -> torch.Tensor:
        """Do :meth:`pd.engine.model_runner.ModelRunner.forward`. The next run overwrites the
        logits."""
        token_ids = np.concatenate([item.token_ids for item in items])
        count = len(token_ids)
        rows = self.sizes[bisect_left(self.sizes, count)]
        graph = self._graphs[rows]
        pinned = self._device.type == "cuda"
        host = torch.zeros(self._num_inputs(rows), dtype=torch.int64, pin_memory=pinned)
        inputs = host.numpy()[: self._fields * rows].reshape(self._fields, rows)
        places, positions, tokens = inputs[:3]
        places[:] = 2 * rows + np.arange(rows)
        tokens[:count] = token_ids
        starts = np.fromiter((item.start for item in items), np.int64, len(items))
        lengths = np.fromiter((len(item.token_ids) for item in items), np.int64, len(items))
        one_each = count == len(items)
        positions[:count] = starts if one_each else find_token_positions(items, starts, lengths)
        if self._eagle is not None:
            inputs[3, :count] = self._eagle.find_places_before(items)
        previous = np.flatnonzero(tokens < 0)
        places[previous] = self._first_previous - 1 - tokens[previous]
        wanted = find_wanted_rows(items, lengths) if self._num_wanted(rows) else None
        if wanted is not None:
            host.numpy()[self._fields * rows :][: len(wanted)] = wanted
        graph.inputs.copy_(host, non_blocking=True)
        if previous_tokens is not None:
            # Sequences that continue come first. Prompts, perhaps with many choices each, come
            # after them.
            known = previous_tokens[: len(self._previous)]
            self._previous[: len(known)].copy_(known)
        unread = None
        if outcome is not None:
            unread = self._find_unread_starts(items, lengths, rows, outcome)
            graph.inputs[rows : 2 * rows].add_(unread.by_row)
        self._plan_attention(graph.attention, StepTokens(items, starts, lengths, unread))
        reread = find_reread_rows(items, self._device)
        if reread is not None:
            hide_tokens(graph.attention, reread)
        graph.graph.replay()
        if self._eagle is not None:
            self._eagle.fused = self._fused[:rows]
        if wanted is not None:
            return graph.logits[: len(wanted)]
        if one_each or all(item.num_logits == len(item.token_ids) for item in items):
            return graph.logits[:count]
        chosen = to_device(find_wanted_rows(items, lengths), torch.int64, self._device)
        return graph.logits.index_select(0, chosen)

    def _find_unread_starts(
        self, items: Sequence[ForwardItem], lengths: Int64Array, rows: int, outcome: StepOutcome
    ) -> UnreadStarts:
        works = np.full(rows, -1, np.int64)
        of_items = np.fromiter((item.work for item in items), np.int64, len(items))
        works[: int(lengths.sum())] = np.repeat(of_items, lengths)
        counts = outcome.counts_of(to_device(works, torch.int64, self._device))
        limits = np.fromiter((item.unread for item in items), np.int64, len(items))
        return UnreadStarts(limits, counts)

    @property
    def _lowest_token_id(self) -> int:
        """The lowest negative token id for which there is room."""
        return -len(self._previous)


def find_wanted_rows(items: Sequence[ForwardItem], lengths: Int64Array) -> Int64Array:
    """Return the rows of a step whose logits are wanted, int64."""
    wanted = np.fromiter((item.num_logits for item in items), np.int64, len(items))
    ends = np.cumsum(lengths)
    rows: Int64Array = np.repeat(ends - np.cumsum(wanted), wanted) + np.arange(wanted.sum())
    return rows
