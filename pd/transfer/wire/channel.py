"""The side channel of one-sided backends: an authenticated connection from P to D with messages.

What the end of a channel proves, and why:

- P closes a channel only when nothing of it can write into D's memory any more. So D knows by a FIN
  or a reset that P drained or that P's process is gone (``proof``): the kernel of a killed process
  sends the same. A time-out or an unreachable peer proves nothing.
- D does not close a channel over which P may still write: :meth:`Channel.half_close` sends D's FIN,
  P drains and closes, and the channel ends on D with proof. Only a channel for which D never made
  memory is closed by D at once.
- A peer that stays silent for about 20 minutes although asked (TCP keep-alive) ends the channel
  without proof.

The opening is authenticated (:mod:`pd.transfer.wire.greeting`); messages are neither encrypted nor
signed, and the receiver of a message has to check what it claims.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.errors import TransferError

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 << 10
# A peer that does not read its messages, which are answers to its own, is broken.
MAX_BACKLOG_BYTES = 4 << 20
_READ_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")
_KEEP_ALIVE_SECONDS, _KEEP_ALIVE_PROBES = 60, 20
# The sockets of a killed process close before its GPU context. Stores and copies between GPUs that
# it had launched end within this time or with the context.
LAST_WRITE_SECONDS = 2.0
# Memory that a peer may write stays in quarantine for this time after an end that proves nothing. A
# kernel sends unacknowledged bytes again for a shorter time.
QUARANTINE_SECONDS = 20 * 60.0


class MessageDecoder(Protocol):
    """Decodes one message of a few types."""

    def decode(self, data: bytearray, /) -> msgspec.Struct:
        """Raises ValueError (or a kind of it, from msgspec) if it is none of them."""


class ChannelEvents(Protocol):
    """Events of a channel, for its owner. The hub's thread calls them, which must not be held up
    for longer than copies in memory take.

    An exception breaks the channel as a bad message does.
    """

    def message(self, channel: Channel, message: msgspec.Struct) -> None:
        """One of the messages that the hub's decoder knows has arrived.

        Raises ValueError for one that this side does not take.
        """

    def ended(self, channel: Channel, reason: str, proof: bool) -> None:
        """The channel has ended; nothing is sent or delivered from now on.

        ``proof`` on D: P drained or is gone. Called a second time, with proof, if that comes after
        an end without. On P the connection stays open until :meth:`Channel.close`.
        """


class DialEvents(ChannelEvents, Protocol):
    """Events of a channel that this side opens."""

    def opened(self, channel: Channel) -> None:
        """The peer accepted the channel. An owner that does not want it any more closes it."""

    def unreachable(self, error: TransferError, final: bool) -> None:
        """The peer cannot be reached or, if ``final``, refuses the channel; then no other try is
        made."""


class MessageReader:
    """Takes a stream of bytes apart into messages, each behind its length."""

    def __init__(self, decoder: MessageDecoder) -> None:
        self._decoder = decoder
        self._data = bytearray()

    def feed(self, data: bytes) -> list[msgspec.Struct]:
        """Messages that are complete with these bytes. Raises ValueError if they are none."""
        self._data += data
        messages, start = [], 0
        while len(self._data) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data, start)
            if size > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {size} bytes, more than {MAX_MESSAGE_BYTES}")
            stop = start + _LENGTH.size + size
            if stop > len(self._data):
                break
            messages.append(self._decoder.decode(self._data[start + _LENGTH.size : stop]))
            start = stop
        del self._data[:start]
        return messages


class Channel:
    """One connection. Made by :class:`pd.transfer.wire.hub.ChannelHub`, which reads it.

    Attributes:
        peer: instance id of the other side, proven by the greeting.
        inbound: the peer opened the channel, so that this node is D.
        origin: the other side's address, for logs.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        *,
        inbound: bool,
        decoder: MessageDecoder,
        attend: Callable[[Channel], None],
    ) -> None:
        sock.setblocking(False)
        set_options(sock)
        self.peer, self.inbound = peer, inbound
        address = sock.getpeername()
        self.origin = f"{address[0]}:{address[1]}"
        self.sock = sock
        self.events: ChannelEvents | None = None
        self._reader, self._attend = MessageReader(decoder), attend
        # Guards the sending half and what was seen of errors: an error is reported only once, to
        # whichever call comes first, and later reads look like a proper end.
        self._lock = threading.Lock()
        self._output = bytearray()
        self._mute = False
        self._doubt = ""
        self.failure = ""
        self.closed = False
        self.end_reported = False
        self.over = False

    def __str__(self) -> str:
        return f"{self.peer} ({self.origin})"

    # ---- any thread

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; never blocks. It is dropped if the channel has ended, of which the owner
        learns by ``ended``."""
        frame = _frame(message)
        with self._lock:
            if self._mute:
                return
            idle = not self._output
            self._output += frame
            if idle:
                self._flush()
            if len(self._output) > MAX_BACKLOG_BYTES:
                self.fail("it does not read its messages")
        if self._output or self.failure:
            self._attend(self)

    def give_up(self, reason: str) -> None:
        """End the channel because of what the peer did, as if it had sent a bad message."""
        self.fail(reason)
        self._attend(self)

    def half_close(self) -> None:
        """D: ask P to drain and close. P's close is reported by ``ended``."""
        assert self.inbound, "P's FIN says that it drained"
        with self._lock:
            self._shut(socket.SHUT_WR)

    def close(self, last: msgspec.Struct | None = None) -> None:
        """End the channel for good; ``ended`` is not called any more. On P this is the promise
        that nothing can write into D's memory. Idempotent.

        Args:
            last: a message that is sent before, also to a peer that sends nothing any more; dropped
                if it would have to wait.
        """
        with self._lock:
            if last is not None and not self.closed and not self._output:
                with contextlib.suppress(OSError):
                    self.sock.send(_frame(last))
            self.closed = True
            if self.over:
                self.sock.close()
            else:
                self._shut(socket.SHUT_RDWR)
        self._attend(self)

    # ---- the hub's thread

    @property
    def wants_to_write(self) -> bool:
        return bool(self._output)

    def write(self) -> None:
        with self._lock:
            self._flush()

    def read(self) -> tuple[list[msgspec.Struct], str]:
        """Messages that have arrived, and the reason if the stream has ended.

        Raises ValueError (or a kind of it, from msgspec) when the data are no message.
        """
        data, end = self._receive()
        return self._reader.feed(data), end

    def discard(self) -> str:
        """Drop what comes after a failure; returns the reason if the stream has ended."""
        return self._receive()[1]

    @property
    def proof(self) -> bool:
        """Whether the peer ended the stream; valid once it has ended."""
        return not self._doubt

    def fail(self, reason: str) -> None:
        """Break the channel; the hub's thread tells the owner."""
        self.failure = self.failure or reason

    def stop_sending(self) -> None:
        """Send nothing after a failure. D sends a FIN, which asks P to close; P must not, since its
        FIN would promise that it drained."""
        with self._lock:
            if self.inbound:
                self._shut(socket.SHUT_WR)
            self._mute = True
            self._output.clear()

    def release(self) -> None:
        """The hub no longer watches the connection; :meth:`close` closes it."""
        with self._lock:
            self.over = self._mute = True
            self._output.clear()
            if self.closed or self.inbound:
                self.sock.close()

    def _receive(self) -> tuple[bytes, str]:
        with self._lock:
            try:
                data = self.sock.recv(_READ_BYTES)
            except BlockingIOError:
                return b"", ""
            except OSError as error:
                self._note(error)
                data = b""
            return data, "" if data else self._doubt or "closed by the peer"

    # ---- with the lock held

    def _flush(self) -> None:
        try:
            while self._output:
                del self._output[: self.sock.send(self._output)]
        except BlockingIOError:
            return
        except OSError as error:
            self._note(error)
            self._mute = True
            self._output.clear()

    def _note(self, error: OSError) -> None:
        """Remember an error that does not prove that the peer answered."""
        if not isinstance(error, ConnectionResetError | BrokenPipeError):
            self._doubt = self._doubt or error.strerror or str(error)

    def _shut(self, how: int) -> None:
        self._mute = True
        self._output.clear()
        with contextlib.suppress(OSError):
            self.sock.shutdown(how)


def _frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    assert len(body) <= MAX_MESSAGE_BYTES, f"a message of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


def set_options(sock: socket.socket) -> None:
    """No delay for small messages, and a limit to how long a silent peer is waited for."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_PROBES)
