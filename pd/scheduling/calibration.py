"""Measures steps of some shapes at a node's start, so that its first predictions are no guesses."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd.core.step_cost import StepShape, chunk_pairs
from pd.engine.model_runner import ForwardItem
from pd.engine.sampling_state import Draw
from pd.speculative.costs import greedy_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.config import NodeConfig
    from pd.engine.engine import Engine
    from pd.scheduling.cost_model import CostModel

logger = logging.getLogger(__name__)

# Shapes that would not be measured within this time, without the compilation of kernels, are left
# out: the fit follows when they occur.
SECONDS = 2.0
# The first is not counted, since it compiles kernels.
_REPEATS = 4
_STREAMS = (1, 8, 32, 128)
_CHUNKS = (16, 64, 256, 512, 1024, 4096)
# Positions at which long sequences are measured, and a short and a long chunk of a long prompt.
_FAR = 4096
_LATE = 32768
_LONG = 2048
# Weight of a measured shape in the fit, in steps.
_WEIGHT = 8


class _SampleStep(NamedTuple):
    """A step to measure.

    Attributes:
        streams: sequences that continue, at position ``context``.
        chunk: prompt tokens from position ``start`` on.
    """

    streams: int = 0
    context: int = 16
    chunk: int = 0
    start: int = 0

    @property
    def is_prompt(self) -> bool:
        """Whether it is the beginning of a prompt and nothing else."""
        return not self.streams and not self.start

    @property
    def shape(self) -> StepShape:
        pairs = chunk_pairs(self.start, self.chunk)
        return StepShape(self.chunk, pairs, self.streams, self.streams * (self.context + 1.0))


def calibrate(model: CostModel, engine: Engine, config: NodeConfig) -> None:
    """Measure steps and fit the model to them. Nothing else may use the engine; the KV that is
    written belongs to no request."""
    began = time.monotonic()
    spent, measured = 0.0, 0
    # The last chunk that was measured alone, and the seconds of its step.
    longest, took = 0, 0.0
    for sample in _sample_steps(engine, config):
        expected = model.cost.seconds(sample.shape)
        if sample.is_prompt and longest:
            # NOTE: a fit to short chunks says little of long ones.
            expected = min(expected, took * sample.chunk / longest)
        if measured > 1 and spent + _REPEATS * expected > SECONDS:
            continue
        seconds = _timed(engine, sample)
        spent += _REPEATS * seconds
        measured += 1
        if sample.is_prompt:
            longest, took = sample.chunk, seconds
        model.measured(sample.shape, seconds, _WEIGHT)
        model.fit(first=True)
    taken = time.monotonic() - began
    one, many = model.cost.seconds(StepShape(streams=1)), model.cost.seconds(StepShape(512, 131328))
    logger.info(
        "measured %d kinds of steps in %.1f s: a step takes %.2f ms, with 512 prompt tokens %.2f",
        *(measured, taken, 1e3 * one, 1e3 * many),
    )
    logger.debug("%s", model.cost)


def _sample_steps(engine: Engine, config: NodeConfig) -> Iterator[_SampleStep]:
    """Shapes that the node can have, cheap ones first."""
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


def _timed(engine: Engine, sample: _SampleStep) -> float:
    """Least seconds of a step: whatever else runs on this host only adds to them."""
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        _run(engine, sample)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _run(engine: Engine, sample: _SampleStep) -> None:
    one = np.zeros(1, np.int32)
    items = [
        ForwardItem(one, sample.context, _pages(engine, index, sample.context + 1))
        for index in range(sample.streams)
    ]
    if sample.chunk:
        ids = np.zeros(sample.chunk, np.int32)
        stop = sample.start + sample.chunk
        items.append(ForwardItem(ids, sample.start, _pages(engine, sample.streams, stop)))
    prepared = engine.sampler.prepare([Draw(greedy_state(engine))] * len(items))
    engine.sampler.launch(engine.runner.forward(items), prepared).result()


def _pages(engine: Engine, index: int, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A page table of a sequence. Sequences share pages where there are not enough; what they
    compute is not used. The last pages, which are written, differ."""
    pool = engine.pool
    count = -(-tokens // pool.page_size)
    pages = (np.arange(count) + index * 7) % pool.num_pages
    pages[-1] = index % pool.num_pages
    return pages.astype(np.int32)
