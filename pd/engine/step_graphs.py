"""CUDA graphs for the steps of a node and the passes of its draft model. There are three kinds: one
token of each sequence, a few tokens of each, and prompts mixed with sequences that continue."""

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
    from pd.engine.forward_item import ForwardItem
    from pd.engine.model_runner import ModelRunner
    from pd.kernels.attention import AttentionBackend
    from pd.kernels.attention.base import PlannedAttention

# Tokens of the largest captured step with drafts. A larger one keeps the GPU busy for longer than
# the host needs to launch it.
MAX_VERIFIED = 512
# Tokens of the captured mixed steps. Larger steps keep the GPU busy for longer than the host needs
# to launch them. A size in between uses the next larger graph.
MIXED_SIZES = tuple(sorted({graph_rows(rows) for rows in range(1, 1025)}))
# Limits of a mixed step: sequences with several tokens (prompts and chains of drafts), and tokens
# whose logits are wanted. Beyond these limits we launch kernel by kernel.
MAX_CHUNKS, MAX_WANTED = 32, 256
# Below this many rows, a step takes about as long as reading the weights, so few sizes are enough.
# In larger batches each padded row costs time.
_DENSE_FROM = 8
# For steps with drafts: (limit, distance between sizes below that limit).
_VERIFY_STEPS = ((6, 1), (12, 2), (32, 4), (64, 8), (128, 16))


def choose_verify_sizes(max_tokens: int) -> tuple[int, ...]:
    """Choose the sizes for steps with drafts of up to ``max_tokens`` tokens. From 4 on, each size
    is at most a third larger than the one before, so little of a step is padding."""
    sizes = [2]
    while sizes[-1] < max_tokens:
        size = sizes[-1]
        sizes.append(size + next((step for below, step in _VERIFY_STEPS if size < below), 32))
    return (*sizes[:-1], max_tokens) if max_tokens > 1 else ()


def choose_decode_sizes(max_running: int) -> tuple[int, ...]:
    """Choose the sizes for batches of up to ``max_running`` sequences: powers of two, then
    multiples of 8, of 16 from 128 on, and of 32 from 256 on."""
    sizes = [1, 2, 4]
    size = _DENSE_FROM
    while size < max_running:
        sizes.append(size)
        size += 8 if size < 128 else 16 if size < 256 else 32
    return tuple(sorted({min(size, max_running) for size in [*sizes, size]}))


class DecodeGraphs(StepGraphs):
    """Runs steps with one token of each sequence."""

    def can_run(self, items: Sequence[ForwardItem]) -> bool:
        lowest = self._lowest_token_id
        for item in items:
            ids = item.token_ids
            if len(ids) != 1 or item.num_logits != 1 or ids[0] < lowest or item.unread:
                return False
        return len(items) <= self.sizes[-1]

    def _make_attention(
        self, backend: AttentionBackend, rows: int, max_context: int
    ) -> DecodeAttention:
        attention = backend.make_decode_graph(rows, max_context)
        if attention is None:
            raise ValueError(f"attention backend {backend.name} has no CUDA graphs")
        attention.plan(np.zeros(0, np.int64), [])
        return attention

    def _plan_attention(self, attention: PlannedAttention, step: StepTokens) -> None:
        assert isinstance(attention, DecodeAttention)
        attention.plan(step.starts, step.pages)


class VerifyGraphs(StepGraphs):
    """Runs steps with at most :data:`MAX_TREE` tokens of each sequence. All logits are wanted,
    except perhaps those of a sequence's first token.

    Attributes:
        takes_unread: whether steps can start at positions that only the device knows.
    """

    takes_unread = False

    def can_run(self, items: Sequence[ForwardItem]) -> bool:
        total, lowest = 0, self._lowest_token_id
        for item in items:
            count = len(item.token_ids)
            total += count
            if count > MAX_TREE or not max(1, count - 1) <= item.num_logits <= count:
                return False
            # The last token has the lowest negative id.
            if item.token_ids[-1] < lowest:
                return False
        return total <= self.sizes[-1]

    def _make_attention(
        self, backend: AttentionBackend, rows: int, max_context: int
    ) -> VerifyAttention:
        attention = backend.make_verify_graph(rows, max_context)
        if attention is None:
            raise ValueError(f"attention backend {backend.name} has no graphs of drafts")
        self.takes_unread = attention.takes_unread
        none = np.zeros(0, np.int64)
        attention.plan(none, none, [])
        return attention

    def _plan_attention(self, attention: PlannedAttention, step: StepTokens) -> None:
        assert isinstance(attention, VerifyAttention)
        trees = None
        if any(item.has_branches for item in step.items):
            trees = [item.make_attention_mask() for item in step.items]
        attention.plan(step.starts, step.lengths, step.pages, trees, step.unread)


