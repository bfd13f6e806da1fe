"""Connections that ask nothing, or ask forever, leave health checks and running streams alone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.responses import Response

from pd.net.connection_limits import ConnectionLimits
from pd.net.connections import Listener
from pd.net.guarded_protocol import MAX_HEADERS, MAX_PIPELINED
from pd.net.http_server import DeferredApp, HttpServers, open_listener
from pd.util.descriptors import raise_file_limit

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))

from fake_node import wait_until
from proxy_cluster import Cluster, read_events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fake_node import FakeNode

    from pd.proxy.server import ProxyThread

HALF_A_HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"
HALF_A_BODY = (
    b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b'Content-Length: 1000\r\n\r\n{"input_ids":['
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
STREAM = {"input_ids": [5, 6], "stream": True, "sampling_params": {"max_new_tokens": 4}}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, str(tmp_path))


def limited(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, **limits: Any) -> ProxyThread:
    """A proxy without a tokenizer that has these limits."""
    monkeypatch.setattr("pd.proxy.server.LIMITS", replace(ConnectionLimits(), **limits))
    return cluster.proxy(text=False)


class Client:
    """Connections that end with the test."""

    def __init__(self, stack: ExitStack, url: str) -> None:
        self._stack = stack
        parts = httpx.URL(url)
        self._address = (parts.host, parts.port)

    def open(self, data: bytes = b"") -> socket.socket:
        connection = self._stack.enter_context(socket.create_connection(self._address, 10))
        connection.sendall(data)
        return connection


@contextlib.contextmanager
def clients(url: str) -> Iterator[Client]:
    with ExitStack() as stack:
        yield Client(stack, url)


def read_all(connection: socket.socket) -> bytes:
    """Until the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


def read_answer(connection: socket.socket) -> bytes:
    """One answer with a length."""
    data = b""
    while not (found := re.search(rb"content-length: (\d+).*\r\n\r\n", data, re.DOTALL)) or (
        len(data) < found.end() + int(found[1])
    ):
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


class Stream:
    """A stream that has begun and ends when the test wants."""

    def __init__(self, pool: ThreadPoolExecutor, proxy: ProxyThread, node: FakeNode) -> None:
        self._node = node
        self._events = pool.submit(self._read, proxy.url)
        self._request = node.wait_generate()
        node.say(self._request, [7])

    def _read(self, url: str) -> list[Any]:
        with httpx.stream("POST", url + "/generate", json=STREAM, timeout=20) as response:
            assert response.status_code == 200, response.read()
            return read_events(response)

    def check(self) -> None:
        """It goes on to its end."""
        from pd.core.messages import Finish

        self._node.say(self._request, [8, 9, 10], position=1, finish=Finish("length"))
        *events, last = self._events.result()
        assert last == "DONE"
        assert events[-1]["output_ids"] == [7, 8, 9, 10]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.mark.parametrize("half", [HALF_A_HEAD, HALF_A_BODY, b""], ids=["head", "body", "nothing"])
def test_1000_half_open_requests_leave_health_and_streams_alone(
    cluster: Cluster, pool: ThreadPoolExecutor, half: bytes
) -> None:
    raise_file_limit()
    node = cluster.node("unified", auto=False)
    proxy = cluster.proxy(text=False)
    stream = Stream(pool, proxy, node)
    with clients(proxy.url) as client:
        for _ in range(1000):
            client.open(half)
        assert httpx.get(proxy.url + "/health").status_code == 200
        assert httpx.get(proxy.url + "/readiness").status_code == 200
        stream.check()


def test_1000_half_open_requests_leave_a_nodes_administration_alone() -> None:
    raise_file_limit()
    app, sock = DeferredApp(), open_listener("127.0.0.1", 0)
    app.app = Response("fine")
    servers = HttpServers([(app, sock)])
    servers.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        with clients(url) as client:
            for _ in range(1100):  # more than it holds
                client.open(HALF_A_HEAD)
            assert httpx.get(url + "/health").text == "fine"
            assert httpx.get(url + "/server_info").text == "fine"
    finally:
        servers.stop()


