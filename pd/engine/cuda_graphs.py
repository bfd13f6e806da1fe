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

from pd.engine.device_copy import to_device
from pd.engine.model_runner import hide_tokens, reread_rows, token_positions
from pd.kernels.attention.base import VerifyAttention
from pd.kernels.attention.trees import MAX_TREE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.core.config import NodeConfig
    from pd.engine.model_runner import ForwardItem, ModelRunner
    from pd.kernels.attention import AttentionBackend, DecodeAttention
    from pd.kernels.attention.base import PlannedAttention

logger = logging.getLogger(__name__)

# Tokens of the largest step with drafts that is captured. Larger ones keep a GPU busy for longer
# than their launches take.
MAX_VERIFIED = 512
# Steps of fewer rows all take about as long as reading the weights, so few sizes are enough; in
# larger batches each padded row costs time.
_DENSE_FROM = 8
# For steps with drafts: sizes below the first number of a pair lie apart by the second.
_VERIFY_STEPS = ((6, 1), (12, 2), (32, 4), (64, 8), (128, 16))


def verify_sizes(max_tokens: int) -> tuple[int, ...]:
    """The ladder for steps with drafts of up to ``max_tokens`` tokens. From 4 on, each size is at
    most a third larger than the one before, so that little of a step is padding."""
    sizes = [2]
    while sizes[-1] < max_tokens:
        size = sizes[-1]
        sizes.append(size + next((step for below, step in _VERIFY_STEPS if size < below), 32))
    return (*sizes[:-1], max_tokens) if max_tokens > 1 else ()


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
class _Captured:
    """One captured size. ``inputs`` is int64 ``[fields * rows]``: the index of each row's token
    among all tokens, positions, the tokens that the host has, and with an EAGLE head where the
    state of the token before lies. ``logits`` ``[rows, vocab_size]`` holds the result of the last
    replay."""

    attention: DecodeAttention | VerifyAttention
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
    """Runs steps of one token per sequence, or of a few.

    Args:
        runner: not used by others meanwhile.
        recorder: shared by all graphs of the process.
        sizes: numbers of tokens to capture.
        max_tokens: tokens of the last step or its drafts to which a step may refer.
        max_context: tokens of a sequence.
        several: capture steps of several tokens of each sequence.
        progress: show a bar on standard error when it is a terminal.
    """

    def __init__(
        self,
        runner: ModelRunner,
        recorder: GraphRecorder,
        sizes: Sequence[int],
        *,
        max_tokens: int,
        max_context: int,
        several: bool = False,
        progress: bool = True,
    ) -> None:
        self._model, self._eagle = runner.model, runner.eagle
        self._several = several
        self._fields = 3 if runner.eagle is None else 4
        self._device = runner.model.embedding.device
        self.sizes = sorted(sizes)
        largest = self.sizes[-1]
        # The inputs are followed by the tokens of the previous step, whose values only the device
        # has.
        self._first_previous = self._fields * largest
        self._tokens = torch.zeros(
            self._first_previous + max(max_tokens, largest), dtype=torch.int64, device=self._device
        )
        self._previous = self._tokens[self._first_previous :]
        dtype, size = runner.model.embedding.dtype, runner.model.config.vocab_size
        self._logits = torch.zeros(largest, size, dtype=dtype, device=self._device)
        if runner.eagle is not None:
            self._fused = runner.eagle.carried.new_zeros(largest, runner.eagle.carried.shape[1])
        self._graphs: dict[int, _Captured] = {}
        bar = tqdm(
            sorted(sizes, reverse=True),
            desc="CUDA graphs" + (" of steps with drafts" if several else ""),
            unit="size",
            disable=not (progress and sys.stderr.isatty()),
        )
        for rows in bar:  # the largest first, for its memory serves all others
            attention = self._attention(runner.attention, rows, max_context)
            inputs = self._tokens[: self._fields * rows]
            compute = functools.partial(self._compute, rows, inputs, attention)
            self._graphs[rows] = _Captured(attention, inputs, *recorder.record(compute))
        torch.cuda.empty_cache()

    def _attention(
        self, backend: AttentionBackend, rows: int, max_context: int
    ) -> DecodeAttention | VerifyAttention:
        none = np.zeros(0, np.int64)
        if self._several:
            verify = backend.verify_graph(rows, max_context)
            if verify is not None:
                verify.plan(none, none, [])
                return verify
        else:
            decode = backend.decode_graph(rows, max_context)
            if decode is not None:
                decode.plan(none, [])
                return decode
        raise ValueError(f"attention backend {backend.name} has no such CUDA graphs")

    def _compute(
        self, rows: int, inputs: torch.Tensor, attention: PlannedAttention
    ) -> torch.Tensor:
        ids = self._tokens.index_select(0, inputs[:rows])
        positions = inputs[rows : 2 * rows]
        features = self._model.new_features(rows)
        hidden = self._model(ids, positions, attention, features=features)
        if self._eagle is not None and features is not None:
            before = inputs[3 * rows : 4 * rows]
            self._eagle.write(ids, positions, attention.slots, features, before)
            self._fused[:rows].copy_(self._eagle.fused)
        return self._logits[:rows].copy_(self._model.logits(hidden))

    def fits(self, items: Sequence[ForwardItem]) -> bool:
        """Whether these are so few tokens, whose logits are wanted, and one of each sequence; or,
        where such steps were captured, at most :data:`MAX_TREE`, of which the first may be computed
        without. And whether there is room for the tokens that they refer to."""
        most, total = MAX_TREE if self._several else 1, 0
        lowest = -len(self._previous)
        for item in items:
            count = len(item.token_ids)
            total += count
            if count > most or not max(1, count - 1) <= item.num_logits <= count:
                return False
            # The last token has the highest place among those that only the device has.
            if item.token_ids[-1] < lowest:
                return False
        return total <= self.sizes[-1]

    def run(
        self, items: Sequence[ForwardItem], previous_tokens: torch.Tensor | None
    ) -> torch.Tensor:
        """See :meth:`pd.engine.model_runner.ModelRunner.forward`. The logits are overwritten by the
        next run."""
        token_ids = np.concatenate([item.token_ids for item in items])
        count = len(token_ids)
        rows = self.sizes[bisect_left(self.sizes, count)]
        graph = self._graphs[rows]
        host = torch.zeros(self._fields * rows, dtype=torch.int64, pin_memory=True)
        inputs = host.numpy().reshape(self._fields, rows)
        places, positions, tokens = inputs[:3]
        places[:] = 2 * rows + np.arange(rows)
        tokens[:count] = token_ids
        starts = np.fromiter((item.start for item in items), np.int64, len(items))
        lengths = np.fromiter((len(item.token_ids) for item in items), np.int64, len(items))
        positions[:count] = token_positions(items, starts, lengths) if self._several else starts
        if self._eagle is not None:
            inputs[3, :count] = self._eagle.places_before(items)
        previous = np.flatnonzero(tokens < 0)
        places[previous] = self._first_previous - 1 - tokens[previous]
        graph.inputs.copy_(host, non_blocking=True)
        if previous_tokens is not None:
            # Rows of prompts, of which there may be many choices, follow the rows that continue.
            known = previous_tokens[: len(self._previous)]
            self._previous[: len(known)].copy_(known)
        pages = [item.pages for item in items]
        if isinstance(graph.attention, VerifyAttention):
            trees = None
            if any(item.branches for item in items):
                trees = [item.visible() for item in items]
            graph.attention.plan(starts, lengths, pages, trees)
            reread = reread_rows(items, self._device)
            if reread is not None:
                hide_tokens(graph.attention, reread)
        else:
            graph.attention.plan(starts, pages)
        graph.graph.replay()
        if self._eagle is not None:
            self._eagle.fused = self._fused[:rows]
        logits = graph.logits[:count]
        unwanted = [item.num_logits < len(item.token_ids) for item in items]
        if not any(unwanted):
            return logits
        wanted = np.ones(count, np.bool_)
        wanted[(np.cumsum(lengths) - lengths)[unwanted]] = False
        chosen = np.flatnonzero(wanted)
        return logits.index_select(0, to_device(chosen, torch.int64, self._device))


