"""Opens, accepts and reads the channels of one manager."""

from __future__ import annotations

import logging
import selectors
import threading
from collections import deque
from typing import TYPE_CHECKING

from pd.core.seldom import Seldom
from pd.core.starvation import Patience
from pd.core.waker import Waker
from pd.transfer.wire.acceptor import Acceptor
from pd.transfer.wire.channel import Channel, ChannelEvents, DialEvents
from pd.transfer.wire.dialler import Dialler, PeerGoneError, longer_pause
from pd.transfer.wire.greeting import PeerRefusedError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    import msgspec

    from pd.core.errors import TransferError
    from pd.transfer.wire.channel import MessageDecoder

logger = logging.getLogger(__name__)

# Channels that stay open until the process ends, since their end would tell the peer that this end
# drained, which it did not.
_KEPT: list[Channel] = []


class Dial:
    """Tries to open a channel until it succeeds, is refused or is cancelled."""

    def __init__(
        self, hub: ChannelHub, peer: str, address: tuple[str, int], events: DialEvents, delay: float
    ) -> None:
        self._hub, self._peer, self._events = hub, peer, events
        self._dialler = Dialler(
            hub.service,
            hub.instance,
            peer,
            address,
            hub.key,
            hub.patience,
            f"{hub.service} channel",
        )
        self._cancelled = threading.Event()
        self._delay = delay

    def start(self) -> None:
        """Begin, on a thread of its own. Raises RuntimeError if the system has none at present."""
        name = f"pd-dial-{self._hub.service}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def cancel(self) -> None:
        """Try no more. A channel that is just being opened may still be announced."""
        self._cancelled.set()

    def _run(self) -> None:
        while not self._cancelled.wait(self._delay):
            channel = self._connect()
            if channel is not None and self._hub.adopt(channel, self._events):
                return
            self._delay = longer_pause(self._delay)

    def _connect(self) -> Channel | None:
        try:
            sock = self._dialler.connect()
        except PeerGoneError as error:
            self._tell(error)
            return None
        except PeerRefusedError as error:
            self._cancelled.set()
            self._tell(error, final=True)
            return None
        if sock is None:
            return None
        try:
            return self._hub.channel(sock, self._peer, inbound=False)
        except OSError as error:
            sock.close()
            logger.info("lost the %s channel to %s: %s", self._hub.service, self._peer, error)
            return None

    def _tell(self, error: TransferError, *, final: bool = False) -> None:
        self._hub.call(lambda: self._events.unreachable(error, final))


