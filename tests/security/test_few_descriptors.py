"""Processes that may open few files say so when they start, and strangers do not take what the
others need."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import edge_helpers  # noqa: F401  # finds the proxy's helpers
import httpx
import pytest
from fake_node import FakeNode, wait_until
from processes import LAUNCH, Process

from pd.core.errors import SetupError
from pd.embedded import EMBEDDED_MODEL
from pd.net.connection_limits import ConnectionLimits
from pd.util import descriptors
from pd.util.descriptors import count_spare_files, file_limit, limit_strangers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HALF_A_HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"
NODE = ("unified", "--model", str(EMBEDDED_MODEL), "--port", "0", "--device", "cpu")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, directory: Path, limit: int, *command: str) -> Process:
    """A process that may have so many files open."""
    prefix = ("prlimit", f"--nofile={limit}:{limit}")
    log = directory / f"{command[0]}.log"
    process = Process(*command, log=log, prefix=prefix, program=LAUNCH)
    stack.callback(process.stop)
    return process


def proxy_of(*nodes: FakeNode) -> list[str]:
    return ["proxy", "--port", "0", *(f"--unified={node.url}" for node in nodes)]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["proxy", "--unified", "http://127.0.0.1:1", "--port", "0"], id="proxy"),
        pytest.param(NODE, id="node"),
        pytest.param([*proxy_of(), "--workers", "2"], id="processes", marks=pytest.mark.full),
        pytest.param(["prefill", *NODE[1:]], id="prefill", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("limit", [64, pytest.param(100, marks=pytest.mark.full)])
def test_a_process_that_may_open_too_few_files_says_so(
    stack: ExitStack, tmp_path: Path, command: list[str], limit: int
) -> None:
    process = start(stack, tmp_path, limit, *command)
    assert process.child.wait(60) == 1
    (line,) = (tmp_path / f"{command[0]}.log").read_text().splitlines()
    assert f"open files: {limit} (limit of 'ulimit -n'); a " in line
    assert "needs at least" in line
    assert "raise the limit, with 'ulimit -n 4096' as root or LimitNOFILE=4096 in systemd" in line


def test_a_proxy_keeps_descriptors_for_its_nodes(stack: ExitStack, tmp_path: Path) -> None:
    """While clients take all that they get, a node fails and returns, others join, and requests
    are answered."""
    nodes = [FakeNode("unified") for _ in range(3)]
    for node in nodes:
        stack.callback(node.kill)
    proxy = start(stack, tmp_path, 200, *proxy_of(nodes[0]))
    address = httpx.URL(proxy.url)

    def open_half() -> None:
        sock = stack.enter_context(socket.create_connection((address.host, address.port), 10))
        sock.sendall(HALF_A_HEAD)

    def generate() -> int:
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
        return httpx.post(f"{proxy.url}/generate", json=body, timeout=20).status_code

    def is_ready(node: FakeNode) -> bool:
        workers = httpx.get(f"{proxy.url}/workers").json()["workers"]
        return any(worker["url"] == node.url and worker["ready"] for worker in workers)

    wait_until(lambda: is_ready(nodes[0]), 20)
    for _ in range(300):
        open_half()
    assert generate() == 200
    for node in nodes[1:]:
        added = httpx.post(f"{proxy.url}/workers", json={"role": "unified", "url": node.url})
        assert added.status_code == 200
        wait_until(lambda node=node: is_ready(node), 20)  # type: ignore[misc]
    nodes[0].kill()
    for _ in range(300):
        open_half()
    for _ in range(4):
        assert generate() == 200
    # Beyond its room it refuses nodes, and says why.
    answers = [
        httpx.post(f"{proxy.url}/workers", json={"role": "unified", "url": f"http://127.0.0.1:{n}"})
        for n in range(1, 20)
    ]
    assert answers[-1].status_code == 400
    assert "may not open enough files for another (limit of 'ulimit -n': 200)" in answers[-1].text
    assert generate() == 200
    assert proxy.child.poll() is None


@pytest.mark.full
def test_a_node_keeps_descriptors_for_its_peers(stack: ExitStack, tmp_path: Path) -> None:
    """While strangers connect to its ports."""
    node = start(stack, tmp_path, 256, *NODE)
    url = httpx.URL(node.url)
    message_port = httpx.URL(httpx.get(f"{url}/server_info").json()["endpoints"]["zmq"]).port
    for port in (url.port, message_port):
        for _ in range(300):
            address = ("127.0.0.1", int(port or 0))
            stack.enter_context(socket.create_connection(address, 10)).sendall(b"GET ")
    proxy = Process("proxy", "--port", "0", "--unified", node.url, log=tmp_path / "proxy.log")
    stack.callback(proxy.stop)
    body = {"prompt": "1 + 1", "max_tokens": 2}

    def is_served() -> bool:
        return httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=60).is_success

    wait_until(is_served, 60)
    assert httpx.get(f"{url}/health").status_code == 200
    assert node.child.poll() is None


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the limit that functions see, with 20 open files."""

    def change(soft: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, soft))
        monkeypatch.setattr(descriptors, "count_files", lambda: 20)

    return change


def test_what_is_left_grows_with_the_limit_and_shrinks_with_peers(limit: Any) -> None:
    limit(1024)
    assert (
        count_spare_files("a test", 0) - count_spare_files("a test", 3)
        == 3 * descriptors.FILES_PER_PEER
    )
    assert count_spare_files("a test", 0) == 1024 - 20 - descriptors.OWN_FILES
    limit(2048)
    assert count_spare_files("a test", 0) == 2048 - 20 - descriptors.OWN_FILES
    limit(resource.RLIM_INFINITY)
    assert count_spare_files("a test", 100) > 1 << 40
    with pytest.raises(SetupError, match="raise the limit, with 'ulimit -n 8192' as root"):
        limit(4100)
        count_spare_files("a test", 500)


def test_strangers_of_all_ports_leave_room_for_what_a_node_needs(limit: Any) -> None:
    """Two HTTP ports, and half-open connections to the ports of messages, data and events."""
    for soft in (300, 1024, 4096, 1 << 20):
        limit(soft)
        strangers = 2 * limit_strangers(1024, 8) + 6 * limit_strangers(256, 16)
        needed = descriptors.OWN_FILES + descriptors.NODE_PEERS * descriptors.FILES_PER_PEER
        assert strangers + needed <= file_limit()
    assert limit_strangers(1024, 8) == 1024
    assert limit_strangers(256, 16) == 256


@pytest.mark.parametrize("files", [1, 4, 32, 100, 1 << 20])
def test_connections_fit_into_the_files_that_are_left(files: int) -> None:
    limits = ConnectionLimits().fit_files(files)
    assert 1 <= limits.connections <= 8192
    assert limits.connections + limits.reserved <= max(files, 1)
