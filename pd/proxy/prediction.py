"""Chooses nodes of a request by what is predicted to happen at each of them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

from pd.core.node_load import MAX_SECONDS
from pd.core.step_cost import LEAST_SLICE, StepShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pd.proxy.node_handle import NodeHandle
    from pd.proxy.policies import Prompt

# Without an objective, a first token may take so many times as long as the prompt would alone on an
# idle node, and as half a step of prompt tokens besides.
_DEFAULT_TTFT_FACTOR = 4.0
# Each answer that a prompt slows while it is computed, within its objective, counts as if the first
# token came later by this share of that time.
_SLOWED_SHARE = 0.05
# Choices whose first token is predicted within this share of the best, or so much later, are equal.
_EQUAL_SHARE = 1.05
_EQUAL_SECONDS = 0.01
# Misses of an objective count by how much it is missed. A stream counts in full once its steps take
# longer than the objective by this part of it. A late first token counts its time divided by the
# objective, but no more than this, lest it outweigh any number of streams.
_FULL_MISS = 0.25
_MOST_LATE = 32.0
# Choices whose misses differ by no more than this are equal in these.
_EQUAL_MISSES = 0.5
# Full steps that a node may have begun: one that is computed, and one that is launched behind it.
_STEPS_UNDER_WAY = 2
# Where prompts take a smaller part of the nodes' time, answers are generated where steps are
# shortest; but only once a node had answers for so many seconds, over which that part is averaged
# (``PromptShare``): before, it tells little.
_FEW_PROMPTS, _FEW_SECONDS = 0.1, 10.0
# A node is passed over for another that has fewer answers, by this many at least.
_MORE_STREAMS = 4
# A request that waits is moved if that brings its first token forward by _GAIN_SECONDS, or by
# _GAIN_SHARE of the objective if that is less, but by _LEAST_GAIN seconds and by a factor of
# _LEAST_RATIO at least.
_GAIN_SECONDS, _GAIN_SHARE, _LEAST_GAIN, _LEAST_RATIO = 0.5, 1 / 3, 0.05, 1.15
# Output for which there should be memory where a request is generated.
_EXPECTED_OUTPUT = 512
# A prompt longer than this share of a pool is not handed off (``Preallocation`` in pd/decode_node).
_LARGEST_SHARE = 0.5
_IDLE = StepShape()


class Demand(NamedTuple):
    """The properties of a request by which its outcome is predicted.

    Attributes:
        streams: answers that are wanted (``n``).
        output: tokens of each of them, at most.
        waited: seconds since the request came.
    """

    prompt: Prompt
    streams: int = 1
    output: int = _EXPECTED_OUTPUT
    waited: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.token_ids)

    @property
    def tokens(self) -> int:
        """Tokens for which the streams should have memory."""
        return self.length + self.streams * min(self.output, _EXPECTED_OUTPUT)


class Predicted(NamedTuple):
    """A choice of nodes and what is predicted of it.

    Attributes:
        decode: generates the answer; the same as ``first`` if KV does not travel.
        ttft: seconds until the first token.
        prefill: seconds of these in which the prompt is computed.
        price: seconds that are added for the answers which the prompt slows.
        objective: seconds within which the first token should come.
        misses: streams, this one and others, that would miss an objective, by how much they would
            (``_FULL_MISS``, ``_MOST_LATE``).
        is_slow: whether steps are shorter at another node, and prompts are few.
    """

    first: NodeHandle
    decode: NodeHandle
    ttft: float
    prefill: float
    price: float
    objective: float
    misses: float
    is_slow: bool

    @property
    def cost(self) -> float:
        """Seconds by which choices are compared."""
        return self.ttft + self.price

    @property
    def way(self) -> str:
        """Way of the request through the nodes, as a label of metrics."""
        if self.first is self.decode:
            return "whole"
        swapped = self.first.role == "decode" or self.decode.role == "prefill"
        return "swapped" if swapped else "split"

    @property
    def fits_roles(self) -> bool:
        """Whether the nodes do what their roles say."""
        if self.way == "whole":
            return self.first.role == "unified"
        return self.way == "split" and "unified" not in (self.first.role, self.decode.role)


class _PromptNode(NamedTuple):
    """A node that may compute the prompt, and what is predicted of that."""

    node: NodeHandle
    ttft: float
    prefill: float
    price: float
    objective: float
    misses: float

    def with_decode(self, decode: NodeHandle, misses: float, *, is_slow: bool = False) -> Predicted:
        """The choice of this node, and of one that generates the answer."""
        return Predicted(
            self.node,
            decode,
            self.ttft,
            self.prefill,
            self.price,
            self.objective,
            misses,
            is_slow,
        )


class _AnswerNode(NamedTuple):
    """A node that may generate the answer.

    Attributes:
        misses: streams that would miss their objective.
        shape: of a step with this answer.
        step: its seconds, less for a prefix that need not travel.
        busy: seconds for which it may be in steps that it began without a thought of answers, since
            it had none; an answer that comes before would stop until they end.
        is_slow: whether steps are shorter at another node, and prompts are few.
    """

    node: NodeHandle
    misses: float
    shape: StepShape
    step: float
    busy: float
    is_slow: bool = False

    def compared_with(self, other: _AnswerNode) -> _AnswerNode:
        """Note whether a step would be shorter with the other node's answers instead of its own.
        Both times are by this node's cost model: fits of equal nodes differ by some percent."""
        report = self.node.load.reported
        assert report is not None
        limit = _EQUAL_SHARE * report.cost.seconds(other.shape)
        is_slow = report.cost.seconds(self.shape) > limit
        is_slow &= self.shape.streams >= other.shape.streams + _MORE_STREAMS
        return self._replace(is_slow=is_slow)


