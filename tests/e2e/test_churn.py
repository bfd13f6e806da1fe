"""2P2D while requests are aborted and nodes killed: no wrong token, and nothing left behind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from backends import PROCESSES, TCP, Backend
from churn import EVENTS_PER_KILL, PER_SECOND, Case, check_churn, make_cases

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def cases(checkpoint: Callable[[str], Path], seed: int) -> list[Case]:
    return make_cases(checkpoint("qwen3"), random.Random(seed))


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "requests", "per_second", "events_per_kill"),
    [
        *((backend, 100, PER_SECOND, EVENTS_PER_KILL) for backend in PROCESSES),
        # Two minutes, for more than 20 kills.
        (TCP, 600, PER_SECOND / 2, 4),
    ],
    ids=str,
    indirect=["backend"],
)
@pytest.mark.timeout(1500)
def test_churn(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    cases: list[Case],
    seed: int,
    backend: Backend,
    requests: int,
    per_second: float,
    events_per_kill: int,
) -> None:
    check_churn(
        checkpoint("qwen3"),
        *(tmp_path, cases, backend, requests, seed),
        events_per_kill=events_per_kill,
        per_second=per_second,
    )
