"""Batches go on where they were when a proxy is killed, stopped or loses a process."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import openai
import pytest
from fake_node import FakeNode, wait_until
from processes import Process, free_port
from proxy_batches import (
    echo,
    make_lines,
    read_number,
    read_results,
    reply_to,
    start,
    wait_completed,
    wait_ended,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.one_process("starts proxies by itself")


class Host(NamedTuple):
    """A node that answers when the test says so, and a real proxy with a directory."""

    node: FakeNode
    proxy: Process
    client: openai.OpenAI
    storage: Path

    def connect(self) -> openai.OpenAI:
        """A client whose connections may break."""
        return openai.OpenAI(base_url=f"{self.proxy.url}/v1", api_key="none", max_retries=5)

    def list_contents(self) -> list[Path]:
        """The contents of files on the disk."""
        return list((self.storage / "files").iterdir())

    def read_written(self) -> set[str]:
        """The ids of the requests that have a whole line on the disk."""
        ids = set()
        for path in self.list_contents():
            lines = path.read_bytes().split(b"\n")[:-1]
            results = [json.loads(line) for line in lines]
            ids |= {result["custom_id"] for result in results if "response" in result}
        return ids

    def count_sent(self) -> Counter[str]:
        """How often each request has come, by its id."""
        return Counter(str(read_number(generate)) for generate in list(self.node.generates))


@pytest.fixture
def start_host(model_dir: str, tmp_path: Path) -> Iterator[Callable[..., Host]]:
    with ExitStack() as stack:

        def begin(*flags: str) -> Host:
            node = FakeNode("unified", echo, auto=False)
            stack.callback(node.kill)
            storage = tmp_path / "storage"
            command = ["proxy", "--unified", node.url, "--port", str(free_port())]
            command += ["--tokenizer", model_dir, "--storage-dir", str(storage), *flags]
            proxy = Process(*command, log=tmp_path / "proxy.log")
            stack.callback(proxy.stop)
            client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0)
            return Host(node, proxy, stack.enter_context(client), storage)

        yield begin


def find_runner(parent: int, storage: Path) -> int | None:
    """The child of a proxy that runs its batches, which has the lock open."""
    lock = str(storage / "batches.lock")
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        opened = (os.readlink(entry.path) for entry in os.scandir(f"/proc/{child}/fd"))
        if lock in opened:
            return int(child)
    return None


def check_results(host: Host, file_id: str | None, count: int) -> None:
    results = read_results(host.client, file_id)
    assert set(results) == set(map(str, range(count)))
    assert all(line["response"]["status_code"] == 200 for line in results.values())


def test_a_killed_proxy_repeats_only_requests_without_a_result(
    start_host: Callable[..., Host],
) -> None:
    host = start_host("--batch-concurrency", "3")
    batch = start(host.client, make_lines(20), metadata={"a": "b"})
    reply_to(host.node, 0, 7)
    wait_completed(host.client, batch, 7)
    host.node.wait_generate(10)
    host.proxy.kill()
    (results,) = (path for path in host.list_contents() if b"batch_req_" in path.read_bytes())
    with results.open("ab") as file:
        file.write(
            b'{"id":"batch_req_0","custom_id":"7","resp'
        )  # a crash of the host may cut a line
    host.node.auto = True
    host.proxy.restart()
    batch = wait_ended(host.client, batch)
    assert batch.status == "completed" and batch.metadata == {"a": "b"}
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    check_results(host, batch.output_file_id, 20)
    sent = host.count_sent()
    assert sorted(sent.values()) == [1] * 17 + [2] * 3, "three were under way"


def test_a_draining_proxy_writes_answers_under_way_and_sends_no_others(
    start_host: Callable[..., Host],
) -> None:
    host = start_host("--batch-concurrency", "3")
    batch = start(host.client, make_lines(9))
    host.node.wait_generate(3)
    host.proxy.child.send_signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(f"{host.proxy.url}/readiness").status_code == 503)
    reply_to(host.node, 0, 3)
    assert host.proxy.child.wait(20) == 0
    assert len(host.node.generates) == 3 and len(host.read_written()) == 3
    host.node.auto = True
    host.proxy.restart()
    batch = wait_ended(host.client, batch)
    check_results(host, batch.output_file_id, 9)
    assert set(host.count_sent().values()) == {1}


@pytest.mark.parametrize("workers", ["2", pytest.param("4", marks=pytest.mark.full)])
def test_processes_share_batches_and_take_over_those_of_a_killed_one(
    start_host: Callable[..., Host], workers: str
) -> None:
    host = start_host("--workers", workers, "--batch-concurrency", "3")
    host.node.auto = True
    for _ in range(4):
        # Each client has connections of its own, so different processes answer.
        with host.connect() as client:
            batch = start(client, make_lines(1))
        with host.connect() as client:
            batch = wait_ended(client, batch)
        with host.connect() as client:
            assert set(read_results(client, batch.output_file_id)) == {"0"}
            assert client.files.content(batch.input_file_id).text
    host.node.auto = False
    host.node.generates.clear()
    batches = [start(host.client, make_lines(10)) for _ in range(2)]
    reply_to(host.node, 0, 6)
    host.node.wait_generate(9)
    assert len(host.node.generates) == 9, "one process runs both"
    runner = find_runner(host.proxy.child.pid, host.storage)
    assert runner is not None
    os.kill(runner, signal.SIGKILL)
    host.node.auto = True
    with host.connect() as client:
        for batch in batches:
            ended = wait_ended(client, batch)
            assert ended.status == "completed"
            check_results(host, ended.output_file_id, 10)
    # Both batches have the same requests. Three of them were under way.
    assert sum(host.count_sent().values()) == 23
    assert find_runner(host.proxy.child.pid, host.storage) not in (None, runner)


@pytest.mark.full
@pytest.mark.parametrize("workers", ["1", "3"])
def test_a_proxy_killed_at_any_moment_loses_and_doubles_nothing(
    start_host: Callable[..., Host], workers: str, seed: int
) -> None:
    rng = random.Random(seed)
    host = start_host("--workers", workers, "--batch-concurrency", "4")
    host.node.auto = True
    lines = 3000
    batch = start(host.client, make_lines(lines))
    for _ in range(8):
        time.sleep(rng.uniform(0.0, 0.8))
        host.proxy.kill()
        # Children notice that their parent is gone.
        time.sleep(0.5)
        written, before = host.read_written(), host.count_sent()
        host.proxy.restart()
        status = host.client.batches.retrieve(batch.id).status
        if status == "completed":
            break
        after = host.count_sent()
        assert not [name for name in written if after[name] != before[name]]
    batch = wait_ended(host.client, batch, 120)
    check_results(host, batch.output_file_id, lines)
    assert sum(host.count_sent().values()) <= lines + 8 * 4
