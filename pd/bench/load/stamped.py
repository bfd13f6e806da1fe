"""Connections whose pieces get the time at which the kernel received them.

A client that waits for a processor reads late. Linux stamps received data (``SO_TIMESTAMPNS``), so
the times of an answer are right all the same. Elsewhere they are those at which the client read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd.bench.load.reception import Reception

# The number is from asm-generic/socket.h, because the ``socket`` module has no name for it.
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("qq")
_READ_BYTES = 1 << 18
# An older stamp cannot belong to the data that we just read.
_MAX_AGE_SECONDS = 60.0


# Try to read the clocks until one reading is this precise, or so many times.
_ENOUGH_SECONDS = 5e-6
_TRIES = 10


def unix_minus_counter() -> float:
    """Return the seconds by which Unix time is ahead of ``time.perf_counter``.

    We cannot read both clocks at once, and a process that loses its processor in between would get
    a wrong answer. So we read one clock twice around the other, several times, and use the
    narrowest reading.
    """
    best, offset = float("inf"), 0.0
    for _ in range(_TRIES):
        before = time.perf_counter()
        unix = time.time()
        after = time.perf_counter()
        if after - before < best:
            best, offset = after - before, unix - (before + after) / 2
        if best < _ENOUGH_SECONDS:
            break
    return offset


async def connect_stamped(host: str, port: int, reception: Reception) -> None:
    """Connect to the first address of a host that accepts. Raises OSError."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            sock.close()
            failure = error
            continue
        except BaseException:
            sock.close()
            raise
        reception.connection_made(StampedTransport(loop, sock, reception))
        return
    raise failure


class StampedTransport(asyncio.Transport):
    """The methods of a transport that a ``Reception`` uses, on one socket."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, reception: Reception
    ) -> None:
        super().__init__()
        self._loop, self._sock, self._reception = loop, sock, reception
        self._unsent = memoryview(b"")
        self._closed = False
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        loop.add_reader(sock, self._read_socket)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send a request; a connection carries only one.

        Does nothing once the connection has ended, because ``Reception.ended`` reports that.
        """
        if self._closed:
            return
        self._unsent = memoryview(data)
        self._send_unsent()

    def _send_unsent(self) -> None:
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # The server hung up. We still read its last words first.
            self._unsent = memoryview(b"")
        if self._unsent:
            self._loop.add_writer(self._sock, self._send_unsent)
        else:
            self._loop.remove_writer(self._sock)

    def _read_socket(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_READ_BYTES, 64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._reception.add_piece(_find_receive_time(ancillary), data)
        else:
            self.abort()

    def abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._loop.call_soon(self._reception.connection_lost, None)


def _find_receive_time(ancillary: list[tuple[int, int, bytes]]) -> float:
    """Return the time of ``time.perf_counter`` at which the kernel received data; now if it has no
    stamp."""
    now = time.perf_counter()
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS) and len(data) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            received: float = seconds + nanoseconds * 1e-9 - unix_minus_counter()
            if 0 <= now - received < _MAX_AGE_SECONDS:
                return received
    return now
