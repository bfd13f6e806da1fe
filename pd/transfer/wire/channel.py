"""The side channel of one-sided backends: an authenticated message connection from P to D.

The end of a channel proves something:

- P closes a channel only when none of its writes can reach D's memory any more. So a FIN or a reset
  proves to D (``proof``) that P drained or that P's process is gone, because the kernel of a killed
  process sends the same. A time-out or an unreachable peer proves nothing.
- D does not close a channel while P may still write. :meth:`Channel.half_close` sends D's FIN, P
  drains and closes, and the channel ends on D with proof. D closes a channel at once only if it
  never made memory for it.
- If a peer stays silent for about 20 minutes (TCP keep-alive), the channel ends without proof.

We authenticate the start of a channel (:mod:`pd.transfer.wire.greeting`). Messages are neither
encrypted nor signed, so you have to check the contents of every message you receive.
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
# Messages to a peer answer its own, so a peer that does not read them is broken.
MAX_BACKLOG_BYTES = 4 << 20
_READ_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")
_KEEP_ALIVE_SECONDS, _KEEP_ALIVE_PROBES = 60, 20
# The sockets of a killed process close before its GPU context. Its launched stores and copies
# between GPUs end within this time or with the context.
LAST_WRITE_SECONDS = 2.0
# After an end without proof, memory that the peer may write stays in quarantine for this time. A
# kernel gives up on unacknowledged bytes earlier.
QUARANTINE_SECONDS = 20 * 60.0


class MessageDecoder(Protocol):
    """Decodes one message of a few types."""

    def decode(self, data: bytearray, /) -> msgspec.Struct:
        """Raises ValueError (or a subclass, from msgspec) if it is none of them."""


class ChannelEvents(Protocol):
    """Events of a channel, for its owner.

    The hub's thread makes these calls, so do not block it for longer than copies in memory take. An
    exception breaks the channel as a bad message does.
    """

    def on_message(self, channel: Channel, message: msgspec.Struct) -> None:
        """Handle a message of one of the decoder's types. Raises ValueError if this side does not
        take it."""

    def on_ended(self, channel: Channel, reason: str, proof: bool) -> None:
        """Handle the channel's end. We send and deliver nothing more.

        ``proof`` on D: P drained or is gone. If proof follows an end without proof, we call this a
        second time. On P the connection stays open until :meth:`Channel.close`.
        """


class DialEvents(ChannelEvents, Protocol):
    """Events of a channel opened by this side."""

    def on_opened(self, channel: Channel) -> None:
        """The peer accepted the channel. If you do not want it any more, close it."""

    def on_unreachable(self, error: TransferError, final: bool) -> None:
        """The peer cannot be reached. If ``final``, it refuses the channel and we try no more."""


class MessageReader:
    """Divides a stream of bytes into messages. Each follows its length."""

    def __init__(self, decoder: MessageDecoder) -> None:
        self._decoder = decoder
        self._data = bytearray()

    def feed_bytes(self, data: bytes) -> list[msgspec.Struct]:
        """Return the messages completed by these bytes. Raises ValueError if they are invalid."""
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
    """One connection. :class:`pd.transfer.wire.hub.ChannelHub` makes and reads it.

    Attributes:
        peer: instance id of the other side, proven by the greeting.
        inbound: the peer opened the channel, so this node is D.
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
        # Guards the sending half and the errors seen. The kernel reports an error only once, to
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
        """Queue a message. Never blocks. If the channel has ended, we drop the message and the
        owner learns of the end by ``on_ended``."""
        frame = _encode_frame(message)
        with self._lock:
            if self._mute:
                return
            idle = not self._output
            self._output += frame
            if idle:
                self._flush_output()
            if len(self._output) > MAX_BACKLOG_BYTES:
                self.mark_failed("it does not read its messages")
        if self._output or self.failure:
            self._attend(self)

    def give_up(self, reason: str) -> None:
        """End the channel for the peer's fault, as if it had sent a bad message."""
        self.mark_failed(reason)
        self._attend(self)

    def half_close(self) -> None:
        """D: ask P to drain and close. ``on_ended`` reports P's close."""
        assert self.inbound, "P's FIN says that it drained"
        with self._lock:
            self._shut_down(socket.SHUT_WR)

    def close(self, last: msgspec.Struct | None = None) -> None:
        """End the channel for good, without a call of ``on_ended``. Idempotent.

        On P this promises that nothing can write into D's memory any more.

        Args:
            last: a message to send before, even to a peer that sends nothing any more. We drop it
                if it would have to wait.
        """
        with self._lock:
            if last is not None and not self.closed and not self._output:
                with contextlib.suppress(OSError):
                    self.sock.send(_encode_frame(last))
            self.closed = True
            if self.over:
                self.sock.close()
            else:
                self._shut_down(socket.SHUT_RDWR)
        self._attend(self)

    # ---- the hub's thread

    @property
    def wants_to_write(self) -> bool:
        return bool(self._output)

    def write_output(self) -> None:
        with self._lock:
            self._flush_output()

    def read_messages(self) -> tuple[list[msgspec.Struct], str]:
        """Return the arrived messages, and the reason if the stream has ended.

        Raises ValueError (or a subclass, from msgspec) for an invalid message.
        """
        data, end = self._receive_bytes()
        return self._reader.feed_bytes(data), end

    def discard_input(self) -> str:
        """Drop input after a failure. Return the reason if the stream has ended."""
        return self._receive_bytes()[1]

    @property
    def proof(self) -> bool:
        """Whether the peer itself ended the stream. Valid once the stream has ended."""
        return not self._doubt

    def mark_failed(self, reason: str) -> None:
        """Break the channel. The hub's thread tells the owner."""
        self.failure = self.failure or reason

    def stop_sending(self) -> None:
        """Send nothing after a failure.

        D sends a FIN to ask P to close. P must not, because its FIN would promise that it drained.
        """
        with self._lock:
            if self.inbound:
                self._shut_down(socket.SHUT_WR)
            self._mute = True
            self._output.clear()

    def release_socket(self) -> None:
        """Note that the hub has stopped watching the connection. :meth:`close` closes it."""
        with self._lock:
            self.over = self._mute = True
            self._output.clear()
            if self.closed or self.inbound:
                self.sock.close()

    def _receive_bytes(self) -> tuple[bytes, str]:
        with self._lock:
            try:
                data = self.sock.recv(_READ_BYTES)
            except BlockingIOError:
                return b"", ""
            except OSError as error:
                self._note_error(error)
                data = b""
            return data, "" if data else self._doubt or "closed by the peer"

    # ---- with the lock held

    def _flush_output(self) -> None:
        try:
            while self._output:
                del self._output[: self.sock.send(self._output)]
        except BlockingIOError:
            return
        except OSError as error:
            self._note_error(error)
            self._mute = True
            self._output.clear()

    def _note_error(self, error: OSError) -> None:
        """Remember an error that does not prove an answer of the peer."""
        if not isinstance(error, ConnectionResetError | BrokenPipeError):
            self._doubt = self._doubt or error.strerror or str(error)

    def _shut_down(self, how: int) -> None:
        self._mute = True
        self._output.clear()
        with contextlib.suppress(OSError):
            self.sock.shutdown(how)


def _encode_frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    assert len(body) <= MAX_MESSAGE_BYTES, f"a message of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


def set_options(sock: socket.socket) -> None:
    """Send small messages without delay, and limit the wait for a silent peer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_PROBES)
