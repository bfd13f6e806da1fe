"""The cost model of a node's steps. A node fits and publishes it; proxies evaluate it."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import msgspec

# The cost of new tokens changes at these numbers. Up to the first, tokens cost little because every
# step reads all weights anyway. Between the two, kernels become efficient. After the second, the
# cost is proportional.
KNEES = (64, 512)

# Every step computes at least LEAST_SLICE tokens of waiting prompts, because prompts must not
# starve even if the decoding sequences miss their objective. If they miss it anyway, we let the
# step take _MISS_FACTOR times as long, because that buys several times as many prompt tokens.
LEAST_SLICE = 64
_MISS_FACTOR = 1.25
# If only a few prompt tokens are queued, we spread them over gentle steps. These take at most
# _GENTLE_FACTOR times as long as a step with LEAST_SLICE tokens. They count as few if gentle steps
# finish them within _GENTLE_STEPS times the limit of one step.
_GENTLE_FACTOR, _GENTLE_STEPS = 1.1, 4

# Without an objective, a first token may take this many times as long as on an idle node after half
# a chunk of another prompt.
_USUAL_TTFT_FACTOR = 4.0

_Coefficient = Annotated[float, msgspec.Meta(ge=0.0, le=1e3)]


# CUDA graphs of steps with prompt tokens have multiples of the first number as sizes up to the
# second, and multiples of the third after it, because on Hopper GPUs cuBLAS needs longer for
# products of 448 rows than for 512.
_GRAPH_STEP, _DENSE_GRAPHS, _WIDE_GRAPH_STEP = 64, 384, 128


def graph_rows(rows: int) -> int:
    """Return the size of the smallest graph for ``rows`` rows, if graphs are that large."""
    step = _GRAPH_STEP if rows <= _DENSE_GRAPHS else _WIDE_GRAPH_STEP
    return -(-rows // step) * step


class StepShape(NamedTuple):
    """Amount of work in one step.

    Attributes:
        tokens: prompt tokens.
        pairs: pairs of query and key of the prompt tokens.
        streams: decoded tokens, one for each sequence unless it drafts.
        context: tokens to which the decoding sequences attend, in all.
    """

    tokens: int = 0
    pairs: float = 0.0
    streams: int = 0
    context: float = 0.0


def chunk_pairs(start: int, tokens: int) -> float:
    """Count pairs of query and key in a chunk whose first token is at position ``start``."""
    return tokens * (start + (tokens + 1) / 2)


class StepCost(msgspec.Struct, frozen=True):
    """Seconds of a step as a function of its shape, linear in each coefficient.

    Attributes:
        base: cost of every step.
        mixed: additional cost of a step with prompt tokens.
        first, middle, rest: cost of a new token below, between and above :data:`KNEES`.
        pair: cost of a pair of query and key of prompt tokens.
        short: additional cost of such a pair in chunks up to the second of :data:`KNEES`, because
            short chunks use a GPU less efficiently over the same context.
        context: cost of a token to which decoding sequences attend.
        stream: cost of a sampled row.
        graphs: steps with prompt tokens and at most this many rows run as CUDA graphs of
            :func:`graph_rows`. Unused rows of a graph take as long as others. 0 without graphs.

    Raises:
        ValueError: a coefficient is not finite, or ``graphs`` is not the size of a graph (msgspec
            raises a ValidationError on decoding).
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
        """The coefficients in the order of :meth:`compute_features`."""
        return tuple(getattr(self, name) for name in COEFFICIENTS)

    def predict_seconds(self, shape: StepShape) -> float:
        """Predict the time of one step."""
        pairs = zip(self.coefficients, self.compute_features(shape), strict=True)
        return sum(coefficient * feature for coefficient, feature in pairs)

    def compute_features(self, shape: StepShape) -> tuple[float, ...]:
        """Return the factors of the coefficients for a step."""
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

    def find_largest_chunk(
        self, limit: float, start: int, decoding: StepShape, max_tokens: int
    ) -> int:
        """Find the most prompt tokens for a step of at most ``limit`` seconds.

        Args:
            start: position of the first of the tokens.
            decoding: the sequences also decoded by the step.
            max_tokens: upper bound of the result.
        """
        low, high = 0, max_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict_seconds(_add_chunk(decoding, start, middle)) <= limit:
                low = middle
            else:
                high = middle - 1
        return low

    def prefill_seconds(self, start: int, tokens: int, chunk: int, decoding: StepShape) -> float:
        """Predict the time of ``tokens`` prompt tokens from position ``start`` on, in chunks.

        Each step also decodes the same sequences.
        """
        return self.queue_seconds(tokens, chunk_pairs(start, tokens), chunk, decoding)

    def usual_ttft(self, tokens: int, chunk: int) -> float:
        """Return the time limit for the first token without an objective, in seconds.

        They are several times the time of the prompt on an idle node, after half a chunk.
        """
        alone = self.prefill_seconds(0, tokens, chunk, StepShape())
        half = self.prefill_seconds(0, max(1, chunk // 2), chunk, StepShape())
        return _USUAL_TTFT_FACTOR * (alone + half)

    def queue_seconds(self, tokens: int, pairs: float, chunk: int, decoding: StepShape) -> float:
        """Predict the time of chunks with ``tokens`` and ``pairs`` in all."""
        if tokens <= 0:
            return 0.0
        steps = -(-tokens // max(1, chunk))
        each = decoding._replace(tokens=-(-tokens // steps), pairs=pairs / steps)
        return steps * self.predict_seconds(each)


COEFFICIENTS = tuple(name for name in StepCost.__struct_fields__ if name != "graphs")


def slice_tokens(
    cost: StepCost,
    limit: float,
    decoding: StepShape,
    start: int,
    max_tokens: int,
    queued: int | None = None,
) -> int:
    """Choose how many prompt tokens a step computes in addition to its decoding sequences.

    Args:
        limit: time limit of the step, in seconds.
        decoding: the sequences decoded by the step.
        start: position of the first prompt token.
        max_tokens: largest number of tokens in a step.
        queued: uncached tokens of all waiting and running prompts; None if they may be many.
    """
    if not decoding.streams:
        return max_tokens
    least = min(LEAST_SLICE, max_tokens)
    max_tokens = max(least, max_tokens - decoding.streams)
    shortest = cost.predict_seconds(_add_chunk(decoding, start, least))
    gentle = _GENTLE_FACTOR * shortest
    if queued is not None and gentle < limit:
        tokens = max(least, cost.find_largest_chunk(gentle, start, decoding, max_tokens))
        if math.ceil(queued / tokens) * gentle <= _GENTLE_STEPS * limit:
            return tokens
    tokens = cost.find_largest_chunk(limit, start, decoding, max_tokens)
    if tokens >= least:
        return tokens
    return max(least, cost.find_largest_chunk(_MISS_FACTOR * shortest, start, decoding, max_tokens))


def _add_chunk(shape: StepShape, start: int, tokens: int) -> StepShape:
    return shape._replace(tokens=tokens, pairs=chunk_pairs(start, tokens))
