"""Two hosts, and a link between them that is cut in the middle of a transfer and comes back later.

Prefill runs in one network namespace and decode in the other, as real processes. The proxy reaches
both all the time: only what passes from host to host is lost, in silence.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import netns
import pytest
from backends import ACROSS_HOSTS, MOONCAKE, NIXL, NIXL_TCP, STAGED, TCP, Backend, over
from checkpoints import make_checkpoint, reference_generate
from processes import (
    ERROR_WITHIN,
    Process,
    Stream,
    free_port,
    is_idle,
    wait_ready,
    wait_until,
)
from security.listening import listening

from pd.core.messages import LEASE_SECONDS
from pd.util.starvation import CEILING_SECONDS, RUN_DELAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

# KV of 16 KiB per token, so that a long prompt occupies a slow link for seconds.
SHAPE = {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 128}
CONTEXT = 8192
TOKEN_BYTES = 4 * 2 * 4 * 128 * 4
LONG_PROMPT = 1600
MEGABITS = 40
# Small, so that pages that were given up are soon somebody else's.
POOL_TOKENS = 8192
OUTAGE = 20.0
# What the kernel and UCX still resend comes within this time of the link's return.
AFTERMATH = 12.0
# An abort reaches both nodes in under a second; the rest is for asking them on a busy machine.
ABORT_WITHIN = 2.0
SHORT_OUTPUT = 6
# Between requests of the traffic, for two cores to do the rest.
PAUSE = 1.0
LONG_OUTPUT = 2000


def prompts(seed: int, count: int, length: int) -> list[list[int]]:
    """Without a common prefix, so that all of it travels."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for _ in range(count)]


