"""Nodes with ``--tp-size 2``: real processes, and what happens when one of them ends."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import ARCHITECTURES, VOCAB_SIZE, reference_generate
from cluster import Cluster, random_prompts, wait_until
from greedy_engine import generate
from processes import LAUNCH, Process
from tiny import tiny_cluster, tiny_model, tiny_node

from pd.core.config import NodeConfig
from pd.core.errors import NodeFailedError, SetupError, UsageError
from pd.engine.engine import Engine
from pd.engine.forward_item import ForwardItem
from pd.engine.tensor_parallel.messages import StartWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def children(pid: int) -> list[int]:
    """Processes that a process has started; empty if it is gone."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in tasks.read_text().split()]
    return found


def workers_of(pid: int) -> list[int]:
    # The server that forks workers for other tests has the module's name in a program of its own.
    return [
        child
        for child in children(pid)
        if b"pd.engine.tensor_parallel.worker"
        in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    ]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends before the read
        return False


def some_requests(seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"n": 2, "temperature": 0.8, "seed": 5},
        {"frequency_penalty": 1.0},
        {"logprobs": True, "top_logprobs": 2},
        {"prompt_logprobs_start": 0, "max_tokens": 1},
    ]
    return [
        (prompt, {"max_tokens": rng.randrange(1, 30)} | kinds[index % len(kinds)])
        for index, prompt in enumerate(
            random_prompts(seed, [rng.randrange(1, 60) for _ in range(15)])
        )
    ]


