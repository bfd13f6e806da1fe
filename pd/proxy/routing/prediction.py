"""Chooses the nodes of a request by predicting the outcome of each choice."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

from pd.core.node_load import MAX_SECONDS
from pd.core.step_cost import LEAST_SLICE, StepShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pd.proxy.nodes.node_handle import NodeHandle
    from pd.proxy.routing.demand import Demand

# A prompt slows answers at its node. Each slowed answer counts as if the first token came later by
# this share of the prefill.
_SLOWED_SHARE = 0.05
# Choices are equal if their first tokens differ by no more than this factor, or by no more than
# these seconds.
_EQUAL_SHARE = 1.05
_EQUAL_SECONDS = 0.01
# Misses count by their size. A stream counts in full if its steps exceed the objective by this
# share. A late first token counts its time divided by the objective, up to this limit, because it
# must not outweigh any number of streams.
_FULL_MISS = 0.25
_MOST_LATE = 32.0
# Choices are equal if their misses differ by no more than this.
_EQUAL_MISSES = 0.5
# Full steps a node may have started: the running one and the one launched after it.
_STEPS_UNDER_WAY = 2
# If prompts take less than this share of the nodes' time, we generate answers where steps are
# shortest. We first wait until a node has had answers for this many seconds, because the share is
# averaged over them (``PromptShare``).
_FEW_PROMPTS, _FEW_SECONDS = 0.1, 10.0
# A node counts as slower only if it has at least this many more answers.
_MORE_STREAMS = 4
# A waiting request moves if its first token then comes earlier by _GAIN_SECONDS, or by _GAIN_SHARE
# of the objective if that is less, but at least by _LEAST_GAIN seconds and by the factor
# _LEAST_RATIO.
_GAIN_SECONDS, _GAIN_SHARE, _LEAST_GAIN, _LEAST_RATIO = 0.5, 1 / 3, 0.05, 1.15
# Prompts above this share of a pool are not handed off (``Preallocation`` in pd/decode_node).
_LARGEST_SHARE = 0.5
_IDLE = StepShape()


class Predicted(NamedTuple):
    """A choice of nodes and its predicted outcome.

    Attributes:
        decode_node: generates the answer; the same as ``first_node`` without a hand-off.
        ttft: seconds until the first token.
        prefill: seconds of prefill, included in ``ttft``.
        price: seconds we add because the prompt slows other answers.
        objective: seconds within which the first token should come.
        misses: weighted number of streams, including others, predicted to miss an objective
            (``_FULL_MISS``, ``_MOST_LATE``).
        is_slow: steps are shorter at another node, and prompts are few.
    """

    first_node: NodeHandle
    decode_node: NodeHandle
    ttft: float
    prefill: float
    price: float
    objective: float
    misses: float
    is_slow: bool

    @property
    def cost(self) -> float:
        """Seconds by which we compare choices."""
        return self.ttft + self.price

    @property
    def way(self) -> str:
        """The request's way through the nodes, as a label of metrics."""
        if self.first_node is self.decode_node:
            return "whole"
        swapped = self.first_node.role == "decode" or self.decode_node.role == "prefill"
        return "swapped" if swapped else "split"

    @property
    def fits_roles(self) -> bool:
        """Whether the nodes act according to their roles."""
        if self.way == "whole":
            return self.first_node.role == "unified"
        return self.way == "split" and "unified" not in (
            self.first_node.role,
            self.decode_node.role,
        )


class _PromptNode(NamedTuple):
    """A node for the prompt, with its prediction."""

    node: NodeHandle
    ttft: float
    prefill: float
    price: float
    objective: float
    misses: float

    def with_decode(self, decode: NodeHandle, misses: float, *, is_slow: bool = False) -> Predicted:
        """Combine this node with a node for the answer."""
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
    """A node for the answer, with its prediction.

    Attributes:
        misses: weighted number of streams predicted to miss their objective.
        shape: a step including this answer.
        step: seconds of that step, reduced for a prefix we need not send.
        busy: seconds of steps planned without answers in mind. An answer arriving earlier would
            stall until they end.
        is_slow: steps are shorter at another node, and prompts are few.
    """

    node: NodeHandle
    misses: float
    shape: StepShape
    step: float
    busy: float
    is_slow: bool = False

    def compared_with(self, other: _AnswerNode) -> _AnswerNode:
        """Note whether a step would be shorter with the other node's answers.

        Both times follow from this node's cost model, because fits of equal nodes differ by some
        percent.
        """
        report = self.node.load.reported
        assert report is not None
        limit = _EQUAL_SHARE * report.cost.predict_seconds(other.shape)
        is_slow = report.cost.predict_seconds(self.shape) > limit
        is_slow &= self.shape.streams >= other.shape.streams + _MORE_STREAMS
        return self._replace(is_slow=is_slow)


