"""P's side of a staged manager: its links and the thread that fills slots from the pool."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.staged.messages import VERSION, Open
from pd.transfer.staged.mover import MoverError
from pd.transfer.staged.outgoing_link import OutgoingLink

if TYPE_CHECKING:
    import torch

    from pd.transfer.copier import Copier, CopyTicket
    from pd.transfer.ranges import Block
    from pd.transfer.staged.messages import BuffersReady
    from pd.transfer.staged.mover import Mover
    from pd.transfer.staged.outgoing_link import BufferPair
    from pd.transfer.staged.pump import Pump
    from pd.transfer.staged.sender import StagedSender
    from pd.transfer.wire.hub import ChannelHub

logger = logging.getLogger(__name__)

MAX_LOST_LINKS = 4
# Links of one node that hold slots; beyond that one that no room uses is closed for another. More
# peers than MAX_CHANNELS are connected when the first room is there, not before.
MAX_LINKS, MAX_CHANNELS = 16, 64
# How long a room waits for a link that cannot be opened, unless its deadline is sooner.
OPENING_SECONDS = 30.0
_SETTLED_SECONDS = 5.0
_MAX_DELAY = 1.0


@dataclass(frozen=True, slots=True)
class StagingShape:
    """Slots of a link: how many, how large, and whether they may lie in CUDA memory.

    ``host``: what both ends must share for that.
    """

    count: int
    slot_bytes: int
    device: bool
    host: str


@dataclass(slots=True)
class _Gather:
    link: OutgoingLink
    sender: StagedSender
    block: Block
    slots: BufferPair
    ticket: CopyTicket


class OutgoingLinks:
    """Links to every D, one live one to each, besides those that still end.

    Attributes:
        changed: guards all links and senders. Reentrant: a sender that ends takes itself out.
    """

    def __init__(
        self, copier: Copier, mover: Mover, pump: Pump, hub: ChannelHub, shape: StagingShape
    ) -> None:
        self.copier, self.mover, self.pump, self.hub = copier, mover, pump, hub
        self.shape = shape
        self.changed = threading.Condition(threading.RLock())
        self._links: dict[str, OutgoingLink] = {}
        self._delays: dict[str, float] = {}
        # Peers to which links cannot be opened: since when, and why.
        self._refused: dict[str, tuple[float, str]] = {}
        self._ending: set[OutgoingLink] = set()
        self._turn = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    # ---- peers

    def connect(self, peer: str, address: tuple[str, int], *, dial: bool) -> None:
        with self.changed:
            old = self._links.get(peer)
            if old is not None and old.address == address and old.refusal is None:
                return
            self._links[peer] = link = OutgoingLink(self, peer, address)
            self._delays.pop(peer, None)
            self._refused.pop(peer, None)
            dial = dial and len(self._links) <= MAX_CHANNELS
        if old is not None:
            old.end(f"{peer} has a new address")
        if dial:
            link.start()

    def disconnect(self, peer: str, reason: str) -> None:
        with self.changed:
            link = self._links.pop(peer, None)
            self._delays.pop(peer, None)
            self._refused.pop(peer, None)
        if link is not None:
            link.end(reason)

    def link(self, peer: str) -> OutgoingLink:
        """Raises TransferError when the peer is not connected."""
        with self.changed:
            link = self._links.get(peer)
            if link is None:
                raise TransferError(f"{peer} is not connected")
            return link

    def close(self, seconds: float) -> list[OutgoingLink]:
        """End all links; returns those of which something may still land after this time."""
        with self.changed:
            self._closing = True
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.end("the transfer manager was closed")
        with self.changed:
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._ending, timeout=seconds)
        if self._thread is not None:
            self._thread.join()
        return list(self._ending)

    @property
    def quarantined(self) -> int:
        """Own slots that the library may still read."""
        with self.changed:
            return sum(link.quarantined for link in self._ending)

    # ---- called by links

    def wishes(self) -> Open:
        shape = self.shape
        return Open(VERSION, shape.count, shape.slot_bytes, shape.device, shape.host)

    def make_slots(self, ready: BuffersReady) -> torch.Tensor:
        """Raises MoverError when D's slots are not what was asked for."""
        shape = self.shape
        if ready.count > shape.count or ready.slot_bytes > shape.slot_bytes:
            raise MoverError(f"{ready.count} slots of {ready.slot_bytes} bytes were not asked for")
        if ready.slot_bytes < self.copier.cell_bytes:
            raise MoverError(f"slots of {ready.slot_bytes} bytes hold no token")
        if ready.device and not shape.device:
            raise MoverError("this pool is not in CUDA memory")
        return self.copier.make_buffers(ready.count, ready.slot_bytes, on_device=ready.device)

    def make_room(self) -> None:
        """With the lock, before a link takes slots: close the one that was used longest ago if too
        many hold some. Its peer stays connected."""
        holding = [link for link in self._links.values() if link.holds_slots]
        idle = [link for link in holding if link.idle]
        if len(holding) >= MAX_LINKS and idle:
            link = min(idle, key=lambda link: link.progress)
            link.end("another link needs its slots", move=True)

    def not_opened(self, peer: str, reason: str) -> None:
        """A link could not be opened; there will be others."""
        with self.changed:
            since, _ = self._refused.get(peer, (time.monotonic(), ""))
            self._refused[peer] = since, reason

    def opened(self, peer: str) -> None:
        """With the lock: a link is up."""
        self._refused.pop(peer, None)

    def opening_refused(self, peer: str, waiting_since: float) -> str:
        """With the lock: why a room that waits since then has waited enough, empty if it has
        not."""
        since, reason = self._refused.get(peer, (float("inf"), ""))
        waited = time.monotonic() - max(since, waiting_since)
        return f"{reason} (tried for {waited:.0f} s)" if waited > OPENING_SECONDS else ""

    def ending(self, link: OutgoingLink) -> OutgoingLink | None:
        """With the lock. A peer that is still wanted gets a new link, which is returned if it can
        be waited for."""
        self._ending.add(link)
        if self._links.get(link.peer) is not link or link.refusal is not None:
            return None
        lived = time.monotonic() - link.up_since
        settled = link.slots is not None and lived > _SETTLED_SECONDS
        delay = 0.0 if settled else min(_MAX_DELAY, 2 * self._delays.get(link.peer, 0.0) or 0.05)
        self._delays[link.peer] = delay
        return self._renew(link.peer, link.address, delay)

    def over(self, link: OutgoingLink) -> None:
        """With the lock."""
        self._ending.discard(link)
        current = self._links.get(link.peer)
        if current is not None and isinstance(current.refusal, TooManyLostLinks):
            self._renew(link.peer, link.address, 0.0)

    def _renew(self, peer: str, address: tuple[str, int], delay: float) -> OutgoingLink | None:
        self._links[peer] = link = OutgoingLink(self, peer, address)
        lost = [z for z in self._ending if z.peer == peer and z.quarantined]
        if len(lost) >= MAX_LOST_LINKS:
            link.refusal = TooManyLostLinks(
                f"{len(lost)} links to {peer} were lost while something was being written; "
                "another has to wait until one of them is over"
            )
            return None
        link.start(delay)
        return link

    # ---- the thread

    def work(self) -> None:
        """There will be something to gather."""
        with self.changed:
            if self._thread is None and not self._closing:
                name = f"pd-{self.mover.name}-gather"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        begun: deque[_Gather] = deque()
        while True:
            taken = self._next(wait=not begun)
            if taken is not None:
                begun.append(taken)
            elif not begun:
                return
            first, full = begun[0], len(begun) >= self.copier.depth
            if taken is None or full or first.ticket.done() or not first.link.writing:
                self._complete(begun.popleft())

    def _next(self, *, wait: bool) -> _Gather | None:
        """Begin another gather; None if there is none to begin, or at the end if ``wait``."""
        while True:
            with self.changed:
                job = self._take()
                while job is None and wait and not self._closing:
                    self.changed.wait()
                    job = self._take()
            if job is None:
                return None
            link, sender, block, slots = job
            try:
                assert link.slots is not None
                ticket = self.copier.gather(sender.table, block, link.views[slots.source])
                return _Gather(link, sender, block, slots, ticket)
            except Exception as error:
                # Say a CUDA error: it ends the room only.
                logger.exception("cannot read the pool for %s", link.peer)
                self._failed(link, sender, block, slots, error)

    def _take(self) -> tuple[OutgoingLink, StagedSender, Block, BufferPair] | None:
        """Links take turns, and rooms on each."""
        peers = list(self._links)
        for turn in range(len(peers)):
            peer = peers[(self._turn + turn) % len(peers)]
            taken = self._links[peer].take()
            if taken is not None:
                self._turn += turn + 1
                return self._links[peer], *taken
        return None

    def _complete(self, gather: _Gather) -> None:
        try:
            gather.ticket.wait()
        except Exception as error:
            logger.exception("cannot read the pool for %s", gather.link.peer)
            self._failed(gather.link, gather.sender, gather.block, gather.slots, error)
            return
        with self.changed:
            gather.link.gathered(gather.sender, gather.block, gather.slots, good=True)
        gather.link.push()

    def _failed(
        self,
        link: OutgoingLink,
        sender: StagedSender,
        block: Block,
        slots: BufferPair,
        error: Exception,
    ) -> None:
        with self.changed:
            sender.fail(TransferError(f"cannot read the pool: {error}"))
            link.gathered(sender, block, slots, good=False)


class TooManyLostLinks(TransferError):
    """A peer whose lost links hold too many slots."""
