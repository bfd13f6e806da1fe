"""One client's huge requests against everybody else: streams, health checks and nodes' leases.

Nodes hear a proxy twice a second, and give it up after a lease of silence; so no attack may keep
them waiting for as long as that. Heartbeats go on while the proxy's event loop stands still, so the
loop itself is watched as well, by a measure that hardly depends on other work of the machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pd.core.messages import LEASE_SECONDS, Finish
from pd.proxy.workers.loop import SWITCH_SECONDS
from pd.util.starvation import RUN_DELAY, read_run_delays

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))

from proxy_cluster import Cluster, read_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fake_node import FakeNode

    from pd.proxy.server import ProxyThread

MODEL = str(Path(__file__).parents[2] / "pd" / "assets" / "embedded")
NODE = {
    "context_length": 131_072,
    "vocab_size": 1024,
    "page_size": 16,
    "pages": {"total": 100_000, "free": 100_000},
}
TOKEN_SECONDS = 0.02
# How often the event loop is looked at, and for how long it may stand still.
TURN_SECONDS = 0.01
STANDSTILL_SECONDS = 0.3

Bodies = tuple[str, list[bytes]]


def repeated(path: str, field: str, item: str, size: int, count: int = 1) -> Bodies:
    """``count`` bodies of about ``size`` bytes with a list of the same items."""
    members = ",".join([item] * (size // (len(item) + 1)))
    return path, [b"{%s:[%s]}" % (json.dumps(field).encode(), members.encode())] * count


def prompts() -> Bodies:
    body = {"prompt": ["1234567890" * 390] * 2100, "max_tokens": 1}
    return "/v1/completions", [json.dumps(body).encode()]


def chats() -> Bodies:
    message = {"role": "user", "content": "hello " * 1_300_000}
    return "/v1/chat/completions", [json.dumps({"messages": [message]}).encode()] * 10


def text() -> Bodies:
    return "/tokenize", [json.dumps({"prompt": "1234567890" * 100_000}).encode()] * 4


def scored_prompts() -> Bodies:
    body = {"prompt": [5] * 60_000, "max_tokens": 1, "echo": True, "logprobs": 5}
    streamed = body | {"stream": True}
    return "/v1/completions", [json.dumps(b).encode() for b in (body, streamed)]


def keys() -> Bodies:
    return "/generate", [b"{%s}" % ",".join(f'"{i}":1' for i in range(700_000)).encode()]


MESSAGE = '{"role":"user","content":"a b c"}'
ATTACKS: dict[str, Callable[[], Bodies]] = {
    "prompts": prompts,
    "ids to detokenize": lambda: repeated("/detokenize", "tokens", "123", 8 << 20, 12),
    "lists": lambda: repeated("/generate", "input_ids", "[1]", 8 << 20),
    "messages": lambda: repeated("/v1/chat/completions", "messages", MESSAGE, 8 << 20),
}
SLOW_ATTACKS: dict[str, Callable[[], Bodies]] = {
    "chats": chats,
    "messages that are taken": lambda: repeated(
        "/v1/chat/completions", "messages", MESSAGE, 16_000 * (len(MESSAGE) + 1), 10
    ),
    "text to tokenize": text,
    "ids to detokenize that are taken": lambda: repeated(
        "/detokenize", "tokens", "123", 4 << 20, 12
    ),
    "ids": lambda: repeated("/generate", "input_ids", "123", 4 << 20),
    "objects": lambda: repeated("/generate", "input_ids", "{}", 8 << 20),
    "strings": lambda: repeated("/generate", "text", '"a"', 8 << 20),
    "keys": keys,
    "scored prompts": scored_prompts,
}


class Stream:
    """A stream of one choice, whose tokens come one by one while something else goes on."""

    def __init__(self, proxy: ProxyThread, prefill: FakeNode, decode: FakeNode) -> None:
        self._proxy = proxy
        self._ended = threading.Event()
        self.sent = 0
        self._reader = ThreadPoolExecutor(1).submit(self._read)
        request = prefill.wait_generate()
        decode.wait_generate()
        self._writer = threading.Thread(
            target=self._write, args=(request, prefill, decode), daemon=True
        )
        self._writer.start()

    def _read(self) -> list[Any]:
        body = {
            "input_ids": [5, 6],
            "stream": True,
            "incremental": True,
            "sampling_params": {"max_new_tokens": 100_000},
        }
        url = self._proxy.url + "/generate"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            assert response.status_code == 200, response.read()
            return read_events(response)

    def _write(self, request: Any, prefill: FakeNode, decode: FakeNode) -> None:
        prefill.say(request, [7], position=0)
        self.sent = 1
        while not self._ended.wait(TOKEN_SECONDS):
            decode.say(request, [7 + self.sent % 500], position=self.sent)
            self.sent += 1
        decode.say(request, [7], position=self.sent, finish=Finish("length"))
        self.sent += 1

    def end(self) -> list[int]:
        """The tokens that the client has received."""
        self._ended.set()
        self._writer.join()
        *events, last = self._reader.result()
        assert last == "DONE"
        return [token for event in events for token in event["output_ids"]]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_SECONDS)  # as in a process of a proxy
        yield Cluster(stack, MODEL)


class LoopWatch:
    """Measures, on a proxy's event loop, how long the loop does not turn at a time.

    Attributes:
        computed: longest time, in seconds, that the loop's thread computed between two turns.
        stood: longest time between two turns, less what the most delayed thread waited for a CPU:
            clients, proxy and nodes are one process here, in which any thread may hold the
            interpreter's lock.
    """

    def __init__(self, proxy: ProxyThread) -> None:
        self.computed = self.stood = 0.0
        self._proxy = proxy
        self._ended = threading.Event()

    def __enter__(self) -> LoopWatch:
        self._pool = ThreadPoolExecutor(1)
        self._watching = self._pool.submit(self._proxy.run, self._watch())
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watching.result()
        self._pool.shutdown()

    async def _watch(self) -> None:
        delays = read_run_delays() or {}
        while not self._ended.is_set():
            before, computed, last = time.monotonic(), time.thread_time(), delays
            await asyncio.sleep(TURN_SECONDS)
            took, computed = time.monotonic() - before, time.thread_time() - computed
            delays = read_run_delays() or {}
            delayed = max((d - last.get(thread, 0.0) for thread, d in delays.items()), default=0.0)
            self.computed = max(self.computed, computed)
            self.stood = max(self.stood, took - delayed)


def send_all(url: str, bodies: list[bytes]) -> list[httpx.Response]:
    """All at once."""

    def send(body: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return httpx.post(url, content=body, headers=headers, timeout=120)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(send, bodies))


def check_that_nobody_notices(
    cluster: Cluster, attack: Callable[[], Bodies], standstill: float = STANDSTILL_SECONDS
) -> None:
    path, bodies = attack()
    prefill, decode = cluster.pair(auto=False, **NODE)
    proxy = cluster.proxy()
    stream = Stream(proxy, prefill, decode)
    delay = RUN_DELAY.total
    for node in (prefill, decode):
        node.auto = True
        node.forget_silence()
    with LoopWatch(proxy) as loop:
        responses = send_all(proxy.url + path, bodies)
    assert max(loop.computed, loop.stood) < standstill
    for response in responses:
        assert response.status_code in (200, 400, 429), response.text
        assert ("retry-after" in response.headers) == (response.status_code == 429)
    assert httpx.get(proxy.url + "/readiness").status_code == 200
    tokens = stream.end()
    assert tokens == [7, *[7 + i % 500 for i in range(1, stream.sent - 1)], 7]
    for node in (prefill, decode):
        # Clients, proxy and nodes are one process here, and the proxy's thread may lack a CPU.
        assert node.longest_silence < LEASE_SECONDS + RUN_DELAY.total - delay
        assert not [abort for abort in node.aborts if abort.room == node.generates[0].room]


@pytest.mark.parametrize("attack", ATTACKS)
def test_huge_bodies_hold_up_nobody(cluster: Cluster, attack: str) -> None:
    check_that_nobody_notices(cluster, ATTACKS[attack])


@pytest.mark.full
@pytest.mark.parametrize("attack", SLOW_ATTACKS)
def test_more_huge_bodies_hold_up_nobody(cluster: Cluster, attack: str) -> None:
    # A node sends the log probabilities of a whole prompt in one message, which is decoded at once.
    standstill = 1.0 if attack == "scored prompts" else STANDSTILL_SECONDS
    check_that_nobody_notices(cluster, SLOW_ATTACKS[attack], standstill)


def test_the_event_loop_turns_while_huge_bodies_are_worked_on(cluster: Cluster) -> None:
    cluster.pair(**NODE)
    proxy = cluster.proxy()
    path, bodies = prompts()
    with LoopWatch(proxy) as loop:
        send_all(proxy.url + path, bodies * 2)
    assert max(loop.computed, loop.stood) < STANDSTILL_SECONDS
