"""What somebody who may add workers, or sits at an address that was added, cannot gain by it."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import edge_helpers  # noqa: F401  # makes the proxy's helpers known
import httpx
import pytest
from fake_node import wait_until
from proxy_cluster import Cluster, nodes_known

from pd.net.cluster_key import derive_admin_key
from pd.proxy.nodes import node_http, pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.proxy.server import ProxyThread

KEY = b"0123456789abcdef0123456789abcdef"
BODY = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules on a shorter clock."""
    monkeypatch.setattr("pd.proxy.nodes.pool.POLL_INTERVAL", 0.1)
    monkeypatch.setattr("pd.proxy.nodes.pool.HEARTBEAT_INTERVAL", 0.1)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, "")


class Listener:
    """An HTTP server that answers what it is told to and keeps what it was sent."""

    def __init__(self, answer: Any) -> None:
        """``answer(handler)`` writes the answer to a GET; POSTs are answered 200."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append((self.command, self.path, dict(self.headers)))
                answer(self)

            def do_POST(self) -> None:
                requests.append((self.command, self.path, dict(self.headers)))
                reply(self, b"{}")

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def reply(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **more: str) -> None:
    handler.send_response(status)
    for name, value in more.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def listeners() -> Iterator[Any]:
    made: list[Listener] = []

    def make(answer: Any) -> Listener:
        made.append(Listener(answer))
        return made[-1]

    yield make
    for listener in made:
        listener.close()


def claiming(info: dict[str, Any]) -> Any:
    return lambda handler: reply(handler, json.dumps(info).encode())


def add(proxy: ProxyThread, role: str, url: str) -> httpx.Response:
    return httpx.post(f"{proxy.url}/workers", json={"role": role, "url": url})


def worker(proxy: ProxyThread, url: str) -> dict[str, Any]:
    listed = httpx.get(f"{proxy.url}/workers").json()["workers"]
    found: dict[str, Any] = next(w for w in listed if w["url"] == url)
    return found


def problem(proxy: ProxyThread, url: str) -> str:
    return worker(proxy, url)["problem"] or ""


def works(proxy: ProxyThread) -> bool:
    return httpx.post(f"{proxy.url}/generate", json=BODY, timeout=20).status_code == 200


# ---- what is sent to it


def test_a_worker_without_the_cluster_key_is_sent_nothing_of_worth(
    cluster: Cluster, listeners: Any
) -> None:
    """It says the same as a real node, message port included, and keeps what it is sent."""
    nodes = cluster.pair(cluster_key=KEY)
    thief = listeners(claiming(nodes[1].server_info() | {"instance_id": "thief"}))
    proxy = cluster.proxy(text=False, cluster_key=KEY)
    assert add(proxy, "decode", thief.url).status_code == 200
    wait_until(lambda: "did not prove" in problem(proxy, thief.url))
    flushed = httpx.post(f"{proxy.url}/flush_cache").json()
    assert flushed == {"flushed": [n.instance_id for n in nodes], "skipped": [thief.url]}
    assert works(proxy)
    assert {(method, path) for method, path, _ in thief.requests} == {("GET", "/server_info")}
    for _, _, headers in thief.requests:
        assert "Authorization" not in headers
    # What a proven node is sent, it can send on to no other.
    key = derive_admin_key(KEY)
    assert key is not None
    (_, sent), *_ = nodes[0].http_requests
    assert key.hex() not in str(sent)
    forwarded = {"Authorization": str(sent["Authorization"])}
    for node in nodes:
        assert httpx.post(f"{node.url}/flush_cache", headers=forwarded).status_code == 401


def test_redirects_are_not_followed(cluster: Cluster, listeners: Any) -> None:
    inside = listeners(claiming({"secret": "of another service"}))
    lure = listeners(lambda handler: reply(handler, b"", 302, Location=f"{inside.url}/metadata"))
    proxy = cluster.proxy(text=False, wait_ready=0, unified=[lure.url])
    wait_until(lambda: "status 302" in problem(proxy, lure.url))
    assert inside.requests == []


# ---- what is believed of it


def test_a_worker_that_sends_no_heartbeats_feeds_nothing(cluster: Cluster, listeners: Any) -> None:
    prefill, _ = cluster.pair()
    false = prefill.server_info() | {
        "instance_id": "false",
        "model": "trojan",
        "model_path": "/etc",
        "context_length": 1 << 30,
        "endpoints": {"zmq": "tcp://127.0.0.1:9", "bootstrap": "http://127.0.0.1:9"},
    }
    same_model = false | {
        "instance_id": "false-2",
        "model": "fake",
        "endpoints": {"zmq": "tcp://127.0.0.1:10"},
    }
    proxy = cluster.proxy(text=False)
    for info in (false, same_model):
        listener = listeners(claiming(info))
        assert add(proxy, "prefill", listener.url).status_code == 200
        url = listener.url
        wait_until(lambda url=url: "heartbeat" in problem(proxy, url))
        assert worker(proxy, url)["model"] is None
    listed = httpx.get(f"{proxy.url}/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in listed] == [("fake", 200)]
    long = {"input_ids": [5] * 300}
    assert httpx.post(f"{proxy.url}/generate", json=long).status_code == 400
    assert httpx.post(f"{proxy.url}/v1/completions", json={"model": "trojan"}).status_code in (
        400,
        404,
    )
    assert all(works(proxy) for _ in range(5))


def test_a_second_entry_for_an_instance_is_refused_and_the_first_unharmed(
    cluster: Cluster, listeners: Any
) -> None:
    _, decode = cluster.pair()
    proxy = cluster.proxy(text=False)
    for info in (
        decode.server_info(),
        decode.server_info() | {"endpoints": {"zmq": "tcp://127.0.0.1:9"}},
        decode.server_info() | {"instance_id": "another"},
    ):
        second = listeners(claiming(info))
        add(proxy, "decode", second.url)
        url = second.url
        wait_until(lambda url=url: f"in use as {decode.url}" in problem(proxy, url))
        assert worker(proxy, url)["instance_id"] is None
    for _ in range(5):
        assert works(proxy)
    time.sleep(0.3)
    assert worker(proxy, decode.url)["ready"]


def test_who_was_first_to_name_a_nodes_port_does_not_keep_it_from_the_node(
    cluster: Cluster, listeners: Any
) -> None:
    prefill, decode = cluster.pair()
    squatter = listeners(claiming(decode.server_info() | {"instance_id": "another"}))
    proxy = cluster.proxy(text=False, wait_ready=0, prefill=[prefill.url], decode=[squatter.url])
    wait_until(lambda: "heartbeat" in problem(proxy, squatter.url))
    add(proxy, "decode", decode.url)
    wait_until(lambda: bool(worker(proxy, decode.url)["ready"]))
    wait_until(lambda: f"in use as {decode.url}" in problem(proxy, squatter.url))
    assert works(proxy)


WRONG = [
    b"not JSON",
    b"[]",
    b"{}",
    json.dumps({"role": "decode"}).encode(),
]
CHANGES: list[dict[str, Any]] = [
    {"page_size": 0},
    {"context_length": -1},
    {"instance_id": "x" * 65},
    {"instance_id": "a\nb"},
    {"pages": {"total": 0}},
    {"model": "x" * 2000},
    {"endpoints": {"zmq": "ipc:///tmp/socket"}},
    {"endpoints": {"zmq": "inproc://x"}},
    {"endpoints": {"zmq": "tcp://user:password@127.0.0.1:1"}},
    {"transfer_backends": ["x"] * 65},
]


def test_nonsense_is_a_problem_of_its_worker_alone(cluster: Cluster, listeners: Any) -> None:
    prefill, _ = cluster.pair()
    proxy = cluster.proxy(text=False)
    bodies = [*WRONG, *(json.dumps(prefill.server_info() | c).encode() for c in CHANGES)]
    urls = []
    for body in bodies:
        listener = listeners(lambda handler, body=body: reply(handler, body))
        add(proxy, "prefill", listener.url)
        urls.append(listener.url)
    for url in urls:
        wait_until(lambda url=url: problem(proxy, url).startswith("/server_info: "))
    assert works(proxy)


def test_endless_answers_are_given_up(
    cluster: Cluster, listeners: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_http, "POLL_TIMEOUT", 0.3)

    def flood(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                handler.wfile.write(b" " * (1 << 20))

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                handler.wfile.write(b" ")
                time.sleep(0.05)

    flooding, dripping = listeners(flood), listeners(drip)
    urls = [flooding.url, dripping.url]
    proxy = cluster.proxy(text=False, wait_ready=0, unified=urls)
    wait_until(lambda: f"exceeds {node_http.MAX_ANSWER_BYTES}" in problem(proxy, urls[0]))
    wait_until(lambda: "TimeoutError" in problem(proxy, urls[1]))


# ---- what may be added


NO_ADDRESSES = [
    "http://10.0.0.1:80/latest/meta-data",
    "http://10.0.0.1:80/?x=1",
    "http://10.0.0.1:80?",
    "http://10.0.0.1:80/#x",
    "http://user:s3cret@10.0.0.1:80",
    "http://s3cret@10.0.0.1",
    "http://:s3cret@/",
    "ftp://10.0.0.1",
    "file:///etc/passwd",
    "http://",
    "http://host:0",
    "http://host:70000",
    "http://a b:1",
    "http://a\nb:1",
    "http://[::1",
]


def test_only_addresses_are_taken(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    proxy = cluster.proxy(text=False, wait_ready=0)
    for url in NO_ADDRESSES:
        answer = add(proxy, "decode", url)
        assert answer.status_code == 400, url
        assert answer.json()["error"]["param"] == "url"
        assert "s3cret" not in answer.text + caplog.text
    assert httpx.get(f"{proxy.url}/workers").json()["workers"] == []


@pytest.mark.parametrize("host", ["a" * 300, "xn--a", "é..x"])
def test_a_host_that_cannot_be_a_name_is_the_workers_problem(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    proxy = cluster.proxy(text=False, wait_ready=0)
    url = f"http://{host}:80"
    assert add(proxy, "decode", url).status_code == 200
    wait_until(lambda: "not reached yet" not in problem(proxy, url))
    assert "Traceback" not in caplog.text


def test_workers_are_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_WORKERS", 3)
    proxy = cluster.proxy(text=False, wait_ready=0)
    statuses = [add(proxy, "decode", f"http://127.0.0.1:{n}").status_code for n in range(1, 5)]
    assert statuses == [200, 200, 200, 400]
    # One that is there already may be named again, and a place that is freed is free.
    assert add(proxy, "decode", "http://127.0.0.1:1").status_code == 200
    assert httpx.delete(f"{proxy.url}/workers/127.0.0.1:1").status_code == 200
    assert add(proxy, "decode", "http://127.0.0.1:4").status_code == 200


def test_an_entry_is_removed_by_its_whole_url(cluster: Cluster) -> None:
    proxy = cluster.proxy(text=False, wait_ready=0)
    secure, plain = "https://127.0.0.1:9", "http://127.0.0.1:9"
    for url in (plain, secure):
        assert add(proxy, "decode", url).status_code == 200
    for name in ("", "/"):
        assert httpx.delete(f"{proxy.url}/workers/{name}").status_code in (404, 405)
    removed = httpx.delete(f"{proxy.url}/workers/{quote(secure, safe='')}")
    assert (removed.status_code, removed.json()["url"]) == (200, secure)
    assert httpx.delete(f"{proxy.url}/workers/{quote(secure, safe='')}").status_code == 404
    assert httpx.delete(f"{proxy.url}/workers/{plain}/").status_code == 200
    assert httpx.get(f"{proxy.url}/workers").json()["workers"] == []


def test_a_node_that_comes_back_on_its_port_is_no_duplicate(cluster: Cluster) -> None:
    _, decode = cluster.pair()
    proxy = cluster.proxy(text=False)
    decode.restart()

    def is_known() -> bool:
        entries = [node for nodes in nodes_known(proxy) for node in nodes]
        found = [node for node in entries if node["url"] == decode.url]
        return all(node["ready"] and node["instance_id"] == decode.instance_id for node in found)

    wait_until(is_known)
    assert works(proxy)
