"""Receiving side of a link with staging buffers."""

from __future__ import annotations

import logging
import threading
import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from pd.transfer.staged.messages import (
    VERSION,
    BuffersReady,
    FilledBuffers,
    Freed,
    Leaving,
    LinkDrained,
    Open,
    Prepared,
    Refused,
    Waiting,
)
from pd.transfer.staged.mover import MoverError
from pd.transfer.wire.channel import LAST_WRITE_SECONDS, QUARANTINE_SECONDS
from pd.util.exit import STUCK_PREFIX

if TYPE_CHECKING:
    import msgspec
    import torch

    from pd.transfer.copier import Copier
    from pd.transfer.staged.messages import Filled
    from pd.transfer.staged.mover import Mover, Target
    from pd.transfer.staged.pump import Pump
    from pd.transfer.wire.channel import Channel

logger = logging.getLogger(__name__)

_SHORT, _LONG = 100e-6, 20e-3
# A call of the library that took longer has moved some bytes.
_MOVED_SECONDS = 20e-6


class InState(IntEnum):
    """States of the receiving link. It takes data only while it is UP, and stays ENDING until no
    write can reach its buffers any more."""

    NEW = 0
    UP = 1
    ENDING = 2
    OVER = 3


class IncomingOwner(Protocol):
    """The links of a manager as one of them sees them.

    Attributes:
        lock: guards all links and receivers.
    """

    copier: Copier
    mover: Mover
    pump: Pump
    lock: threading.RLock

    def find_refusal(self, link: IncomingLink) -> str:
        """Return why a link gets no buffers; empty if it does."""

    def end_idle_link(self) -> None:
        """End an idle link if too many hold buffers. Called before a link takes some."""

    def make_buffers(self, wishes: Open) -> tuple[torch.Tensor, bool]:
        """Make buffers, and return whether they lie in CUDA memory."""

    def land_blocks(self, link: IncomingLink, notes: list[Filled]) -> None:
        """Copy filled buffers into the pool, then notify P."""

    def on_link_lost(self, link: IncomingLink, reason: str) -> None:
        """Fail the rooms that a lost link leaves without KV."""

    def on_link_over(self, link: IncomingLink) -> None:
        """Forget a link whose buffers nothing can write any more."""


