"""2P2D of real processes under load while nodes are killed or restarted: no answer fails, none is
wrong, and pools are as before. Measured over minutes by ``benchmarks/failover.py``."""

from __future__ import annotations

import argparse
import random
from typing import TYPE_CHECKING, Any

import pytest
from programs import import_program

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECONDS = 25.0


@pytest.fixture(scope="module")
def failover() -> Any:
    return import_program("benchmarks/failover.py")


@pytest.mark.full
@pytest.mark.alone  # a machine that does more besides hardly has streams when a node is killed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", ["kills", "many kills", "restarts"])
def test_no_request_fails(
    failover: Any, checkpoint: Callable[[str], Path], seed: int, phase: str
) -> None:
    rng, model = random.Random(seed), checkpoint("qwen3")
    cases = failover.make_cases(model, rng)
    args = argparse.Namespace(seconds=SECONDS, clients=4)
    failover.RESTARTS = 1
    found = failover.measure(phase, model, cases, args, rng)
    print(found)
    assert found["failed"] == found["wrong"] == 0, found
    if phase != "many kills":  # which leave no node for new requests at times
        assert found["refused"] == 0, found
    assert found["moved"], found
