"""Draws a run: its requests, their times, and cancellations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from pd.bench.load.arrivals import draw_arrivals
from pd.bench.load.datasets.jsonl import draw_jsonl, draw_last_lines
from pd.bench.load.datasets.spec import Drawn
from pd.bench.load.datasets.synthetic import (
    draw_multi_turn,
    draw_random,
    draw_shared_prefix,
    draw_structured,
)
from pd.bench.load.datasets.trace import draw_trace
from pd.bench.load.workload import Session, count_tokens
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.bench.load.arrivals import Arrivals
    from pd.bench.load.datasets.spec import DatasetSpec

# Warm-up sessions have another seed than measured ones.
_WARM_UP_SEED = 1 << 32
_DATASETS: dict[str, Callable[[DatasetSpec, int], Drawn]] = {
    "random": draw_random,
    "shared-prefix": draw_shared_prefix,
    "multi-turn": draw_multi_turn,
    "jsonl": draw_jsonl,
    "trace": draw_trace,
    "structured": draw_structured,
}


def draw_sessions(
    dataset: DatasetSpec,
    arrivals: Arrivals | None,
    *,
    seed: int,
    closed_loop: bool = False,
    cancel_rate: float = 0.0,
    cancel_delay: float = 1.0,
) -> tuple[list[Session], dict[str, Any]]:
    """Draw the sessions of a run in order of arrival, and notes for its results.

    The result depends only on the arguments and the dataset's file.

    Args:
        arrivals: how sessions arrive; None: as the dataset says, else as soon as possible.
        closed_loop: sessions wait for a place; they have arrival times only with ``arrivals``.
        cancel_rate: share of sessions whose client hangs up, after a uniform time of at most
            ``cancel_delay`` seconds.
    """
    drawn = _DATASETS[dataset.name](dataset, seed)
    _check_lengths(dataset, drawn)
    count = len(drawn.sessions)
    times: list[float] | list[None] = [None] * count
    if arrivals is not None:
        times = draw_arrivals(arrivals, count, seed)
    elif drawn.arrivals is not None and not closed_loop:
        times = drawn.arrivals
    rng = np.random.default_rng([seed, 5])
    cancelled, delays = rng.random(count) < cancel_rate, rng.uniform(0, cancel_delay, count)
    sessions = [
        Session(number, turns, times[number], float(delays[number]) if cancelled[number] else None)
        for number, turns in enumerate(drawn.sessions)
    ]
    return sorted(sessions, key=lambda session: session.arrival or 0.0), drawn.notes


def draw_warm_up(
    dataset: DatasetSpec, count: int, *, seed: int, measured: int
) -> tuple[list[Session], dict[str, Any]]:
    """Draw sessions to send before a run, and notes for its results.

    They differ from the ``measured`` sessions of the run: they have another seed, or for ``jsonl``
    are the last lines of the file, if it has enough.
    """
    if dataset.name == "jsonl":
        drawn = draw_last_lines(dataset, count, measured)
    else:
        other = dataclasses.replace(dataset, count=count)
        drawn = Drawn(_DATASETS[dataset.name](other, seed + _WARM_UP_SEED).sessions)
    _check_lengths(dataset, drawn)
    return [Session(number, turns) for number, turns in enumerate(drawn.sessions)], drawn.notes


def _check_lengths(dataset: DatasetSpec, drawn: Drawn) -> None:
    """Raise UsageError for a session beyond the model's context."""
    for turns in drawn.sessions:
        if dataset.context is not None and count_tokens(turns) > dataset.context:
            raise UsageError(
                f"a session of {count_tokens(turns)} tokens does not fit the model's context of "
                f"{dataset.context}: give shorter lengths, smaller --random-range-ratio or "
                "fewer --turns"
            )
