"""Bodies that are begun and not continued leave connections to other clients."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import edge_helpers  # noqa: F401  # finds the proxy's helpers
import httpx
import pytest
from fake_node import wait_until
from guarded_server import read_all
from proxy_cluster import Cluster

from pd.core.messages import Finish
from pd.net.connection_limits import ConnectionLimits
from pd.net.connections import OWNER_SHARE
from pd.proxy.http.api_keys import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fake_node import FakeNode

    from pd.proxy.server import ProxyThread

GREEDY, EAGER, MODEST = "greedy-key", "eager-keys", "modest-key"
KEYS = [ApiKey(key, "inference") for key in (GREEDY, EAGER, MODEST)]
CONNECTIONS = 40
BODY = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4}}


def head(key: str, length: str = "Content-Length: 1000", path: str = "/generate") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {key}"]
    return "\r\n".join([*lines, "Content-Type: application/json", length, "", ""]).encode()


# Some 130 bytes each. `make test` has the first.
HALVES = {
    "a length": head(GREEDY) + b"{",
    "chunks": head(GREEDY, "Transfer-Encoding: chunked") + b"2\r\n{ \r\n",
    "no byte": head(GREEDY),
    "expectation": head(GREEDY, "Content-Length: 1000\r\nExpect: 100-continue"),
    "tokens": head(GREEDY, path="/tokenize") + b"{",
}


HALF_BODIES = [
    pytest.param(half, id=name, marks=[] if name == "a length" else pytest.mark.full)
    for name, half in HALVES.items()
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, str(tmp_path))


@pytest.fixture
def node(cluster: Cluster) -> FakeNode:
    return cluster.node("unified")


@pytest.fixture
def serve(cluster: Cluster, node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a proxy with few connections and two keys."""

    def start(silent_seconds: float, **options: Any) -> ProxyThread:
        limits = ConnectionLimits(
            connections=CONNECTIONS, reserved=8, silent_seconds=silent_seconds
        )
        monkeypatch.setattr("pd.proxy.server.LIMITS", limits)
        options = {"api_keys": KEYS, "workers": 1} | options
        return cluster.proxy(text=False, **options)

    return start


