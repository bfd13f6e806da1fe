"""`trace`: a recorded trace in Mooncake's format, with scaled lengths and times.

A row has ``timestamp`` (milliseconds), ``input_length``, ``output_length`` and ``hash_ids``, one id
for each block of 512 tokens of the prompt. Equal leading ids are an equal prefix. We draw the
tokens of a block from the seed and its id, so prompts share exactly the blocks that rows share.

A length scale of 1/32 makes blocks of 16 tokens, and of a prompt with n tokens one with ⌈n/32⌉. It
has as many blocks as before, so prefixes keep their structure. We reject scales that do not divide
a block.

We skip lines that are not JSON with a warning, because the disk of a recorder may have been full.

Recorders often round their times, so rows of one timestamp arrive in a burst that never happened.
The granularity is the greatest common divisor of the timestamps. With `spread`, arrivals are
uniform within it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pd.bench.load.datasets.jsonl import read_rows
from pd.bench.load.datasets.spec import Drawn, words_of
from pd.bench.load.workload import Turn
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pd.bench.load.datasets.spec import DatasetSpec, TraceSpec

BLOCK_TOKENS = 512


class Row(NamedTuple):
    """One recorded request; its time is in milliseconds."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def draw_trace(spec: DatasetSpec, seed: int) -> Drawn:
    """Draw the requests of a window. Raises UsageError for invalid rows and scales."""
    assert spec.path is not None
    trace, scales = spec.trace, _Scales(spec.trace)
    rows = read_window(spec.path, trace.window)
    granularity = granularity_ms(rows)
    kept = [row for row in rows if _fits_context(spec, scales, row)][: spec.count]
    if not kept:
        raise UsageError(f"{spec.path}: no row is left of {len(rows)} in --trace-window")
    blocks = _Blocks(seed, scales.block, spec.vocab_size)
    sessions: list[tuple[Turn, ...]] = [(_make_turn(spec, scales, blocks, row),) for row in kept]
    notes: dict[str, Any] = {
        "trace_rows": len(rows),
        "trace_rows_too_long": len(rows) - sum(_fits_context(spec, scales, row) for row in rows),
        "trace_granularity_ms": granularity,
        "trace_block_tokens": scales.block,
    }
    return Drawn(sessions, arrival_times(kept, trace, granularity, seed), notes)


def read_window(path: Path, window: tuple[float, float]) -> list[Row]:
    """Read the rows from START to before END, in seconds of the trace, in order of time."""
    begin, end = window
    rows = [_parse_row(where, row) for where, row in read_rows(path, is_recorded=True)]
    first = min((row.timestamp for row in rows), default=0)
    inside = [row for row in rows if begin <= (row.timestamp - first) / 1e3 < end]
    return sorted(inside, key=lambda row: row.timestamp)


def _parse_row(where: str, row: dict[str, Any]) -> Row:
    numbers = []
    for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0)):
        value = row.get(name)
        if type(value) is not int or not least <= value < 1 << 53:
            raise UsageError(f"{where}: {name} must be an integer from {least}, not {value!r:.60}")
        numbers.append(value)
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 63 for i in ids):
        raise UsageError(f"{where}: hash_ids must be a list of integers, not {ids!r:.60}")
    blocks = -(-numbers[1] // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise UsageError(
            f"{where}: {numbers[1]} tokens are {blocks} blocks of {BLOCK_TOKENS}, "
            f"and there are {len(ids)} hash_ids"
        )
    return Row(numbers[0], numbers[1], numbers[2], tuple(ids))


class _Scales:
    """Factors of lengths, and the resulting length of a block."""

    def __init__(self, trace: TraceSpec) -> None:
        self.input = _parse_fraction("--trace-length-scale", trace.length_scale)
        self.output = self.input
        if trace.output_scale is not None:
            self.output = _parse_fraction("--trace-output-scale", trace.output_scale)
        block = self.input * BLOCK_TOKENS
        if block.denominator != 1:
            raise UsageError(
                f"--trace-length-scale {trace.length_scale} makes blocks of {float(block):g} "
                f"tokens; give k/{BLOCK_TOKENS} for blocks of k tokens"
            )
        self.block = int(block)

    def scale_lengths(self, row: Row) -> tuple[int, int]:
        """Return the tokens of the prompt and of the answer."""
        output = max(1, round(row.output_length * self.output))
        return math.ceil(row.input_length * self.input), output


def _parse_fraction(flag: str, text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value <= 1000:
        raise UsageError(f"{flag} is a number above 0 or a fraction such as 1/32, not {text}")
    return value


def _fits_context(spec: DatasetSpec, scales: _Scales, row: Row) -> bool:
    """Return whether a request fits the server's context. Raises UsageError if it has to."""
    tokens = sum(scales.scale_lengths(row))
    if spec.context is None or tokens <= spec.context:
        return True
    if spec.trace.too_long == "error":
        raise UsageError(
            f"a row of {row.input_length} + {row.output_length} tokens makes {tokens}; the "
            f"model's context is {spec.context}: give --trace-length-scale or "
            "--trace-too-long drop"
        )
    return False


class _Blocks:
    """Token ids of each block, which depend only on the seed and the block's id."""

    def __init__(self, seed: int, num_tokens: int, vocab_size: int) -> None:
        self._seed, self._num_tokens, self._vocab_size = seed, num_tokens, vocab_size
        self._known: dict[int, list[int]] = {}

    def __getitem__(self, hash_id: int) -> list[int]:
        if hash_id not in self._known:
            rng = np.random.default_rng([self._seed, 3, hash_id])
            ids = rng.integers(0, self._vocab_size, self._num_tokens)
            self._known[hash_id] = ids.tolist()
        return self._known[hash_id]


def _make_turn(spec: DatasetSpec, scales: _Scales, blocks: _Blocks, row: Row) -> Turn:
    num_in, num_out = scales.scale_lengths(row)
    ids = [token for hash_id in row.hash_ids for token in blocks[hash_id]][:num_in]
    return Turn(words_of(ids) if spec.as_text else ids, num_in, num_out)


def granularity_ms(rows: list[Row]) -> int:
    """Return the step of the recorder's clock; 1 if the rows do not show it."""
    first = rows[0].timestamp if rows else 0
    return math.gcd(*(row.timestamp - first for row in rows)) or 1


def arrival_times(rows: list[Row], trace: TraceSpec, granularity: int, seed: int) -> list[float]:
    """Return seconds after the start of the window, in order."""
    start = math.floor(rows[0].timestamp)
    times = np.array([row.timestamp - start for row in rows], dtype=np.float64)
    if trace.arrivals == "spread":
        times += np.random.default_rng([seed, 4]).uniform(0, granularity, len(times))
        # Rows of one timestamp keep their order in the file, whichever times we drew.
        times.sort()
    scaled: list[float] = (times / 1e3 * trace.time_scale).tolist()
    return scaled
