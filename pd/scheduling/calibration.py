"""Measures some steps when a node starts, so its first predictions are not guesses."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd.core.step_cost import StepShape, chunk_pairs
from pd.engine.forward_item import ForwardItem
from pd.engine.sampling_state import Draw
from pd.speculative.costs import make_greedy_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from pd.core.config import NodeConfig
    from pd.engine.engine import Engine
    from pd.scheduling.cost_model import CostModel

logger = logging.getLogger(__name__)

# We skip shapes that would take longer than this in all, not counting compilation. The fit learns
# them when they occur.
SECONDS = 2.0
# We ignore the first one, because it compiles kernels.
_REPEATS = 4
_STREAMS = (1, 8, 32, 128)
_CHUNKS = (16, 64, 256, 512, 1024, 4096)
# Position of long sequences, position of chunks late in a long prompt, and a long chunk.
_FAR = 4096
_LATE = 32768
_LONG = 2048
# Weight of a measured shape in the fit, in steps.
_WEIGHT = 8


class _SampleStep(NamedTuple):
    """A step to measure.

    Attributes:
        streams: number of answers, each at position ``context``.
        chunk: number of prompt tokens from position ``start`` on.
    """

    streams: int = 0
    context: int = 16
    chunk: int = 0
    start: int = 0

    @property
    def is_prompt(self) -> bool:
        """Whether the step has only the beginning of a prompt."""
        return not self.streams and not self.start

    @property
    def shape(self) -> StepShape:
        pairs = chunk_pairs(self.start, self.chunk)
        return StepShape(self.chunk, pairs, self.streams, self.streams * (self.context + 1.0))


def calibrate_costs(model: CostModel, engine: Engine, config: NodeConfig) -> None:
    """Measure steps and fit the model to them.

    Nothing else may use the engine meanwhile. The KV we write belongs to no request.
    """
    began = time.monotonic()
    spent, measured = 0.0, 0
    # The last chunk measured alone, and the seconds of its step.
    longest, took = 0, 0.0
    for sample in _iter_sample_steps(engine, config):
        expected = model.cost.predict_seconds(sample.shape)
        if sample.is_prompt and longest:
            # A fit to short chunks says little about long ones.
            expected = min(expected, took * sample.chunk / longest)
        if measured > 1 and spent + _REPEATS * expected > SECONDS:
            continue
        seconds = _time_step(engine, sample)
        spent += _REPEATS * seconds
        measured += 1
        if sample.is_prompt:
            longest, took = sample.chunk, seconds
        model.add_measurement(sample.shape, seconds, _WEIGHT)
        model.fit(first=True)
    taken = time.monotonic() - began
    one, many = (
        model.cost.predict_seconds(StepShape(streams=1)),
        model.cost.predict_seconds(StepShape(512, 131328)),
    )
    logger.info(
        "measured %d kinds of steps in %.1f s: a step takes %.2f ms, with 512 prompt tokens %.2f",
        *(measured, taken, 1e3 * one, 1e3 * many),
    )
    logger.debug("%s", model.cost)


def _iter_sample_steps(engine: Engine, config: NodeConfig) -> Iterator[_SampleStep]:
    """Iterate over steps that fit the node, cheap ones first."""
    pool = engine.pool
    tokens = min(engine.context_length, pool.num_pages * pool.page_size) - 1
    streams = min(config.max_running_requests, pool.num_pages)
    chunks = [
        c for c in (*_CHUNKS, config.chunked_prefill_size) if c <= config.chunked_prefill_size
    ]
    chunks = sorted({min(chunk, tokens) for chunk in chunks})
    far = min(_FAR, tokens - 1)
    batches = sorted({min(batch, streams) for batch in _STREAMS})
    yield from (_SampleStep(streams=batch) for batch in batches[:2])
    yield from (_SampleStep(chunk=chunk) for chunk in chunks[:3])
    yield _SampleStep(streams=batches[1 if len(batches) > 1 else 0], context=far)
    yield _SampleStep(streams=batches[-1], chunk=chunks[len(chunks) // 2])
    yield from (_SampleStep(streams=batch) for batch in batches[2:])
    for late in (chunks[len(chunks) // 2], min(_LONG, chunks[-1])):
        if late < tokens:
            yield _SampleStep(chunk=late, start=min(_LATE, tokens - late))
    yield from (_SampleStep(chunk=chunk) for chunk in chunks[3:])


def _time_step(engine: Engine, sample: _SampleStep) -> float:
    """Return the shortest time of a step, because other work on this host only adds to it."""
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        _run_step(engine, sample)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _run_step(engine: Engine, sample: _SampleStep) -> None:
    one = np.zeros(1, np.int32)
    items = [
        ForwardItem(one, sample.context, _make_pages(engine, index, sample.context + 1))
        for index in range(sample.streams)
    ]
    if sample.chunk:
        ids = np.zeros(sample.chunk, np.int32)
        stop = sample.start + sample.chunk
        items.append(ForwardItem(ids, sample.start, _make_pages(engine, sample.streams, stop)))
    prepared = engine.sampler.prepare_draws([Draw(make_greedy_state(engine))] * len(items))
    engine.sampler.launch_draws(engine.runner.forward(items), prepared).read_tokens()


def _make_pages(engine: Engine, index: int, tokens: int) -> npt.NDArray[np.int32]:
    """Make page tables. Sequences may share pages, but each writes to a last page of its own."""
    pool = engine.pool
    count = -(-tokens // pool.page_size)
    pages = (np.arange(count) + index * 7) % pool.num_pages
    pages[-1] = index % pool.num_pages
    return pool.repeat_table(pages.astype(np.int32))
