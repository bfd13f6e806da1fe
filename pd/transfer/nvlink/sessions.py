"""Sessions of a decode node over nvlink: which peer may store, and when nothing can land."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Protocol

from pd.core.errors import TransferError
from pd.transfer.nvlink.messages import SessionWelcome
from pd.transfer.wire.channel import LAST_WRITE_SECONDS, QUARANTINE_SECONDS

if TYPE_CHECKING:
    import msgspec

    from pd.core.errors import PDError
    from pd.transfer.wire.channel import Channel

logger = logging.getLogger(__name__)


class SessionReceiver(Protocol):
    """A receiver as its session sees it."""

    def fail(self, error: PDError) -> None:
        """Record the first error."""


class NvlinkSession:
    """The time from one connection of a prefill node to its end.

    Reservations name their session, and P stores only for those of the session in which D welcomed
    its channel. Nothing can land before a channel came or after it ended.

    Args:
        changed: the condition of :class:`NvlinkSessions`. It guards the session and its receivers.
    """

    def __init__(self, peer: str, changed: threading.Condition) -> None:
        self.peer = peer
        self.number = secrets.randbits(63)
        self.channel: Channel | None = None
        self.over = False
        self._changed = changed
        self._receivers: set[SessionReceiver] = set()
        self._safe_at: float | None = None

    def bind_channel(self, channel: Channel) -> None:
        """Welcome the peer's channel."""
        with self._changed:
            self.channel = channel
            channel.send(SessionWelcome(self.number))

    def add_receiver(self, receiver: SessionReceiver) -> None:
        with self._changed:
            assert not self.over
            self._receivers.add(receiver)

    def discard_receiver(self, receiver: SessionReceiver) -> None:
        with self._changed:
            self._receivers.discard(receiver)

    def retire_session(self, error: TransferError) -> None:
        """Take no more reservations, and ask P to drain and to close the channel."""
        with self._changed:
            self._fail_receivers(error)
            if self.channel is not None:
                self.channel.half_close()
            elif self._safe_at is None:
                # We will welcome no channel in this session any more.
                self._safe_at = time.monotonic()

    def is_quiet(self) -> bool:
        """Whether nothing of this session can land any more."""
        with self._changed:
            return self._safe_at is not None and time.monotonic() >= self._safe_at

    def on_message(self, channel: Channel, message: msgspec.Struct) -> None:
        raise ValueError(f"prefill nodes do not send {type(message).__name__}")

    def on_ended(self, channel: Channel, reason: str, proof: bool) -> None:
        now = time.monotonic()
        with self._changed:
            safe_at = now + (LAST_WRITE_SECONDS if proof else QUARANTINE_SECONDS)
            self._safe_at = safe_at if self._safe_at is None else min(self._safe_at, safe_at)
            self._fail_receivers(
                TransferError(f"the nvlink channel from {self.peer} ended: {reason}")
            )
            self._changed.notify_all()

    @property
    def is_ending(self) -> bool:
        """Whether we still expect the peer's end of the channel."""
        return self.channel is not None and self._safe_at is None

    def _fail_receivers(self, error: TransferError) -> None:
        self.over = True
        for receiver in list(self._receivers):
            receiver.fail(error)


class NvlinkSessions:
    """The sessions of all prefill nodes."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._current: dict[str, NvlinkSession] = {}
        # Sessions that are over while their stores may still land.
        self._ending: list[NvlinkSession] = []
        self._closed = False

    def get_session(self, peer: str) -> NvlinkSession:
        """Return the session for new reservations. Raises TransferError after :meth:`close`."""
        with self.changed:
            if self._closed:
                raise TransferError("the transfer manager was closed")
            current = self._current.get(peer)
            if current is None or current.over:
                self._current = {p: s for p, s in self._current.items() if not s.is_quiet()}
                self._ending = [session for session in self._ending if not session.is_quiet()]
                if current is not None:
                    self._ending.append(current)
                current = self._current[peer] = NvlinkSession(peer, self.changed)
            return current

    def is_bound(self, peer: str) -> bool:
        """Whether the peer has a channel open for its next reservation."""
        with self.changed:
            current = self._current.get(peer)
            return current is not None and not current.over and current.channel is not None

    def accept_channel(self, channel: Channel) -> NvlinkSession:
        """Bind a prefill node's new channel to a session. The hub's thread calls this."""
        with self.changed:
            if self._closed:
                late = NvlinkSession(channel.peer, self.changed)
                late.channel = channel
                late.retire_session(TransferError("the transfer manager was closed"))
                return late
            session = self.get_session(channel.peer)
            if session.channel is not None:
                # The peer has closed the old channel, but we have not noticed yet.
                session.retire_session(TransferError(f"{channel.peer} opened another channel"))
                session = self.get_session(channel.peer)
            session.bind_channel(channel)
            return session

    def disconnect_peer(self, peer: str) -> None:
        """Fail the peer's reservations. The pages are safe when the session is quiet."""
        with self.changed:
            session = self._current.pop(peer, None)
            if session is not None:
                session.retire_session(TransferError(f"{peer} was disconnected"))
                self._ending.append(session)

    def close(self, patience: float) -> None:
        """End all sessions, and wait ``patience`` seconds for the peers to drain."""
        with self.changed:
            self._closed = True
            for peer in list(self._current):
                self.disconnect_peer(peer)
            self.changed.wait_for(
                lambda: not any(s.is_ending for s in self._ending), timeout=patience
            )