class ChannelHub:
    """One thread that accepts, greets and reads; another for each channel while it is dialled.

    Args:
        service: the backend's name; both ends must have the same.
        key: sub-key of data connections (:func:`pd.transfer.wire.greeting.transfer_key`).
        decoder: of the messages that peers may send.
        accept: called with each inbound channel by the hub's thread; returns the owner's events.
        patience: extends the limits of greetings.
    """

    def __init__(
        self,
        service: str,
        instance_id: str,
        host: str,
        key: bytes | None,
        decoder: MessageDecoder,
        accept: Callable[[Channel], ChannelEvents],
        patience: Patience | None = None,
    ) -> None:
        self.service, self.instance, self.key = service, instance_id, key
        self.patience = patience or Patience()
        self._decoder = decoder
        self._accept_channel = accept
        self._channels: set[Channel] = set()
        self._calls: deque[Callable[[], None]] = deque()
        # Dials that no thread could be started for, which this one tries again.
        self._not_begun: list[Dial] = []
        self._closing = False
        self._seldom = Seldom(logger)
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            service,
            instance_id,
            host,
            key,
            self.patience,
            self._selector,
            f"{service} channel",
            self._welcome,
        )
        self.port = self._acceptor.port
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker.drain)
        self._thread = threading.Thread(target=self._run, name=f"pd-{service}-channels")
        self._thread.daemon = True
        self._thread.start()

    # ---- any thread

    @property
    def refused(self) -> int:
        """Connections closed for their greeting, or for want of one."""
        return self._acceptor.refused

    def dial(
        self, peer: str, address: tuple[str, int], events: DialEvents, delay: float = 0.0
    ) -> Dial:
        """Open a channel to D in the background, trying again with growing pauses; the first try
        comes after ``delay`` seconds."""
        dial = Dial(self, peer, address, events, delay)
        if not self._begins(dial):
            self.call(lambda: self._not_begun.append(dial))
        return dial

    def _begins(self, dial: Dial) -> bool:
        try:
            dial.start()
        except RuntimeError as error:
            self._seldom.warn(f"cannot dial a {self.service} peer yet: {error}")
            return False
        return True

    def call(self, what: Callable[[], None]) -> None:
        """Have the hub's thread call a function that does not block."""
        self._calls.append(what)
        self._waker.wake()

    def channel(self, sock: socket.socket, peer: str, *, inbound: bool) -> Channel:
        """The channel of a connection that was greeted. Raises OSError if it is lost."""
        return Channel(sock, peer, inbound=inbound, decoder=self._decoder, attend=self._attend)

    def adopt(self, channel: Channel, events: DialEvents) -> bool:
        """Watch a channel that :class:`Dial` opened. False if that was not possible, so that the
        channel is closed; another try may succeed."""
        settled = threading.Event()
        failed = False

        def watch() -> None:
            nonlocal failed
            if self._closing:
                channel.sock.close()
            elif self._watch(channel):
                channel.events = events
                self._guard(channel, lambda: events.opened(channel))
            else:
                failed = True
            settled.set()

        self.call(watch)
        # NOTE: the thread may have ended before it came to this call.
        while self._thread.is_alive() and not settled.wait(1.0):
            pass
        if not settled.is_set():
            channel.sock.close()
        return not failed

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
            timeout = 1.0 if self._acceptor.pending or self._not_begun else None
            for key, mask in self._selector.select(timeout):
                if callable(key.data):
                    key.data()
                elif key.data in self._channels:
                    self._serve(key.data, mask)
            while self._calls:
                self._calls.popleft()()
            self._acceptor.sweep()
            if self._not_begun:
                self._not_begun = [dial for dial in self._not_begun if not self._begins(dial)]
        while self._calls:
            self._calls.popleft()()
        for channel in list(self._channels):
            if channel.inbound:
                channel.close()
            elif not channel.closed:
                _KEPT.append(channel)
            self._forget(channel)
        self._acceptor.close()
        self._selector.close()
        self._waker.close()

    def _welcome(self, sock: socket.socket, peer: str, origin: str) -> None:
        try:
            channel = self.channel(sock, peer, inbound=True)
        except OSError as error:
            logger.info("lost the %s channel of %s: %s", self.service, peer, error)
            sock.close()
            return
        if self._watch(channel):
            self._guard(channel, lambda: self._own(channel))

    def _own(self, channel: Channel) -> None:
        channel.events = self._accept_channel(channel)

    def _watch(self, channel: Channel) -> bool:
        """Read a channel from now on. False if the system lets nobody watch it: it is closed, and
        was not used."""
        try:
            self._selector.register(channel.sock, selectors.EVENT_READ, channel)
        except OSError as error:  # for example, the user may watch no more descriptors
            self._seldom.warn(f"cannot watch the {self.service} channel of {channel}: {error}")
            channel.sock.close()
            return False
        self._channels.add(channel)
        return True

    def _attend(self, channel: Channel) -> None:
        """Have the thread look at a channel that has something to write, failed or was closed."""
        self.call(lambda: self._look_after(channel))

    def _look_after(self, channel: Channel) -> None:
        if channel not in self._channels:
            return
        if channel.closed:
            self._forget(channel)
            return
        if channel.failure and not channel.end_reported:
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
        messages: list[msgspec.Struct] = []
        reason = ""
        if channel.end_reported:
            reason = channel.discard()
        else:
            try:
                messages, reason = channel.read()
            except ValueError as error:
                self._break(channel, f"it sent no message of ours: {error}")
        for message in messages:
            if channel.end_reported or channel.closed:
                break
            self._deliver(channel, message)
        if reason and channel in self._channels:
            self._ended(channel, reason)

    def _deliver(self, channel: Channel, message: msgspec.Struct) -> None:
        assert channel.events is not None
        events = channel.events
        self._guard(channel, lambda: events.message(channel, message))

    def _guard(self, channel: Channel, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            # An owner's error, such as one of CUDA or of a wrong message, ends this channel only.
            logger.exception("cannot go on with the %s channel of %s", self.service, channel)
            self._break(channel, str(error))

    def _break(self, channel: Channel, reason: str) -> None:
        """Send nothing more, but wait for the peer's end of the stream if that proves anything."""
        channel.fail(reason)
        channel.stop_sending()
        if channel.end_reported or channel.closed:
            return
        channel.end_reported = True
        logger.warning("gave up the %s channel of %s: %s", self.service, channel, reason)
        self._tell_end(channel, reason, proof=False)
        if not channel.inbound and channel in self._channels:
            self._forget(channel)

    def _ended(self, channel: Channel, reason: str) -> None:
        self._forget(channel)
        if not channel.closed and (channel.proof or not channel.end_reported):
            channel.end_reported = True
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
