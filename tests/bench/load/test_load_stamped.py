"""The kernel says when the bytes of an answer came, and requests are sent whole."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from pd.bench.load import stamped
from pd.bench.load.target import EndpointAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SO_TIMESTAMPNS = 35
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


def serve_once(answer: Callable[[socket.socket], None]) -> EndpointAddress:
    """A server for one connection."""
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listening.accept()
        with connection, listening:
            answer(connection)

    threading.Thread(target=run, daemon=True).start()
    return EndpointAddress("127.0.0.1", listening.getsockname()[1], False, "/")


@contextlib.contextmanager
def kernel_stamps() -> Iterator[None]:
    """A kernel that stamps what arrives.

    Linux begins to stamp arrivals some time after the first socket asked for it. What arrives
    before has the time at which it was read.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        asking.bind(("127.0.0.1", 0))
        deadline = time.monotonic() + 30
        while True:
            asking.sendto(b"when?", asking.getsockname())
            sent_by = time.time()
            time.sleep(0.01)
            _, [(_, _, stamp)], _, _ = asking.recvmsg(10, 100)
            seconds, nanoseconds = struct.unpack("qq", stamp)
            if seconds + nanoseconds * 1e-9 <= sent_by:
                break
            assert time.monotonic() < deadline, "the kernel stamps nothing"
        yield


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux stamps received data")
def test_bytes_came_when_they_came_however_late_the_client_reads_them() -> None:
    sent = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(HEAD + b"ok")
        sent.set()

    async def ask() -> tuple[float, float]:
        reception = await serve_once(answer).connect()
        reception.send_request(b"hello")
        # The loop is blocked while the answer comes, as if the process had no processor.
        assert sent.wait(10)
        arrived_before = time.perf_counter()
        time.sleep(0.05)
        await reception.ended
        return reception.pieces[0][0], arrived_before

    with kernel_stamps():
        at, arrived_before = asyncio.run(ask())
    # The kernel's clock is another one, whose offset is known to some microseconds.
    assert at <= arrived_before + 0.001


def test_a_request_that_the_socket_cannot_take_at_once_is_sent_whole() -> None:
    request = bytes(range(256)) * 40_000
    received = bytearray()

    def answer(connection: socket.socket) -> None:
        while len(received) < len(request):
            received.extend(connection.recv(1 << 20))
        connection.sendall(HEAD + b"ok")

    async def ask() -> bytes:
        reception = await serve_once(answer).connect()
        reception.send_request(request)
        await reception.ended
        return b"".join(data for _, data in reception.pieces)

    assert asyncio.run(ask()).endswith(b"ok")
    assert received == request


def test_a_server_that_hangs_up_ends_the_answer() -> None:
    async def ask() -> list[tuple[float, bytes]]:
        reception = await serve_once(lambda connection: None).connect()
        reception.send_request(b"hello")
        await reception.ended
        reception.cut()
        return reception.pieces

    assert asyncio.run(ask()) == []


def test_a_request_on_a_connection_that_the_server_closed_before_is_not_answered() -> None:
    """Its transport has closed the socket by then, and the run must go on."""

    async def ask() -> list[tuple[float, bytes]]:
        reception = await serve_once(lambda connection: None).connect()
        await reception.ended
        reception.send_request(b"hello")
        return reception.pieces

    assert asyncio.run(ask()) == []


@pytest.mark.parametrize("lost_at", [1, 2])
def test_a_processor_lost_between_two_clocks_does_not_count(
    monkeypatch: pytest.MonkeyPatch, lost_at: int
) -> None:
    elapsed, readings = 0.0, 0

    def passed() -> float:
        """A microsecond goes by with each reading, and once the process waits for 20 ms."""
        nonlocal elapsed, readings
        elapsed += 0.02 if readings == lost_at else 1e-6
        readings += 1
        return elapsed

    monkeypatch.setattr(stamped.time, "perf_counter", passed)
    monkeypatch.setattr(stamped.time, "time", lambda: 1e9 + passed())
    assert stamped.unix_minus_counter() == pytest.approx(1e9, abs=3e-6)