def capture_steps(
    runner: ModelRunner,
    recorder: GraphRecorder,
    config: NodeConfig,
    sizes: Sequence[int],
    max_context: int,
    *,
    only_extremes: bool = False,
    progress: bool = True,
) -> tuple[DecodeGraphs, DecodeGraphs | None]:
    """Capture a node's decode steps and, where it has a drafter and an attention backend for
    them, its steps with drafts.

    Args:
        sizes: batch sizes.
        max_context: tokens of a sequence.
        only_extremes: of each kind only the smallest graph and the largest, which take as much
            memory as all.
        progress: show bars on standard error when it is a terminal.
    """
    rows = config.max_running_requests
    decode = DecodeGraphs(
        runner,
        recorder,
        [min(sizes), max(sizes)] if only_extremes else sizes,
        max_tokens=rows,
        max_context=max_context,
        progress=progress,
    )
    of_each = config.speculative_num_draft_tokens + 1
    if config.speculative_algorithm == "none" or not runner.attention.verify_graph(2, 2):
        return decode, None
    verified = verify_sizes(min(MAX_VERIFIED, max(sizes) * of_each))
    verify = DecodeGraphs(
        runner,
        recorder,
        [verified[0], verified[-1]] if only_extremes else verified,
        # Both running sequences and those whose places they took have drafts.
        max_tokens=rows * 2 * of_each,
        max_context=max_context,
        several=True,
        progress=progress,
    )
    return decode, verify
