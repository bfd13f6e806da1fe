"""Batches that Ctrl-C ends, that their caller leaves, or whose node dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cluster import wait_until
from processes import deployment
from scripted_backend import ScriptedBackend

import pd.lang as pl
from pd.core.errors import AbortedError
from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from pathlib import Path

    from cluster import Cluster

    from pd.lang.ir import GenSettings

# Asks for answers that take a minute, and says when it ends.
ENDLESS = """
import sys, time
import pd.lang as pl

@pl.function
def program(s, i):
    s += str(i) + pl.gen("a", 4000, ignore_eos=True)
    s["a"]

try:
    program.run_batch([[i] for i in range(8)], backend=pl.RuntimeEndpoint(sys.argv[1]))
except KeyboardInterrupt:
    print(time.monotonic(), flush=True)
"""


def test_ctrl_c_ends_a_batch_within_a_second_and_its_requests(url: str, cluster: Cluster) -> None:
    (node,) = cluster.unified
    command = [sys.executable, "-c", ENDLESS, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        wait_until(lambda: count_running(node) == 8, 30)
        interrupted = time.monotonic()
        program.send_signal(signal.SIGINT)
        ended = float(program.stdout.readline())
        assert program.wait(5) == 0
    assert ended - interrupted < 1
    cluster.wait_idle(1)


def count_running(node: Any) -> int:
    return int(httpx.get(f"{node.url}/server_info").json()["queues"]["running"])


class SlowBackend(ScriptedBackend):
    """Answers only once its request is aborted."""

    def __init__(self) -> None:
        super().__init__(self.wait_abort)
        self._aborted = threading.Event()
        self.began = threading.Event()

    def wait_abort(self, text: str, settings: GenSettings) -> str:
        if text == "slow":
            self.began.set()
            assert self._aborted.wait(5)
        return "answer"

    def abort(self, rid: str) -> None:
        super().abort(rid)
        self._aborted.set()


def test_a_batch_that_is_left_early_aborts_the_rest() -> None:
    @pl.function
    def program(s: Any, text: str) -> None:
        s += text + pl.gen("a") + pl.gen("b")

    backend = SlowBackend()
    states = program.run_batch(
        [["quick"], ["slow"]], backend=backend, generator_style=True, num_threads=2
    )
    assert next(iter(states))["b"] == "answer"
    assert backend.began.wait(5)
    states.close()  # type: ignore[union-attr]
    wait_until(lambda: ("gen", "slow") in backend.log and "abort" in dict(backend.log), 5)
    # The next generation of the state that was aborted is not sent.
    assert "slowanswer" not in backend.list_texts("gen")


def test_a_body_that_raises_aborts_its_requests() -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "slow" + pl.gen("a")
        states.append(s)
        backend.began.wait(5)
        raise KeyboardInterrupt

    states: list[Any] = []
    backend = SlowBackend()
    try:
        program.run(backend=backend)
    except KeyboardInterrupt:
        error = states[0].error()
    assert isinstance(error.__cause__, AbortedError)


class StuckBackend(ScriptedBackend):
    """Neither answers nor takes aborts for a while, as a server that is stuck."""

    def __init__(self) -> None:
        super().__init__(self.stick)
        self.began = threading.Semaphore(0)
        self.may_end = threading.Event()

    def stick(self, text: str, settings: GenSettings) -> str:
        if text:
            self.began.release()
            assert self.may_end.wait(20)
        return "answer"

    def abort(self, rid: str) -> None:
        self.may_end.wait(0.5)


def test_a_server_that_is_stuck_does_not_hold_up_the_end_of_a_batch() -> None:
    @pl.function
    def program(s: Any, text: str) -> None:
        s += text + pl.gen("a")

    backend = StuckBackend()
    states = program.run_batch(
        [[""], *[["stuck"]] * 40], backend=backend, generator_style=True, num_threads=41
    )
    next(iter(states))
    for _ in range(40):
        assert backend.began.acquire(timeout=5)
    began = time.monotonic()
    states.close()  # type: ignore[union-attr]
    assert time.monotonic() - began < 1
    backend.may_end.set()


@pytest.mark.full
def test_a_killed_node_costs_a_batch_only_time(tmp_path: Path) -> None:
    @pl.function
    def program(s: Any, question: str) -> None:
        s += pl.user(question) + pl.assistant(pl.gen("a", 48))
        forks = s.fork(2)
        forks += pl.user("What is pd?")
        forks += pl.assistant(pl.gen("b", 48))
        forks.join()
        s += pl.user("Is it?") + pl.assistant(pl.select("c", ["Yes", "No"]))

    questions = ["What does the proxy do?", "What is a unified node?", "What is the KV cache?"]
    batch = [[question] for question in questions * 4]

    def read(states: Any) -> list[tuple[Any, ...]]:
        return [(s.error(), s["a"], s["b"], s["c"]) for s in states]

    flags = ["--kv-cache-tokens", "16384", "--dtype", "float32"]
    with deployment(EMBEDDED_MODEL, tmp_path, prefill=2, decode=2, node_flags=flags) as running:
        backend = pl.RuntimeEndpoint(running.proxy.url)
        expected = read(program.run_batch(batch, backend=backend, temperature=0))
        states = program.run_batch(batch, backend=backend, temperature=0, generator_style=True)
        first = next(iter(states))
        running.decode[0].kill()
        running.prefill[0].kill()
        assert [*read([first]), *read(states)] == expected
