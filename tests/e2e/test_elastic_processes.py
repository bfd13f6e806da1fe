"""Real processes with ``--elastic auto`` under load: all nodes of a role are killed and come back,
and roles change. No request fails, and each has its tokens."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cluster import random_prompts
from processes import deployment, kill_all
from tiny import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from processes import Deployment, Process

TOKENS = 60
CLIENTS = 4


class Load:
    """Clients that ask one request after the other, and what came of that."""

    def __init__(self, running: Deployment, seed: int) -> None:
        self._running, self._seed = running, seed
        self._prompts = list(random_prompts(seed, [20, 90, 200, 400]))
        self._expected = [running.stream(p, TOKENS).join().output for p in self._prompts]
        self._over = threading.Event()
        self.answered = 0
        self.wrong: list[str] = []

    def _ask(self, number: int) -> None:
        rng = random.Random(self._seed + number)
        while not self._over.is_set():
            which = rng.randrange(len(self._prompts))
            stream = self._running.stream(self._prompts[which], TOKENS).join()
            if not stream.succeeded_as(self._expected[which]):
                self.wrong.append(repr(stream))
            self.answered += 1

    def wait_answered(self, count: int) -> None:
        """Wait for so many more answers."""
        target, deadline = self.answered + count, time.monotonic() + 120
        while self.answered < target:
            assert time.monotonic() < deadline, (self.answered, target, self.wrong, self._seed)
            time.sleep(0.05)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        clients = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self._over.set()
            for client in clients:
                client.join(180)
        assert self.wrong == [], self._seed


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Deployment]:
    flags = ["--elastic", "auto", "--load-format", "dummy", "--page-size", "4"]
    proxy = ["--max-failovers", "20"]
    settings: dict[str, Any] = {
        "prefill": 2,
        "decode": 2,
        "node_flags": flags,
        "proxy_flags": proxy,
    }
    with deployment(tiny_model(), tmp_path, **settings) as made:
        yield made


@pytest.mark.full
@pytest.mark.timeout(600)
def test_service_goes_on_while_all_nodes_of_each_role_are_killed(
    running: Deployment, seed: int
) -> None:
    load = Load(running, seed)
    with load.going_on():
        for role in (running.prefill, running.decode):
            load.wait_answered(2 * CLIENTS)
            kill_all(role)
            load.wait_answered(4 * CLIENTS)
            for node in role:
                node.restart()
            running.wait_ready()
    running.wait_idle()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_roles_change_under_load(running: Deployment, seed: int) -> None:
    load = Load(running, seed)

    def change(node: Process, role: str) -> None:
        instance = node.ready()["instance_id"]
        url = f"{running.proxy.url}/workers/{instance}"
        changed = httpx.post(url, json={"role": role}, timeout=20)
        assert changed.status_code == 200, changed.text

    with load.going_on():
        for role in ("decode", "unified", "prefill"):
            for node in running.nodes:
                load.wait_answered(CLIENTS)
                change(node, role)
    running.wait_idle()