class Attacker:
    """Opens connections that begin a request, over and over, until it is closed."""

    def __init__(self, proxy: ProxyThread, half: bytes, count: int) -> None:
        self._address = httpx.URL(proxy.url).host, httpx.URL(proxy.url).port
        self._half = half
        self.connections = [self.open() for _ in range(count)]

    def open(self) -> socket.socket:
        connection = socket.create_connection(self._address, 10)
        connection.sendall(self._half)
        return connection

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def ask(proxy: ProxyThread, key: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(proxy.url + "/generate", json=BODY, headers=headers, timeout=20)


def asking(proxy: ProxyThread) -> int:
    served: Any = proxy.proxy
    (listener,) = served._server.listeners
    return sum(map(len, listener._asking.values()))


@pytest.mark.one_process("reads the server's connections")
@pytest.mark.parametrize("half", HALF_BODIES)
@pytest.mark.parametrize("keys", [1, 2])
def test_another_key_is_served_while_one_holds_all_connections(
    serve: Any, half: bytes, keys: int
) -> None:
    """At once, before any body counts as silent, and while the attack goes on."""
    proxy = serve(silent_seconds=60)
    halves = [half, half.replace(GREEDY.encode(), EAGER.encode())][:keys]
    with ExitStack() as stack:
        attackers = [
            stack.enter_context(contextlib.closing(Attacker(proxy, half, CONNECTIONS)))
            for half in halves
        ]
        held = int(CONNECTIONS * OWNER_SHARE) if keys == 1 else CONNECTIONS
        wait_until(lambda: asking(proxy) >= held)
        for _ in range(CONNECTIONS):
            for attacker in attackers:
                attacker.connections.append(attacker.open())
            assert ask(proxy, MODEST).status_code == 200


@pytest.mark.one_process("reads the server's connections")
def test_a_key_is_served_after_its_own_bodies_fall_silent(serve: Any) -> None:
    proxy = serve(silent_seconds=0.2)
    half = HALVES["a length"]
    with contextlib.closing(Attacker(proxy, half, int(CONNECTIONS * OWNER_SHARE))):
        time.sleep(0.3)
        assert ask(proxy, GREEDY).status_code == 200


@pytest.mark.one_process("reads the server's connections")
def test_one_key_does_not_get_all_connections(serve: Any, node: FakeNode) -> None:
    """Whole requests close for nobody, so a key may have only its share of the connections."""
    node.auto = False
    proxy = serve(silent_seconds=60)
    share = int(CONNECTIONS * OWNER_SHARE)
    data = json.dumps(BODY).encode()
    whole = head(GREEDY, f"Content-Length: {len(data)}") + data
    with contextlib.closing(Attacker(proxy, whole, share)) as attacker:
        requests = [node.wait_generate(number + 1) for number in range(share)]
        with attacker.open() as refused:
            answer = read_all(refused)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"connection: close" in answer
        assert (
            b"requests of this API key: 31 (limit 30); wait for answers to earlier ones" in answer
        )
        node.auto = True
        assert ask(proxy, MODEST).status_code == 200
        for request in requests:
            node.say(request, [7], finish=Finish("length"))
        for connection in attacker.connections:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.one_process("reads the server's connections")
@pytest.mark.parametrize("half", HALF_BODIES)
def test_silent_bodies_give_way_to_the_same_owner(serve: Any, half: bytes) -> None:
    """Where there are no keys, as with one that is all that there is."""
    proxy = serve(silent_seconds=0.2, api_keys=[])
    with contextlib.closing(Attacker(proxy, half, CONNECTIONS + 8)) as attacker:
        wait_until(lambda: asking(proxy) == CONNECTIONS)
        time.sleep(0.3)
        for _ in range(5):
            assert ask(proxy, GREEDY).status_code == 200
        # The longest silent of all went first, and was told why.
        answer = attacker.connections[0].recv(1 << 16)
        assert b"HTTP/1.1 503 " in answer
        assert b"the body of this request did not arrive" in answer


@pytest.mark.one_process("reads the server's connections")
def test_an_active_body_does_not_give_way_to_the_same_owner(serve: Any) -> None:
    proxy = serve(silent_seconds=0.5, api_keys=[])
    data = json.dumps(BODY).encode().ljust(1000)
    ended = threading.Event()
    with contextlib.closing(Attacker(proxy, head(GREEDY), 1)) as slow:
        (connection,) = slow.connections

        def go_on() -> None:
            for byte in data[:-1]:
                connection.sendall(bytes([byte]))
                if not ended.is_set():
                    time.sleep(0.02)
            connection.sendall(data[-1:])

        thread = threading.Thread(target=go_on)
        thread.start()
        with contextlib.closing(Attacker(proxy, HALVES["a length"], CONNECTIONS)):
            time.sleep(0.7)
            for _ in range(10):
                assert ask(proxy, GREEDY).status_code == 200
            ended.set()
            thread.join()
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.one_process("reads the server's connections")
def test_ended_requests_are_not_counted(serve: Any) -> None:
    """However they end, nothing is left of them in any list."""
    proxy = serve(silent_seconds=60)
    served: Any = proxy.proxy
    (listener,) = served._server.listeners
    with httpx.Client(base_url=proxy.url) as client:
        for key in (GREEDY, MODEST, "wrong"):
            for path in ("/generate", "/v1/models", "/nowhere"):
                client.post(path, json=BODY, headers={"Authorization": f"Bearer {key}"})
                client.get("/health")
        data = json.dumps(BODY).encode()
        whole = head(GREEDY, f"Content-Length: {len(data)}") + data
        for half in (*HALVES.values(), whole, whole * 3, whole + HALVES["a length"]):
            Attacker(proxy, half, 3).close()
        wait_until(lambda: listener.connections == 1)
        # Its answer was read, perhaps before it is idle here.
        wait_until(lambda: list(listener._idle) == list(listener._open))
    wait_until(lambda: listener.connections == 0)
    for owners in (listener._asking, listener._bodies):
        assert not any(owners.values())
    assert not listener._new
    assert not listener._idle
