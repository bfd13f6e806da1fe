"""A node that has served for a while needs no more memory than one that has just begun to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tiny import CONTEXT, VOCAB_SIZE, tiny_cluster

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIB = 1 << 20


def used() -> dict[str, int]:
    """Bytes of this process, and of the GPU's memory that torch holds."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return {"host": resident, "gpu": torch.cuda.memory_reserved() if DEVICE == "cuda" else 0}


@pytest.mark.parametrize("turns", [4, pytest.param(10, marks=pytest.mark.full)])
def test_memory_does_not_grow_with_what_was_served(seed: int, turns: int) -> None:
    rng = random.Random(seed)

    def prompt() -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, CONTEXT - 40))]

    with tiny_cluster(0, 0, 1, device=DEVICE, kv_cache_tokens=16384) as cluster:

        def serve(count: int) -> None:
            asked = [
                cluster.client.generate(prompt(), cluster.unified, max_tokens=rng.randrange(1, 30))
                for _ in range(count)
            ]
            for request in asked:
                request.result()

        cluster.client.generate([1] * (CONTEXT - 40), cluster.unified, max_tokens=30).result()
        for _ in range(turns):
            serve(25)
        before = used()
        for _ in range(turns):
            serve(25)
        after = used()
    print(f"seed {seed}: {before}, then {after}")
    assert after["gpu"] <= before["gpu"] + 32 * MIB
    assert after["host"] <= before["host"] + 32 * MIB