class Hosts:
    """Prefill on one host, decode on the other; a second prefill node stands beside decode.

    The proxy ``far`` uses the pair that the link joins, the proxy ``near`` the other. Both pairs
    share the decode node.
    """

    def __init__(
        self,
        net: netns.Network,
        model: Path,
        logs: Path,
        backend: Backend,
        flags: Sequence[str] = (),
    ) -> None:
        self.net, self._logs, self._env = net, logs, backend.env
        self._processes: list[Process] = []
        key = logs / "cluster.key"
        key.write_text(secrets.token_hex(32))
        self._secured = ["--cluster-key-file", str(key)]
        self._common = ["--model", str(model), "--kv-cache-tokens", str(POOL_TOKENS)]
        self._common += ["--cpu-threads", "1", "--chunked-prefill-size", "256", *self._secured]
        self._common += ["--transfer-backend", backend.flag, *flags]

    def start(self) -> None:
        """Until both proxies can serve."""
        # Fixed ports, which nobody else has there: a node that comes back is found again. Ports
        # where nodes introduce themselves are free ones, others after each start.
        self.prefill = self._node("prefill", self.net.a, 30000, "prefill")
        self.decode = self._node("decode", self.net.b, 30100, "decode")
        self.beside = self._node("beside", self.net.b, 30000, "prefill")
        self.nodes = [self.prefill, self.decode, self.beside]
        self.places = [self.net.a, self.net.b, self.net.b]
        self.far, self.near = self._proxy("far", self.prefill), self._proxy("near", self.beside)
        self.wait_ready()

    def wait_ready(self) -> None:
        wait_ready(self.far, [self.prefill, self.decode])
        wait_ready(self.near, [self.beside, self.decode])

    def _node(self, name: str, host: netns.Host, port: int, *command: str) -> Process:
        place = ["--host", "0.0.0.0", "--advertise-host", host.address, "--port", str(port)]
        return self._process(name, host.prefix, *command, *place, *self._common)

    def _proxy(self, name: str, prefill: Process) -> Process:
        workers = ["--prefill", prefill.url, "--decode", self.decode.url]
        port = ["--port", str(free_port())]
        failover = ["--failover", "off"]
        return self._process(name, (), "proxy", *port, *workers, *failover, *self._secured)

    def proxy_of_all(self) -> Process:
        """A proxy with failover whose first request goes over the link."""
        workers = ["--prefill", self.prefill.url, "--prefill", self.beside.url]
        workers += ["--decode", self.decode.url, "--policy", "round_robin"]
        port = ["--port", str(free_port())]
        proxy = self._process("all", (), "proxy", *port, *workers, *self._secured)
        wait_ready(proxy, self.nodes)
        return proxy

    def _process(self, name: str, prefix: Sequence[str], *command: str) -> Process:
        log = self._logs / f"{name}.log"
        process = Process(*command, log=log, prefix=prefix, env=self._env)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End everything and show the logs, which pytest prints if the test failed."""
        for process in self._processes:
            if process.child.poll() is None:
                process.child.terminate()
        for process in self._processes:
            process.stop()
            print(f"--- {process.log.name}\n{process.log.read_text()[-3000:]}")

    def instances(self) -> list[Any]:
        return [node.server_info()["instance_id"] for node in self.nodes]

    def idle(self) -> bool:
        return all(is_idle(node.server_info()) for node in self.nodes)

    def run_delay(self) -> float:
        """Seconds for which prefill, decode and this process were ready to run and got no CPU."""
        pages = [
            httpx.get(f"{n.url}/metrics", timeout=30).text for n in (self.prefill, self.decode)
        ]
        found = [re.search(r"^pd_run_delay_seconds_total (\S+)", page, re.M) for page in pages]
        return RUN_DELAY.total + sum(float(match[1]) for match in found if match)

    def quarantined_buffers(self) -> list[int]:
        """Staging buffers of prefill and decode that a lost transfer may still touch."""
        infos = [node.server_info() for node in (self.prefill, self.decode)]
        return [info["staging"]["quarantined"] for info in infos]

    def describe(self) -> str:
        infos = [node.server_info() for node in self.nodes]
        return str([(i["role"], i["pages"], i["queues"], i["staging"]) for i in infos])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hosts") / "qwen3"
    return make_checkpoint("qwen3", directory, max_position_embeddings=CONTEXT, **SHAPE)


@pytest.fixture
def hosts(backend: Backend, model: Path, tmp_path: Path) -> Iterator[Hosts]:
    netns.require()
    with (
        netns.network() as net,
        contextlib.closing(Hosts(net, model, tmp_path, backend)) as running,
    ):
        running.start()
        yield running


class Traffic:
    """Requests one after the other whose tokens are compared with what they must be."""

    def __init__(self, url: str, asked: list[list[int]], expected: list[list[int]]) -> None:
        self._url, self._cases = url, list(zip(asked, expected, strict=True))
        self._stop = threading.Event()
        self.right = 0
        self.wrong: list[object] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for prompt, tokens in itertools.cycle(self._cases):
            if self._stop.is_set():
                return
            stream = Stream(self._url, prompt, len(tokens)).join(60)
            if stream.output == tokens and stream.done:
                self.right += 1
                time.sleep(PAUSE)
            else:
                self.wrong.append((stream, prompt[:4]))

    def stop(self) -> int:
        self._stop.set()
        self._thread.join(60)
        assert not self.wrong, self.wrong
        return self.right


def ask(proxy: Process, prompt: list[int], expected: list[int]) -> None:
    stream = Stream(proxy.url, prompt, len(expected)).join(60)
    assert stream.succeeded(), stream
    assert stream.output == expected


def assert_failed(stream: Stream, by: float, extension: Callable[[], float] = lambda: 0.0) -> None:
    """Before a time of ``time.monotonic``, with words that say what happened.

    ``extension`` returns the seconds by which starved nodes may take longer.
    """
    stream.join(60)
    assert stream.error is not None and not stream.done, stream
    assert stream.error["type"] == "node_failed_error", stream.error
    assert any(word in stream.error["message"] for word in ("node", "link", "reach")), stream.error
    assert stream.ended_at is not None
    late = stream.ended_at - by
    assert late < 0 or late < min(extension(), CEILING_SECONDS), f"{late:.1f} s too late"


def stopped_in_the_middle(
    hosts: Hosts,
    prompt: list[int],
    stop: Callable[[Stream], None],
    proxy: Process | None = None,
) -> tuple[Stream, float]:
    """Start a long transfer on the slow link and end it when a third has passed.

    Returns the request and when ``stop`` was done with it.
    """
    size = len(prompt) * TOKEN_BYTES
    before = hosts.net.bytes_sent()
    stream = Stream((proxy or hosts.far).url, prompt, SHORT_OUTPUT)
    wait_until(lambda: hosts.net.bytes_sent() - before > size / 3, 30)
    assert hosts.net.bytes_sent() - before < size * 0.8, "the transfer was nearly over"
    stop(stream)
    stopped_at = time.monotonic()
    assert len(stream.output) < SHORT_OUTPUT, "the transfer was over"
    return stream, stopped_at


@over(ACROSS_HOSTS, sample=[])
@pytest.mark.timeout(900)
def test_a_link_that_is_cut_during_a_transfer_and_comes_back(
    hosts: Hosts, backend: Backend, model: Path, seed: int
) -> None:
    long_prompts, short_prompts = prompts(seed, 4, LONG_PROMPT), prompts(seed + 1, 12, 500)
    expected = reference_generate(model, long_prompts, SHORT_OUTPUT)
    shorts = reference_generate(model, short_prompts, SHORT_OUTPUT)
    instances = hosts.instances()
    ask(hosts.far, long_prompts[0], expected[0])
    ask(hosts.near, short_prompts[0], shorts[0])
    (survivors_prompt,) = prompts(seed + 2, 1, 100)

    survivor = Stream(hosts.far.url, survivors_prompt, LONG_OUTPUT)
    survivor.wait_first()
    traffic = Traffic(hosts.near.url, short_prompts, shorts)
    wait_until(lambda: len(survivor.output) > 20, 30)
    hosts.net.slow(MEGABITS)
    delay = hosts.run_delay()
    stream, cut_at = stopped_in_the_middle(hosts, long_prompts[1], lambda _: hosts.net.cut())
    assert not survivor.done, "the other request was over"
    assert_failed(stream, cut_at + LEASE_SECONDS + 1.0, lambda: hosts.run_delay() - delay)

    # While the link is down: the pair refuses in time, the others go on, nobody is unhealthy.
    delay, by = hosts.run_delay(), time.monotonic() + LEASE_SECONDS + 1.0
    refused = Stream(hosts.far.url, long_prompts[2], SHORT_OUTPUT)
    assert_failed(refused, by, lambda: hosts.run_delay() - delay)
    again = Stream(hosts.near.url, survivors_prompt, LONG_OUTPUT // 8)
    # A machine that does much else is slow.
    assert survivor.join(600).succeeded(), survivor
    assert again.join().succeeded(), again
    assert survivor.output[: len(again.output)] == again.output
    assert all(node.healthy() for node in hosts.nodes)
    time.sleep(max(0.0, cut_at + OUTAGE - time.monotonic()))
    done_before = traffic.right
    assert done_before > 2 and not traffic.wrong, (done_before, traffic.wrong)
    if backend in STAGED:
        assert any(hosts.quarantined_buffers()), "nobody knows yet that the writes are over"

    # The link returns, and with it whatever was under way: nobody's pages may take it.
    hosts.net.restore()
    hosts.net.fast()
    restored_at = time.monotonic()
    ask(hosts.far, long_prompts[2], expected[2])
    while time.monotonic() < restored_at + AFTERMATH:
        ask(hosts.far, long_prompts[3], expected[3])
        ask(hosts.far, long_prompts[1], expected[1])
        time.sleep(PAUSE)
    assert traffic.stop() > done_before
    wait_until(hosts.idle, 60, hosts.describe)
    assert hosts.instances() == instances, "a node was restarted"
    assert all(node.child.poll() is None for node in hosts.nodes)


@pytest.mark.full
@over(ACROSS_HOSTS)
@pytest.mark.timeout(280)
def test_a_stream_goes_on_when_the_link_of_its_pair_is_cut(
    hosts: Hosts, backend: Backend, model: Path, seed: int
) -> None:
    """With failover, by the prefill node beside the decode node."""
    (prompt,) = prompts(seed, 1, LONG_PROMPT)
    (expected,) = reference_generate(model, [prompt], SHORT_OUTPUT)
    proxy = hosts.proxy_of_all()
    hosts.net.slow(MEGABITS)
    stream, cut_at = stopped_in_the_middle(hosts, prompt, lambda _: hosts.net.cut(), proxy)
    assert stream.join().succeeded() and stream.output == expected, stream
    assert stream.ended_at is not None
    print(f"{backend}: the answer ended {stream.ended_at - cut_at:.2f} s after the cut")
    hosts.net.restore()
    hosts.net.fast()
    wait_until(hosts.idle, 60, hosts.describe)


@pytest.mark.full
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.timeout(280)
def test_auto_opens_ports_of_a_library_only_where_the_network_is_trusted(
    model: Path, tmp_path: Path, seed: int, trusted: bool
) -> None:
    """Between hosts by tcp, unless told that nobody else is there; then UCX listens where the nodes
    are advertised and nowhere else. Within one host nixl needs no port."""
    NIXL.require()
    netns.require()
    flags = ["--trust-network"] if trusted else []
    asked = prompts(seed, 2, 100)
    expected = reference_generate(model, asked, SHORT_OUTPUT)
    auto = Backend("auto", "auto")
    with (
        netns.network() as net,
        contextlib.closing(Hosts(net, model, tmp_path, auto, flags)) as hosts,
    ):
        hosts.start()
        ask(hosts.far, asked[0], expected[0])
        ask(hosts.near, asked[1], expected[1])
        prefill, decode, beside = (node.server_info() for node in hosts.nodes)
        used = {peer["instance_id"]: peer["transfer_backend"] for peer in decode["peers"]}
        assert used == {
            prefill["instance_id"]: "nixl" if trusted else "tcp",
            beside["instance_id"]: "nixl",
        }
        for node, host in zip(hosts.nodes, hosts.places, strict=True):
            assert node.server_info()["trust_network"] is trusted
            own = {"0.0.0.0", "::"}
            elsewhere = {address for address, _ in listening(node.child.pid)} - own
            assert elsewhere == ({host.address} if trusted else set())


@pytest.mark.full
@pytest.mark.parametrize(
    ("victim", "backend"),
    [
        # Both over tcp; a library's process has little of its own to lose on either side.
        ("prefill", TCP),
        ("decode", TCP),
        ("decode", NIXL_TCP),
        ("prefill", MOONCAKE),
    ],
    ids=str,
    indirect=["backend"],
)
@pytest.mark.timeout(280)
def test_a_node_is_killed_while_the_link_is_cut(
    hosts: Hosts, model: Path, seed: int, victim: str
) -> None:
    """What its kernel still holds is sent when the link returns, and must hit nobody."""
    asked, short_prompts = prompts(seed, 4, LONG_PROMPT), prompts(seed + 1, 12, 500)
    expected = reference_generate(model, asked, SHORT_OUTPUT)
    shorts = reference_generate(model, short_prompts, SHORT_OUTPUT)
    ask(hosts.far, asked[0], expected[0])
    ask(hosts.near, short_prompts[0], shorts[0])
    process: Process = getattr(hosts, victim)

    def cut_and_kill(_: Stream) -> None:
        hosts.net.cut()
        process.kill()

    hosts.net.slow(MEGABITS)
    stream, killed_at = stopped_in_the_middle(hosts, asked[1], cut_and_kill)
    assert_failed(stream, killed_at + ERROR_WITHIN)
    process.restart()
    hosts.wait_ready()
    traffic = Traffic(hosts.near.url, short_prompts, shorts)
    time.sleep(max(0.0, killed_at + OUTAGE / 2 - time.monotonic()))
    hosts.net.restore()
    hosts.net.fast()
    until = time.monotonic() + AFTERMATH
    for number in itertools.cycle(range(4)):
        ask(hosts.far, asked[number], expected[number])
        if time.monotonic() > until:
            break
        time.sleep(PAUSE)
    assert traffic.stop() > 2
    wait_until(hosts.idle, 60, hosts.describe)


def is_over(node: Process) -> bool:
    """Nobody waits for a transfer any more; its pages may still be in quarantine."""
    queues = node.server_info()["queues"]
    return not queues.get("transfer") and not queues.get("in_flight")


@over(ACROSS_HOSTS, sample=[])
@pytest.mark.timeout(280)
def test_a_client_gone_and_nodes_killed_during_a_transfer(
    hosts: Hosts, model: Path, seed: int
) -> None:
    asked = prompts(seed, 5, LONG_PROMPT)
    expected = reference_generate(model, asked, SHORT_OUTPUT)
    short_prompts = prompts(seed + 1, 40, 500)
    shorts = reference_generate(model, short_prompts, SHORT_OUTPUT)
    ask(hosts.far, asked[0], expected[0])
    hosts.net.slow(MEGABITS)

    # Pages that were given up are soon the traffic's.
    traffic = Traffic(hosts.near.url, short_prompts, shorts)
    stopped_in_the_middle(hosts, asked[1], lambda stream: abort(hosts.far, stream))
    for node in (hosts.prefill, hosts.decode):
        wait_until(lambda n=node: is_over(n), ABORT_WITHIN, hosts.describe)
    ask(hosts.far, asked[2], expected[2])

    stream, killed_at = stopped_in_the_middle(hosts, asked[3], lambda _: hosts.prefill.kill())
    assert_failed(stream, killed_at + ERROR_WITHIN)
    assert hosts.decode.healthy() and hosts.beside.healthy()
    hosts.prefill.restart()
    hosts.wait_ready()
    ask(hosts.far, asked[3], expected[3])
    assert traffic.stop() > 2

    stream, killed_at = stopped_in_the_middle(hosts, asked[4], lambda _: hosts.decode.kill())
    assert_failed(stream, killed_at + ERROR_WITHIN)
    assert hosts.prefill.healthy() and hosts.beside.healthy()
    hosts.decode.restart()
    hosts.wait_ready()
    hosts.net.fast()
    for number in range(5):
        ask(hosts.far, asked[number], expected[number])
    wait_until(hosts.idle, 30, hosts.describe)


def abort(proxy: Process, stream: Stream) -> None:
    """As a client does that goes away, and says so."""
    answer = httpx.post(f"{proxy.url}/abort_request", json={"abort_all": True}, timeout=10)
    assert answer.json() == {"aborted": 1}, answer.text
    stream.hang_up()
