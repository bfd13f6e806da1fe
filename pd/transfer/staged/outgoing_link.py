"""Sending side of a link with staging buffers."""

from __future__ import annotations

import logging
import threading
import time
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pd.transfer.staged.messages import (
    BuffersReady,
    FilledBuffers,
    Freed,
    Leaving,
    LinkDrained,
    Prepared,
    Refused,
    Waiting,
)
from pd.transfer.staged.mover import MoverError
from pd.transfer.staged.outgoing_writes import OutgoingWrites, StagedBlock
from pd.util.exit import STUCK_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec
    import torch

    from pd.core.errors import TransferError
    from pd.transfer.copier import Copier
    from pd.transfer.staged.link_thread import LinkThread
    from pd.transfer.staged.messages import Open
    from pd.transfer.staged.mover import Mover, Path
    from pd.transfer.staged.outgoing_peer import OutgoingPeer
    from pd.transfer.wire.channel import Channel
    from pd.transfer.wire.hub import ChannelHub, Dial

logger = logging.getLogger(__name__)


class OutgoingState(IntEnum):
    """States of the sending link.

    It is CONNECTED, without buffers, until the first room needs some. Rooms send only while it is
    UP. It stays ENDING until no write can reach the decode node any more.
    """

    DIALLING = 0
    CONNECTED = 1
    OPENING = 2
    UP = 3
    ENDING = 4
    OVER = 5


class OutgoingOwner(Protocol):
    """The links of a manager as one of them sees them. The link thread calls the methods, but for
    :meth:`make_buffers`."""

    copier: Copier
    mover: Mover
    hub: ChannelHub
    thread: LinkThread

    def end_idle_link(self) -> None:
        """End an idle link if too many hold buffers. Called before a link asks for some."""

    def make_wishes(self) -> Open:
        """Return the message that asks D for buffers."""

    def make_buffers(self, ready: BuffersReady) -> torch.Tensor:
        """Make P's buffers for D's answer, from any thread. Raises MoverError if it asks for more
        than we wished."""

    def add_thread(self, thread: threading.Thread) -> None:
        """Have the manager's end wait for a thread that calls the library."""

    def open_successor(self, link: OutgoingLink) -> bool:
        """Open another link when one begins to end. Return whether rooms can wait for it."""

    def on_link_over(self, link: OutgoingLink) -> None:
        """Forget a link of which nothing can land any more."""


