"""A proxy with ``--tls-cert`` and ``--tls-key`` serves HTTPS only, within the limits that hold for
HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import ssl
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from fake_node import EOS, wait_until
from processes import LAUNCH, Process
from proxy_cluster import read_events
from proxy_tokenizers import byte_level

from pd.bench.load.target import EndpointAddress, make_tls_context
from pd.bench.serve_client import Server
from pd.core.messages import Finish
from pd.net.connection_limits import ConnectionLimits
from pd.net.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from certificates import Authority, CertificateFiles
    from proxy_cluster import Cluster

    from pd.proxy.server import ProxyThread

    Serving = ProxyThread | Process

TEXT = "hello world 😀"
HELLO: Any = [{"role": "user", "content": "hello"}]
HALF_A_HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
STREAM = {"input_ids": [5, 6], "stream": True, "incremental": True}
APPLICATION_DATA = 23


def speak(prompt: list[int], index: int) -> list[int]:
    return [*byte_level().encode(TEXT).ids, EOS]


@pytest.fixture
def serve(
    cluster: Cluster, files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ProxyThread]:
    """Starts a proxy with limits on its connections."""

    def start(**limits: Any) -> ProxyThread:
        monkeypatch.setattr("pd.proxy.server.LIMITS", replace(ConnectionLimits(), **limits))
        return cluster.proxy(text=False, **files.flags)

    return start


class RawClient:
    """Sockets to one proxy; they end with the test."""

    def __init__(self, stack: contextlib.ExitStack, trusting: ssl.SSLContext) -> None:
        self._stack = stack
        self._trusting = trusting

    def open(self, proxy: Serving, data: bytes = b"", receive_buffer: int = 0) -> socket.socket:
        """A connection without TLS."""
        url = httpx.URL(proxy.url)
        sock = self._stack.enter_context(socket.socket())
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(10)
        sock.connect((url.host, url.port))
        sock.sendall(data)
        return sock

    def shake_hands(
        self, proxy: Serving, data: bytes = b"", receive_buffer: int = 0
    ) -> ssl.SSLSocket:
        """A connection with TLS."""
        plain = self.open(proxy, b"", receive_buffer)
        sock = self._trusting.wrap_socket(plain, server_hostname="localhost")
        self._stack.enter_context(sock)
        sock.sendall(data)
        return sock

    def hello(self) -> bytes:
        """What a client sends first."""
        sent = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            self._trusting.wrap_bio(
                ssl.MemoryBIO(), sent, server_hostname="localhost"
            ).do_handshake()
        return sent.read()


@pytest.fixture
def raw(authority: Authority) -> Iterator[RawClient]:
    with contextlib.ExitStack() as stack:
        yield RawClient(stack, authority.trusting())


def post(body: dict[str, Any], path: str = "/generate") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def read_all(sock: socket.socket) -> bytes:
    """Until the other end closes."""
    data = bytearray()
    with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
        while part := sock.recv(1 << 20):
            data += part
    return bytes(data)


@contextlib.contextmanager
def nothing_goes_wrong(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No traceback, and nothing that an operator would have to look at."""
    caplog.clear()
    yield
    time.sleep(0.05)
    assert [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR] == []


def test_chats_and_streams(cluster: Cluster, authority: Authority, files: CertificateFiles) -> None:
    cluster.pair(speak)
    proxy = cluster.proxy(**files.flags)
    assert proxy.url.startswith("https://127.0.0.1:")
    with httpx.Client(verify=authority.trusting()) as http:
        client = openai.OpenAI(
            base_url=f"{proxy.url}/v1", api_key="-", max_retries=0, http_client=http
        )
        answer = client.chat.completions.create(model="fake", messages=HELLO)
        assert answer.choices[0].message.content == TEXT
        stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == TEXT
        # A body of many records, which is more than the connection is read ahead.
        long = client.completions.create(model="fake", prompt="x", user="u" * (1 << 20))
        assert long.choices[0].text == TEXT
        # A page of the proxy's own is one of https.
        own = {"Origin": proxy.url}
        assert http.get(f"{proxy.url}/v1/models", headers=own).status_code == 200
        foreign = {"Origin": proxy.url.replace("https", "http")}
        assert http.get(f"{proxy.url}/v1/models", headers=foreign).status_code == 403