class IncomingLink:
    """D's staging buffers of one link.

    ``incoming.lock`` guards it. Threads of its own call the library to prepare it and to make the
    buffers. After that only the pump's thread calls the library. The hub's thread reads messages
    and empties the announced buffers itself, because a change of threads per block would cost more
    than it saves.

    Attributes:
        views: the buffers as converted for the copier.
        landing: filled buffers, which P must not write.
        read: the buffers in ``landing`` that D has read without notifying P yet.
    """

    def __init__(self, incoming: IncomingOwner, channel: Channel) -> None:
        self.peer = channel.peer
        self.state = InState.NEW
        self.buffers: torch.Tensor | None = None
        self.views: list[Any] = []
        self.buffer_bytes = 0
        self.landing: set[int] = set()
        self.read: list[int] = []
        self._incoming, self._channel = incoming, channel
        self._target: Target | None = None
        self._setting_up = False
        self._prepared = threading.Event()
        self._peer_prepared = False
        self.used_at = time.monotonic()
        self._on_device = self._drained = self._lost = self._broken = False
        self._safe_at = float("inf")
        self._peer_waits = True
        self._moved_at = time.monotonic()

    @property
    def is_live(self) -> bool:
        """Whether data may arrive over it."""
        return self.state in (InState.NEW, InState.UP)

    @property
    def num_quarantined(self) -> int:
        with self._incoming.lock:
            ending = self.state is InState.ENDING and self.buffers is not None
            return len(self.buffers) if ending and self.buffers is not None else 0

    @property
    def claims_buffers(self) -> bool:
        """Whether the link has buffers or is making some."""
        return self.buffers is not None or self._setting_up

    @property
    def is_in_quarantine(self) -> bool:
        """Whether the link is ending, and has buffers or is making some."""
        return self.state is InState.ENDING and self.claims_buffers

    @property
    def may_be_written(self) -> bool:
        """Whether P, or a copy it had begun, may still write into the buffers of an ended link."""
        return self.is_in_quarantine and time.monotonic() < self._safe_at

    @property
    def is_prepared(self) -> bool:
        """Whether both ends have prepared everything except the buffers."""
        return self.is_live and self._prepared.is_set() and self._peer_prepared

    def start_preparing(self) -> None:
        """Have the library do its slow preparations now. Any thread may call this."""
        name = STUCK_PREFIX + "preparation of a link"
        threading.Thread(target=self._prepare_library, name=name, daemon=True).start()

    def _prepare_library(self) -> None:
        try:
            self._incoming.mover.prepare()
        except MoverError as error:
            # D reports the error to P when P asks for buffers.
            logger.warning("cannot prepare a link of %s: %s", self.peer, error)
        finally:
            self._prepared.set()

    def end_link(self) -> None:
        """Ask P to drain. The buffers stay until P has drained or is gone. Any thread may call
        this."""
        with self._incoming.lock:
            if self.state >= InState.ENDING:
                return
            self.state = InState.ENDING
        self._channel.half_close()
        self._incoming.pump.wake()

    # ---- the hub's thread

    def on_message(self, channel: Channel, message: msgspec.Struct) -> None:
        if isinstance(message, FilledBuffers):
            self._on_filled(message.notes)
        elif isinstance(message, Waiting):
            self._peer_waits = message.waits
            self._moved_at = time.monotonic()
            self._incoming.pump.wake()
        elif isinstance(message, Open):
            self._on_open(message)
        elif isinstance(message, Prepared):
            self._peer_prepared = True
        elif isinstance(message, Leaving):
            if message.returns:
                self.end_link()
            self._incoming.on_link_lost(self, message.reason)
        elif isinstance(message, LinkDrained):
            self._drained = True
        else:
            raise ValueError(f"a prefill node does not send {type(message).__name__}")

    def on_ended(self, channel: Channel, reason: str, proof: bool) -> None:
        incoming = self._incoming
        with incoming.lock:
            late = LAST_WRITE_SECONDS if self._on_device and not self._drained else 0.0
            seconds = late if proof else QUARANTINE_SECONDS
            self._safe_at = min(self._safe_at, time.monotonic() + seconds)
            unused = self.buffers is None and not self._setting_up
        if unused:
            # Rooms wait for the next link. P opens it if it lives; if not, its lease ends them.
            self.end_link()
            self.finish_unused()
        else:
            incoming.on_link_lost(self, reason)

    def _on_filled(self, notes: list[Filled]) -> None:
        incoming = self._incoming
        self.used_at = time.monotonic()
        with incoming.lock:
            if self.state is InState.ENDING:
                return
            if self.state is not InState.UP or self.buffers is None:
                raise ValueError("buffers were filled before there were any")
            filled: set[int] = set()
            for note in notes:
                if note.buffer >= len(self.buffers) or note.buffer in self.landing | filled:
                    raise ValueError(f"buffer {note.buffer} is not P's to fill")
                note.check_fits(incoming.copier.shape, self.buffer_bytes)
                filled.add(note.buffer)
            # NOTE: all or none, because nothing of a bad message may land.
            self.landing |= filled
        incoming.land_blocks(self, notes)

    def _on_open(self, message: Open) -> None:
        if self.state is InState.ENDING:
            return
        if message.version != VERSION:
            raise ValueError(f"it speaks version {message.version}, not {VERSION}")
        if self._setting_up or self.state is not InState.NEW or self._target is not None:
            raise ValueError("it opens the link twice")
        refusal = self._incoming.find_refusal(self)
        if refusal:
            logger.warning("refused a link of %s: %s", self.peer, refusal)
            self._channel.send(Refused(refusal))
            return
        self._incoming.end_idle_link()
        self._setting_up = True
        name = STUCK_PREFIX + "set-up of a link"
        try:
            threading.Thread(target=self._set_up, args=(message,), name=name, daemon=True).start()
        except RuntimeError:  # the system has no room for one: P opens another link
            self._setting_up = False
            raise

    def _set_up(self, wishes: Open) -> None:
        """Make the buffers. This runs on a thread of its own, because the library may take long."""
        incoming = self._incoming
        self._prepared.wait()
        try:
            buffers, device = incoming.make_buffers(wishes)
            origin = self._channel.origin.rpartition(":")[0]
            target = incoming.mover.make_target(buffers, self.peer, origin)
        except Exception as error:
            # MoverError, or any error of a library or of torch without memory.
            unknown = not isinstance(error, MoverError)
            logger.error("cannot make buffers for %s: %s", self.peer, error, exc_info=unknown)
            self._channel.send(Refused(f"cannot make buffers: {error}"[:1000]))
            with incoming.lock:
                self._setting_up = False
                if self._lost:
                    self.finish_unused()
            return
        with incoming.lock:
            self.buffers, self._target, self._on_device = buffers, target, device
            self.views = [incoming.copier.make_view(buffer) for buffer in buffers]
            self.buffer_bytes = buffers.shape[1]
            if self.state is InState.NEW:
                self.state = InState.UP
            self._setting_up = False
        incoming.pump.add_link(self)
        count, size = buffers.shape
        self._channel.send(BuffersReady(count, size, device, target.description))

    def finish_unused(self) -> None:
        """End the link after its channel, if it has no buffers."""
        with self._incoming.lock:
            self._lost = True
            if self._target is not None or self._setting_up or self.state is InState.OVER:
                return
            self.state = InState.OVER
        self._channel.close()
        self._incoming.on_link_over(self)

    @property
    def has_many_read(self) -> bool:
        """Whether to notify P now of the buffers read."""
        return 4 * len(self.read) >= len(self.landing) + len(self.read)

    def reject_peer(self, reason: str) -> None:
        """End the channel because P broke the rules."""
        self._channel.give_up(reason)

    def done_reading(self, buffer: int) -> None:
        """Note that a buffer's block was scattered or discarded."""
        self.read.append(buffer)

    def send_freed(self) -> None:
        """Notify P of the buffers it may write again."""
        freed, self.read = self.read, []
        if freed:
            with self._incoming.lock:
                self.landing.difference_update(freed)
            self._channel.send(Freed(freed))
            if not self.is_live:
                self._incoming.pump.wake()

    # ---- the pump's thread

    def drive(self) -> float | None:
        target = self._target
        assert target is not None
        if self.state is InState.ENDING and self._may_close():
            incoming = self._incoming
            incoming.pump.remove_link(self)
            target.close()
            with incoming.lock:
                self._target = self.buffers = None
                self.views = []
                self.state = InState.OVER
            self._channel.close()
            incoming.on_link_over(self)
            return None
        if not self._peer_waits and self.state is InState.UP:
            return None
        begun = time.monotonic()
        if not self._broken:
            try:
                target.make_progress()
            except MoverError as error:
                # The buffers stay until P has ended the link, as after any error.
                self._broken = True
                self._channel.give_up(str(error))
        now = time.monotonic()
        if now - begun > _MOVED_SECONDS:
            self._moved_at = now
            return 0.0
        # Poll less and less often while nothing arrives.
        idle = now - self._moved_at
        return min(_LONG, max(_SHORT, idle * 0.02))

    def on_failure(self, error: Exception) -> None:
        """Keep the buffers in quarantine for good, because the library broke its promise."""
        self._channel.give_up(str(error))

    def _may_close(self) -> bool:
        with self._incoming.lock:
            return time.monotonic() >= self._safe_at and not self.landing
