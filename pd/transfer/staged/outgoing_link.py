"""Sending side of a link that goes through staging buffers."""

from __future__ import annotations

import logging
import threading
import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from pd.core.exit import STUCK_PREFIX
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

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec
    import torch

    from pd.core.errors import TransferError
    from pd.transfer.staged.mover import Path
    from pd.transfer.staged.outgoing_links import OutgoingLinks
    from pd.transfer.staged.outgoing_peer import OutgoingPeer
    from pd.transfer.wire.channel import Channel
    from pd.transfer.wire.hub import Dial

logger = logging.getLogger(__name__)


class OutgoingState(IntEnum):
    """States of the sending link. It is CONNECTED, without buffers, until the first room asks for
    some. Rooms send only while it is UP. It stays ENDING until no write can reach the decode node
    any more."""

    DIALLING = 0
    CONNECTED = 1
    OPENING = 2
    UP = 3
    ENDING = 4
    OVER = 5


class OutgoingLink:
    """State machine of one link, driven by the :class:`LinkThread` alone.

    The hub's thread and threads that call the library for long post to it (the methods below "any
    thread"); metrics read ``state`` and counts of buffers.

    Attributes:
        to: the peer and its rooms, which may outlive the link.
        writes: buffers and the library's writes; None before the first room and at the end.
    """

    def __init__(self, links: OutgoingLinks, to: OutgoingPeer) -> None:
        self.to, self.name = to, to.peer
        self.state = OutgoingState.DIALLING
        self.writes: OutgoingWrites | None = None
        self.up_since = time.monotonic()
        self._links, self._thread = links, links.thread
        self._dial: Dial | None = None
        self._channel: Channel | None = None
        self._setting_up = False
        self._prepared = threading.Event()
        # Whether D calls its library. It does from the start, until it is told that nothing waits.
        self._helped = True
        self._broken = False

    # ---- any thread

    def opened(self, channel: Channel) -> None:
        self._post(lambda: self._on_opened(channel))

    def unreachable(self, error: TransferError, final: bool) -> None:
        self.to.unreachable(error, final=final)

    def message(self, channel: Channel, message: msgspec.Struct) -> None:
        if isinstance(message, Freed):
            self._post(lambda: self._on_freed(message))
        elif isinstance(message, BuffersReady):
            self._post(lambda: self._on_buffers_ready(message))
        elif isinstance(message, Refused):
            logger.warning("%s refused a link: %s", self.name, message.reason)
            reason = f"{self.name} refused a link: {message.reason}"
            self._post(lambda: self._not_opened(reason))
        else:
            raise ValueError(f"a decode node does not send {type(message).__name__}")

    def ended(self, channel: Channel, reason: str, proof: bool) -> None:
        lost = f"the link to {self.name} was lost: {reason}"
        self._post(lambda: self.end(lost, move=True))

    def _post(self, event: Callable[[], None]) -> None:
        """Have the link thread call something."""
        self._thread.post(lambda: self._guarded(event))

    @property
    def quarantined(self) -> int:
        """Buffers that the library may still read although the link has ended."""
        writes = self.writes
        return writes.pool.flying if self.state is OutgoingState.ENDING and writes else 0

    # ---- the link thread: opening

    def start(self, delay: float = 0.0) -> None:
        """Open the channel. A node that only receives needs none."""
        if self._dial is None and self.state is OutgoingState.DIALLING:
            self._dial = self._links.hub.dial(self.name, self.to.address, self, delay)

    def ask(self) -> None:
        """Ask for buffers, when there is a room to send."""
        if not self.to.has_rooms:
            return
        self.start()
        if self.state is OutgoingState.CONNECTED:
            assert self._channel is not None
            self._links.make_room()
            self.state = OutgoingState.OPENING
            self.to.link_opens()
            self._channel.send(self._links.wishes())

    def _on_opened(self, channel: Channel) -> None:
        if self.state is not OutgoingState.DIALLING:
            channel.close()
            return
        self.state, self._channel = OutgoingState.CONNECTED, channel
        self.to.progressed()
        self._spawn("preparation", self._prepare)
        self.ask()

    def _on_buffers_ready(self, ready: BuffersReady) -> None:
        if self.state is OutgoingState.ENDING:
            return
        if self.state is not OutgoingState.OPENING or self._setting_up:
            self._reject("buffers that were not asked for")
            return
        self.to.progressed()
        self._spawn("set-up", lambda: self._set_up(ready))
        self._setting_up = True  # only now: nothing waits for a thread that could not start

    def _on_path(self, buffers: torch.Tensor, path: Path) -> None:
        self._setting_up = False
        self.writes = OutgoingWrites(buffers, path, self._links.copier)
        self.to.progressed()
        if self.state is OutgoingState.OPENING:
            # Rooms send when a first write has shown that the way is open.
            self._guarded(self.writes.probe)
        self.drive()

    def _on_no_path(self, reason: str, *, lasting: bool) -> None:
        self._setting_up = False
        if self.state is OutgoingState.ENDING:
            self._finish()
        self._not_opened(reason, lasting=lasting)

    def _not_opened(self, reason: str, *, lasting: bool = False) -> None:
        """End a link that could not be opened. Its rooms wait for another link, unless that would
        fail in the same way."""
        self.to.link_not_opened(reason)
        self.end(reason, move=not lasting)

    def _came_up(self, buffer_bytes: int) -> None:
        if self.state is OutgoingState.OPENING:
            self.state, self.up_since = OutgoingState.UP, time.monotonic()
            self.to.link_opened(buffer_bytes)
            self._thread.link_up(self)
            logger.info("the %s link to %s is up", self._links.mover.name, self.name)

    # ---- threads of their own, since libraries take their time

    def _spawn(self, what: str, run: Callable[[], None]) -> None:
        name = f"{STUCK_PREFIX}{what} of a link"
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._links.add_thread(thread)

    def _prepare(self) -> None:
        try:
            self._links.mover.prepare()
        except MoverError as error:
            # The set-up for the first room reports it.
            logger.warning("cannot prepare a link to %s: %s", self.name, error)
        finally:
            self._prepared.set()
        self._post(self._on_prepared)

    def _on_prepared(self) -> None:
        if self._channel is not None and self.state < OutgoingState.ENDING:
            self._channel.send(Prepared())

    def _set_up(self, ready: BuffersReady) -> None:
        links = self._links
        self._prepared.wait()
        try:
            buffers = links.make_buffers(ready)
            path = links.mover.path(buffers, ready.description, self.name, self._wake)
        except Exception as error:
            # MoverError, or whatever a library and torch raise without memory.
            unknown = not isinstance(error, MoverError)
            logger.error("cannot open a link to %s: %s", self.name, error, exc_info=unknown)
            reason = f"cannot open a link to {self.name}: {error}"
            lasting = isinstance(error, MoverError) and error.lasting
            self._post(lambda: self._on_no_path(reason, lasting=lasting))
            return
        self._post(lambda: self._on_path(buffers, path))

    def _wake(self) -> None:
        self._post(self.drive)

    # ---- the link thread: sending

    @property
    def can_take(self) -> bool:
        writes = self.writes
        return writes is not None and writes.pool.free > 0 and self.to.has_blocks

    @property
    def writing(self) -> bool:
        """Whether the library has a write to do."""
        return self.writes is not None and self.writes.pool.flying > 0

    def view(self, source: int) -> Any:
        """A buffer of P as the copier wants it."""
        assert self.writes is not None
        return self.writes.views[source]

    def take(self) -> StagedBlock | None:
        """The next block and buffers for it, until :meth:`gathered`. Only while the link is UP."""
        if not self.can_take:
            return None
        taken = self.to.take()
        if taken is None:
            return None
        assert self.writes is not None
        return StagedBlock(*taken, self.writes.pool.take())

    def gathered(self, staged: StagedBlock) -> None:
        """The pool is not read any more; a room that ended meanwhile needs no write."""
        writes, sender, to = self.writes, staged.sender, self.to
        assert writes is not None
        with to.changed:
            sender.was_read()
            to.progress = time.monotonic()
            wanted = sender.active and self.state is OutgoingState.UP
            if not wanted:
                sender.was_sent()
        if not wanted:
            writes.pool.put_back(staged.pair)
        elif self._guarded(lambda: writes.write(staged)):
            self.drive()
            return
        if self.state is OutgoingState.ENDING:
            self.drive()

    def drive(self) -> None:
        """See which writes are over, and close an ending link after the last one."""
        if self._broken or self.writes is None:
            return
        if self._guarded(self._poll) and self.writes is not None:
            self._thread.drive_in(self, self.writes.pause())

    def _guarded(self, call: Callable[[], object]) -> bool:
        """Whether a call did not raise.

        An exception means that the library or this code broke its contract. It is unknown which
        writes are still under way, so the channel stays open and the buffers are never used again.
        """
        try:
            call()
        except Exception as error:
            # An error ends its link, not the thread that serves the others.
            logger.exception("the link to %s failed", self.name)
            self._broken = True
            self.end(f"the link to {self.name} failed: {error}")
            self._thread.drive_in(self, None)
            return False
        return True

    def _poll(self) -> None:
        writes = self.writes
        assert writes is not None
        arrived, probed, error = writes.poll()
        if probed:
            self._came_up(writes.buffer_bytes)
        if arrived:
            self._announce(arrived)
        self._ask_for_help(writes)
        if error:
            self.end(f"the link to {self.name} was lost: {error}", move=True)
        elif self.state is not OutgoingState.ENDING:
            self._check_stall(writes)
        if self.state is OutgoingState.ENDING and writes.quiet:
            self._close(writes)

    def _announce(self, arrived: list[StagedBlock]) -> None:
        """Notify D of filled buffers."""
        assert self._channel is not None
        self._channel.send(FilledBuffers([staged.note() for staged in arrived]))
        with self.to.changed:
            self.to.progress = time.monotonic()
            for staged in arrived:
                staged.sender.was_sent()

    def _on_freed(self, freed: Freed) -> None:
        writes = self.writes
        if writes is None:
            if self.state < OutgoingState.ENDING:
                self._reject("it freed buffers before there were any")
            return
        try:
            writes.pool.release(freed.buffers)
        except ValueError as error:
            self._reject(str(error))
            return
        self.to.progressed()

    def _reject(self, reason: str) -> None:
        """End the channel because D broke the rules; the hub reports the end."""
        assert self._channel is not None
        self._channel.give_up(reason)

    def _ask_for_help(self, writes: OutgoingWrites) -> None:
        """Have D do its part of the library's work, in case there is one."""
        helped = writes.needs_peer(helped=self._helped)
        if helped != self._helped:
            assert self._channel is not None
            self._channel.send(Waiting(helped))
            self._helped = helped

    def _check_stall(self, writes: OutgoingWrites) -> None:
        """End the link when the library, which is more patient, completes nothing."""
        limit = writes.path.stall_seconds
        if limit is None or not writes.pool.flying:
            return
        if self.to.patience.is_over(writes.moved_at, limit, self.name):
            stuck = f"nothing was written for {writes.stuck():.1f} s"
            self.end(f"the link to {self.name} was lost: {stuck}", move=True)

    # ---- the link thread: the end

    @property
    def holds_buffers(self) -> bool:
        """Whether buffers were asked for and the link has not begun to end."""
        return self.state in (OutgoingState.OPENING, OutgoingState.UP)

    @property
    def idle(self) -> bool:
        """Whether the link has buffers and no room that needs them."""
        writes = self.writes
        if self.state is not OutgoingState.UP or writes is None:
            return False
        return writes.quiet and not writes.pool.held and not self.to.has_rooms

    def end(self, reason: str, *, move: bool = False) -> None:
        """Stop issuing; the link is over when nothing of it can land any more.

        ``move``: rooms of which nothing was begun wait for the next link instead of failing.
        """
        if self.state >= OutgoingState.ENDING:
            return
        self.state = OutgoingState.ENDING
        self._thread.link_down(self)
        if self._dial is not None:
            self._dial.cancel()
        moves = self._links.renew(self) and move
        self.to.link_lost(reason, keep_waiting=moves)
        if self._channel is not None:
            self._channel.send(Leaving(reason[:1000], moves))
        if self.writes is not None:
            self._thread.drive_in(self, 0.0)
        elif not self._setting_up:
            self._finish()

    def _close(self, writes: OutgoingWrites) -> None:
        self.writes = None
        self._thread.drive_in(self, None)

        def close() -> None:
            try:
                writes.path.close()
            except Exception:
                # Nothing is known of its buffers then: the link is never over.
                logger.exception("cannot close a link to %s", self.name)
                return
            self._post(self._finish)

        self._spawn("end", close)

    def _finish(self) -> None:
        """End the link. Nothing can land any more, and the closed channel tells D so."""
        self.state = OutgoingState.OVER
        if self._channel is not None:
            self._channel.close(LinkDrained())
        self._links.over(self)