class Predictor:
    """Predicts the time to the first token, and what streams lose, for each choice of nodes; takes
    what keeps the objectives of most, and of choices that are about equal the split.

    Attributes:
        ttft: seconds until the first token that are promised (``--slo-ttft-ms``); None has them
            follow from the prompt and the speed of the nodes.
    """

    def __init__(self, ttft: float | None = None) -> None:
        self.ttft = ttft

    def choose(
        self,
        firsts: Sequence[NodeHandle],
        decoders: Sequence[NodeHandle],
        demand: Demand,
        fit: Callable[[NodeHandle, NodeHandle], bool],
    ) -> Predicted | None:
        """The best choice; None if some node has not reported its load.

        Args:
            firsts: nodes that may compute the prompt, all elastic.
            decoders: nodes that may generate the answer, all elastic; empty if one token is wanted.
            fit: whether KV can travel from the first to the second.
        """
        if not firsts or any(node.load.reported is None for node in (*firsts, *decoders)):
            return None
        ranked = [self._first(node, demand) for node in firsts]
        joined = [self._second(node, demand) for node in decoders]
        if joined and _prompts_are_few((*firsts, *decoders)):
            fastest = min(joined, key=lambda second: second.step)
            joined = [second.compared_with(fastest) for second in joined]
        joined.sort(key=_by_second)
        own = {second.node: second for second in joined}
        found = [choice for first in ranked for choice in _choices(first, joined, own, demand, fit)]
        if not found:
            return None
        most = min(choice.misses for choice in found) + _EQUAL_MISSES
        kept = [choice for choice in found if choice.misses <= most]
        best = min(choice.cost for choice in kept)
        limit = max(best * _EQUAL_SHARE, best + _EQUAL_SECONDS)
        return min((c for c in kept if c.cost <= limit), key=_by_preference)

    def better(
        self,
        present: Predicted,
        firsts: Sequence[NodeHandle],
        decoders: Sequence[NodeHandle],
        demand: Demand,
        fit: Callable[[NodeHandle, NodeHandle], bool],
    ) -> Predicted | None:
        """A choice with which the first token of a waiting request comes so much earlier that the
        request should move; None if it should stay.

        Args:
            present: the nodes of the request, with the time to the first token as it is expected
                now.
            firsts, decoders, fit: see :meth:`choose`; the node that was to compute the prompt is
                not among the first.
        """
        found = self.choose(firsts, decoders, demand, fit)
        if found is None or present.first.load.reported is None:
            return None
        own = demand.streams if present.decode is present.first else 0
        first = self._first(present.first, demand, present.ttft, own)
        misses, cost = first.misses, first.ttft + first.price
        if decoders:
            misses += self._second(present.decode, demand).misses
        objective = self.ttft_objective(present.first, demand)
        least = max(_LEAST_GAIN, min(_GAIN_SECONDS, _GAIN_SHARE * objective))
        is_faster = present.ttft > max(found.ttft + least, found.ttft * _LEAST_RATIO)
        is_faster &= cost > found.cost
        return found if is_faster and found.misses <= misses + _EQUAL_MISSES else None

    def ttft_objective(self, node: NodeHandle, demand: Demand) -> float:
        """Seconds in which the first token of a request should come."""
        if self.ttft is not None:
            return self.ttft
        report = node.load.reported
        assert report is not None
        alone = report.cost.prefill_seconds(0, demand.length, report.chunk, _IDLE)
        half = report.cost.prefill_seconds(0, max(1, report.chunk // 2), report.chunk, _IDLE)
        return min(_DEFAULT_TTFT_FACTOR * (alone + half), MAX_SECONDS)

    def _first(
        self, node: NodeHandle, demand: Demand, ttft: float | None = None, own: int = 0
    ) -> _PromptNode:
        """
        Args:
            ttft: that of a request which waits there already; None predicts it for a new one.
            own: answers of that request which the node counts among its own.
        """
        load, length = node.load, demand.length
        assert load.reported is not None
        cached = min(node.cached_tokens(demand.prompt), length - 1)
        prefill = load.prefill_seconds(length, cached)
        if ttft is None:
            ttft = load.queue_seconds + prefill
        objective = self.ttft_objective(node, demand)
        misses = _late(demand.waited + ttft, objective)
        misses += length - cached > load.free_tokens  # it would wait for memory
        decoding = load.decoding
        if decoding.streams:
            step = load.reported.cost.seconds(decoding._replace(tokens=LEAST_SLICE))
            misses += decoding.streams * _slow(step, load.reported.itl)
        price = _SLOWED_SHARE * max(0, decoding.streams - own) * prefill
        return _PromptNode(node, ttft, prefill, price, objective, misses)

    def _second(self, node: NodeHandle, demand: Demand) -> _AnswerNode:
        load = node.load
        assert load.reported is not None
        decoding = load.decoding
        streams = decoding.streams + demand.streams
        context = decoding.context + demand.streams * demand.length
        shape = StepShape(streams=streams, context=context)
        step = load.reported.cost.seconds(shape)
        misses = streams * _slow(step, load.reported.itl)
        cached = node.cached_tokens(demand.prompt)
        if demand.tokens - cached > load.free_tokens:
            misses += demand.streams  # they would wait for memory
        busy = 0.0
        if not load.reported.answering and not load.reported.awaits:
            cost, chunk = load.reported.cost, load.reported.chunk
            full = cost.prefill_seconds(0, chunk, chunk, _IDLE)
            busy = min(load.queue_seconds, _STEPS_UNDER_WAY * full)
        return _AnswerNode(node, misses, shape, step * (1 - 0.2 * cached / demand.length), busy)


def might_gain(ttft: float, shortest: float) -> bool:
    """Whether a waiting request whose first token comes after ``ttft`` seconds might have to move
    to a node where prompts wait for ``shortest``."""
    return ttft > max(shortest + _LEAST_GAIN, shortest * _LEAST_RATIO)


def _late(ttft: float, objective: float) -> float:
    """Weight of a first token that comes after so many seconds: 0 within the objective, from 1 on
    beyond it."""
    if ttft <= objective:
        return 0.0
    return min(_MOST_LATE, ttft / objective) if objective else _MOST_LATE


def _slow(step: float, itl: float) -> float:
    """Weight of a stream whose steps take so long: 0 within the objective, 1 far beyond it."""
    return min(1.0, max(0.0, step / itl - 1) / _FULL_MISS)


def _choices(
    first: _PromptNode,
    seconds: Sequence[_AnswerNode],
    by_node: Mapping[NodeHandle, _AnswerNode],
    demand: Demand,
    fit: Callable[[NodeHandle, NodeHandle], bool],
) -> Iterator[Predicted]:
    """Yield the choices with ``first``: the whole request there, and the best other node for the
    answers. ``by_node`` has the same ``seconds``, whose order is that of preference."""
    node = first.node
    if not seconds:
        yield first.with_decode(node, first.misses)
    own = by_node.get(node)
    if own is not None:
        yield first.with_decode(node, first.misses + own.misses, is_slow=own.is_slow)
    stopped: _AnswerNode | None = None
    for second in seconds:
        other = second.node
        if other is node or not _may_travel(node, other, demand) or not fit(node, other):
            continue
        if second.busy <= first.ttft:
            yield first.with_decode(other, first.misses + second.misses, is_slow=second.is_slow)
            return
        stopped = stopped or second
    if stopped is not None:
        misses = first.misses + stopped.misses + demand.streams
        yield first.with_decode(stopped.node, misses, is_slow=stopped.is_slow)


_RANKS = {"decode": 0, "unified": 1, "prefill": 2}


def _by_second(second: _AnswerNode) -> tuple[float, bool, int, float]:
    return second.misses // _EQUAL_MISSES, second.is_slow, _RANKS[second.node.role], second.step


def _by_preference(choice: Predicted) -> tuple[bool, bool, float]:
    return choice.is_slow, not choice.fits_roles, choice.cost


def _prompts_are_few(nodes: Sequence[NodeHandle]) -> bool:
    """Whether prompts take little of the nodes' time, so that answers need not keep away from nodes
    that compute them."""
    loads = {id(node): node.load for node in nodes}.values()
    began = [load.answers_since for load in loads if load.answers_since is not None]
    if time.monotonic() - min(began, default=math.inf) < _FEW_SECONDS:
        return False
    shares = [load.reported.prompt_share for load in loads if load.reported is not None]
    return sum(shares) < _FEW_PROMPTS * len(shares)


def _may_travel(first: NodeHandle, second: NodeHandle, demand: Demand) -> bool:
    """Whether both nodes have room for the prompt beside what they send each other."""
    pools = [node.info.pool_tokens for node in (first, second) if node.info is not None]
    return demand.length <= _LARGEST_SHARE * min(pools, default=0)