@pytest.mark.one_process("starts a proxy by its command")
def test_pd_launch_serves_https_with_several_processes(
    cluster: Cluster,
    authority: Authority,
    files: CertificateFiles,
    raw: RawClient,
    tmp_path: Path,
) -> None:
    """On the event loop that proxies have, which is uvloop's."""
    node = cluster.node("unified", speak)
    flags = ["--port=0", "--workers=2", f"--unified={node.url}", f"--tokenizer={cluster.model_dir}"]
    flags += [f"--tls-cert={files.cert}", f"--tls-key={files.key}"]
    proxy = Process("proxy", *flags, log=tmp_path / "log", program=LAUNCH)
    try:
        assert proxy.url.startswith("https://127.0.0.1:")
        body = {"model": "fake", "messages": HELLO, "stream": True}
        for _ in range(4):
            with (
                httpx.Client(verify=authority.trusting()) as client,
                client.stream("POST", f"{proxy.url}/v1/chat/completions", json=body) as response,
            ):
                *events, last = read_events(response)
            assert last == "DONE"
            texts = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
            assert "".join(texts) == TEXT
            assert b"HTTP" not in read_all(raw.open(proxy, HEALTH))
    finally:
        proxy.stop()
    log = proxy.log.read_text()
    assert "Traceback" not in log
    assert not any(line in log for line in Path(files.key).read_text().splitlines())


def test_events_leave_at_once_each_in_a_record(
    cluster: Cluster, serve: Callable[..., ProxyThread], raw: RawClient
) -> None:
    node = cluster.node("unified", auto=False)
    proxy = serve()
    plain = raw.open(proxy)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = raw._trusting.wrap_bio(incoming, outgoing, server_hostname="localhost")
    records: list[int] = []

    def receive() -> None:
        """One record."""
        head = b""
        while len(head) < 5:
            head += plain.recv(5 - len(head))
        body = b""
        while len(body) < int.from_bytes(head[3:]):
            body += plain.recv(int.from_bytes(head[3:]) - len(body))
        records.append(head[0])
        incoming.write(head + body)

    while True:
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
            break
        plain.sendall(outgoing.read())
        receive()
    tls.write(post(STREAM))
    plain.sendall(outgoing.read())
    request = node.wait_generate()
    data = b""

    def read_until(end: bytes) -> None:
        nonlocal data
        while end not in data:
            with contextlib.suppress(ssl.SSLWantReadError):
                data += tls.read(1 << 16)
                continue
            receive()

    node.say(request, [7])
    read_until(b'"output_ids":[7]')
    for number in range(8, 20):
        records.clear()
        node.say(request, [number], position=number - 7)
        read_until(b'"output_ids":[%d]' % number)
        assert records == [APPLICATION_DATA]
    node.say(request, [20], position=13, finish=Finish("length"))
    read_until(b"[DONE]")


@pytest.mark.parametrize("says_so", [True, False], ids=["close_notify", "reset"])
def test_a_client_that_is_gone_aborts_its_request(
    cluster: Cluster, serve: Callable[..., ProxyThread], raw: RawClient, says_so: bool
) -> None:
    node = cluster.node("unified", auto=False)
    sock = raw.shake_hands(serve(), post(STREAM))
    request = node.wait_generate()
    node.say(request, [7])
    assert sock.recv(1 << 16)
    if says_so:
        sock.settimeout(0.2)
        with contextlib.suppress(OSError):
            sock.unwrap()
    else:
        sock.close()
    node.wait_abort(request.room)


def test_strangers_who_never_finish_handshakes_keep_nobody_out(
    cluster: Cluster, serve: Callable[..., ProxyThread], raw: RawClient, authority: Authority
) -> None:
    node = cluster.node("unified", auto=False)
    proxy = serve(connections=8, reserved=2)
    stream = raw.shake_hands(proxy, post(STREAM))
    request = node.wait_generate()
    hello = raw.hello()
    silent = [raw.open(proxy) for _ in range(20)]
    half = [raw.open(proxy, hello[:100]) for _ in range(20)]
    whole = [raw.open(proxy, hello) for _ in range(20)]
    with httpx.Client(verify=authority.trusting()) as client:
        assert client.get(f"{proxy.url}/health").status_code == 200
    assert read_all(silent[0]) == read_all(half[0]) == b""
    read_all(whole[0])
    node.say(request, [7], finish=Finish("length"))
    data = b""
    while b"[DONE]" not in data:
        part = stream.recv(1 << 16)
        assert part, data
        data += part