def test_a_head_has_a_deadline(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = limited(monkeypatch, cluster, head_seconds=0.3)
    with clients(proxy.url) as client:
        silent, half = client.open(), client.open(HALF_A_HEAD)
        assert read_all(silent) == b""
        answer = read_all(half)
        assert status_of(answer) == 408
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "deadline"


@pytest.mark.one_process("reads the bytes that the proxy holds")
def test_a_body_has_a_deadline(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.node("unified")
    proxy = limited(monkeypatch, cluster, body_seconds=0.3, body_rate=1000)
    with clients(proxy.url) as client:
        half = client.open(HALF_A_BODY)
        assert status_of(read_all(half)) == 408
        # One that comes steadily may take longer.
        body = json.dumps(STREAM | {"stream": False}).encode().ljust(1000)
        head, _, _ = HALF_A_BODY.partition(b"{")
        steady = client.open(head)
        for start in range(0, len(body), 100):
            time.sleep(0.06)
            steady.sendall(body[start : start + 100])
        assert status_of(read_answer(steady)) == 200
    assert proxy.proxy is not None
    assert proxy.proxy._service.bodies.held == 0


def test_a_body_may_not_pause_however_much_has_arrived(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = limited(monkeypatch, cluster, body_rate=1, body_pause_seconds=0.3)
    with clients(proxy.url) as client:
        assert status_of(read_all(client.open(HALF_A_BODY + b"5," * 400))) == 408


def test_only_uploads_have_long_bodies(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = {"/v1/files": 5000}
    url = limited(monkeypatch, cluster, body_bytes=2000, long_bodies=uploads).url
    for path, size, status in (
        ("/v1/files", 4000, 200),
        ("/v1/files/", 4000, 200),
        ("/v1/files", 6000, 413),
    ):
        form = {"purpose": (None, "batch"), "file": ("a", b"x" * size)}
        assert httpx.post(url + path, files=form).status_code == status, path
    assert httpx.post(f"{url}/generate", json={"input_ids": [5] * 4000}).status_code == 413


def test_incomplete_requests_get_503_when_the_server_stops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as asking, ExitStack() as serving:
        cluster = Cluster(serving, str(tmp_path))
        cluster.node("unified")
        client = Client(asking, cluster.proxy(text=False).url)
        halves = [client.open(HALF_A_BODY) for _ in range(3)]
        head = client.open(HALF_A_HEAD)
        whole = json.dumps(STREAM | {"stream": False}).encode().ljust(1000)
        after = client.open(HALF_A_BODY.partition(b"{")[0] + whole + HALF_A_BODY)
        assert status_of(read_answer(after)) == 200
        # Its connection is newer than theirs, so the proxy has read what they sent.
        assert status_of(read_answer(client.open(HEALTH))) == 200
        serving.close()
        for half in (*halves, after):
            answer = read_all(half)
            assert status_of(answer) == 503
            assert b"connection: close" in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"
        assert read_all(head) == b""
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_deadlines_do_not_apply_to_streams_and_idle_clients(
    cluster: Cluster, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.node("unified", auto=False)
    proxy = limited(monkeypatch, cluster, head_seconds=0.3, body_seconds=0.3)
    stream = Stream(pool, proxy, node)
    with httpx.Client(base_url=proxy.url) as client, clients(proxy.url) as raw:
        connection = raw.open(HEALTH)
        assert status_of(read_answer(connection)) == 200
        assert client.get("/health").status_code == 200
        time.sleep(2)
        connection.sendall(HEALTH)
        assert status_of(read_answer(connection)) == 200
        assert client.get("/health").status_code == 200
    stream.check()


def test_a_connection_without_a_next_request_is_closed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = limited(monkeypatch, cluster, keep_alive_seconds=1)
    with clients(proxy.url) as client:
        connection = client.open(HEALTH)
        for _ in range(2):
            assert status_of(read_answer(connection)) == 200
            time.sleep(0.2)
            connection.sendall(HEALTH)
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_an_incomplete_request_after_a_running_stream_does_not_end_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pd.core.messages import Finish

    node = cluster.node("unified", auto=False)
    proxy = limited(monkeypatch, cluster, head_seconds=0.3, body_seconds=0.3)
    body = json.dumps(STREAM).encode()
    head, _, _ = HALF_A_BODY.partition(b"{")
    with clients(proxy.url) as client:
        connection = client.open(head.replace(b"1000", str(len(body)).encode()) + body)
        request = node.wait_generate()
        connection.sendall(HALF_A_HEAD)
        time.sleep(1.5)
        node.say(request, [7, 8, 9, 10], finish=Finish("length"))
        data = b""
        while b"[DONE]" not in data:
            part = connection.recv(65536)
            assert part, data
            data += part


def test_with_too_many_connections_idle_ones_give_way(
    cluster: Cluster, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.node("unified", auto=False)
    proxy = limited(monkeypatch, cluster, connections=8, reserved=2)
    stream = Stream(pool, proxy, node)
    with clients(proxy.url) as client:
        half = [client.open(HALF_A_HEAD) for _ in range(30)]
        asking = client.open(HEALTH)
        assert status_of(read_answer(asking)) == 200
        assert read_all(half[0]) == b""
        stream.check()


@pytest.mark.one_process("reads the server's connections")
def test_health_is_answered_when_all_connections_have_requests(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.node("unified")
    proxy = limited(monkeypatch, cluster, connections=4, reserved=2, body_seconds=1.0)
    with clients(proxy.url) as client:
        for _ in range(4):
            busy = client.open(HALF_A_BODY)
        wait_until(lambda: asking(proxy) == 4)
        answer = read_all(client.open(HALF_A_BODY))
        assert status_of(answer) == 503
        assert b"connection: close" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"
        assert status_of(read_answer(client.open(HEALTH))) == 200
        assert status_of(read_all(busy)) == 408
    assert httpx.post(proxy.url + "/generate", json={"input_ids": [5]}).status_code == 200


def asking(proxy: ProxyThread) -> int:
    """Connections that have a request."""
    assert proxy.proxy is not None
    (listener,) = proxy.proxy._server.listeners
    return sum(map(len, listener._asking.values()))


def test_bursts_of_requests_on_one_connection_are_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = limited(monkeypatch, cluster)
    with clients(proxy.url) as client:
        few = client.open(HEALTH * MAX_PIPELINED)
        answers = b""
        while answers.count(b'{"status":"ok"}') < MAX_PIPELINED:
            answers += few.recv(65536)
        many = read_all(client.open(HEALTH * 5000))
        assert many.count(b"HTTP/1.1 200") <= MAX_PIPELINED + 1
        headers = b"".join(b"X-%d: 1\r\n" % i for i in range(MAX_HEADERS + 1))
        answer = read_all(client.open(HEALTH[:-2] + headers + b"\r\n"))
        assert status_of(answer) == 400
        assert b"more than 256 headers" in answer


STARVED = """
import asyncio, resource, sys, uvicorn
from pd.net.connection_limits import ConnectionLimits
from pd.net.connections import GuardedServer
from pd.net.http_server import DeferredApp, open_listener

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
server = GuardedServer(uvicorn.Config(DeferredApp(), lifespan="off"), ConnectionLimits())
server._limits = ConnectionLimits(connections=10_000)
sock = open_listener("127.0.0.1", 0)
print(sock.getsockname()[1], flush=True)
asyncio.run(server.serve(sockets=[sock]))
"""


def test_without_descriptors_connections_are_refused_and_the_log_stays_short() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STARVED)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        began = time.monotonic()
        with clients(url) as client:
            connections = [client.open(HALF_A_HEAD) for _ in range(300)]
            assert status_of(read_all(connections[-1])) == 503
        # They are gone; 503 is what an application says that is not there yet.
        wait_until(lambda: "retry-after" in httpx.get(url + "/health").headers)
        seconds = time.monotonic() - began
    finally:
        process.terminate()
        _, errors = process.communicate()
    lines = [line for line in errors.splitlines() if "INFO" not in line]
    assert any("Too many open files" in line for line in lines), errors
    assert len(lines) <= 2 * (seconds + 2), errors


class FailingSocket(socket.socket):
    def accept(self) -> Any:
        raise OSError(errno.EPROTO, "Protocol error")


def test_failures_to_accept_are_logged_once_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problems: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, problem: problems.append(problem)
        )
        with FailingSocket() as sock, socket.socket() as client:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            listener = Listener(sock, ConnectionLimits(), lambda _: pytest.fail("none is accepted"))
            client.connect(sock.getsockname())
            await asyncio.sleep(0.35)
            listener.close()

    began = time.monotonic()
    asyncio.run(main())
    seconds = time.monotonic() - began
    assert not problems
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "cannot accept connections: Protocol error"
    assert len(said) <= 1 + seconds, said


def test_the_limit_on_open_files_is_raised() -> None:
    code = """
import resource
from pd.util.descriptors import raise_file_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
raise_file_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- several requests on one connection


def post(body: dict[str, Any]) -> bytes:
    head, _, _ = HALF_A_BODY.partition(b"{")
    data = json.dumps(body).encode()
    return head.replace(b"1000", str(len(data)).encode()) + data


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


def events_of(answer: bytes) -> list[Any]:
    """Events of a chunked stream, of which every byte is looked at."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert status_of(head) == 200
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, end, rest = body + rest[:length], rest[length : length + 2], rest[length + 2 :]
        assert end == b"\r\n"
        if not length:
            break
    assert rest == b""
    events = body.decode().removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize(
    "behind", [HEALTH, post(STREAM), HEALTH * 3, HALF_A_BODY], ids=["get", "post", "three", "half"]
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_that_leaves_is_noticed_despite_pipelined_requests(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, behind: bytes, stream: bool, at_once: bool
) -> None:
    node = cluster.node("unified", auto=False)
    proxy = limited(monkeypatch, cluster)
    with clients(proxy.url) as client:
        connection = client.open(post(STREAM | {"stream": stream}) + behind * at_once)
        request = node.wait_generate()
        if stream:
            node.say(request, [7])
            read_until(connection, b"[7]")
        if not at_once:
            time.sleep(0.1)
            connection.sendall(behind)
            time.sleep(0.1)
        connection.close()
        node.wait_abort(request.room)
    time.sleep(0.2)
    assert len(node.generates) == 1, "what waited behind it is not begun"


MALFORMED = {
    "no request": b"\x00\x01 nonsense\r\n\r\n",
    "address": b"GET http://[ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "too many headers": HEALTH[:-2] + b"X: 1\r\n" * (MAX_HEADERS + 1) + b"\r\n",
    "head too long": HEALTH[:-2] + b"X: " + b"1" * (80 << 10),
    "chunk": HALF_A_HEAD[:-8] + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    "body too long": HALF_A_HEAD + b"Length: 3000\r\n\r\n" + b"x" * 3000 + HEALTH,
    "body too late": HALF_A_BODY,
}


@pytest.mark.parametrize("between", [0, 1], ids=["second", "third"])
@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_request_does_not_affect_earlier_answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, malformed: bytes, between: int
) -> None:
    from pd.core.messages import Finish

    node = cluster.node("unified", auto=False)
    proxy = limited(monkeypatch, cluster, body_seconds=0.3, body_bytes=2000)
    with clients(proxy.url) as client:
        connection = client.open(post(STREAM))
        request = node.wait_generate()
        node.say(request, [7])
        data = read_until(connection, b"[7]")
        connection.sendall(HEALTH * between)
        time.sleep(0.1 * between)
        connection.sendall(malformed)
        time.sleep(1.5 if malformed == HALF_A_BODY else 0.3)
        connection.sendall(HEALTH)  # not read any more
        time.sleep(0.1)
        assert not node.aborts
        node.say(request, [8, 9, 10], position=1, finish=Finish("length"))
        data += read_all(connection)
    streamed, begin, second = data.partition(b"0\r\n\r\n")
    assert events_of(streamed + begin)[-1]["output_ids"] == [7, 8, 9, 10]
    assert second.count(b"HTTP/1.1 ") == between, second
    assert second.count(b'{"status":"ok"}') == between


def test_the_error_of_a_malformed_request_comes_after_earlier_answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pd.core.messages import Finish

    node = cluster.node("unified", auto=False)
    proxy = limited(monkeypatch, cluster)
    with clients(proxy.url) as client:
        connection = client.open(post(STREAM | {"stream": False}) + MALFORMED["no request"])
        request = node.wait_generate()
        time.sleep(0.2)
        node.say(request, [7, 8, 9, 10], finish=Finish("length"))
        answer = read_all(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status_of(head) == 200
    assert b"connection: close" in head
    assert json.loads(body)["output_ids"] == [7, 8, 9, 10]
