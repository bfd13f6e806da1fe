"""Measures how long steps take, by their number of tokens, when a node starts."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pd.core.sampling_params import SamplingParams
from pd.engine.forward_item import ForwardItem
from pd.engine.sampling_state import Draw, SamplingState
from pd.speculative.adaptation import StepCosts
from pd.speculative.drafter import DraftRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from pd.core.config import NodeConfig
    from pd.engine.eagle import CarriedState
    from pd.engine.engine import Engine
    from pd.speculative.draft import Draft
    from pd.speculative.drafter import Drafter
    from pd.speculative.shape import DraftShape

    IntArray = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Tokens of one sequence in measured steps with verification.
_TOKENS = 4
# We ignore the first one, because it compiles kernels.
_REPEATS = 4
# We measure whole drafts for one of this many sizes.
_WHOLE_DRAFTS = 3
# We stop after this many seconds with a slow model, and assume costs in proportion for larger
# steps.
_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _RehearsedRequest:
    """A request without a client; see :class:`pd.speculative.drafter.RequestView`."""

    prompt: IntArray
    namespace: str = ""
    outgoing: None = None


@dataclass(eq=False, slots=True)
class _RehearsedSequence:
    """A sequence for one measurement; see :class:`pd.speculative.drafter.TokenSequence`."""

    request: _RehearsedRequest
    ids: IntArray
    num_tokens: int
    pages: IntArray
    next_draft: Draft | None = None
    carried_state: CarriedState | None = None

    @property
    def tables(self) -> IntArray:
        return self.pages


def measure_costs(
    engine: Engine, drafter: Drafter, config: NodeConfig, shape: DraftShape
) -> StepCosts:
    """Time steps of growing sizes with short contexts.

    Nothing else may use the engine meanwhile. The KV we write belongs to no request.

    Args:
        shape: shape of the largest draft.
    """
    largest = min(config.max_running_requests * (config.speculative_num_draft_tokens + 1), 512)
    began = time.monotonic()
    rows: list[tuple[float, ...]] = []
    for size in _SIZES:
        if size > largest or size > engine.pool.num_pages:
            break
        if rows and time.monotonic() - began > _SECONDS:
            break
        plain = _time_run(partial(_run_step, engine, size, 1))
        verify = _time_run(partial(_run_step, engine, -(-size // _TOKENS), min(size, _TOKENS)))
        draft = _time_run(partial(_run_draft, engine, drafter, size, 1))
        if len(rows) % _WHOLE_DRAFTS == 0 and shape.depth > 1:
            whole = _time_run(partial(_run_draft, engine, drafter, size, shape.tree.size))
            deeper = max(0.0, whole - draft) / (shape.depth - 1)
        # Between the sizes of whole drafts, the cost grows like that of the first tokens.
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


def _time_run(run: Callable[[], None]) -> float:
    """Return the median seconds of a call."""
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _run_step(engine: Engine, sequences: int, tokens: int) -> None:
    """Compute and sample ``tokens`` tokens of each sequence, greedily."""
    ids = np.zeros(tokens, np.int32)
    per_sequence = -(-tokens // engine.pool.page_size)
    # Sequences may share pages, because we do not use the results.
    places = np.arange(sequences * per_sequence) % engine.pool.num_pages
    pages = places.astype(np.int32).reshape(sequences, per_sequence)
    items = [ForwardItem(ids, 0, engine.pool.repeat_table(table), tokens) for table in pages]
    draws = [Draw(make_greedy_state(engine))] * (sequences * tokens)
    prepared = engine.sampler.prepare_draws(draws)
    engine.sampler.launch_draws(engine.runner.forward(items), prepared).read_tokens()


def _run_draft(engine: Engine, drafter: Drafter, count: int, limit: int) -> None:
    """Draft ``limit`` tokens for each of ``count`` new sequences, which share a page."""
    ids = np.arange(2, dtype=np.int32)
    pages = np.zeros(len(ids) + limit, np.int32)
    request, state = _RehearsedRequest(ids), make_greedy_state(engine)
    sequences = [_RehearsedSequence(request, ids, len(ids), pages) for _ in range(count)]
    drafter.rehearse_draft([DraftRequest(sequence, state, limit) for sequence in sequences])


def make_greedy_state(engine: Engine) -> SamplingState:
    """Make the sampling state of a greedy choice without output."""
    model = engine.model_config
    params = SamplingParams(max_tokens=64, temperature=0.0)
    return SamplingState(
        params, np.zeros(1, np.int32), model.eos_token_ids, model.vocab_size, seed=0
    )
