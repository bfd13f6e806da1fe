"""2P2D of real processes under load while nodes are killed or restarted: no answer fails, none is
wrong, and pools are as before. Measured over minutes by ``benchmarks/failover.py``."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import failover

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 25.0


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", ["kills", "restarts"])
def test_no_request_fails(checkpoint: Callable[[str], Path], seed: int, phase: str) -> None:
    rng, model = random.Random(seed), checkpoint("qwen3")
    cases = failover.make_cases(model, rng)
    args = argparse.Namespace(seconds=SECONDS, clients=4)
    found = failover.measure(phase, model, cases, args, rng)
    print(found)
    assert found["failed"] == found["wrong"] == found["refused"] == 0, found
    assert found["moved"], found
