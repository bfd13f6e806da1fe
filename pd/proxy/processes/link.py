"""A stream socket over which two processes of one proxy send each other messages and replies.

Both ends are created by the parent before it starts the child, so nobody else can reach them.
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
    """A message, or with ``is_reply`` the reply to one; ``number`` 0: none is wanted."""

    number: int
    is_reply: bool
    body: msgspec.Raw


_FRAMES = msgspec.msgpack.Decoder(_Frame)


class ProcessLink(Generic[M]):
    """One end. Everything runs on the event loop.

    Messages are handled in the order in which they were sent, so ``on_message`` does not wait: it
    is called with a message and a function that takes the reply, then or later.

    Args:
        incoming: of the messages that come.
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

    async def open(self) -> None:
        """Make it possible to send."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)

    async def run(self) -> None:
        """Handle what comes until the other process is gone. Call :meth:`open` before."""
        assert self._writer is not None
        reader = self._reader
        try:
            # A connection that the other end's death resets has ended, too.
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
                    self._handle(await reader.readexactly(length))
        finally:
            self._writer.close()
            self._writer = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(LinkClosedError)

    def tell(self, message: object) -> None:
        """Send a message that needs no reply."""
        self._send(_Frame(0, False, _encode(message)))

    async def ask(self, message: object, reply: msgspec.msgpack.Decoder[R]) -> R:
        """Send a message and wait for its reply. Raises LinkClosedError."""
        if self._writer is None:
            raise LinkClosedError
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(_Frame(number, False, _encode(message)))
        try:
            return reply.decode(await future)
        finally:
            del self._waiting[number]

    def _send(self, frame: _Frame) -> None:
        if self._writer is not None:
            data = msgspec.msgpack.encode(frame)
            self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def _handle(self, data: bytes) -> None:
        frame = _FRAMES.decode(data)
        if not frame.is_reply:

            def reply(value: object) -> None:
                if frame.number:
                    self._send(_Frame(frame.number, True, _encode(value)))

            self._on_message(self._incoming.decode(frame.body), reply)
        elif (future := self._waiting.get(frame.number)) is not None and not future.done():
            future.set_result(frame.body)


def _encode(message: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(message))
