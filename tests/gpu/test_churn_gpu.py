"""Churn between pools on GPUs: two GPUs if there are, else one that all nodes share."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from e2e.backends import NIXL, NVLINK, Backend
from e2e.churn import Case, check_churn, make_cases

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

# As exact as what gave the expected tokens, and few graphs to capture: nodes start again and again.
NODE_FLAGS = ("--dtype", "float32", "--max-running-requests", "16")


@pytest.fixture(scope="module")
def cases(checkpoint: Callable[[str], Path], seed: int) -> list[Case]:
    """What one node makes of them, on the CPU unless PD_TEST_DEVICE says otherwise."""
    return make_cases(checkpoint("qwen3"), random.Random(seed))


@pytest.mark.parametrize("backend", [NVLINK, pytest.param(NIXL, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("flags", [(), ("--kv-digest",)], ids=["plain", "digest"])
@pytest.mark.parametrize("requests", [160, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.timeout(900)
def test_churn_on_gpus(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    cases: list[Case],
    seed: int,
    backend: Backend,
    requests: int,
    flags: tuple[str, ...],
) -> None:
    backend.require()
    devices = [f"cuda:{number}" for number in range(min(2, torch.cuda.device_count()))]
    check_churn(
        checkpoint("qwen3"),
        tmp_path,
        cases,
        backend,
        requests,
        seed,
        devices=devices,
        node_flags=[*NODE_FLAGS, *flags],
    )