class OutgoingLink:
    """State machine of one link. Only the :class:`LinkThread` drives it.

    The hub's thread and threads with long library calls post to it (the methods below "any
    thread"). Metrics read ``state`` and counts of buffers.

    Attributes:
        to: the peer and its rooms, which may outlive the link.
        writes: buffers and the library's writes, or None before the first room and at the end.
    """

    def __init__(self, links: OutgoingOwner, to: OutgoingPeer) -> None:
        self.to, self.name = to, to.peer
        self.state = OutgoingState.DIALLING
        self.writes: OutgoingWrites | None = None
        self.up_since = time.monotonic()
        self._links, self._thread = links, links.thread
        self._dial: Dial | None = None
        self._channel: Channel | None = None
        self._setting_up = False
        self._prepared = threading.Event()
        # Whether D calls its library. It does from the start, until we tell it that nothing waits.
        self._helped = True
        self._broken = False

    # ---- any thread

    def on_opened(self, channel: Channel) -> None:
        self._post_event(lambda: self._on_opened(channel))

    def on_unreachable(self, error: TransferError, final: bool) -> None:
        self.to.on_unreachable(error, final=final)

    def on_message(self, channel: Channel, message: msgspec.Struct) -> None:
        if isinstance(message, Freed):
            self._post_event(lambda: self._on_freed(message))
        elif isinstance(message, BuffersReady):
            self._post_event(lambda: self._on_buffers_ready(message))
        elif isinstance(message, Refused):
            logger.warning("%s refused a link: %s", self.name, message.reason)
            reason = f"{self.name} refused a link: {message.reason}"
            self._post_event(lambda: self._on_not_opened(reason))
        else:
            raise ValueError(f"a decode node does not send {type(message).__name__}")

    def on_ended(self, channel: Channel, reason: str, proof: bool) -> None:
        lost = f"the link to {self.name} was lost: {reason}"
        self._post_event(lambda: self.end_link(lost, move=True))

    def _post_event(self, event: Callable[[], None]) -> None:
        """Have the link thread call a function."""
        self._thread.post_event(lambda: self._call_guarded(event))

    @property
    def num_quarantined(self) -> int:
        """Number of buffers that the library may still read after the link's end."""
        writes = self.writes
        return writes.pool.num_flying if self.state is OutgoingState.ENDING and writes else 0

    # ---- the link thread: opening

    def start(self, delay: float = 0.0) -> None:
        """Open the channel. A node that only receives needs none."""
        if self._dial is None and self.state is OutgoingState.DIALLING:
            self._dial = self._links.hub.dial_peer(self.name, self.to.address, self, delay)

    def ask_for_buffers(self) -> None:
        """Ask for buffers, if there is a room to send."""
        if not self.to.has_rooms:
            return
        self.start()
        if self.state is OutgoingState.CONNECTED:
            assert self._channel is not None
            self._links.end_idle_link()
            self.state = OutgoingState.OPENING
            self.to.on_link_opening()
            self._channel.send(self._links.make_wishes())

    def _on_opened(self, channel: Channel) -> None:
        if self.state is not OutgoingState.DIALLING:
            channel.close()
            return
        self.state, self._channel = OutgoingState.CONNECTED, channel
        self.to.note_progress()
        self._start_thread("preparation", self._prepare_library)
        self.ask_for_buffers()

    def _on_buffers_ready(self, ready: BuffersReady) -> None:
        if self.state is OutgoingState.ENDING:
            return
        if self.state is not OutgoingState.OPENING or self._setting_up:
            self._reject_peer("buffers that were not asked for")
            return
        self.to.note_progress()
        self._start_thread("set-up", lambda: self._set_up(ready))
        self._setting_up = True  # only now: nothing waits for a thread that could not start

    def _on_path(self, buffers: torch.Tensor, path: Path) -> None:
        self._setting_up = False
        self.writes = OutgoingWrites(buffers, path, self._links.copier)
        self.to.note_progress()
        if self.state is OutgoingState.OPENING:
            # Rooms send after a first write has shown that the way is open.
            self._call_guarded(self.writes.begin_probe)
        self.drive()

    def _on_no_path(self, reason: str, *, lasting: bool) -> None:
        self._setting_up = False
        if self.state is OutgoingState.ENDING:
            self._finish_link()
        self._on_not_opened(reason, lasting=lasting)

    def _on_not_opened(self, reason: str, *, lasting: bool = False) -> None:
        """End a link after failing to open it. Its rooms wait for another link, unless that would
        fail in the same way."""
        self.to.on_link_not_opened(reason)
        self.end_link(reason, move=not lasting)

    # ---- threads of their own, since libraries take their time

    def _start_thread(self, what: str, run: Callable[[], None]) -> None:
        name = f"{STUCK_PREFIX}{what} of a link"
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._links.add_thread(thread)

    def _prepare_library(self) -> None:
        try:
            self._links.mover.prepare()
        except MoverError as error:
            # The set-up for the first room reports the error.
            logger.warning("cannot prepare a link to %s: %s", self.name, error)
        finally:
            self._prepared.set()
        self._post_event(self._on_prepared)

    def _on_prepared(self) -> None:
        if self._channel is not None and self.state < OutgoingState.ENDING:
            self._channel.send(Prepared())

    def _set_up(self, ready: BuffersReady) -> None:
        links = self._links
        self._prepared.wait()
        try:
            buffers = links.make_buffers(ready)
            path = links.mover.make_path(
                buffers, ready.description, self.name, partial(self._post_event, self.drive)
            )
        except Exception as error:
            # MoverError, or any error of a library or of torch without memory.
            unknown = not isinstance(error, MoverError)
            logger.error("cannot open a link to %s: %s", self.name, error, exc_info=unknown)
            reason = f"cannot open a link to {self.name}: {error}"
            lasting = isinstance(error, MoverError) and error.lasting
            self._post_event(lambda: self._on_no_path(reason, lasting=lasting))
            return
        self._post_event(lambda: self._on_path(buffers, path))

    # ---- the link thread: sending

    @property
    def can_take(self) -> bool:
        writes = self.writes
        return writes is not None and writes.pool.num_free > 0 and self.to.has_blocks

    @property
    def is_writing(self) -> bool:
        """Whether the library has a write to do."""
        return self.writes is not None and self.writes.pool.num_flying > 0

    def view_buffer(self, source: int) -> Any:
        """Return a buffer of P as converted for the copier."""
        assert self.writes is not None
        return self.writes.views[source]

    def take_block(self) -> StagedBlock | None:
        """Take the next block and buffers for it, until :meth:`on_gathered`. Only while the link is
        UP."""
        if not self.can_take:
            return None
        taken = self.to.take_block()
        if taken is None:
            return None
        assert self.writes is not None
        return StagedBlock(*taken, self.writes.pool.take_pair())

    def on_gathered(self, staged: StagedBlock) -> None:
        """Write a block whose pages were read, unless its room has ended meanwhile."""
        writes, sender, to = self.writes, staged.sender, self.to
        assert writes is not None
        with to.changed:
            sender.mark_read()
            to.progress = time.monotonic()
            wanted = sender.is_active and self.state is OutgoingState.UP
            if not wanted:
                sender.mark_sent()
        if not wanted:
            writes.pool.put_back(staged.pair)
        elif self._call_guarded(lambda: writes.begin_write(staged)):
            self.drive()
            return
        if self.state is OutgoingState.ENDING:
            self.drive()

    def drive(self) -> None:
        """Check which writes are over, and close an ending link after the last one."""
        if self._broken or self.writes is None:
            return
        if self._call_guarded(self._poll_writes) and self.writes is not None:
            self._thread.drive_after(self, self.writes.next_pause())

    def _call_guarded(self, call: Callable[[], object]) -> bool:
        """Make a call, and return whether it did not raise.

        An exception means that the library or this code broke its contract. We do not know which
        writes are still under way, so the channel stays open and we never use the buffers again.
        """
        try:
            call()
        except Exception as error:
            # An error ends its link, not the thread that serves the others.
            logger.exception("the link to %s failed", self.name)
            self._broken = True
            self.end_link(f"the link to {self.name} failed: {error}")
            self._thread.drive_after(self, None)
            return False
        return True

    def _poll_writes(self) -> None:
        writes = self.writes
        assert writes is not None
        arrived, probed, error = writes.poll_writes()
        if probed and self.state is OutgoingState.OPENING:
            self.state, self.up_since = OutgoingState.UP, time.monotonic()
            self.to.on_link_opened(writes.buffer_bytes)
            self._thread.add_link(self)
            logger.info("the %s link to %s is up", self._links.mover.name, self.name)
        if arrived:
            self._announce_filled(arrived)
        self._ask_for_help(writes)
        if error:
            self.end_link(f"the link to {self.name} was lost: {error}", move=True)
        elif self.state is not OutgoingState.ENDING:
            self._check_stall(writes)
        if self.state is OutgoingState.ENDING and writes.is_quiet:
            self._close_path(writes)

    def _announce_filled(self, arrived: list[StagedBlock]) -> None:
        """Notify D of filled buffers."""
        assert self._channel is not None
        self._channel.send(FilledBuffers([staged.make_note() for staged in arrived]))
        with self.to.changed:
            self.to.progress = time.monotonic()
            for staged in arrived:
                staged.sender.mark_sent()

    def _on_freed(self, freed: Freed) -> None:
        writes = self.writes
        if writes is None:
            if self.state < OutgoingState.ENDING:
                self._reject_peer("it freed buffers before there were any")
            return
        try:
            writes.pool.release_targets(freed.buffers)
        except ValueError as error:
            self._reject_peer(str(error))
            return
        self.to.note_progress()

    def _reject_peer(self, reason: str) -> None:
        """End the channel because D broke the rules. The hub reports the end."""
        assert self._channel is not None
        self._channel.give_up(reason)

    def _ask_for_help(self, writes: OutgoingWrites) -> None:
        """Tell D whether to do its part of the library's work."""
        helped = writes.needs_peer(helped=self._helped)
        if helped != self._helped:
            assert self._channel is not None
            self._channel.send(Waiting(helped))
            self._helped = helped

    def _check_stall(self, writes: OutgoingWrites) -> None:
        """End the link if the library completes nothing for too long, because the library is more
        patient."""
        limit = writes.path.stall_seconds
        if limit is None or not writes.pool.num_flying:
            return
        if self.to.patience.is_over(writes.moved_at, limit, self.name):
            stuck = f"nothing was written for {writes.stuck_seconds():.1f} s"
            self.end_link(f"the link to {self.name} was lost: {stuck}", move=True)

    # ---- the link thread: the end

    @property
    def holds_buffers(self) -> bool:
        """Whether the link has asked for buffers and has not begun to end."""
        return self.state in (OutgoingState.OPENING, OutgoingState.UP)

    @property
    def is_idle(self) -> bool:
        """Whether the link has buffers that no room needs."""
        writes = self.writes
        if self.state is not OutgoingState.UP or writes is None:
            return False
        return writes.is_quiet and not writes.pool.num_held and not self.to.has_rooms

    def end_link(self, reason: str, *, move: bool = False) -> None:
        """Stop issuing writes. The link is over when nothing of it can land any more.

        Args:
            move: rooms of which nothing was begun wait for the next link instead of failing.
        """
        if self.state >= OutgoingState.ENDING:
            return
        self.state = OutgoingState.ENDING
        self._thread.remove_link(self)
        if self._dial is not None:
            self._dial.cancel()
        moves = self._links.open_successor(self) and move
        self.to.on_link_lost(reason, keep_waiting=moves)
        if self._channel is not None:
            self._channel.send(Leaving(reason[:1000], moves))
        if self.writes is not None:
            self._thread.drive_after(self, 0.0)
        elif not self._setting_up:
            self._finish_link()

    def _close_path(self, writes: OutgoingWrites) -> None:
        self.writes = None
        self._thread.drive_after(self, None)

        def close() -> None:
            try:
                writes.path.close()
            except Exception:
                # We know nothing of its buffers then, so the link is never over.
                logger.exception("cannot close a link to %s", self.name)
                return
            self._post_event(self._finish_link)

        self._start_thread("end", close)

    def _finish_link(self) -> None:
        """End the link. Nothing can land any more, and the closed channel tells D so."""
        self.state = OutgoingState.OVER
        if self._channel is not None:
            self._channel.close(LinkDrained())
        self._links.on_link_over(self)