def test_handshakes_share_the_deadline_of_heads(
    serve: Callable[..., ProxyThread], raw: RawClient
) -> None:
    proxy = serve(head_seconds=0.3, body_seconds=0.3)
    hello = raw.hello()
    began = time.monotonic()
    waiting = [raw.open(proxy), raw.open(proxy, hello[:100]), raw.open(proxy, hello)]
    late = [raw.shake_hands(proxy), raw.shake_hands(proxy, HALF_A_HEAD)]
    body = raw.shake_hands(proxy, post(STREAM)[:-5])
    for sock in waiting:
        read_all(sock)
    assert read_all(late[0]) == b""
    for sock in (late[1], body):
        assert read_all(sock).startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 5


@pytest.mark.one_process("reads the server's connections")
@pytest.mark.parametrize("reserved", [0, 1])
def test_when_all_connections_have_requests_others_are_refused(
    cluster: Cluster, serve: Callable[..., ProxyThread], raw: RawClient, reserved: int
) -> None:
    cluster.node("unified", auto=False)
    proxy = serve(connections=2, reserved=reserved)
    half = post(STREAM)[:-5]
    for _ in range(2):
        raw.shake_hands(proxy, half)
    served: Any = proxy.proxy
    (listener,) = served._server.listeners
    wait_until(lambda: not listener._new)
    if reserved:
        answer = read_all(raw.shake_hands(proxy, half))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in answer
    else:  # there is no room for a handshake, without which nothing can be said
        assert read_all(raw.open(proxy, raw.hello())) == b""


