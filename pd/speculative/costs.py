"""Measures at a node's start how long its steps take, by the number of their tokens."""

from __future__ import annotations

import logging
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pd.core.request import Request, Sequence
from pd.core.sampling_params import SamplingParams
from pd.engine.model_runner import ForwardItem
from pd.engine.sampling_state import Draw, SamplingState
from pd.speculative.adaptation import StepCosts
from pd.speculative.drafter import DraftRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.config import NodeConfig
    from pd.engine.engine import Engine
    from pd.speculative.drafter import Drafter
    from pd.speculative.shape import DraftShape

logger = logging.getLogger(__name__)

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Tokens of one sequence in the steps that are measured as verification.
_TOKENS = 4
# The first of these is not counted, since it compiles kernels.
_REPEATS = 4
# Drafts of several tokens are measured for one of so many sizes.
_WHOLE_DRAFTS = 3
# Steps of a model that is slow here are measured for so long; larger ones are taken to cost as much
# more as they have more tokens.
_SECONDS = 5.0


def measure_costs(
    engine: Engine, drafter: Drafter, config: NodeConfig, shape: DraftShape
) -> StepCosts:
    """Time steps of growing sizes with contexts of a few tokens. Nothing else may use the engine;
    the KV that is written belongs to no request. ``shape`` is that of the largest draft."""
    largest = min(config.max_running_requests * (config.speculative_num_draft_tokens + 1), 512)
    began = time.monotonic()
    rows: list[tuple[float, ...]] = []
    for size in _SIZES:
        if size > largest or size > engine.pool.num_pages:
            break
        if rows and time.monotonic() - began > _SECONDS:
            break
        plain = _timed(partial(_step, engine, size, 1))
        verify = _timed(partial(_step, engine, -(-size // _TOKENS), min(size, _TOKENS)))
        draft = _timed(partial(_draft, engine, drafter, size, 1))
        if len(rows) % _WHOLE_DRAFTS == 0 and shape.depth > 1:
            whole = _timed(partial(_draft, engine, drafter, size, shape.tree.size))
            deeper = max(0.0, whole - draft) / (shape.depth - 1)
        # Between the sizes of whole drafts, as the first tokens' cost grows.
        elif rows:
            deeper = rows[-1][4] * draft / rows[-1][3]
        else:
            deeper = 0.0
        rows.append((size, plain, verify, draft, deeper))
        logger.info(
            "steps of %d tokens: %.2f ms, %.2f in drafts of %d; %.2f to draft one for each, "
            "%.2f for each further one",
            *(size, 1e3 * plain, 1e3 * verify, _TOKENS - 1, 1e3 * draft, 1e3 * deeper),
        )
    return StepCosts(*(np.array(column) for column in zip(*rows, strict=True)))


def _timed(run: Callable[[], None]) -> float:
    """Median seconds of a call."""
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _step(engine: Engine, sequences: int, tokens: int) -> None:
    """Compute and sample ``tokens`` tokens of each sequence, greedily."""
    ids = np.zeros(tokens, np.int32)
    per_sequence = -(-tokens // engine.pool.page_size)
    # Sequences share pages where there are not enough; what they compute is not used.
    places = np.arange(sequences * per_sequence) % engine.pool.num_pages
    pages = places.astype(np.int32).reshape(sequences, per_sequence)
    items = [ForwardItem(ids, 0, table, tokens) for table in pages]
    draws = [Draw(greedy_state(engine))] * (sequences * tokens)
    prepared = engine.sampler.prepare(draws)
    engine.sampler.launch(engine.runner.forward(items), prepared).result()


def _draft(engine: Engine, drafter: Drafter, count: int, limit: int) -> None:
    """Draft ``limit`` tokens for each of ``count`` sequences that were not seen before and share a
    page."""
    ids = np.arange(2, dtype=np.int32)
    pages = np.zeros(len(ids) + limit, np.int32)
    params = SamplingParams(max_tokens=1 + limit)
    sequences = []
    for _ in range(count):
        request = Request(rid="", room=b"", proxy=b"", prompt=ids, params=params)
        sequences.append(Sequence(request, 0, ids, len(ids), pages=pages))
    state = greedy_state(engine)
    drafter.rehearse([DraftRequest(sequence, state, limit) for sequence in sequences])


def greedy_state(engine: Engine) -> SamplingState:
    """Sampling state of a greedy choice without any output."""
    model = engine.model_config
    params = SamplingParams(max_tokens=64, temperature=0.0)
    return SamplingState(
        params, np.zeros(1, np.int32), model.eos_token_ids, model.vocab_size, seed=0
    )