def answers(cluster: Cluster, requests: list[tuple[list[int], dict[str, Any]]]) -> list[Any]:
    sent = [cluster.client.generate(p, cluster.unified, **params) for p, params in requests]
    return [request.result(60) for request in sent]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node of two ranks with a pool so small that sequences are retracted."""
    settings = {"kv_cache_tokens": 160, "reserved_decode_tokens": 2, "chunked_prefill_size": 48}
    with tiny_cluster(0, 0, 1, tp_size=2, overlap_schedule="on", **settings) as made:
        yield made


class TestNode:
    def test_answers_are_those_of_one_rank(self, cluster: Cluster) -> None:
        """The pool is so small that sequences are retracted, and their KV comes back from the host
        memory of both ranks."""
        requests = some_requests(3)
        with tiny_cluster(0, 0, 1) as single:
            expected = answers(single, requests)
        node = cluster.unified[0].node
        scatter, returned = node.engine.pool.scatter_pages, []

        def counting(pages: Any, host: Any) -> None:
            returned.append(len(pages))
            scatter(pages, host)

        node.engine.pool.scatter_pages = counting
        assert answers(cluster, requests) == expected
        assert node.core.metrics.retractions._value.get() > 0
        assert sum(returned) > 0
        cluster.wait_idle()
        assert node.scheduler.decode._host_used == 0

    def test_server_info_says_so(self, cluster: Cluster) -> None:
        assert cluster.unified[0].node.server_info()["tp_size"] == 2

    def test_a_step_that_cannot_be_launched_ends_the_group(self) -> None:
        """The workers are in a step that rank 0 is not in, so nothing can be computed any more."""
        config = NodeConfig(
            role="unified",
            model=tiny_model(),
            device="cpu",
            load_format="dummy",
            tp_size=2,
            kv_cache_tokens=160,
        )
        engine = Engine.build(config)
        reasons: list[str] = []
        engine.set_failure_callback(reasons.append)
        try:
            (worker,) = workers_of(os.getpid())[-1:]
            runner: Any = engine.runner
            runner._runner.forward = None
            item = ForwardItem(np.arange(3, dtype=np.int32), 0, np.arange(1, dtype=np.int32))
            for _ in range(2):
                with pytest.raises(NodeFailedError, match="could not launch a step"):
                    engine.runner.forward([item])
            assert len(reasons) == 1
            wait_until(lambda: not alive(worker), 5)
        finally:
            engine.close()

    def test_a_killed_worker_fails_its_requests_and_the_node(self, cluster: Cluster) -> None:
        """The last test of this node."""
        server = cluster.unified[0]
        (prompt,) = random_prompts(1, [10])
        request = cluster.client.generate(prompt, cluster.unified, max_tokens=100)
        wait_until(lambda: len(request.choices[0].tokens) > 2, 10)
        (worker,) = workers_of(os.getpid())
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(NodeFailedError, match=rf"rank 1 \(process {worker}\) ended with .*-9"):
            request.result(30)
        wait_until(lambda: not server.node.ready, 30)
        again = cluster.client.generate(prompt, cluster.unified, max_tokens=1)
        with pytest.raises(Exception, match="takes no requests"):
            again.result(10)


class TestStart:
    def test_a_worker_that_cannot_start_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(SetupError, match=r"rank 1 \(process \d+\) ended with status 1"):
            tiny_node("unified", tp_size=2)

    def test_a_worker_that_cannot_build_its_part_says_why(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def spoiled(settings: dict[str, Any], *rest: Any) -> StartWorker:
            return StartWorker(settings | {"dtype": "int3"}, *rest)

        monkeypatch.setattr("pd.engine.tensor_parallel.leader.StartWorker", spoiled)
        before = set(workers_of(os.getpid()))
        with pytest.raises(SetupError, match=r"rank 1 failed: --dtype must be .* not int3"):
            tiny_node("unified", tp_size=2)
        assert set(workers_of(os.getpid())) <= before

    def test_a_worker_that_ends_while_the_ranks_connect_is_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def join(*args: object) -> None:
            for worker in workers_of(os.getpid()):
                os.kill(worker, signal.SIGKILL)
            raise RuntimeError("Connection closed by peer")  # as gloo does

        monkeypatch.setattr("pd.engine.tensor_parallel.leader.ProcessGroup", join)
        with pytest.raises(SetupError, match=r"rank 1 \(process \d+\) ended with status -9"):
            tiny_node("unified", tp_size=2)

    def test_sizes_below_one_are_refused(self) -> None:
        with pytest.raises(UsageError, match="--tp-size must be at least 1, not 0"):
            NodeConfig(role="unified", model=tiny_model(), tp_size=0)

    def test_sizes_that_do_not_divide_start_nothing(self) -> None:
        before = set(workers_of(os.getpid()))
        with pytest.raises(UsageError, match=r"--tp-size 3 does not divide .* num_heads 4"):
            tiny_node("unified", tp_size=3)
        assert set(workers_of(os.getpid())) <= before


@pytest.mark.parametrize("how", ["killed", pytest.param("drained", marks=pytest.mark.full)])
def test_workers_end_with_their_node(how: str, tmp_path: Path) -> None:
    """They also heed no Ctrl-C, which a terminal sends to all: rank 0 drains first."""
    command = ["unified", "--model", str(tiny_model()), "--load-format", "dummy", "--port", "0"]
    command += ["--device", "cpu", "--tp-size", "2", "--kv-cache-tokens", "4096"]
    node = Process(*command, log=tmp_path / "log", program=LAUNCH)
    try:
        assert node.server_info()["tp_size"] == 2
        (worker,) = workers_of(node.child.pid)
        if how == "killed":
            node.kill()
        else:
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGTERM)
            node.child.send_signal(signal.SIGINT)
            assert node.child.wait(15) == 0
            assert "ERROR" not in node.log.read_text()
            assert "CRITICAL" not in node.log.read_text()
        wait_until(lambda: not alive(worker), 3)
    finally:
        node.stop()


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers(
    checkpoint: Callable[[str], Path], architecture: str
) -> None:
    """Two processes with each architecture; pd/engine/test_tensor_parallel has threads."""
    check_two_processes(checkpoint(architecture))


@pytest.mark.parametrize(
    "architecture", ["deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.full)]
)
def test_processes_with_different_experts_equal_transformers(
    checkpoint: Callable[[str], Path], architecture: str
) -> None:
    check_two_processes(checkpoint(architecture), ep_size=2)


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_different_experts_with_retraction_and_drafts(
    checkpoint: Callable[[str], Path], drafter: str
) -> None:
    """As :class:`TestNode`, but the ranks have different experts."""
    path = checkpoint("qwen3_moe")
    requests = [(p, {"ignore_eos": True} | each) for p, each in some_requests(4)]
    common: dict[str, Any] = {"unified": 1, "speculative_algorithm": drafter}
    with Cluster(path, **common) as single:
        expected = answers(single, requests)
    tight = {"kv_cache_tokens": 96, "reserved_decode_tokens": 2, "chunked_prefill_size": 48}
    with Cluster(path, tp_size=2, ep_size=2, **tight, **common) as cluster:
        assert answers(cluster, requests) == expected
        assert cluster.unified[0].node.core.metrics.retractions._value.get() > 0
        assert cluster.unified[0].node.server_info()["ep_size"] == 2
        cluster.wait_idle()


def check_two_processes(path: Path, **settings: Any) -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 17, 40, 150)]
    common: dict[str, Any] = {"device": "cpu", "tp_size": 2, "kv_cache_tokens": 2048}
    config = NodeConfig(role="unified", model=path, **common, **settings)
    engine = Engine.build(config)
    try:
        runner: Any = engine.runner
        runner.pool = engine.pool
        found = generate(runner, prompts, 12, max_chunk=50, seed=0)
    finally:
        engine.close()
    assert [s.output for s in found] == reference_generate(path, prompts, 12)
