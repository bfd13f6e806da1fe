"""Decode steps as CUDA graphs: a few hundred kernels launched by one call.

A graph computes a fixed number of rows at fixed addresses, so there is one for each of a ladder of
batch sizes, and a step uses the smallest that it fits in. Rows that are left over are padding: they
attend to the pool's extra page, and their logits are not read. All graphs share the memory of their
intermediate results and of their logits, since only one runs at a time.
"""

from __future__ import annotations

import functools
import logging
import sys
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.engine.model_runner import ForwardItem
    from pd.kernels.attention import AttentionBackend, DecodeAttention
    from pd.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)

# Steps of fewer rows all take about as long as reading the weights, so few sizes are enough; in
# larger batches each padded row costs time.
_DENSE_FROM = 8


def default_sizes(max_running: int) -> tuple[int, ...]:
    """The ladder for batches of up to ``max_running`` sequences: powers of two, then multiples of
    8, from 128 on of 16 and from 256 on of 32."""
    sizes = [1, 2, 4]
    size = _DENSE_FROM
    while size < max_running:
        sizes.append(size)
        size += 8 if size < 128 else 16 if size < 256 else 32
    return tuple(sorted({min(size, max_running) for size in [*sizes, size]}))


@dataclass(frozen=True)
class _CapturedDecode:
    """One captured size. ``inputs`` is int64 ``[3 * rows]``: the index of each row's token among
    all tokens, positions, and the tokens that the host has. ``logits`` ``[rows, vocab_size]`` holds
    the result of the last replay."""

    attention: DecodeAttention
    inputs: torch.Tensor
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class GraphRecorder:
    """Captures graphs that share the memory of their intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def record(
        self, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Run ``compute``, which compiles and chooses kernels, then capture it.

        Returns:
            The graph and what ``compute`` returned, which each replay overwrites.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads, such as NCCL's watchdog, must not end a capture.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            result = compute()
        return graph, result


class DecodeGraphs:
    """Runs steps of one token per sequence.

    Args:
        recorder: shared by all graphs of the process.
        sizes: batch sizes to capture.
        max_rows: sequences that a step may have, in a graph or not.
        max_context: tokens of a sequence.
        progress: show a bar on standard error when it is a terminal.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        recorder: GraphRecorder,
        sizes: Sequence[int],
        *,
        max_rows: int,
        max_context: int,
        progress: bool = True,
    ) -> None:
        self._model = model
        self._device = model.embedding.device
        self.sizes = sorted(sizes)
        largest = self.sizes[-1]
        # The inputs are followed by the tokens of the previous step, whose values only the device
        # has.
        self._tokens = torch.zeros(
            3 * largest + max(max_rows, largest), dtype=torch.int64, device=self._device
        )
        self._previous = self._tokens[3 * largest :]
        self._logits = torch.zeros(
            largest, model.config.vocab_size, dtype=model.embedding.dtype, device=self._device
        )
        self._graphs: dict[int, _CapturedDecode] = {}
        bar = tqdm(
            sorted(sizes, reverse=True),
            desc="CUDA graphs",
            unit="size",
            disable=not (progress and sys.stderr.isatty()),
        )
        for rows in bar:  # the largest first, for its memory serves all others
            attention = backend.decode_graph(rows, max_context)
            if attention is None:
                raise ValueError(f"attention backend {backend.name} has no CUDA graphs")
            inputs = self._tokens[: 3 * rows]
            attention.plan(np.zeros(0, np.int64), [])
            compute = functools.partial(self._compute, rows, inputs, attention)
            self._graphs[rows] = _CapturedDecode(attention, inputs, *recorder.record(compute))
        torch.cuda.empty_cache()

    def _compute(self, rows: int, inputs: torch.Tensor, attention: DecodeAttention) -> torch.Tensor:
        ids = self._tokens.index_select(0, inputs[:rows])
        logits = self._model.logits(self._model(ids, inputs[rows : 2 * rows], attention))
        return self._logits[:rows].copy_(logits)

    def fits(self, items: Sequence[ForwardItem]) -> bool:
        """Whether these are one token of each of not too many sequences."""
        return len(items) <= self.sizes[-1] and all(
            len(item.token_ids) == 1 and item.num_logits == 1 for item in items
        )

    def run(
        self, items: Sequence[ForwardItem], previous_tokens: torch.Tensor | None
    ) -> torch.Tensor:
        """See :meth:`pd.engine.model_runner.ModelRunner.forward`. The logits are overwritten by the
        next run."""
        count = len(items)
        rows = self.sizes[bisect_left(self.sizes, count)]
        graph = self._graphs[rows]
        host = torch.zeros(3 * rows, dtype=torch.int64, pin_memory=True)
        places, positions, tokens = host.numpy().reshape(3, rows)
        places[:] = 2 * rows + np.arange(rows)
        tokens[:count] = [item.token_ids[0] for item in items]
        positions[:count] = [item.start for item in items]
        previous = np.flatnonzero(tokens < 0)
        # NOTE: at most max_rows sequences continue, and their rows come first.
        places[previous] = 3 * self.sizes[-1] - 1 - tokens[previous]
        graph.inputs.copy_(host, non_blocking=True)
        if previous_tokens is not None:
            # Rows of prompts, of which there may be many choices, follow the rows that continue.
            known = previous_tokens[: len(self._previous)]
            self._previous[: len(known)].copy_(known)
        graph.attention.plan(positions[:count].copy(), [item.pages for item in items])
        graph.graph.replay()
        return graph.logits[:count]