class Predictor:
    """Predicts, for each choice of nodes, the time to the first token and the harm to other
    streams.

    We take the choice keeping most objectives. Among nearly equal choices we prefer the split by
    roles.

    Attributes:
        ttft: promised seconds until the first token (``--slo-ttft-ms``); None derives them from the
            prompt and the speed of the nodes.
    """

    def __init__(self, ttft: float | None = None) -> None:
        self.ttft = ttft

    def choose_nodes(
        self,
        firsts: Sequence[NodeHandle],
        decoders: Sequence[NodeHandle],
        demand: Demand,
        fit: Callable[[NodeHandle, NodeHandle], bool],
    ) -> Predicted | None:
        """Return the best choice; None if a node has not reported its load.

        Args:
            firsts: nodes for the prompt, all elastic.
            decoders: nodes for the answer, all elastic; empty for a single token.
            fit: whether the first node can send KV to the second.
        """
        if not firsts or any(node.load.reported is None for node in (*firsts, *decoders)):
            return None
        ranked = [self._predict_prompt(node, demand) for node in firsts]
        joined = [self._predict_answer(node, demand) for node in decoders]
        if joined and _prompts_are_few((*firsts, *decoders)):
            fastest = min(joined, key=lambda second: second.step)
            joined = [second.compared_with(fastest) for second in joined]
        joined.sort(key=_rank_answer_node)
        own = {second.node: second for second in joined}
        choices = [
            choice for first in ranked for choice in _iter_choices(first, joined, own, demand, fit)
        ]
        if not choices:
            return None
        max_misses = min(choice.misses for choice in choices) + _EQUAL_MISSES
        kept = [choice for choice in choices if choice.misses <= max_misses]
        best = min(choice.cost for choice in kept)
        limit = max(best * _EQUAL_SHARE, best + _EQUAL_SECONDS)
        equal = [choice for choice in kept if choice.cost <= limit]
        return min(equal, key=lambda choice: (choice.is_slow, not choice.fits_roles, choice.cost))

    def find_better(
        self,
        present: Predicted,
        firsts: Sequence[NodeHandle],
        decoders: Sequence[NodeHandle],
        demand: Demand,
        fit: Callable[[NodeHandle, NodeHandle], bool],
    ) -> Predicted | None:
        """Return a choice with a much earlier first token for a waiting request; None to let it
        stay.

        Args:
            present: nodes of the request, with the time to the first token we expect now.
            firsts, decoders, fit: see :meth:`choose_nodes`. ``firsts`` excludes the present first
                node.
        """
        better = self.choose_nodes(firsts, decoders, demand, fit)
        if better is None or present.first_node.load.reported is None:
            return None
        own = demand.streams if present.decode_node is present.first_node else 0
        first = self._predict_prompt(present.first_node, demand, present.ttft, own)
        misses, cost = first.misses, first.ttft + first.price
        if decoders:
            misses += self._predict_answer(present.decode_node, demand).misses
        objective = self.get_ttft_objective(present.first_node, demand)
        least = max(_LEAST_GAIN, min(_GAIN_SECONDS, _GAIN_SHARE * objective))
        is_faster = present.ttft > max(better.ttft + least, better.ttft * _LEAST_RATIO)
        is_faster &= cost > better.cost
        return better if is_faster and better.misses <= misses + _EQUAL_MISSES else None

    def get_ttft_objective(self, node: NodeHandle, demand: Demand) -> float:
        """Return the seconds within which the first token should come."""
        if self.ttft is not None:
            return self.ttft
        report = node.load.reported
        assert report is not None
        return min(report.cost.usual_ttft(demand.length, report.chunk), MAX_SECONDS)

    def _predict_prompt(
        self, node: NodeHandle, demand: Demand, ttft: float | None = None, own: int = 0
    ) -> _PromptNode:
        """Predict the outcome of prefilling at a node.

        Args:
            ttft: expected time of a request already waiting there; None predicts it for a new one.
            own: answers of that request, included in the node's count.
        """
        load, length = node.load, demand.length
        assert load.reported is not None
        cached = min(node.cached_tokens(demand.prompt), length - 1)
        prefill = load.prefill_seconds(length, cached)
        if ttft is None:
            ttft = load.queue_seconds + prefill
        objective = self.get_ttft_objective(node, demand)
        misses = _weigh_lateness(demand.waited + ttft, objective)
        misses += length - cached > load.free_tokens  # it would wait for memory
        decoding = load.decoding
        if decoding.streams:
            step = load.reported.cost.predict_seconds(decoding._replace(tokens=LEAST_SLICE))
            misses += decoding.streams * _weigh_slowness(step, load.reported.itl)
        price = _SLOWED_SHARE * max(0, decoding.streams - own) * prefill
        return _PromptNode(node, ttft, prefill, price, objective, misses)

    def _predict_answer(self, node: NodeHandle, demand: Demand) -> _AnswerNode:
        """Predict the outcome of generating the answer at a node."""
        load = node.load
        assert load.reported is not None
        decoding = load.decoding
        streams = decoding.streams + demand.streams
        context = decoding.context + demand.streams * demand.length
        shape = StepShape(streams=streams, context=context)
        step = load.reported.cost.predict_seconds(shape)
        misses = streams * _weigh_slowness(step, load.reported.itl)
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
    """Whether a waiting request might gain from a move. Its first token comes after ``ttft``
    seconds; another node's prompts wait for ``shortest`` seconds."""
    return ttft > max(shortest + _LEAST_GAIN, shortest * _LEAST_RATIO)


