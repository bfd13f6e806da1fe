"""Receives the bytes of one answer: notes each piece with its time, to be parsed afterwards.

A model that makes 48 streams a token every 7 ms sends 7,000 events a second. A client that parsed
them on arrival would measure itself.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import cast

# A piece of an answer, after the time of ``time.perf_counter`` at which it arrived.
Piece = tuple[float, bytes]

# A longer answer ends its request with an error.
MAX_ANSWER_BYTES = 64 << 20
_LAST_CHUNK = b"0\r\n\r\n"
_LINE_AND_LAST_CHUNK = b"\r\n" + _LAST_CHUNK
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,12})\r\n", re.IGNORECASE)


class Reception(asyncio.Protocol):
    """One connection with one request.

    Attributes:
        sent: when the request was written.
        events: number of lines that begin an event; at least the number of whole events.
        ended: done when the answer is whole, or when the server or :meth:`cut` has closed the
            connection.
        cut_reason: reason given to :meth:`cut`; None if it was not called.
    """

    def __init__(self) -> None:
        self.sent = 0.0
        self.events = 0
        self.cut_reason: str | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pieces: list[Piece] = []
        self._size = 0
        self._whole_size = MAX_ANSWER_BYTES
        self._transport: asyncio.Transport | None = None

    @property
    def pieces(self) -> list[Piece]:
        return self._pieces

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have another base class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.add_piece(time.perf_counter(), data)

    def add_piece(self, at: float, data: bytes) -> None:
        """Note data that arrived at a time of ``time.perf_counter``."""
        if self._pieces:
            at = max(at, self._pieces[-1][0])
        self._pieces.append((at, data))
        self.events += data.count(b"data:")
        self._size += len(data)
        if len(self._pieces) == 1:
            self._whole_size = _whole_size(data)
        if self._size >= MAX_ANSWER_BYTES:
            self.cut("too long")
        elif (
            self._size >= self._whole_size
            # A last chunk of size 0. No line of an event of JSON looks like it.
            or data.endswith(_LINE_AND_LAST_CHUNK)
            or data == _LAST_CHUNK
        ):
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def send_request(self, request: bytes) -> None:
        assert self._transport is not None
        self.sent = time.perf_counter()
        self._transport.write(request)

    def cut(self, reason: str = "cut") -> None:
        """Close the connection. The pieces so far count."""
        if not self.ended.done():
            self.cut_reason = reason
            self._finish()

    def _finish(self) -> None:
        assert self._transport is not None
        self._transport.abort()
        if not self.ended.done():
            self.ended.set_result(None)


def _whole_size(data: bytes) -> int:
    """Return the size of an answer if its first piece says so, else the largest allowed size."""
    head, blank, _ = data.partition(b"\r\n\r\n")
    match = _CONTENT_LENGTH.search(head + b"\r\n") if blank else None
    return len(head) + len(blank) + int(match[1]) if match else MAX_ANSWER_BYTES
