"""Opens, accepts and reads the channels of one manager."""

from __future__ import annotations

import logging
import selectors
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from pd.transfer.wire.acceptor import Acceptor
from pd.transfer.wire.channel import Channel, ChannelEvents, DialEvents
from pd.transfer.wire.dialler import Dialler, PeerGoneError, longer_pause
from pd.transfer.wire.greeting import PeerRefusedError
from pd.util.starvation import Patience
from pd.util.waker import Waker
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    import msgspec

    from pd.core.errors import TransferError
    from pd.transfer.wire.channel import MessageDecoder

logger = logging.getLogger(__name__)

# Channels that stay open until the process ends, because closing them would falsely tell the peer
# that this end drained.
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
        """Begin on a new thread. Raises RuntimeError if the system has none at present."""
        name = f"pd-dial-{self._hub.service}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def cancel(self) -> None:
        """Stop trying. A channel that is just being opened may still be announced."""
        self._cancelled.set()

    def _run(self) -> None:
        while not self._cancelled.wait(self._delay):
            channel = self._open_channel()
            if channel is not None and self._hub.adopt_channel(channel, self._events):
                return
            self._delay = longer_pause(self._delay)

    def _open_channel(self) -> Channel | None:
        try:
            sock = self._dialler.connect()
        except PeerGoneError as error:
            self._report_failure(error)
            return None
        except PeerRefusedError as error:
            self._cancelled.set()
            self._report_failure(error, final=True)
            return None
        if sock is None:
            return None
        try:
            return self._hub.make_channel(sock, self._peer, inbound=False)
        except OSError as error:
            sock.close()
            logger.info("lost the %s channel to %s: %s", self._hub.service, self._peer, error)
            return None

    def _report_failure(self, error: TransferError, *, final: bool = False) -> None:
        self._hub.call_soon(lambda: self._events.on_unreachable(error, final))


