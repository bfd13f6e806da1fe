"""P's end of a staged link."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.errors import TransferError
from pd.core.exit import STUCK_PREFIX
from pd.core.messages import LEASE_SECONDS
from pd.transfer.staged.messages import (
    BuffersReady,
    Filled,
    FilledSlots,
    Freed,
    Leaving,
    LinkDrained,
    Prepared,
    Waiting,
)
from pd.transfer.staged.mover import MoverError

if TYPE_CHECKING:
    import torch

    from pd.transfer.ranges import Block
    from pd.transfer.staged.mover import Path
    from pd.transfer.staged.outgoing_links import OutgoingLinks
    from pd.transfer.staged.sender import StagedSender
    from pd.transfer.wire.channel import Channel
    from pd.transfer.wire.hub import Dial

logger = logging.getLogger(__name__)

# After this long without D's help a write is taken to need it.
_ALONE_SECONDS = 1e-3


class BufferPair(NamedTuple):
    """P's, and D's, to which it is written."""

    source: int
    target: int


class OutState(IntEnum):
    """States of the sending link. CONNECTED has no slots, which are taken for the first room. Rooms
    send only while it is UP. It stays ENDING until nothing can land at D."""

    DIALLING = 0
    CONNECTED = 1
    OPENING = 2
    UP = 3
    ENDING = 4
    OVER = 5


class OutgoingLink:
    """The slots of one link, what lies in them, and the rooms that wait for one.

    A slot of P (``_own``) and one of D (``_free``) are taken together. P's is free again when the
    library has written it, D's later, when D, which holds it until then, has read it; so whenever D
    has a free one, P has. Of either the one that was freed last is taken first: it is still in the
    cache. ``progress`` is when something of that, or a step of the link's opening, was last seen.
    ``changed`` guards this and the senders. ``views`` are the slots as the copier wants them.
    """

    def __init__(self, outgoing: OutgoingLinks, peer: str, address: tuple[str, int]) -> None:
        self.peer, self.address = peer, address
        self.changed = outgoing.changed
        self.state = OutState.DIALLING
        self.refusal: TransferError | None = None
        self.progress = self.up_since = time.monotonic()
        self.gathering = 0
        self.slots: torch.Tensor | None = None
        self.views: list[Any] = []
        self.max_cells = 1
        self._outgoing = outgoing
        self._dial: Dial | None = None
        self._channel: Channel | None = None
        self._path: Path | None = None
        self._setting_up = False
        self._prepared = threading.Event()
        self._senders: set[StagedSender] = set()
        self._queue: deque[StagedSender] = deque()
        self._own: list[int] = []
        self._free: list[int] = []
        self._filled: deque[tuple[BufferPair, StagedSender, Block]] = deque()
        self._flying: dict[int, tuple[BufferPair, StagedSender, Block] | None] = {}
        self._held: set[int] = set()
        self._flying_since = 0.0
        # D helps from the start until it is told that nothing is waited for.
        self._said_waiting = True
        self._library = threading.Lock()
        self._to_probe = True

    # ---- any thread

    def start(self, delay: float = 0.0) -> None:
        """Open the channel. A node that only receives needs none."""
        with self.changed:
            if self._dial is None and self.state is OutState.DIALLING:
                hub = self._outgoing.hub
                self._dial = hub.dial(self.peer, self.address, self, delay)

    def open(self, sender: StagedSender) -> None:
        self.start()
        with self.changed:
            if self.refusal is not None:
                raise self.refusal
            if self.state >= OutState.ENDING:
                raise TransferError(f"{self.peer} is not connected")
            self._senders.add(sender)
            self._ask()

    def adopt(self, sender: StagedSender, *, queued: bool) -> None:
        """A room that waited for the last link."""
        since = sender.waiting_since
        self._senders.add(sender)
        if queued:
            self.enqueue(sender)
            sender.waiting_since = since
        self._ask()

    def enqueue(self, sender: StagedSender) -> None:
        if sender not in self._queue:
            self._queue.append(sender)
            sender.waiting_since = time.monotonic()
            self.changed.notify_all()

    def queued(self, sender: StagedSender) -> bool:
        return sender in self._queue

    def forget(self, sender: StagedSender) -> None:
        self._senders.discard(sender)
        with contextlib.suppress(ValueError):
            self._queue.remove(sender)

    def check_progress(self, sender: StagedSender) -> None:
        with self.changed:
            if sender not in self._queue and not sender.unsaid:
                return
            refused = self._outgoing.opening_refused(self.peer, sender.waiting_since)
            if refused:
                sender.fail(TransferError(refused))
                return
            since = max(self.progress, sender.waiting_since)
            if self._outgoing.hub.patience.is_over(since, LEASE_SECONDS, self.peer):
                idle = time.monotonic() - since
                sender.fail(
                    TransferError(f"no KV data could be sent to node {self.peer} for {idle:.1f} s")
                )

    def end(self, reason: str, *, move: bool = False) -> None:
        """Stop issuing; the link is over when nothing of it can land any more.

        ``move``: rooms of which nothing was begun wait for the next link instead of failing.
        """
        with self.changed:
            if self.state >= OutState.ENDING:
                return
            self.state = OutState.ENDING
            if self._dial is not None:
                self._dial.cancel()
            next_link = self._outgoing.ending(self)
            for sender in list(self._senders):
                if move and next_link is not None and not sender.begun:
                    self.forget(sender)
                    sender.move(next_link)
                else:
                    sender.fail(TransferError(reason))
            self.changed.notify_all()
            if self._channel is not None:
                self._channel.send(Leaving(reason[:1000], move and next_link is not None))
            if self._path is None and not self._setting_up:
                self._finish()
        self._outgoing.pump.wake()

    @property
    def holds_slots(self) -> bool:
        """Slots were asked for and are not given up."""
        return self.state in (OutState.OPENING, OutState.UP)

    @property
    def idle(self) -> bool:
        """With the lock: it has slots and no room that needs them."""
        busy = self._senders or self._filled or self._flying or self._held or self.gathering
        return self.state is OutState.UP and not busy

    @property
    def quarantined(self) -> int:
        """Slots of a link that lost its peer while they were being written."""
        return len(self._flying) if self.state is OutState.ENDING else 0

    # ---- the hub's thread

    def opened(self, channel: Channel) -> None:
        with self.changed:
            if self.state is not OutState.DIALLING:
                channel.close()
                return
            self.state, self._channel = OutState.CONNECTED, channel
            self.progress = time.monotonic()
        name = STUCK_PREFIX + "preparation of a link"
        threading.Thread(target=self._prepare, name=name, daemon=True).start()
        with self.changed:
            self._ask()

    def unreachable(self, error: TransferError, final: bool) -> None:
        """Who waits for the peer ends now: an instance listens as long as it lives."""
        with self.changed:
            if final:
                self.refusal = error
            for sender in list(self._senders if final else self._queue):
                sender.fail(error)

    def message(self, channel: Channel, message: Any) -> None:
        if isinstance(message, Freed):
            self._freed(message.slots)
        elif isinstance(message, BuffersReady):
            with self.changed:
                if self.state is not OutState.OPENING or self._setting_up:
                    raise ValueError("slots that were not asked for")
                self._setting_up, self.progress = True, time.monotonic()
            name = STUCK_PREFIX + "set-up of a link"
            threading.Thread(target=self._set_up, args=(message,), name=name, daemon=True).start()
        else:
            reason = getattr(message, "reason", "")
            if not reason:
                raise ValueError(f"a decode node does not send {type(message).__name__}")
            logger.warning("%s refused a link: %s", self.peer, reason)
            self._not_opened(f"{self.peer} refused a link: {reason}")

    def ended(self, channel: Channel, reason: str, proof: bool) -> None:
        self.end(f"the link to {self.peer} was lost: {reason}", move=True)

    def _freed(self, slots: list[int]) -> None:
        with self.changed:
            if not self._held.issuperset(slots) or len(set(slots)) < len(slots):
                raise ValueError(f"it freed slots {slots} of which it holds only {self._held}")
            self._held.difference_update(slots)
            self._free.extend(slots)
            self.progress = time.monotonic()
            self.changed.notify_all()

    def _set_up(self, ready: BuffersReady) -> None:
        """On a thread of its own, since libraries take their time."""
        outgoing = self._outgoing
        self._prepared.wait()
        try:
            slots = outgoing.make_slots(ready)
            path = outgoing.mover.path(slots, ready.description, self.peer, outgoing.pump.wake)
        except Exception as error:
            # MoverError, or whatever a library and torch raise without memory.
            unknown = not isinstance(error, MoverError)
            logger.error("cannot open a link to %s: %s", self.peer, error, exc_info=unknown)
            with self.changed:
                self._setting_up = False
                if self.state is OutState.ENDING:
                    self._finish()
            lasting = isinstance(error, MoverError) and error.lasting
            self._not_opened(f"cannot open a link to {self.peer}: {error}", lasting=lasting)
            return
        with self.changed:
            self.slots, self._path, self._setting_up = slots, path, False
            self.views = [outgoing.copier.view(slot) for slot in slots]
            self.progress = time.monotonic()
            self.max_cells = slots.shape[1] // outgoing.copier.cell_bytes
        outgoing.pump.add(self)

    def _prepare(self) -> None:
        """On a thread of its own, since libraries take their time."""
        try:
            self._outgoing.mover.prepare()
        except MoverError as error:
            # The first room hears of it.
            logger.warning("cannot prepare a link to %s: %s", self.peer, error)
        finally:
            self._prepared.set()
        with self.changed:
            if self._channel is not None and self.state < OutState.ENDING:
                self._channel.send(Prepared())

    def _not_opened(self, reason: str, *, lasting: bool = False) -> None:
        """The rooms wait for another link, unless that would end the same way."""
        self._outgoing.not_opened(self.peer, reason)
        self.end(reason, move=not lasting)

    # ---- the gatherer's thread, with the lock

    def take(self) -> tuple[StagedSender, Block, BufferPair] | None:
        """The next block and slots for it, until :meth:`gathered`."""
        while self.state is OutState.UP and self._free and self._queue:
            sender = self._queue.popleft()
            block = sender.next_block(self.max_cells)
            if block is None:
                sender.settle()
                continue
            self._queue.append(sender)
            sender.reading += 1
            sender.unsaid += 1
            self.gathering += 1
            return sender, block, BufferPair(self._own.pop(), self._free.pop())
        return None

    def gathered(
        self, sender: StagedSender, block: Block, slots: BufferPair, *, good: bool
    ) -> None:
        """The pool is not read any more; a room that ended meanwhile needs no write."""
        self.gathering -= 1
        sender.reading -= 1
        self.progress = time.monotonic()
        if good and sender.active and self.state is OutState.UP:
            self._filled.append((slots, sender, block))
        else:
            self._own.append(slots.source)
            self._free.append(slots.target)
            sender.said()
        if self.state is OutState.ENDING:
            self._outgoing.pump.wake()

    # ---- the gatherer's thread, without the lock

    @property
    def writing(self) -> bool:
        """The library has something to do."""
        return bool(self._flying)

    def push(self) -> None:
        """Begin the writes of what was gathered, and see which are over already."""
        with self._library:
            path = self._path
            if path is None or self.state is not OutState.UP:
                return
            self._write(path)
            self._collect(path)
            flying = bool(self._flying)
        if flying:
            self._outgoing.pump.wake()

    # ---- the pump's thread

    def drive(self) -> float | None:
        with self._library:
            return self._drive()

    def _drive(self) -> float | None:
        path = self._path
        assert path is not None
        if self._to_probe and self.state is OutState.OPENING:
            # A first write, of which D is not told, shows that the way is open.
            self._to_probe, self._flying_since = False, time.monotonic()
            self._flying[0] = None
            path.write(0, 0, 1)
        if self.state is OutState.UP:
            self._write(path)
        self._collect(path)
        self._ask_for_help(path)
        self._check_stall(path)
        if self.state is OutState.ENDING:
            with self.changed:
                idle = not self._flying and not self.gathering
                if idle:
                    self._drop_filled()
            if idle:
                self._close(path)
                return None
        if not self._flying or path.poll_seconds is None:
            return None
        return path.poll_seconds * (1 + min(100.0, 20.0 * self._stuck()))

    def failed(self, error: Exception) -> None:
        """The library broke a promise: what it still does is unknown, so the channel stays open
        and the slots are never used again."""
        self.end(f"the link to {self.peer} failed: {error}")

    def _stuck(self) -> float:
        return time.monotonic() - self._flying_since

    def _write(self, path: Path) -> None:
        while self._filled:
            slots, sender, block = self._filled.popleft()
            if not self._flying:
                self._flying_since = time.monotonic()
            self._flying[slots.target] = (slots, sender, block)
            num_bytes = block.cells * self._outgoing.copier.cell_bytes
            path.write(slots.source, slots.target, num_bytes)

    def _collect(self, path: Path) -> None:
        """Tell D of what has arrived."""
        notes, told, errors = [], [], []
        for written in path.poll():
            job = self._flying.pop(written.target)
            self._flying_since = time.monotonic()
            if written.error:
                errors.append(written.error)
            elif job is None:
                self._came_up()
            else:
                slots, sender, block = job
                told.append((sender, slots))
                notes.append(
                    Filled(
                        slots.target,
                        sender.room,
                        sender.epoch,
                        block.token_start,
                        block.token_stop,
                        block.layer_start,
                        block.layer_stop,
                    )
                )
        if notes:
            self._tell(notes, told)
        if errors:
            self.end(f"the link to {self.peer} was lost: {errors[0]}", move=True)

    def _came_up(self) -> None:
        with self.changed:
            assert self.slots is not None
            self._own = list(reversed(range(len(self.slots))))
            self._free = list(self._own)
            self._outgoing.opened(self.peer)
            if self.state is OutState.OPENING:
                self.state, self.progress = OutState.UP, time.monotonic()
                self.up_since = self.progress
            self.changed.notify_all()
        logger.info("the %s link to %s is up", self._outgoing.mover.name, self.peer)

    def _tell(self, notes: list[Filled], told: list[tuple[StagedSender, BufferPair]]) -> None:
        assert self._channel is not None
        with self.changed:
            self._held.update(slots.target for _, slots in told)
            self._own.extend(slots.source for _, slots in told)
        self._channel.send(FilledSlots(notes))
        with self.changed:
            self.progress = time.monotonic()
            for sender, _ in told:
                sender.said()

    def _ask_for_help(self, path: Path) -> None:
        """D's part of the library's work, in case it has one."""
        waits = path.needs_peer and bool(self._flying)
        waits = waits and (self._said_waiting or self._stuck() > _ALONE_SECONDS)
        if waits != self._said_waiting:
            assert self._channel is not None
            self._channel.send(Waiting(waits))
            self._said_waiting = waits

    def _check_stall(self, path: Path) -> None:
        """Give the link up when the library, which is more patient, completes nothing."""
        limit, since = path.stall_seconds, self._flying_since
        if limit is None or not self._flying or self.state is OutState.ENDING:
            return
        if self._outgoing.hub.patience.is_over(since, limit, self.peer):
            stuck = f"nothing was written for {self._stuck():.1f} s"
            self.end(f"the link to {self.peer} was lost: {stuck}", move=True)

    def _drop_filled(self) -> None:
        while self._filled:
            _, sender, _ = self._filled.popleft()
            sender.said()

    def _close(self, path: Path) -> None:
        self._outgoing.pump.remove(self)
        path.close()
        with self.changed:
            self._path = self.slots = None
            self.views = []
            self._finish()

    # ---- with the lock

    def _ask(self) -> None:
        """Ask for slots, when there is a room to send."""
        if self.state is OutState.CONNECTED and self._senders:
            assert self._channel is not None
            self._outgoing.make_room()
            self.state, self.progress = OutState.OPENING, time.monotonic()
            self._channel.send(self._outgoing.wishes())

    def _finish(self) -> None:
        """Nothing can land any more, which closing the channel says."""
        self.state = OutState.OVER
        if self._channel is not None:
            self._channel.close(LinkDrained())
        self._outgoing.over(self)
        self.changed.notify_all()
