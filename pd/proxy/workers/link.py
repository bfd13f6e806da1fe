"""A stream socket for messages and replies between two processes of a proxy.

The parent creates both ends before it starts the child, so nobody else can reach them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

M = TypeVar("M")
R = TypeVar("R")

_LENGTH_BYTES = 4


class LinkClosedError(Exception):
    """The process at the other end is gone."""


class _Frame(msgspec.Struct, array_like=True):
    """A message, or with ``is_reply`` a reply. ``number`` 0: the sender wants no reply."""

    number: int
    is_reply: bool
    body: msgspec.Raw


_FRAMES = msgspec.msgpack.Decoder(_Frame)


class ProcessLink(Generic[M]):
    """One end. Runs on the event loop.

    We handle messages in order, so ``on_message`` must not wait. It gets a message and a function
    to send the reply, at once or later.

    Args:
        incoming: decodes messages from the other end.
    """

    def __init__(
        self,
        sock: socket.socket,
        incoming: msgspec.msgpack.Decoder[M],
        on_message: Callable[[M, Callable[[object], None]], None],
    ) -> None:
        self._socket = sock
        self._incoming = incoming
        self._on_message = on_message
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def open_streams(self) -> None:
        """Prepare for sending."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)

    async def handle_messages(self) -> None:
        """Handle messages until the other process is gone. Call :meth:`open_streams` before."""
        assert self._writer is not None
        reader = self._reader
        try:
            # The death of the other process may also reset the connection.
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
                    self._handle_frame(await reader.readexactly(length))
        finally:
            self._writer.close()
            self._writer = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(LinkClosedError)

    def send_message(self, message: object) -> None:
        """Send a message that needs no reply."""
        self._send_frame(_Frame(0, False, _encode_body(message)))

    async def send_request(self, message: object, reply: msgspec.msgpack.Decoder[R]) -> R:
        """Send a message and wait for the reply. Raises LinkClosedError."""
        if self._writer is None:
            raise LinkClosedError
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send_frame(_Frame(number, False, _encode_body(message)))
        try:
            return reply.decode(await future)
        finally:
            del self._waiting[number]

    def _send_frame(self, frame: _Frame) -> None:
        if self._writer is not None:
            data = msgspec.msgpack.encode(frame)
            self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def _handle_frame(self, data: bytes) -> None:
        frame = _FRAMES.decode(data)
        if not frame.is_reply:

            def reply(value: object) -> None:
                if frame.number:
                    self._send_frame(_Frame(frame.number, True, _encode_body(value)))

            self._on_message(self._incoming.decode(frame.body), reply)
        elif (future := self._waiting.get(frame.number)) is not None and not future.done():
            future.set_result(frame.body)


def _encode_body(message: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(message))
