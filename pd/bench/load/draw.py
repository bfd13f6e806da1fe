"""Draws a run: what is asked, when, and which clients hang up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pd.bench.load.arrivals import schedule
from pd.bench.load.datasets.jsonl import draw_jsonl
from pd.bench.load.datasets.synthetic import (
    draw_multi_turn,
    draw_random,
    draw_shared_prefix,
    draw_structured,
)
from pd.bench.load.datasets.trace import draw_trace
from pd.bench.load.workload import Session, longest
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.bench.load.arrivals import Arrivals
    from pd.bench.load.datasets.spec import DatasetSpec, Drawn

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
    """Sessions of a run in order of arrival, and notes for its results.

    A pure function of its arguments and of the dataset's file.

    Args:
        arrivals: how sessions arrive; None: as the dataset says, else as soon as they can be sent.
        closed_loop: sessions have no time of arrival but with ``arrivals``; they wait for a place.
        cancel_rate: share of sessions whose client hangs up, after a time that is uniform from 0
            to ``cancel_delay`` seconds.
    """
    drawn = _DATASETS[dataset.name](dataset, seed)
    for turns in drawn.sessions:
        if dataset.context is not None and longest(turns) > dataset.context:
            raise UsageError(
                f"a session of {longest(turns)} tokens does not fit the model's context of "
                f"{dataset.context}: give shorter lengths, smaller --random-range-ratio or "
                "fewer --turns"
            )
    count = len(drawn.sessions)
    times: list[float] | list[None] = [None] * count
    if arrivals is not None:
        times = schedule(arrivals, count, seed)
    elif drawn.arrivals is not None and not closed_loop:
        times = drawn.arrivals
    rng = np.random.default_rng([seed, 5])
    cancelled, delays = rng.random(count) < cancel_rate, rng.uniform(0, cancel_delay, count)
    sessions = [
        Session(number, turns, times[number], float(delays[number]) if cancelled[number] else None)
        for number, turns in enumerate(drawn.sessions)
    ]
    return sorted(sessions, key=lambda session: session.arrival or 0.0), drawn.notes
