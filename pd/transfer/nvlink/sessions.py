"""Sessions of a decode node over nvlink: which peer may store, and when nothing can land."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.nvlink.messages import SessionWelcome
from pd.transfer.wire.channel import LAST_WRITE_SECONDS, QUARANTINE_SECONDS

if TYPE_CHECKING:
    import msgspec

    from pd.transfer.nvlink.receiver import NvlinkReceiver
    from pd.transfer.wire.channel import Channel

logger = logging.getLogger(__name__)


class NvlinkSession:
    """The time from one connection of a prefill node to its end.

    Reservations name their session, and P stores only for those that name the session in which D
    welcomed its channel. Nothing can land before a channel came and after it ended.

    Args:
        changed: the condition of :class:`NvlinkSessions`, which guards the session and its
            receivers.
    """

    def __init__(self, peer: str, changed: threading.Condition) -> None:
        self.peer = peer
        self.number = secrets.randbits(63)
        self.channel: Channel | None = None
        self.over = False
        self._changed = changed
        self._receivers: set[NvlinkReceiver] = set()
        self._safe_at: float | None = None

    def bind(self, channel: Channel) -> None:
        """The peer opened its channel."""
        with self._changed:
            self.channel = channel
            channel.send(SessionWelcome(self.number))

    def add(self, receiver: NvlinkReceiver) -> None:
        with self._changed:
            assert not self.over
            self._receivers.add(receiver)

    def discard(self, receiver: NvlinkReceiver) -> None:
        with self._changed:
            self._receivers.discard(receiver)

    def retire(self, error: TransferError) -> None:
        """Take no more reservations; ask P to drain and to close the channel."""
        with self._changed:
            self._fail(error)
            if self.channel is not None:
                self.channel.half_close()
            elif self._safe_at is None:
                # No channel will be welcomed in this session any more.
                self._safe_at = time.monotonic()

    def quiet(self) -> bool:
        """Whether nothing of this session can land any more."""
        with self._changed:
            return self._safe_at is not None and time.monotonic() >= self._safe_at

    def message(self, channel: Channel, message: msgspec.Struct) -> None:
        raise ValueError(f"prefill nodes do not send {type(message).__name__}")

    def ended(self, channel: Channel, reason: str, proof: bool) -> None:
        now = time.monotonic()
        with self._changed:
            safe_at = now + (LAST_WRITE_SECONDS if proof else QUARANTINE_SECONDS)
            self._safe_at = safe_at if self._safe_at is None else min(self._safe_at, safe_at)
            self._fail(TransferError(f"the nvlink channel from {self.peer} ended: {reason}"))
            self._changed.notify_all()

    @property
    def ending(self) -> bool:
        """Whether the peer's end of the channel is still to come."""
        return self.channel is not None and self._safe_at is None

    def _fail(self, error: TransferError) -> None:
        self.over = True
        for receiver in list(self._receivers):
            receiver.fail(error)


class NvlinkSessions:
    """The sessions of all prefill nodes."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._current: dict[str, NvlinkSession] = {}
        # Sessions that are over, but whose stores may still land.
        self._ending: list[NvlinkSession] = []
        self._closed = False

    def session(self, peer: str) -> NvlinkSession:
        """The session for new reservations. Raises TransferError after :meth:`close`."""
        with self.changed:
            if self._closed:
                raise TransferError("the transfer manager was closed")
            current = self._current.get(peer)
            if current is None or current.over:
                self._forget_quiet()
                if current is not None:
                    self._ending.append(current)
                current = self._current[peer] = NvlinkSession(peer, self.changed)
            return current

    def is_bound(self, peer: str) -> bool:
        """Whether the peer has a channel open for its next reservation."""
        with self.changed:
            current = self._current.get(peer)
            return current is not None and not current.over and current.channel is not None

    def _forget_quiet(self) -> None:
        self._current = {p: s for p, s in self._current.items() if not s.quiet()}
        self._ending = [session for session in self._ending if not session.quiet()]

    def accept(self, channel: Channel) -> NvlinkSession:
        """A prefill node opened a channel (the hub's thread)."""
        with self.changed:
            if self._closed:
                late = NvlinkSession(channel.peer, self.changed)
                late.channel = channel
                late.retire(TransferError("the transfer manager was closed"))
                return late
            session = self.session(channel.peer)
            if session.channel is not None:
                # The peer has closed the old channel, and its end has not arrived here yet.
                session.retire(TransferError(f"{channel.peer} opened another channel"))
                session = self.session(channel.peer)
            session.bind(channel)
            return session

    def disconnect(self, peer: str) -> None:
        """The peer's reservations fail; the pages are safe when the session is quiet."""
        with self.changed:
            session = self._current.pop(peer, None)
            if session is not None:
                session.retire(TransferError(f"{peer} was disconnected"))
                self._ending.append(session)

    def close(self, patience: float) -> None:
        """End all sessions, and wait ``patience`` seconds for the peers to drain."""
        with self.changed:
            self._closed = True
            for peer in list(self._current):
                self.disconnect(peer)
            self.changed.wait_for(lambda: not any(s.ending for s in self._ending), timeout=patience)