class MixedGraphs(StepGraphs):
    """Runs steps with chunks of a few prompts and sequences that continue.

    The host needs tens of milliseconds to launch their kernels one by one, as long as the GPU needs
    for a thousand prompt tokens. Without graphs, every answer would wait for that at every step.

    Args:
        max_running: maximum number of sequences that continue.
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

    def can_run(self, items: Sequence[ForwardItem]) -> bool:
        total = chunks = wanted = 0
        lowest = self._lowest_token_id
        for item in items:
            count = len(item.token_ids)
            total += count
            chunks += count > 1
            wanted += item.num_logits
            if item.has_branches or item.token_ids[-1] < lowest:
                return False
        if chunks > MAX_CHUNKS or total > self.sizes[-1]:
            return False
        rows = self.sizes[bisect_left(self.sizes, total)]
        return max(wanted, len(items) - chunks) <= self._num_wanted(rows)

    def _num_wanted(self, rows: int) -> int:
        return min(rows, self._most_wanted)

    def _make_attention(
        self, backend: AttentionBackend, rows: int, max_context: int
    ) -> MixedAttention:
        attention = backend.make_mixed_graph(rows, self._num_wanted(rows), MAX_CHUNKS, max_context)
        if attention is None:
            raise ValueError(f"attention backend {backend.name} has no graphs of mixed steps")
        return attention

    def _plan_attention(self, attention: PlannedAttention, step: StepTokens) -> None:
        assert isinstance(attention, MixedAttention)
        attention.plan(step.starts, step.lengths, step.pages)


class CapturedSteps(NamedTuple):
    """The graphs of a model's steps. A kind is None if the model has no such steps or the attention
    backend has no graphs for it.

    Attributes:
        decode: one token of each sequence.
        verify: a few tokens of each sequence, such as drafts.
        mixed: prompts and sequences that continue.
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
    """Capture a node's decode steps. If the node has a drafter, also capture steps with drafts, and
    if it computes prompts, mixed steps, provided that the attention backend supports them.

    Args:
        sizes: batch sizes.
        max_context: longest sequence in tokens.
        only_extremes: capture only the smallest and the largest graph of each kind. They take as
            much memory as all.
        progress: show bars on standard error if it is a terminal.
    """
    rows = config.max_running_requests
    of_each = config.speculative_num_draft_tokens + 1
    drafts = config.speculative_algorithm != "none"
    drafted = choose_verify_sizes(min(MAX_VERIFIED, max(sizes) * of_each)) if drafts else ()
    ladder = [size for size in MIXED_SIZES if size <= config.chunked_prefill_size]
    ladders = _Ladders(sorted(sizes), drafted, ladder if config.computes_prompts else ())
    return _capture_kinds(
        runner,
        recorder,
        ladders.extremes if only_extremes else ladders,
        max_running=rows,
        max_decode_tokens=rows,
        # With drafts, each sequence has its last token, the samples, and the drafts of this step. A
        # sequence that sat out the last step has older drafts, too.
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
    """Capture the passes of a draft model: passes with one drafted token of each sequence, and
    passes over the tokens that it has not seen yet. The latter are one or two per sequence, but
    more after a new prompt or a pause of drafting.

    Args:
        runner: runner of the draft model.
        sizes, max_context, only_extremes, progress: see :func:`capture_steps`.

    Returns:
        None if the attention backend has no graphs.
    """
    if runner.attention.make_decode_graph(1, 2) is None:
        return None
    rows = config.max_running_requests
    lacking = choose_verify_sizes(min(MAX_VERIFIED, 2 * max(sizes)))
    ladders = _Ladders(sorted(sizes), lacking, MIXED_SIZES)
    num_tokens = rows * config.speculative_num_draft_tokens
    return _capture_kinds(
        runner,
        recorder,
        ladders.extremes if only_extremes else ladders,
        max_running=rows,
        max_decode_tokens=num_tokens,
        max_tokens=num_tokens,
        max_context=max_context,
        progress="CUDA graphs of the draft model" if progress else "",
    )


class _Ladders(NamedTuple):
    """Graph sizes in tokens by kind, as in :class:`CapturedSteps`, in ascending order; empty for
    none of the kind."""

    decode: Sequence[int]
    verify: Sequence[int]
    mixed: Sequence[int]

    @property
    def extremes(self) -> _Ladders:
        """The smallest and the largest size of each kind."""
        return _Ladders(*([ladder[0], ladder[-1]] if ladder else () for ladder in self))


def _capture_kinds(
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
    """Capture graphs of each kind that the attention backend supports. It must support decode
    steps.

    Args:
        max_running: maximum number of sequences in a step.
        max_decode_tokens: ``max_tokens`` of :class:`StepGraphs` for decode steps.
        max_tokens: the same for the other kinds.
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
    if ladders.verify and runner.attention.make_verify_graph(2, 2):
        verify = VerifyGraphs(
            runner,
            recorder,
            ladders.verify,
            max_tokens=max_tokens,
            max_context=max_context,
            progress=progress and f"{progress}, a few tokens of each sequence",
        )
    if ladders.mixed and runner.attention.make_mixed_graph(2, 1, 1, 2):
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
