"""TLS at a server's end of a connection, between the plain transport and the protocol.

asyncio's own TLS keeps encrypted bytes in buffers that its flow control does not count. It also
hides a connection from the protocol until the handshake is over. Here all written bytes lie in the
plain transport's buffer, and the protocol gets the connection at its beginning. The limits of
:mod:`pd.net.connections` therefore cover both.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pd.net.turns import Turns

logger = logging.getLogger(__name__)

# OpenSSL returns at most one record at a time, up to 16 KiB.
_READ_BYTES = 16 << 10
# A record begins with its type, version and length.
_HEADER_BYTES = 5
_RECORD_TYPES, _MAJOR_VERSION = range(20, 24), 3
# Longest record, TLS 1.2's encryption included.
_RECORD_BYTES = _HEADER_BYTES + (16 << 10) + (2 << 10)
# Bytes that a client may send in records without plaintext. Key updates are the most expensive
# bytes a client can send. Each byte of plaintext pays for `_SILENT_PER_PLAIN` of them, so a single
# byte between two floods does not reset the count.
_SILENT_BYTES = 4 << 10
_SILENT_PER_PLAIN = 32
# Limit on a client's side of a handshake, which usually takes less than 3 KiB.
_HANDSHAKE_BYTES = 32 << 10


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """The transport of a server's protocol, and itself the protocol of the plain transport.

    We give OpenSSL one record at a time. Otherwise it would process any number of records without
    plaintext in a single call.
    """

    def __init__(self, turns: Turns, context: ssl.SSLContext, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._turns = turns
        self._context = context
        self._protocol = protocol
        self._plain: asyncio.Transport
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        # We make this when the first bytes arrive, because it takes memory.
        self._tls: ssl.SSLObject | None = None
        self._is_established = self._is_closing = False
        # Received bytes that OpenSSL has not had yet.
        self._encrypted = bytearray()
        # Bytes of records without plaintext, less those paid for by plaintext.
        self._silent_bytes = 0
        # Whether a processing step is under way, and whether the protocol wants to
        # read.
        self._is_busy, self._is_wanted = False, True

    # ---- protocol of the plain transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast("asyncio.Transport", transport)
        self._protocol.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._encrypted.clear()
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def data_received(self, data: bytes) -> None:
        self._encrypted += data
        self._process_soon()

    def _process_soon(self) -> None:
        """Process received records, now or in this connection's turn."""
        if self._is_busy or self.is_closing():
            return
        self._is_busy = True
        if not self._turns.run_step(self._process_records):
            self._update_reading()

    def _process_records(self, end: float) -> bool:
        """Decrypt records for the protocol until ``end``. Returns whether we are done."""
        parts: list[bytes] = []
        has_ended = is_late = False
        while not (has_ended or is_late or self.is_closing()) and (record := self._next_record()):
            part = self._decrypt_record(record)
            if part:
                parts.append(part)
            has_ended = part == b""
            is_late = time.monotonic() >= end
        self._flush_outgoing()
        if parts and not self.is_closing():
            self._protocol.data_received(b"".join(parts))
        if has_ended:
            self.close()
        if is_late and self._is_wanted and not self.is_closing():
            return False
        self._is_busy = False
        self._update_reading()
        return True

    def _next_record(self) -> bytes | None:
        """Take the next complete record. We pass other bytes on, because OpenSSL refuses them."""
        data = self._encrypted
        size = len(data)
        if size and data[0] in _RECORD_TYPES:
            if size < _HEADER_BYTES:
                return None
            length = _HEADER_BYTES + int.from_bytes(data[3:_HEADER_BYTES], "big")
            if data[1] == _MAJOR_VERSION and size < length <= _RECORD_BYTES:
                return None
            size = min(size, length)
        record = bytes(data[:size])
        del data[:size]
        return record

    def _decrypt_record(self, record: bytes) -> bytes | None:
        """Decrypt a record.

        Returns:
            Its plaintext, None if it has none, empty if the client announced the end of its data.
        """
        self._incoming.write(record)
        try:
            if not self._is_established:
                self._shake_hands()
                return None
            assert self._tls is not None
            part = self._tls.read(_READ_BYTES)
        except ssl.SSLWantReadError:
            limit = _SILENT_BYTES if self._is_established else _HANDSHAKE_BYTES
            self._silent_bytes += len(record)
            if self._silent_bytes > limit:
                self._close_with_alert(
                    f"{self._silent_bytes} bytes of records brought no plaintext"
                )
            return None
        except ssl.SSLError as error:
            self._close_with_alert(error)
            return None
        self._silent_bytes = max(0, self._silent_bytes - _SILENT_PER_PLAIN * len(part))
        return part

    def _shake_hands(self) -> None:
        """Go on with the handshake. Raises SSLError if it needs more bytes or they are wrong."""
        if self._tls is None:
            self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._tls.do_handshake()
        self._is_established, self._silent_bytes = True, 0

    def _update_reading(self) -> None:
        """Read from the client if the protocol wants more and we have processed all records."""
        reads = self._is_wanted and not self._is_busy
        if self._plain.is_closing() or reads == self._plain.is_reading():
            return
        if reads:
            self._plain.resume_reading()
        else:
            self._plain.pause_reading()

    def _flush_outgoing(self) -> None:
        if self._outgoing.pending and not self._plain.is_closing():
            self._plain.write(self._outgoing.read())

    def _close_with_alert(self, reason: object) -> None:
        """Close the connection of a client that violates TLS."""
        logger.debug("closing a connection: %s", reason)
        self._is_closing = True
        self._flush_outgoing()  # sends OpenSSL's alert
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
            while rest:  # one record per turn
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError as error:
            logger.debug("aborting a connection: %s", error)
            self.abort()
            return
        self._flush_outgoing()

    def get_write_buffer_size(self) -> int:
        return self._plain.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._plain.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._plain.set_write_buffer_limits(high, low)

    def is_reading(self) -> bool:
        return self._is_wanted

    def pause_reading(self) -> None:
        self._is_wanted = False
        self._update_reading()

    def resume_reading(self) -> None:
        self._is_wanted = True
        self._update_reading()
        if self._encrypted:
            self._process_soon()

    def close(self) -> None:
        if self.is_closing():
            return
        self._is_closing = True
        if self._is_established:
            assert self._tls is not None
            # Announce the end of our data, without waiting for the client to do the same.
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush_outgoing()
        self._plain.close()

    def abort(self) -> None:
        self._is_closing = True
        self._plain.abort()
