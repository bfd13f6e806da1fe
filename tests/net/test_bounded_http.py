"""We give up HTTP answers that are too large, too slow or malformed, within the limits."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from pd.net.bounded_http import fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[bytes]]]:
    """Answer each connection on a thread. Yields the URL and the heads of requests."""
    heads: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                heads.append(connection.recv(65536))
                answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", heads
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)
    assert not thread.is_alive()


def drip(start: bytes, unit: bytes) -> Callable[[socket.socket], None]:
    """Begin an answer that never ends and never pauses for long."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(unit)
            time.sleep(0.05)

    return answer


@pytest.mark.parametrize(
    ("start", "unit"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"", b"H"),
    ],
    ids=["head", "body", "chunks", "status"],
)
def test_an_endless_answer_is_given_up_in_time(start: bytes, unit: bytes) -> None:
    with server(drip(start, unit)) as (url, _):
        began = time.monotonic()
        with pytest.raises((OSError, ValueError)):
            fetch(url, 1000, 1.0)
        assert time.monotonic() - began < 5


def test_a_huge_answer_is_not_read_to_its_end() -> None:
    sent: list[int] = []

    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)
            sent.append(65536)

    with server(answer) as (url, _), pytest.raises(ValueError, match="exceeds 1000 bytes"):
        fetch(url, 1000, 10.0)
    assert sum(sent) < 32 << 20


@pytest.mark.parametrize("answer", [b"", b"\x80\x04cposix\nsystem\n", b"HTTP/1.1 x y\r\n\r\n"])
def test_an_answer_other_than_http_is_a_value_error(answer: bytes) -> None:
    with (
        server(lambda connection: connection.sendall(answer)) as (url, _),
        pytest.raises((OSError, ValueError)),
    ):
        fetch(url, 1000, 5.0)


def test_headers_do_not_follow_a_redirect() -> None:
    def nothing(connection: socket.socket) -> None:
        pass

    with server(nothing) as (other, heads_of_other):
        redirect = f"HTTP/1.1 307 No\r\nLocation: {other}/\r\nContent-Length: 0\r\n\r\n".encode()
        with server(lambda connection: connection.sendall(redirect)) as (url, heads):
            secret = {"Authorization": "Bearer secret"}
            status, body = fetch(f"{url}/a/b", 1000, 5.0, content=b"{}", headers=secret)
    assert (status, body) == (307, b"")
    assert heads[0].startswith(b"POST /a/b HTTP/1.1") and b"Bearer secret" in heads[0]
    assert heads_of_other == []
