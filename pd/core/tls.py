"""TLS at a server's end of a connection, between the plain transport and the protocol.

asyncio's own TLS keeps what it has encrypted in buffers that its flow control does not count, and
shows the protocol no connection before its handshake is over. Here everything that was written lies
in the plain transport's buffer, and the protocol has the connection from its beginning, so that the
limits of :mod:`pd.core.connections` hold for both.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# One call reads so much: OpenSSL returns no more than a record, which has 16 KiB.
_READ_BYTES = 16 << 10
# Handshakes take so long of a turn of the event loop; a signature with an RSA key takes about a
# millisecond.
_HANDSHAKE_SECONDS = 0.005


class Handshakes:
    """The handshakes of one server. They take turns, so that a thousand at once do not keep the
    event loop from everything else."""

    def __init__(self, context: Callable[[], ssl.SSLContext]) -> None:
        """``context`` returns that of a connection which begins."""
        self.context = context
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def add(self, step: Callable[[], None]) -> None:
        """Have the event loop call ``step`` soon."""
        self._waiting.append(step)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        end = time.monotonic() + _HANDSHAKE_SECONDS
        try:
            while self._waiting and time.monotonic() < end:
                self._waiting.popleft()()
        finally:
            self._schedule()


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """The transport of a server's protocol, and itself the protocol of the plain transport."""

    def __init__(self, handshakes: Handshakes, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._handshakes = handshakes
        self._context = handshakes.context()
        self._protocol = protocol
        self._plain: asyncio.Transport
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        # It takes memory, so it is made when the first bytes come.
        self._tls: ssl.SSLObject | None = None
        self._is_established = self._is_closing = False

    # ---- protocol of the plain transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast("asyncio.Transport", transport)
        self._protocol.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if self._is_established:
            self._receive()
        else:
            self._plain.pause_reading()
            self._handshakes.add(self._shake_hands)

    def _shake_hands(self) -> None:
        if self.is_closing():
            return
        if self._tls is None:
            self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
            return
        else:
            self._is_established = True
        self._flush()
        if self.is_closing():  # the client was gone when that was written
            return
        self._plain.resume_reading()
        if self._is_established:
            self._receive()

    def _receive(self) -> None:
        """Give the protocol what has come."""
        assert self._tls is not None
        parts: list[bytes] = []
        has_ended = False
        try:
            while part := self._tls.read(_READ_BYTES):
                parts.append(part)
            has_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._flush()
        if parts:
            self._protocol.data_received(b"".join(parts))
        if has_ended:
            self.close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._plain.write(self._outgoing.read())

    def _fail(self, error: ssl.SSLError) -> None:
        """Close the connection of a client that does not speak TLS as it should."""
        logger.debug("a connection is closed: %s", error)
        self._is_closing = True
        self._flush()  # an alert says why
        self._plain.close()

    # ---- transport of the protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return self._context
        return self._plain.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._is_closing or self._plain.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_established or self.is_closing():
            return
        assert self._tls is not None
        rest = memoryview(data)
        try:
            while rest:  # a record of each turn
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError as error:
            logger.debug("a connection is ended: %s", error)
            self.abort()
            return
        self._flush()

    def get_write_buffer_size(self) -> int:
        return self._plain.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._plain.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._plain.set_write_buffer_limits(high, low)

    def is_reading(self) -> bool:
        return self._plain.is_reading()

    def pause_reading(self) -> None:
        self._plain.pause_reading()

    def resume_reading(self) -> None:
        self._plain.resume_reading()

    def close(self) -> None:
        if self.is_closing():
            return
        self._is_closing = True
        if self._is_established:
            assert self._tls is not None
            # Says that nothing follows, and does not wait for the client to say so.
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()
        self._plain.close()

    def abort(self) -> None:
        self._is_closing = True
        self._plain.abort()