class ChannelHub:
    """One thread accepts, greets and reads. While we dial a channel, it has another thread.

    Args:
        service: name of the backend, equal on both ends.
        key: sub-key of data connections (:func:`pd.transfer.wire.greeting.transfer_key`).
        decoder: decodes the messages that peers may send.
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
        # Dials without a thread, because the system had none. The hub's thread starts them later.
        self._not_begun: list[Dial] = []
        self._closing = False
        self._warnings = WarningLimit(logger)
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            service,
            instance_id,
            host,
            key,
            self.patience,
            self._selector,
            f"{service} channel",
            self._on_accepted,
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
        """Number of connections closed for a bad or missing greeting."""
        return self._acceptor.refused

    def dial_peer(
        self, peer: str, address: tuple[str, int], events: DialEvents, delay: float = 0.0
    ) -> Dial:
        """Open a channel to D in the background, trying again after growing pauses.

        Args:
            delay: seconds before the first try.
        """
        dial = Dial(self, peer, address, events, delay)
        if not self._start_dial(dial):
            self.call_soon(lambda: self._not_begun.append(dial))
        return dial

    def _start_dial(self, dial: Dial) -> bool:
        try:
            dial.start()
        except RuntimeError as error:
            self._warnings.log_warning(f"cannot dial a {self.service} peer yet: {error}")
            return False
        return True

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have the hub's thread call a function that does not block."""
        self._calls.append(call)
        self._waker.wake_poll()

    def make_channel(self, sock: socket.socket, peer: str, *, inbound: bool) -> Channel:
        """Make the channel of a greeted connection. Raises OSError if the connection is lost."""
        return Channel(
            sock, peer, inbound=inbound, decoder=self._decoder, attend=self._request_check
        )

    def adopt_channel(self, channel: Channel, events: DialEvents) -> bool:
        """Watch a channel opened by :class:`Dial`.

        Return False if we cannot watch it. We then close the channel, and another try may succeed.
        """
        settled = threading.Event()
        failed = False

        def watch() -> None:
            nonlocal failed
            if self._closing:
                channel.sock.close()
            elif self._watch_channel(channel):
                channel.events = events
                self._call_guarded(channel, lambda: events.on_opened(channel))
            else:
                failed = True
            settled.set()

        self.call_soon(watch)
        # NOTE: the thread may have ended without making this call.
        while self._thread.is_alive() and not settled.wait(1.0):
            pass
        if not settled.is_set():
            channel.sock.close()
        return not failed

    def close(self) -> None:
        """Close everything except P's channels that their owners left open. Those stay open as long
        as the process lives, because their end would say that P drained."""
        self._closing = True
        self.call_soon(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            timeout = 1.0 if self._acceptor.has_pending or self._not_begun else None
            for key, mask in self._selector.select(timeout):
                if callable(key.data):
                    key.data()
                elif key.data in self._channels:
                    self._serve_channel(key.data, mask)
            while self._calls:
                self._calls.popleft()()
            self._acceptor.close_overdue()
            if self._not_begun:
                self._not_begun = [dial for dial in self._not_begun if not self._start_dial(dial)]
        while self._calls:
            self._calls.popleft()()
        for channel in list(self._channels):
            if channel.inbound:
                channel.close()
            elif not channel.closed:
                _KEPT.append(channel)
            self._forget_channel(channel)
        self._acceptor.close()
        self._selector.close()
        self._waker.close()

    def _on_accepted(self, sock: socket.socket, peer: str, origin: str) -> None:
        try:
            channel = self.make_channel(sock, peer, inbound=True)
        except OSError as error:
            logger.info("lost the %s channel of %s: %s", self.service, peer, error)
            sock.close()
            return
        if self._watch_channel(channel):
            self._call_guarded(channel, partial(self._adopt_inbound, channel))

    def _adopt_inbound(self, channel: Channel) -> None:
        channel.events = self._accept_channel(channel)

    def _watch_channel(self, channel: Channel) -> bool:
        """Read a channel from now on. If the system does not let us watch it, close it unused and
        return False."""
        try:
            self._selector.register(channel.sock, selectors.EVENT_READ, channel)
        except OSError as error:  # for example, the user may watch no more descriptors
            self._warnings.log_warning(
                f"cannot watch the {self.service} channel of {channel}: {error}"
            )
            channel.sock.close()
            return False
        self._channels.add(channel)
        return True

    def _request_check(self, channel: Channel) -> None:
        """Have the thread check a channel with output, a failure or a close."""
        self.call_soon(lambda: self._check_channel(channel))

    def _check_channel(self, channel: Channel) -> None:
        if channel not in self._channels:
            return
        if channel.closed:
            self._forget_channel(channel)
            return
        if channel.failure and not channel.end_reported:
            self._break_channel(channel, channel.failure)
        write = selectors.EVENT_WRITE if channel.wants_to_write else 0
        self._selector.modify(channel.sock, selectors.EVENT_READ | write, channel)

    def _serve_channel(self, channel: Channel, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            channel.write_output()
            if not channel.wants_to_write:
                self._check_channel(channel)
        if not mask & selectors.EVENT_READ or channel not in self._channels:
            return
        messages: list[msgspec.Struct] = []
        reason = ""
        if channel.end_reported:
            reason = channel.discard_input()
        else:
            try:
                messages, reason = channel.read_messages()
            except ValueError as error:
                self._break_channel(channel, f"it sent an invalid message: {error}")
        for message in messages:
            if channel.end_reported or channel.closed:
                break
            events = channel.events
            assert events is not None
            self._call_guarded(channel, partial(events.on_message, channel, message))
        if reason and channel in self._channels:
            self._forget_channel(channel)
            if not channel.closed and (channel.proof or not channel.end_reported):
                channel.end_reported = True
                self._tell_end(channel, reason, proof=channel.proof)

    def _call_guarded(self, channel: Channel, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            # An owner's error, such as a CUDA error or a wrong message, ends only this channel.
            logger.exception("cannot continue the %s channel of %s", self.service, channel)
            self._break_channel(channel, str(error))

    def _break_channel(self, channel: Channel, reason: str) -> None:
        """Stop sending, but wait for the peer's end of the stream if it would prove something."""
        channel.mark_failed(reason)
        channel.stop_sending()
        if channel.end_reported or channel.closed:
            return
        channel.end_reported = True
        logger.warning("gave up the %s channel of %s: %s", self.service, channel, reason)
        self._tell_end(channel, reason, proof=False)
        if not channel.inbound and channel in self._channels:
            self._forget_channel(channel)

    def _tell_end(self, channel: Channel, reason: str, *, proof: bool) -> None:
        if channel.events is None:
            return
        try:
            channel.events.on_ended(channel, reason, proof)
        except Exception:
            # The thread must keep serving the other channels.
            logger.exception("failed to end the %s channel of %s", self.service, channel)

    def _forget_channel(self, channel: Channel) -> None:
        self._channels.discard(channel)
        self._selector.unregister(channel.sock)
        channel.release_socket()