def _weigh_lateness(ttft: float, objective: float) -> float:
    """Return the weight of a late first token: 0 within the objective, at least 1 beyond it."""
    if ttft <= objective:
        return 0.0
    return min(_MOST_LATE, ttft / objective) if objective else _MOST_LATE


def _weigh_slowness(step: float, itl: float) -> float:
    """Return the weight of a slow stream: 0 within the objective, 1 far beyond it."""
    return min(1.0, max(0.0, step / itl - 1) / _FULL_MISS)


def _iter_choices(
    first: _PromptNode,
    seconds: Sequence[_AnswerNode],
    by_node: Mapping[NodeHandle, _AnswerNode],
    demand: Demand,
    fit: Callable[[NodeHandle, NodeHandle], bool],
) -> Iterator[Predicted]:
    """Yield the choices with ``first``: the whole request there, and the best other node for
    answers.

    Args:
        seconds: nodes for answers, best first. ``by_node`` has the same nodes.
    """
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


def _rank_answer_node(second: _AnswerNode) -> tuple[float, bool, int, float]:
    return second.misses // _EQUAL_MISSES, second.is_slow, _RANKS[second.node.role], second.step


def _prompts_are_few(nodes: Sequence[NodeHandle]) -> bool:
    """Whether prompts take little of the nodes' time. Answers then need not avoid prefilling
    nodes."""
    loads = {id(node): node.load for node in nodes}.values()
    began = [load.answers_since for load in loads if load.answers_since is not None]
    if time.monotonic() - min(began, default=math.inf) < _FEW_SECONDS:
        return False
    shares = [load.reported.prompt_share for load in loads if load.reported is not None]
    return sum(shares) < _FEW_PROMPTS * len(shares)


def _may_travel(first: NodeHandle, second: NodeHandle, demand: Demand) -> bool:
    """Whether both nodes have room for the prompt in addition to other hand-offs."""
    pools = [node.info.pool_tokens for node in (first, second) if node.info is not None]
    return demand.length <= _LARGEST_SHARE * min(pools, default=0)
