"""Without failover, whichever process dies, the requests concerned end with an error within 5 s,
others go on, survivors stay healthy, the restarted process is used again, and no page is lost. Real
processes throughout.

Partitions, which need two hosts, are in ``test_hosts.py``.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import backends
import held_transfers
import httpx
import pytest
from backends import PROCESSES, TCP
from processes import ERROR_WITHIN, Deployment, Stream, deployment, wait_ready, wait_until

from pd.core.messages import LEASE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from backends import Backend
    from processes import Process

NO_FAILOVER = ["--failover", "off"]
LONG = 1200
# For requests that have to finish; still far longer than a node needs to be killed meanwhile.
WHOLE = 400
HEAD = "Host: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module", params=backends.params(PROCESSES, [TCP]))
def pair_of_decoders(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Deployment]:
    """One prefill node, whose transfers stop where ``held_transfers`` says, and two decode nodes;
    every test leaves it as it found it."""
    backend: Backend = request.param
    backend.require()
    with deployment(
        model,
        tmp_path_factory.mktemp("faults"),
        decode=2,
        node_flags=["--transfer-backend", backend.flag, "--chunked-prefill-size", "128"],
        prefill_program=[held_transfers.__file__],
        proxy_flags=["--policy", "round_robin", *NO_FAILOVER],
        env=backend.env,
    ) as running:
        yield running


def prompt(number: int, length: int = 40) -> list[int]:
    return [(number * 31 + i * 7) % 256 for i in range(length)]


def assert_failed_in_time(stream: Stream, killed_at: float, within: float = ERROR_WITHIN) -> None:
    stream.join(30)
    assert stream.error is not None and not stream.done, stream
    assert stream.error["type"] == "node_failed_error", stream.error
    assert stream.ended_at is not None
    assert stream.ended_at - killed_at < within


def assert_works(running: Deployment) -> None:
    """A new request succeeds and nothing is left behind."""
    running.wait_ready()
    for number in range(2 * len(running.decode)):
        stream = running.stream(prompt(100 + number), 5).join(60)
        assert stream.succeeded(), (stream.status, stream.error, stream.output)
    running.wait_idle()


def in_sample(params: Mapping[str, object]) -> bool:
    """A few sharp cells of all backends, stages, victims and kinds of fault."""
    cell = (params["pair_of_decoders"], params["stage"], params["victim"], params["fault"])
    return cell in {
        (TCP, "during", "prefill", "killed"),
        (TCP, "during", "decode", "killed"),
    }


@pytest.mark.sample(cells=in_sample)
@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("stage", held_transfers.HELD)
def test_a_node_is_lost_during_a_hand_off(
    pair_of_decoders: Deployment, stage: str, victim: str, fault: str
) -> None:
    running, length = pair_of_decoders, held_transfers.HELD[stage]
    running.wait_ready()
    stream = running.stream(prompt(5, length), LONG)
    stream.wait_first()
    (receiver,) = wait_for_receivers(running)
    lost: Process = running.prefill[0] if victim == "prefill" else receiver
    others = [node for node in running.nodes if node is not lost]
    instance = lost.ready()["instance_id"]
    lost_at = time.monotonic()
    if fault == "killed":
        lost.kill()
    else:
        lost.child.send_signal(signal.SIGSTOP)
    try:
        # Nothing tells of a process that is stopped but the end of its lease.
        silence = LEASE_SECONDS if fault == "stopped" else 0.0
        assert_failed_in_time(stream, lost_at, silence + ERROR_WITHIN)
        assert all(node.healthy() for node in [*others, running.proxy])
        if victim == "decode":
            # The stream may have failed by what a peer noticed, before the proxy did.
            wait_ready(running.proxy, others)
            survivors = running.stream(prompt(6), 5).join(60)
            assert survivors.succeeded(), survivors
        if fault == "stopped":
            # A process that goes on before every lease has ended is lost once more.
            wait_until(lambda: not any(knows(node, instance) for node in others), 30)
            wait_ready(running.proxy, others)
    finally:
        if fault == "stopped":
            lost.child.send_signal(signal.SIGCONT)
        else:
            lost.restart()
    assert_works(running)


def knows(node: Process, instance: str) -> bool:
    """Whether a node believes that another process lives."""
    return any(peer["instance_id"] == instance for peer in node.server_info()["peers"])


def wait_for_receivers(running: Deployment) -> list[Process]:
    """Decode nodes with a room in transfer, once there is one and part of its KV has gone."""
    found: list[Process] = []

    def receiving() -> bool:
        infos = [(node, node.server_info()) for node in running.decode]
        found[:] = [node for node, info in infos if info["queues"]["transfer"]]
        return bool(found) and running.prefill[0].server_info()["queues"]["in_flight"] == 1

    wait_until(receiving, 10)
    return found


def test_prefill_killed_after_the_transfer(pair_of_decoders: Deployment) -> None:
    streams = [pair_of_decoders.stream(prompt(10 + i), WHOLE // 2) for i in range(4)]
    for stream in streams:
        wait_until(lambda s=stream: len(s.output) > 3, 30)
    pair_of_decoders.prefill[0].kill()
    for stream in streams:
        assert stream.join().succeeded(), (stream.error, len(stream.output))
    assert all(node.healthy() for node in pair_of_decoders.decode)
    pair_of_decoders.prefill[0].restart()
    assert_works(pair_of_decoders)


def test_decode_killed_while_streaming(pair_of_decoders: Deployment) -> None:
    streams = [pair_of_decoders.stream(prompt(20 + i), WHOLE) for i in range(4)]
    for stream in streams:
        wait_until(lambda s=stream: len(s.output) > 3, 30)
    victim = pair_of_decoders.decode[0]
    concerned = victim.server_info()["queues"]["running"]
    killed_at = time.monotonic()
    victim.kill()
    for stream in streams:
        stream.join()
    failed = [stream for stream in streams if not stream.succeeded()]
    assert 0 < len(failed) == concerned < len(streams)
    for stream in failed:
        assert_failed_in_time(stream, killed_at)
    assert pair_of_decoders.prefill[0].healthy() and pair_of_decoders.decode[1].healthy()
    victim.restart()
    assert_works(pair_of_decoders)


def test_proxy_killed_and_restarted(pair_of_decoders: Deployment) -> None:
    other = pair_of_decoders.another_proxy()
    try:
        wait_until(lambda: httpx.get(f"{other.url}/readiness").status_code == 200, 20)
        streams = [pair_of_decoders.stream(prompt(30 + i), LONG) for i in range(3)]
        untouched = Stream(other.url, prompt(35), WHOLE)
        for stream in [*streams, untouched]:
            stream.wait_first()
        pair_of_decoders.proxy.kill()
        for stream in streams:
            stream.join(10)
            assert stream.error is not None and not stream.done
        assert untouched.join().succeeded(), untouched.error
        assert all(node.healthy() for node in pair_of_decoders.nodes)
        pair_of_decoders.wait_idle()
        pair_of_decoders.proxy.restart()
        assert_works(pair_of_decoders)
    finally:
        other.stop()


def test_proxy_that_stood_still(pair_of_decoders: Deployment) -> None:
    """The nodes gave its requests up meanwhile, so its clients must hear that."""
    running = pair_of_decoders
    held = [prompt(40 + i, held_transfers.DURING_TOKENS) for i in range(3)]
    streams = [running.stream(tokens, LONG) for tokens in held]
    for stream in streams:
        stream.wait_first()
    running.proxy.child.send_signal(signal.SIGSTOP)
    time.sleep(LEASE_SECONDS + 1.5)
    running.proxy.child.send_signal(signal.SIGCONT)
    for stream in streams:
        stream.join(10)
        assert stream.error is not None and not stream.done
    running.wait_idle(30)
    assert_works(running)


@pytest.mark.parametrize("tokens_before", [0, 1, 30])
def test_client_gone(pair_of_decoders: Deployment, tokens_before: int) -> None:
    streams = [pair_of_decoders.stream(prompt(40 + i, 600), LONG) for i in range(3)]
    survivor = pair_of_decoders.stream(prompt(50), 100)
    for stream in streams:
        wait_until(lambda s=stream: len(s.output) >= tokens_before, 30)
        stream.hang_up()
    assert survivor.join().succeeded()
    pair_of_decoders.wait_idle(ERROR_WITHIN)


@pytest.mark.parametrize("stage", held_transfers.HELD)
def test_client_gone_while_the_hand_off_is_under_way(
    pair_of_decoders: Deployment, stage: str
) -> None:
    sock = raw_request(pair_of_decoders, prompt(60, held_transfers.HELD[stage]))
    prefill = pair_of_decoders.prefill[0]
    wait_until(lambda: prefill.server_info()["queues"]["in_flight"] == 1, 10)
    sock.close()
    pair_of_decoders.wait_idle(ERROR_WITHIN)
    assert_works(pair_of_decoders)


def raw_request(running: Deployment, tokens: list[int]) -> socket.socket:
    """A streamed request on a bare socket, whose answer nobody reads."""
    address = urlsplit(running.proxy.url)
    params = {"max_new_tokens": LONG, "ignore_eos": True}
    wordy = {"return_logprob": True, "top_logprobs_num": 20}
    request = {"stream": True, "input_ids": tokens, "sampling_params": params} | wordy
    body = json.dumps(request).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((address.hostname, address.port))
    head = f"POST /generate HTTP/1.1\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def test_client_that_stops_reading_is_aborted(pair_of_decoders: Deployment) -> None:
    sock = raw_request(pair_of_decoders, prompt(70))
    try:
        survivor = pair_of_decoders.stream(prompt(71), 100)
        assert survivor.join().succeeded()
        pair_of_decoders.wait_idle(60)
        assert pair_of_decoders.proxy.healthy()
    finally:
        sock.close()


def test_deadline_passed(pair_of_decoders: Deployment) -> None:
    begin = time.monotonic()
    stream = pair_of_decoders.stream(prompt(80), LONG, timeout=0.7).join()
    assert stream.error is not None and stream.error["type"] == "timeout_error", stream.error
    assert stream.ended_at is not None and stream.ended_at - begin < ERROR_WITHIN
    pair_of_decoders.wait_idle(ERROR_WITHIN)
    unread = {"input_ids": prompt(81), "timeout": 0.3, "sampling_params": {"max_new_tokens": LONG}}
    unread["sampling_params"]["ignore_eos"] = True  # type: ignore[index]
    response = httpx.post(f"{pair_of_decoders.proxy.url}/generate", json=unread, timeout=30)
    assert response.status_code == 408, response.text
    pair_of_decoders.wait_idle(ERROR_WITHIN)
