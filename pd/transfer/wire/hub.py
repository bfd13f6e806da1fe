"""Opens, accepts and reads the channels of one manager."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from pd.core.errors import TransferError
from pd.core.seldom import Seldom
from pd.core.starvation import Patience
from pd.transfer.wire.channel import Channel, ChannelEvents, DialEvents
from pd.transfer.wire.greeting import GreetingError, IncomingGreeting, RefusedError, greet

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

logger = logging.getLogger(__name__)

_GREETING_SECONDS = 5.0
_DIAL_SECONDS = 2.0
_MAX_BACKOFF = 1.0
MAX_PENDING = 256
# Channels whose end would be a false promise.
_KEPT: list[Channel] = []


class PendingConnection:
    """An accepted connection whose greeting is not complete."""

    def __init__(self, sock: socket.socket, origin: str, welcome: IncomingGreeting) -> None:
        self.sock, self.origin, self.welcome = sock, origin, welcome
        self.since = time.monotonic()
        self.head = bytearray()


class Dial:
    """Tries to open a channel until it succeeds, is refused or is cancelled."""

    def __init__(
        self, hub: ChannelHub, peer: str, address: tuple[str, int], events: DialEvents, delay: float
    ) -> None:
        self._hub, self._peer, self._address, self._events = hub, peer, address, events
        self._cancelled = threading.Event()
        self._delay = delay
        threading.Thread(target=self._run, name=f"pd-dial-{hub.service}", daemon=True).start()

    def cancel(self) -> None:
        """Try no more. A channel that is just being opened may still be announced."""
        self._cancelled.set()

    def _run(self) -> None:
        while not self._cancelled.wait(self._delay):
            channel = self._connect()
            if channel is not None:
                self._hub.adopt(channel, self._events)
                return
            self._delay = min(_MAX_BACKOFF, self._delay * 2 or 0.05)

    def _connect(self) -> Channel | None:
        hub, peer = self._hub, self._peer
        try:
            sock = socket.create_connection(self._address, timeout=_DIAL_SECONDS)
        except (OSError, UnicodeError) as error:
            # UnicodeError: a host that cannot be a name.
            logger.info("cannot reach %s at %s:%d: %s", peer, *self._address, error)
            if isinstance(error, ConnectionRefusedError):
                self._tell(TransferError(f"{peer} is gone: nobody listens at its address"))
            return None
        try:
            greet(sock, hub.service, hub.instance, peer, hub.key, hub.patience)
            return hub.channel(sock, peer, inbound=False)
        except RefusedError as error:
            sock.close()
            logger.warning("%s", error)
            self._cancelled.set()
            self._tell(error, final=True)
            return None
        except OSError as error:
            sock.close()
            logger.info("cannot open a %s channel to %s: %s", hub.service, peer, error)
            return None

    def _tell(self, error: TransferError, *, final: bool = False) -> None:
        self._hub.call(lambda: self._events.unreachable(error, final))


class ChannelHub:
    """One thread that accepts, greets and reads; another for each channel while it is dialled.

    Args:
        service: the backend's name; both ends must have the same.
        key: sub-key of data connections (:func:`pd.transfer.wire.greeting.transfer_key`).
        decoder: of the messages that peers may send.
        accept: told of each inbound channel, by the hub's thread; returns its owner.
        patience: extends the limits of greetings.
    """

    def __init__(
        self,
        service: str,
        instance_id: str,
        host: str,
        key: bytes | None,
        decoder: msgspec.msgpack.Decoder[Any],
        accept: Callable[[Channel], ChannelEvents],
        patience: Patience | None = None,
    ) -> None:
        self.service, self.instance, self.key = service, instance_id, key
        self.patience = patience or Patience()
        self._decoder = decoder
        self._accept_channel = accept
        self._pending: set[PendingConnection] = set()
        self._channels: set[Channel] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = False
        self._seldom = Seldom(logger)
        self.refused = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake_reader, self._waker = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name=f"pd-{service}-channels")
        self._thread.daemon = True
        self._thread.start()

    # ---- any thread

    def dial(
        self, peer: str, address: tuple[str, int], events: DialEvents, delay: float = 0.0
    ) -> Dial:
        """Open a channel to D in the background, trying again with growing pauses; the first try
        comes after ``delay`` seconds."""
        return Dial(self, peer, address, events, delay)

    def call(self, what: Callable[[], None]) -> None:
        """Have the hub's thread call something that does not block."""
        self._calls.append(what)
        with contextlib.suppress(OSError):
            # Full: it will wake anyway. Closed: nothing is called any more.
            self._waker.send(b"\0")

    def channel(self, sock: socket.socket, peer: str, *, inbound: bool) -> Channel:
        """Of a connection that was greeted. Raises OSError when that is over already."""
        return Channel(sock, peer, inbound=inbound, decoder=self._decoder, attend=self._attend)

    def adopt(self, channel: Channel, events: DialEvents) -> None:
        """Watch a channel that :class:`Dial` opened."""

        def watch() -> None:
            if self._closing:
                channel.sock.close()
                return
            self._watch(channel)
            channel.events = events
            self._guard(channel, lambda: events.opened(channel))

        self.call(watch)
        if not self._thread.is_alive():
            channel.sock.close()

    def close(self) -> None:
        """Close everything but P's channels that their owners did not close: those stay open for
        the life of the process, since their end would say that P drained."""
        self._closing = True
        self.call(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            for key, mask in self._selector.select(timeout=1.0 if self._pending else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_reader:
                    self._wake_reader.recv(4096)
                elif isinstance(key.data, PendingConnection):
                    self._greet(key.data)
                elif key.data in self._channels:
                    self._serve(key.data, mask)
            while self._calls:
                self._calls.popleft()()
            self._sweep()
        while self._calls:
            self._calls.popleft()()
        for channel in list(self._channels):
            if channel.inbound:
                channel.close()
            elif not channel.closed:
                _KEPT.append(channel)
            self._forget(channel)
        for pending in list(self._pending):
            self._refuse(pending, "this node stopped")
        self._selector.close()
        for sock in (self._listener, self._wake_reader, self._waker):
            sock.close()

    def _sweep(self) -> None:
        is_over, seconds = self.patience.is_over, _GREETING_SECONDS
        for pending in [s for s in self._pending if is_over(s.since, seconds)]:
            self._refuse(pending, f"it did not introduce itself in {seconds:g} s")

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            self._seldom.warn(f"cannot accept a {self.service} channel: {error}")
            # Out of file descriptors: the socket stays readable, so do not spin on it.
            time.sleep(0.01)
            return
        sock.setblocking(False)
        welcome = IncomingGreeting(self.service, self.instance, self.key)
        pending = PendingConnection(sock, f"{address[0]}:{address[1]}", welcome)
        self._pending.add(pending)
        self._selector.register(sock, selectors.EVENT_READ, pending)
        if len(self._pending) > MAX_PENDING:
            first = min(self._pending, key=lambda s: s.since)
            self._refuse(first, "too many connections wait for their greeting")

    def _greet(self, pending: PendingConnection) -> None:
        if pending not in self._pending:
            return
        try:
            data = pending.sock.recv(pending.welcome.needs - len(pending.head))
            pending.head += data
            if not data:
                self._refuse(pending, "closed by the peer")
            elif len(pending.head) == pending.welcome.needs:
                answer, refusal = pending.welcome.feed(bytes(pending.head))
                pending.head.clear()
                # A fresh connection's send buffer is empty, so this cannot come up short.
                pending.sock.send(answer)
                if refusal:
                    self._refuse(pending, refusal)
                elif not pending.welcome.needs:
                    self._welcome(pending)
        except BlockingIOError:
            return
        except (GreetingError, OSError) as error:
            self._refuse(pending, str(error))

    def _welcome(self, pending: PendingConnection) -> None:
        self._pending.discard(pending)
        self._selector.unregister(pending.sock)
        peer = pending.welcome.peer
        try:
            channel = self.channel(pending.sock, peer, inbound=True)
        except OSError as error:
            logger.info("lost the %s channel of %s: %s", self.service, peer, error)
            pending.sock.close()
            return
        self._watch(channel)
        self._guard(channel, lambda: self._own(channel))

    def _own(self, channel: Channel) -> None:
        channel.events = self._accept_channel(channel)

    def _refuse(self, pending: PendingConnection, reason: str) -> None:
        self.refused += 1
        self._seldom.warn(f"closed the {self.service} channel of {pending.origin}: {reason}")
        self._pending.discard(pending)
        self._selector.unregister(pending.sock)
        pending.sock.close()

    def _watch(self, channel: Channel) -> None:
        self._channels.add(channel)
        self._selector.register(channel.sock, selectors.EVENT_READ, channel)

    def _attend(self, channel: Channel) -> None:
        """A channel has something to write, failed or was closed."""
        self.call(lambda: self._look_after(channel))

    def _look_after(self, channel: Channel) -> None:
        if channel not in self._channels:
            return
        if channel.closed:
            self._forget(channel)
            return
        if channel.failure and not channel.told:
            self._break(channel, channel.failure)
        write = selectors.EVENT_WRITE if channel.wants_to_write else 0
        self._selector.modify(channel.sock, selectors.EVENT_READ | write, channel)

    def _serve(self, channel: Channel, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            channel.write()
            if not channel.wants_to_write:
                self._look_after(channel)
        if not mask & selectors.EVENT_READ or channel not in self._channels:
            return
        messages: list[Any] = []
        reason = ""
        if channel.told:
            reason = channel.discard()
        else:
            try:
                messages, reason = channel.read()
            except ValueError as error:
                self._break(channel, f"it sent no message of ours: {error}")
        for message in messages:
            if channel.told or channel.closed:
                break
            self._deliver(channel, message)
        if reason and channel in self._channels:
            self._ended(channel, reason)

    def _deliver(self, channel: Channel, message: Any) -> None:
        assert channel.events is not None
        events = channel.events
        self._guard(channel, lambda: events.message(channel, message))

    def _guard(self, channel: Channel, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            # Say a CUDA error, or a peer that asks for the impossible: it ends this channel only.
            logger.exception("cannot go on with the %s channel of %s", self.service, channel)
            self._break(channel, str(error))

    def _break(self, channel: Channel, reason: str) -> None:
        """Stop talking, but wait for the peer's end of it if that proves anything."""
        channel.fail(reason)
        channel.stop_sending()
        if channel.told or channel.closed:
            return
        channel.told = True
        logger.warning("gave up the %s channel of %s: %s", self.service, channel, reason)
        self._tell_end(channel, reason, proof=False)
        if not channel.inbound and channel in self._channels:
            self._forget(channel)

    def _ended(self, channel: Channel, reason: str) -> None:
        self._forget(channel)
        if not channel.closed and (channel.proof or not channel.told):
            channel.told = True
            self._tell_end(channel, reason, proof=channel.proof)

    def _tell_end(self, channel: Channel, reason: str, *, proof: bool) -> None:
        if channel.events is None:
            return
        try:
            channel.events.ended(channel, reason, proof)
        except Exception:
            # The thread serves the other channels.
            logger.exception("failed to end the %s channel of %s", self.service, channel)

    def _forget(self, channel: Channel) -> None:
        self._channels.discard(channel)
        self._selector.unregister(channel.sock)
        channel.release()