@pytest.mark.one_process("reads the server's connections")
def test_who_reads_nothing_is_cut_off(
    cluster: Cluster,
    serve: Callable[..., ProxyThread],
    raw: RawClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pd.proxy.dispatch.job.MAX_UNREAD_BYTES", 64 << 10)
    monkeypatch.setattr("pd.proxy.dispatch.job.MAX_UNREAD_TOKENS", 2000)
    huge = {"context_length": 1 << 20, "pages": {"total": 1 << 20}}
    node = cluster.node("unified", auto=False, **huge)
    proxy = serve()
    asked = STREAM | {"sampling_params": {"max_new_tokens": 900_000}}
    sock = raw.shake_hands(proxy, post(asked), receive_buffer=4096)
    request = node.wait_generate()
    assert proxy.proxy is not None
    (listener,) = proxy.proxy._server.listeners  # type: ignore[attr-defined]
    (connection,) = listener._open
    most = position = 0
    while not node.aborts and position < 800_000:
        node.say(request, [40] * 500, position=position)
        position += 500
        most = max(most, connection.unread_bytes)
        time.sleep(0.001)
    node.wait_abort(request.room)
    # What waits in the process is counted, and is little.
    assert 64 << 10 < most < 1 << 20
    wait_until(lambda: not listener._open)
    assert b"[DONE]" not in read_all(sock)


def test_who_does_not_read_a_whole_answer_is_cut_off(
    cluster: Cluster, serve: Callable[..., ProxyThread], raw: RawClient
) -> None:
    """An answer that is written in one piece, too, counts as unread until the client has it."""
    node = cluster.node("unified", auto=False, context_length=1 << 20, pages={"total": 1 << 20})
    proxy = serve(read_seconds=0.3)
    asked = STREAM | {"stream": False, "sampling_params": {"max_new_tokens": 900_000}}
    sock = raw.shake_hands(proxy, post(asked), receive_buffer=4096)
    request = node.wait_generate()
    tokens = 500_000
    for position in range(0, tokens, 100_000):
        finish = Finish("length") if position + 100_000 == tokens else None
        node.say(request, [40] * 100_000, position=position, finish=finish)
    assert sock.recv(1)
    time.sleep(1.5)
    assert len(read_all(sock)) < 2 * tokens  # of three bytes for each


def test_plain_http_ends_in_a_closed_connection(
    serve: Callable[..., ProxyThread], raw: RawClient, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = serve()
    caplog.set_level(logging.WARNING)
    with nothing_goes_wrong(caplog):
        for data in (
            HEALTH,
            b"\0" * 1000,
            os.urandom(1000),
            b"\x16\x03\x01\xff\xff" + b"a" * 70000,
        ):
            sock = raw.open(proxy)
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            assert b"HTTP" not in read_all(sock)
        # Clients that are gone when they are answered.
        for _ in range(20):
            sock = raw.open(proxy, raw.hello())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        # Rubbish behind a handshake, and an end in the middle of a record.
        for data in (b"no record at all", b"\x17\x03\x03\x40\x00" + bytes(100)):
            plain = socket.socket(fileno=raw.shake_hands(proxy, HALF_A_HEAD).detach())
            plain.settimeout(10)
            plain.sendall(data)
            plain.shutdown(socket.SHUT_WR)
            assert b"HTTP" not in read_all(plain)
            plain.close()


def test_old_versions_of_tls_are_refused(
    serve: Callable[..., ProxyThread], authority: Authority, raw: RawClient
) -> None:
    proxy = serve()
    old = authority.trusting()
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        old.wrap_socket(raw.open(proxy), server_hostname="localhost")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with old.wrap_socket(raw.open(proxy), server_hostname="localhost") as sock:
        sock.sendall(HEALTH)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


@pytest.mark.one_process("each process looks at files in its own time")
def test_a_certificate_that_changes_is_taken_without_a_restart(
    cluster: Cluster,
    authority: Authority,
    raw: RawClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pd.proxy.http.certificate.LOOK_SECONDS", 0.0)
    first, second = authority.issue("first"), authority.issue("second")
    cert, key = str(tmp_path / "cert"), str(tmp_path / "key")
    shutil.copy(first.cert, cert)
    shutil.copy(first.key, key)
    proxy = cluster.proxy(text=False, tls_cert=cert, tls_key=key)

    def name(sock: ssl.SSLSocket) -> str:
        found: Any = sock.getpeercert()
        return str(found["subject"][0][0][1])

    before = raw.shake_hands(proxy)
    assert name(before) == "first"
    # One file is replaced before the other.
    shutil.copy(second.cert, cert)
    assert name(raw.shake_hands(proxy)) == "first"
    assert "is not the key of the certificate" in caplog.text
    os.remove(key)
    assert name(raw.shake_hands(proxy)) == "first"
    shutil.copy(second.key, key)
    assert name(raw.shake_hands(proxy)) == "second"
    before.sendall(HEALTH)
    assert before.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_many_handshakes_leave_the_loop_time_for_others() -> None:
    async def main() -> int:
        shared = Turns()
        done = turns = 0

        def step(end: float) -> bool:
            nonlocal done
            done += 1
            time.sleep(0.002)
            return True

        for _ in range(50):
            shared.run_step(step)
        while done < 50:
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(main()) > 10


def test_the_harness_measures_behind_a_certificate_of_a_private_authority(
    cluster: Cluster,
    authority: Authority,
    files: CertificateFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster.pair()
    url = cluster.proxy(text=False, **files.flags).url
    monkeypatch.setenv("SSL_CERT_FILE", authority.cert)
    # Tests share a context, which has read another file; so does the harness in one process.
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: authority.trusting())
    make_tls_context.cache_clear()
    try:
        server = Server(url, None)
        assert server.context_length() == 200
        answer = asyncio.run(server.send_request(server.make_request([5, 6], 3)))
        assert (answer.error, answer.num_tokens) == (None, 3)

        async def ask() -> bytes:
            target = EndpointAddress.parse(url, "/v1/completions")
            reception = await target.connect()
            reception.send_request(target.make_request({"prompt": [5], "max_tokens": 2}, "name"))
            await reception.ended
            return b"".join(data for _, data in reception._pieces)

        assert asyncio.run(ask()).startswith(b"HTTP/1.1 200 ")
    finally:
        make_tls_context.cache_clear()


def test_who_leaves_is_missed_although_there_is_a_request_behind_the_running_one(
    cluster: Cluster, serve: Callable[..., ProxyThread], raw: RawClient
) -> None:
    node = cluster.node("unified", auto=False)
    sock = raw.shake_hands(serve(), post(STREAM) + HEALTH)
    request = node.wait_generate()
    node.say(request, [7])
    data = b""
    while b"[7]" not in data:
        data += sock.recv(1 << 16)
    sock.close()
    node.wait_abort(request.room)


def test_a_malformed_request_leaves_the_running_stream_alone(
    cluster: Cluster, serve: Callable[..., ProxyThread], raw: RawClient
) -> None:
    node = cluster.node("unified", auto=False)
    sock = raw.shake_hands(serve(), post(STREAM) + b"nonsense\r\n\r\n")
    request = node.wait_generate()
    node.say(request, [7])
    time.sleep(0.2)
    node.say(request, [8], position=1, finish=Finish("length"))
    data = read_all(sock)
    assert data.count(b"HTTP/1.1 ") == 1
    assert data.endswith(b"0\r\n\r\n")
    assert b"[DONE]" in data
