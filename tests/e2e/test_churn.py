"""2P2D while requests are aborted and nodes killed: no wrong token, and nothing left behind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from backends import PROCESSES, TCP, Backend, over
from churn import EVENTS_PER_KILL, Case, check_churn, make_cases

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def cases(checkpoint: Callable[[str], Path], seed: int) -> list[Case]:
    return make_cases(checkpoint("qwen3"), random.Random(seed))


@over(PROCESSES, sample=[])
@pytest.mark.timeout(600)
def test_churn(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    cases: list[Case],
    seed: int,
    backend: Backend,
) -> None:
    check_churn(
        checkpoint("qwen3"),
        *(tmp_path, cases, backend, 100, seed),
        events_per_kill=EVENTS_PER_KILL,
    )


@pytest.mark.full
@over([TCP])
@pytest.mark.timeout(1500)
def test_long_churn(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    cases: list[Case],
    seed: int,
    backend: Backend,
) -> None:
    check_churn(
        checkpoint("qwen3"),
        *(tmp_path, cases, backend, 2000, seed),
        events_per_kill=EVENTS_PER_KILL,
    )
