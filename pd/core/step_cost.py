"""Time of a node's steps: a formula that a node fits and publishes, and a proxy evaluates."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import msgspec

# New tokens of a step up to the first number cost little where a step reads all weights anyway;
# between the two a kernel becomes efficient; beyond the second their cost is proportional.
KNEES = (64, 512)

# Every step computes at least LEAST_SLICE tokens of prompts that wait, even if answers beside them
# miss their objective, so that prompts do not starve. Where they miss it, a step computes as many
# more as make it _MISS_FACTOR times as long: that is several times as many tokens.
LEAST_SLICE = 64
_MISS_FACTOR = 1.25
# A few prompt tokens are computed in steps that take at most _GENTLE_FACTOR times as long as one
# with LEAST_SLICE. They are few if they are done all the same within _GENTLE_STEPS times what a
# step may take.
_GENTLE_FACTOR, _GENTLE_STEPS = 1.1, 4

_Coefficient = Annotated[float, msgspec.Meta(ge=0.0, le=1e3)]


# Sizes of CUDA graphs of steps with prompt tokens are multiples of the first number up to the
# second, and of the third beyond: on Hopper GPUs products of 448 rows take cuBLAS longer than those
# of 512.
_GRAPH_STEP, _DENSE_GRAPHS, _WIDE_GRAPH_STEP = 64, 384, 128


def graph_rows(rows: int) -> int:
    """The least size of a graph in which so many rows fit, if there are any as large."""
    step = _GRAPH_STEP if rows <= _DENSE_GRAPHS else _WIDE_GRAPH_STEP
    return -(-rows // step) * step


class StepShape(NamedTuple):
    """Amounts of work of one step.

    Attributes:
        tokens: prompt tokens.
        pairs: pairs of query and key of these tokens.
        streams: tokens that continue answers, one for each sequence unless it drafts.
        context: tokens that these sequences attend to, in all.
    """

    tokens: int = 0
    pairs: float = 0.0
    streams: int = 0
    context: float = 0.0


def chunk_pairs(start: int, tokens: int) -> float:
    """Pairs of query and key of a chunk whose first token is at position ``start``."""
    return tokens * (start + (tokens + 1) / 2)


class StepCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step as a function of its shape, linear in each coefficient.

    Attributes:
        base: any step.
        mixed: a step that computes prompt tokens, in addition.
        first, middle, rest: a new token below, between and above :data:`KNEES`.
        pair: a pair of query and key of prompt tokens.
        short: in addition, such a pair of the first tokens up to the second of :data:`KNEES`: over
            the same context, short chunks make less good use of a GPU.
        context: a token that answers attend to.
        stream: a row that is sampled.
        graphs: steps with prompt tokens of up to so many rows are replayed as CUDA graphs of
            :func:`graph_rows`, where there is room for their sequences; rows that are left over
            take as long as others. 0 if no steps are.

    Raises:
        ValueError: a coefficient is not a finite number, or ``graphs`` no size of a graph (a
            ValidationError of msgspec on decoding).
    """

    base: _Coefficient = 0.0
    mixed: _Coefficient = 0.0
    first: _Coefficient = 0.0
    middle: _Coefficient = 0.0
    rest: _Coefficient = 0.0
    pair: _Coefficient = 0.0
    short: _Coefficient = 0.0
    context: _Coefficient = 0.0
    stream: _Coefficient = 0.0
    graphs: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0

    def __post_init__(self) -> None:
        for name, value in zip(COEFFICIENTS, self.coefficients, strict=True):
            if not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number of seconds, not {value}")
        if self.graphs != graph_rows(self.graphs):
            raise ValueError(f"graphs must be the size of a graph, not {self.graphs}")

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients in the order of :meth:`features`."""
        return tuple(getattr(self, name) for name in COEFFICIENTS)

    def seconds(self, shape: StepShape) -> float:
        """Predicted time of one step."""
        pairs = zip(self.coefficients, self.features(shape), strict=True)
        return sum(coefficient * feature for coefficient, feature in pairs)

    def features(self, shape: StepShape) -> tuple[float, ...]:
        """Numbers by which the coefficients are multiplied."""
        low, high = KNEES
        rows = shape.tokens + shape.streams
        if shape.tokens and rows <= self.graphs:
            rows = graph_rows(rows)
        return (
            1.0,
            1.0 if shape.tokens else 0.0,
            min(rows, low),
            min(max(rows - low, 0), high - low),
            max(rows - high, 0),
            shape.pairs,
            shape.pairs * min(1.0, high / max(1, shape.tokens)),
            shape.context,
            shape.streams,
        )

    def largest_chunk(self, limit: float, start: int, beside: StepShape, most: int) -> int:
        """Most prompt tokens, ``most`` at most, with which a step takes no longer than ``limit``
        seconds.

        Args:
            start: position of the first of the tokens.
            beside: the answers that the step continues.
        """
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(_with_chunk(beside, start, middle)) <= limit:
                low = middle
            else:
                high = middle - 1
        return low

    def prefill_seconds(self, start: int, tokens: int, chunk: int, beside: StepShape) -> float:
        """Predicted time in which ``tokens`` prompt tokens from position ``start`` on are computed
        in chunks, every one of them beside the same answers."""
        return self.queue_seconds(tokens, chunk_pairs(start, tokens), chunk, beside)

    def queue_seconds(self, tokens: int, pairs: float, chunk: int, beside: StepShape) -> float:
        """Predicted time of chunks with so many tokens and pairs in all."""
        if tokens <= 0:
            return 0.0
        steps = -(-tokens // max(1, chunk))
        each = beside._replace(tokens=-(-tokens // steps), pairs=pairs / steps)
        return steps * self.seconds(each)


COEFFICIENTS = tuple(name for name in StepCost.__struct_fields__ if name != "graphs")


def slice_tokens(
    cost: StepCost,
    limit: float,
    decoding: StepShape,
    start: int,
    most: int,
    queued: int | None = None,
) -> int:
    """Prompt tokens that a step computes beside answers.

    Args:
        limit: seconds that the step may take.
        decoding: the answers that it continues.
        start: position of the first prompt token.
        most: tokens of a step.
        queued: tokens of all prompts that wait or are under way, without those that were cached;
            None if they are not known to be few.
    """
    if not decoding.streams:
        return most
    least = min(LEAST_SLICE, most)
    most = max(least, most - decoding.streams)
    shortest = cost.seconds(_with_chunk(decoding, start, least))
    gentle = _GENTLE_FACTOR * shortest
    if queued is not None and gentle < limit:
        found = max(least, cost.largest_chunk(gentle, start, decoding, most))
        if math.ceil(queued / found) * gentle <= _GENTLE_STEPS * limit:
            return found
    found = cost.largest_chunk(limit, start, decoding, most)
    if found >= least:
        return found
    return max(least, cost.largest_chunk(_MISS_FACTOR * shortest, start, decoding, most))


def _with_chunk(shape: StepShape, start: int, tokens: int) -> StepShape:
    return shape._replace(tokens=tokens, pairs=chunk_pairs(start, tokens))
