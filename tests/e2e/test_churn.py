"""2P2D while requests are aborted and nodes killed: no wrong token, and nothing left behind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import httpx
import pytest
from backends import PROCESSES, TCP, Backend, over
from churn import Case, Churn, Footprint, make_cases
from processes import Deployment, deployment, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Every pair of a prefill and a decode node, round robin on both sides, several times.
WARM_UP = 24


@pytest.fixture(scope="module")
def cases(checkpoint: Callable[[str], Path], seed: int) -> list[Case]:
    return make_cases(checkpoint("qwen3"), random.Random(seed), 60)


def calm_round(running: Deployment, cases: list[Case]) -> None:
    """All succeed, one after the other."""
    for case in (cases * WARM_UP)[:WARM_UP]:
        stream = running.stream(case.prompt, case.length, **case.body).join(60)
        assert stream.succeeded_as(case.expected), stream


def footprints(running: Deployment) -> dict[str, Footprint]:
    return {p.log.stem: Footprint.of(p) for p in (running.proxy, *running.nodes)}


def proxy_is_idle(running: Deployment) -> bool:
    """As the proxy sees it, a heartbeat later than the nodes."""
    workers = httpx.get(f"{running.proxy.url}/workers").json()["workers"]
    return all(w["running"] == w["queued_tokens"] == 0 for w in workers)


@over(PROCESSES, sample=[TCP])
@pytest.mark.parametrize("requests", [160, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.timeout(1500)
def test_churn(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    cases: list[Case],
    seed: int,
    backend: Backend,
    requests: int,
) -> None:
    print(f"PD_TEST_SEED={seed}: {requests} requests over {backend}")
    flags = ["--transfer-backend", backend.flag]
    balanced = ["--policy", "round_robin"]
    with deployment(
        checkpoint("qwen3"),
        tmp_path,
        prefill=2,
        decode=2,
        node_flags=flags,
        proxy_flags=balanced,
        env=backend.env,
    ) as running:
        calm_round(running, cases)
        before = footprints(running)
        churn = Churn(running, cases, seed)
        churn.run(requests)
        summary = churn.summary()
        print(summary)
        assert not churn.faults(), summary
        assert summary["right"] > requests // 2, summary
        assert summary["kills"] > 0, summary
        calm_round(running, cases)
        running.wait_idle(60)
        after = footprints(running)
        print(before, after)
        keeps = backend.keeps
        assert not [n for n, now in after.items() if now.has_grown_from(before[n], keeps)]
        wait_until(lambda: proxy_is_idle(running), 10)
