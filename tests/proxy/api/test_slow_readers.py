"""Clients that read more slowly than the model writes, on every way that events are written."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fake_node import wait_until

from pd.core.messages import Finish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate
    from pd.proxy.server import ProxyThread

TOKENS = 900_000
A_MESSAGE = 500
COMPLETION = {"prompt": [5], "max_tokens": TOKENS, "stream": True}
GENERATE = {"input_ids": [5], "sampling_params": {"max_new_tokens": TOKENS}, "stream": True}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "a template for every event": ("/v1/completions", COMPLETION),
    "token ids": ("/v1/completions", COMPLETION | {"return_token_ids": True}),
    "SGLang's parts": ("/generate", GENERATE | {"incremental": True}),
    "two choices": ("/v1/completions", COMPLETION | {"n": 2}),
}


class Reader:
    """A streamed request whose answer waits in small buffers until it is read."""

    def __init__(self, cluster: Cluster, path: str, body: dict[str, Any]) -> None:
        huge = {"context_length": 1 << 20, "pages": {"total": 1 << 20}}
        self.node: FakeNode = cluster.node("unified", auto=False, **huge)
        self.proxy: ProxyThread = cluster.proxy()
        url = httpx.URL(self.proxy.url)
        self.connection = socket.socket()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.connection.connect((url.host, url.port))
        self.connection.settimeout(30)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        self.connection.sendall(head.encode() + content)
        self.request: Generate = self.node.wait_generate()
        self.choices = body.get("n", 1)
        self.sent = 0

    def say(self, *, last: bool = False) -> None:
        """The node says the next tokens of every choice."""
        for index in range(self.choices):
            finish = Finish("length") if last else None
            tokens = [40] * A_MESSAGE
            self.node.say(self.request, tokens, position=self.sent, index=index, finish=finish)
        self.sent += A_MESSAGE

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.proxy.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))

    def has_said_all(self) -> bool:
        """Whether the proxy has everything that the node said."""
        return self.metric("pd_proxy_output_tokens_total") >= self.sent * self.choices

    def read(self) -> bytes:
        """Everything until the connection ends, or the stream does."""
        # With a small buffer the kernel would send a few kilobytes at a time.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        found = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while data := self.connection.recv(1 << 16):
                found += data
                if b"[DONE]" in found[-100:]:
                    break
        return bytes(found)


@pytest.fixture
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a proxy is made: further processes of it know what is patched when they start."""
    monkeypatch.setattr("pd.proxy.dispatch.job.MAX_UNREAD_TOKENS", 1 << 40)
    monkeypatch.setattr("pd.proxy.dispatch.job.MAX_UNREAD_BYTES", 1 << 40)


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is cut off that is behind by more than a few messages."""
    monkeypatch.setattr("pd.proxy.dispatch.job.MAX_UNREAD_TOKENS", 5 * A_MESSAGE)


@pytest.fixture
def reader(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Reader]:
    made = Reader(cluster, *WAYS[request.param])
    yield made
    made.connection.close()


def ways(*sharp: str) -> pytest.MarkDecorator:
    """Every way that events are written, the others in ``make test-all``."""
    others = [pytest.param(way, marks=pytest.mark.full) for way in WAYS if way not in sharp]
    return pytest.mark.parametrize("reader", [*sharp, *others], indirect=True)


@pytest.mark.usefixtures("few_tokens")
@ways("a template for every event", "SGLang's parts")
def test_who_reads_nothing_is_cut_off(reader: Reader) -> None:
    stop = threading.Event()

    def flood() -> None:
        while reader.sent < TOKENS - A_MESSAGE and not stop.wait(0.001):
            reader.say()

    thread = threading.Thread(target=flood)
    thread.start()
    reader.node.wait_abort(reader.request.room)
    stop.set()
    thread.join()
    wait_until(lambda: reader.metric("pd_proxy_running_requests") == 0)
    assert reader.metric('pd_proxy_aborts_total{reason="slow_reader"}') == 1
    # What was under way may still be read, but it does not end as if it were complete.
    assert b"[DONE]" not in reader.read()


@pytest.mark.usefixtures("no_limits")
@ways("token ids")
def test_who_reads_late_gets_everything_in_fewer_events(reader: Reader) -> None:
    messages = 400
    tokens = messages * A_MESSAGE * reader.choices
    for number in range(messages):
        reader.say(last=number == messages - 1)
        if number % 100 == 99:
            # Sockets hold so many messages, and the proxy all tokens before the client reads.
            wait_until(reader.has_said_all, 30.0)
    lines = [line for line in reader.read().splitlines() if line.startswith(b"data: {")]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    text = "".join(e["choices"][0]["text"] if "choices" in e else e["text"] for e in events)
    assert len(text) == tokens
    assert len(events) < messages * reader.choices / 2
