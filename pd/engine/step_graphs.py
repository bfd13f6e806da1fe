"""The steps of a node and the passes of its draft model as CUDA graphs, by kind: one token of each
sequence, a few tokens of each, and prompts beside sequences that continue."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd.core.step_cost import graph_rows
from pd.engine.cuda_graphs import StepGraphs
from pd.kernels.attention.base import DecodeAttention, MixedAttention, VerifyAttention
from pd.kernels.attention.trees import MAX_TREE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.core.config import NodeConfig
    from pd.engine.cuda_graphs import GraphRecorder, StepTokens
    from pd.engine.model_runner import ForwardItem, ModelRunner
    from pd.kernels.attention import AttentionBackend
    from pd.kernels.attention.base import PlannedAttention

# Tokens of the largest step with drafts that is captured. Larger ones keep a GPU busy for longer
# than their launches take.
MAX_VERIFIED = 512
# Tokens of the mixed steps that are captured: larger ones keep a GPU busy for longer than their
# launches take. Those in between are computed with the next larger one.
MIXED_SIZES = tuple(sorted({graph_rows(rows) for rows in range(1, 1025)}))
# Sequences with several tokens in a mixed step, which are prompts and chains of drafts, and tokens
# whose logits are wanted, at most. Steps with more are launched kernel by kernel.
MAX_CHUNKS, MAX_WANTED = 32, 256
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


class DecodeGraphs(StepGraphs):
    """Runs steps of one token per sequence."""

    def fits(self, items: Sequence[ForwardItem]) -> bool:
        lowest = self._lowest
        for item in items:
            ids = item.token_ids
            if len(ids) != 1 or item.num_logits != 1 or ids[0] < lowest or item.unread:
                return False
        return len(items) <= self.sizes[-1]

    def _attention(self, backend: AttentionBackend, rows: int, max_context: int) -> DecodeAttention:
        attention = backend.decode_graph(rows, max_context)
        if attention is None:
            raise ValueError(f"attention backend {backend.name} has no CUDA graphs")
        attention.plan(np.zeros(0, np.int64), [])
        return attention

    def _plan(self, attention: PlannedAttention, step: StepTokens) -> None:
        assert isinstance(attention, DecodeAttention)
        attention.plan(step.starts, step.pages)


class VerifyGraphs(StepGraphs):
    """Runs steps of a few tokens of each sequence, at most :data:`MAX_TREE`, whose logits are
    wanted; of which the first may be computed without.

    Attributes:
        takes_unread: whether steps may begin where only the device knows.
    """

    takes_unread = False

    def fits(self, items: Sequence[ForwardItem]) -> bool:
        total, lowest = 0, self._lowest
        for item in items:
            count = len(item.token_ids)
            total += count
            if count > MAX_TREE or not max(1, count - 1) <= item.num_logits <= count:
                return False
            # The last token has the highest place among those that only the device has.
            if item.token_ids[-1] < lowest:
                return False
        return total <= self.sizes[-1]

    def _attention(self, backend: AttentionBackend, rows: int, max_context: int) -> VerifyAttention:
        attention = backend.verify_graph(rows, max_context)
        if attention is None:
            raise ValueError(f"attention backend {backend.name} has no graphs of drafts")
        self.takes_unread = attention.takes_unread
        none = np.zeros(0, np.int64)
        attention.plan(none, none, [])
        return attention

    def _plan(self, attention: PlannedAttention, step: StepTokens) -> None:
        assert isinstance(attention, VerifyAttention)
        trees = None
        if any(item.branches for item in step.items):
            trees = [item.visible() for item in step.items]
        attention.plan(step.starts, step.lengths, step.pages, trees, step.unread)


class MixedGraphs(StepGraphs):
    """Runs steps of chunks of a few prompts beside sequences that continue.

    Their kernels take the host tens of milliseconds to launch one by one, as long as the GPU needs
    for a thousand prompt tokens: answers would wait for that at every step.

    Args:
        max_running: sequences that continue, at most.
    """

    def __init__(
        self,
        runner: ModelRunner,
        recorder: GraphRecorder,
        sizes: Sequence[int],
        *,
        max_running: int,
        max_tokens: int,
        max_context: int,
        progress: str = "",
    ) -> None:
        self._most_wanted = min(MAX_WANTED, max_running + MAX_CHUNKS)
        super().__init__(
            runner,
            recorder,
            sizes,
            max_tokens=max_tokens,
            max_context=max_context,
            progress=progress,
        )

    def fits(self, items: Sequence[ForwardItem]) -> bool:
        total = chunks = wanted = 0
        lowest = self._lowest
        for item in items:
            count = len(item.token_ids)
            total += count
            chunks += count > 1
            wanted += item.num_logits
            if item.branches or item.token_ids[-1] < lowest:
                return False
        if chunks > MAX_CHUNKS or total > self.sizes[-1]:
            return False
        rows = self.sizes[bisect_left(self.sizes, total)]
        return max(wanted, len(items) - chunks) <= self._wanted(rows)

    def _wanted(self, rows: int) -> int:
        return min(rows, self._most_wanted)

    def _attention(self, backend: AttentionBackend, rows: int, max_context: int) -> MixedAttention:
        attention = backend.mixed_graph(rows, self._wanted(rows), MAX_CHUNKS, max_context)
        if attention is None:
            raise ValueError(f"attention backend {backend.name} has no graphs of mixed steps")
        return attention

    def _plan(self, attention: PlannedAttention, step: StepTokens) -> None:
        assert isinstance(attention, MixedAttention)
        attention.plan(step.starts, step.lengths, step.pages)


class CapturedSteps(NamedTuple):
    """The graphs of a model's steps; None where it has no such steps, or its attention backend no
    graphs of them.

    Attributes:
        decode: one token of each sequence.
        verify: a few tokens of each sequence, such as drafts.
        mixed: prompts beside sequences that continue.
    """

    decode: DecodeGraphs
    verify: VerifyGraphs | None
    mixed: MixedGraphs | None


def capture_steps(
    runner: ModelRunner,
    recorder: GraphRecorder,
    config: NodeConfig,
    sizes: Sequence[int],
    max_context: int,
    *,
    only_extremes: bool = False,
    progress: bool = True,
) -> CapturedSteps:
    """Capture a node's decode steps and, where it has a drafter and an attention backend for them,
    its steps with drafts; where it computes prompts beside them, mixed steps.

    Args:
        sizes: batch sizes.
        max_context: tokens of a sequence.
        only_extremes: of each kind only the smallest graph and the largest, which take as much
            memory as all.
        progress: show bars on standard error when it is a terminal.
    """
    rows = config.max_running_requests
    of_each = config.speculative_num_draft_tokens + 1
    drafts = config.speculative_algorithm != "none"
    drafted = verify_sizes(min(MAX_VERIFIED, max(sizes) * of_each)) if drafts else ()
    ladder = [size for size in MIXED_SIZES if size <= config.chunked_prefill_size]
    ladders = _Ladders(sorted(sizes), drafted, ladder if config.computes_prompts else ())
    return _capture(
        runner,
        recorder,
        ladders.extremes if only_extremes else ladders,
        max_running=rows,
        max_decode_tokens=rows,
        # With drafts: of each sequence the last token, the samples, and drafts of this step and of
        # the one before, for those that were not in the last one.
        max_tokens=rows * (1 + 3 * of_each) if drafts else rows,
        max_context=max_context,
        progress="CUDA graphs" if progress else "",
    )


def capture_drafting(
    runner: ModelRunner,
    recorder: GraphRecorder,
    config: NodeConfig,
    sizes: Sequence[int],
    max_context: int,
    *,
    only_extremes: bool = False,
    progress: bool = True,
) -> CapturedSteps | None:
    """Capture the passes of a draft model: those of one drafted token of each sequence, and those
    before, of the tokens that it lacks. These are one or two of each sequence, and more where a
    prompt comes or where nothing was drafted for a while.

    Args:
        runner: of the draft model.
        sizes, max_context, only_extremes, progress: as of :func:`capture_steps`.

    Returns:
        None if the attention backend has no graphs.
    """
    if runner.attention.decode_graph(1, 2) is None:
        return None
    rows = config.max_running_requests
    lacking = verify_sizes(min(MAX_VERIFIED, 2 * max(sizes)))
    ladders = _Ladders(sorted(sizes), lacking, MIXED_SIZES)
    most = rows * config.speculative_num_draft_tokens
    return _capture(
        runner,
        recorder,
        ladders.extremes if only_extremes else ladders,
        max_running=rows,
        max_decode_tokens=most,
        max_tokens=most,
        max_context=max_context,
        progress="CUDA graphs of the draft model" if progress else "",
    )


class _Ladders(NamedTuple):
    """Tokens of the graphs to capture, by kind as in :class:`CapturedSteps`, growing; empty for
    none of the kind."""

    decode: Sequence[int]
    verify: Sequence[int]
    mixed: Sequence[int]

    @property
    def extremes(self) -> _Ladders:
        """The smallest and the largest of each kind."""
        return _Ladders(*([ladder[0], ladder[-1]] if ladder else () for ladder in self))


def _capture(
    runner: ModelRunner,
    recorder: GraphRecorder,
    ladders: _Ladders,
    *,
    max_running: int,
    max_decode_tokens: int,
    max_tokens: int,
    max_context: int,
    progress: str,
) -> CapturedSteps:
    """Capture graphs of each kind for which the attention backend has them; it must have those of
    decode steps.

    Args:
        max_running: sequences of a step, at most.
        max_decode_tokens, max_tokens: ``max_tokens`` of :class:`StepGraphs` for decode steps, and
            for the others.
    """
    decode = DecodeGraphs(
        runner,
        recorder,
        ladders.decode,
        max_tokens=max_decode_tokens,
        max_context=max_context,
        progress=progress,
    )
    verify = mixed = None
    if ladders.verify and runner.attention.verify_graph(2, 2):
        verify = VerifyGraphs(
            runner,
            recorder,
            ladders.verify,
            max_tokens=max_tokens,
            max_context=max_context,
            progress=progress and f"{progress}, a few tokens of each sequence",
        )
    if ladders.mixed and runner.attention.mixed_graph(2, 1, 1, 2):
        mixed = MixedGraphs(
            runner,
            recorder,
            ladders.mixed,
            max_running=max_running,
            max_tokens=max_tokens,
            max_context=max_context,
            progress=progress and f"{progress}, mixed steps",
        )
    return CapturedSteps(decode, verify, mixed)
