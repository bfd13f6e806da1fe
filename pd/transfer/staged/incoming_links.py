"""D's side of a staged manager: links, receivers, and how staging buffers are emptied."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.staged.incoming_link import IncomingLink
from pd.transfer.staged.outgoing_links import MAX_LINKS, MAX_LOST_LINKS
from pd.transfer.wire.errors import PeerDataError

if TYPE_CHECKING:
    import torch

    from pd.core.starvation import Patience
    from pd.transfer.copier import Copier, CopyTicket
    from pd.transfer.staged.messages import Filled, Open
    from pd.transfer.staged.mover import Mover
    from pd.transfer.staged.outgoing_links import StagingShape
    from pd.transfer.staged.pump import Pump
    from pd.transfer.staged.receiver import StagedReceiver
    from pd.transfer.wire.channel import Channel

logger = logging.getLogger(__name__)

_LOG_INTERVAL = 1.0
_PINNED_BUFFER_BYTES = 8 << 20


@dataclass
class StagingCounters:
    """Blocks that arrived and blocks that were discarded, since the start."""

    links: int = 0
    frames: int = 0
    bytes: int = 0
    discarded_frames: int = 0
    duplicate_frames: int = 0


@dataclass(slots=True)
class _Scatter:
    link: IncomingLink
    note: Filled
    receiver: StagedReceiver
    ticket: CopyTicket


class IncomingLinks:
    """Links from every P and the receivers that they may write for."""

    def __init__(
        self, copier: Copier, mover: Mover, pump: Pump, shape: StagingShape, patience: Patience
    ) -> None:
        self.copier, self.mover, self.pump, self.shape = copier, mover, pump, shape
        self.patience = patience
        self.counters = StagingCounters()
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._receivers: dict[tuple[bytes, int], StagedReceiver] = {}
        self._links: set[IncomingLink] = set()
        self._closing = False
        self._next_log = 0.0

    # ---- any thread

    def add(self, receiver: StagedReceiver) -> None:
        with self.lock:
            key = (receiver.room, receiver.epoch)
            if self._closing or key in self._receivers:
                reason = "closed" if self._closing else "a receiver of this room and epoch exists"
                raise TransferError(f"cannot receive from {receiver.peer}: {reason}")
            self._receivers[key] = receiver

    def remove(self, receiver: StagedReceiver) -> None:
        with self.lock:
            self._receivers.pop((receiver.room, receiver.epoch), None)

    def disconnect(self, peer: str) -> None:
        """Fail the peer's receivers and ask it to drain."""
        self._fail_all(TransferError(f"{peer} was disconnected"), peer)
        with self.lock:
            links = [link for link in self._links if link.peer == peer]
        for link in links:
            link.end()

    def close(self, seconds: float) -> list[IncomingLink]:
        """End all links; returns those in whose buffers something may still land after this time.
        Copies may go on until the hub is closed."""
        with self.lock:
            self._closing = True
            links = list(self._links)
        self._fail_all(TransferError("the transfer manager was closed"))
        for link in links:
            link.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._links, timeout=seconds)
            return list(self._links)

    @property
    def quarantined(self) -> int:
        """D's staging buffers into which a lost peer may still write."""
        with self.lock:
            return sum(link.quarantined for link in self._links)

    def _fail_all(self, error: TransferError, peer: str | None = None) -> None:
        with self.lock:
            ended = [r for r in self._receivers.values() if peer in (None, r.peer)]
        for receiver in ended:
            receiver.fail(error)

    # ---- the hub's thread

    def accept(self, channel: Channel) -> IncomingLink:
        """Adopt a channel. A peer that opens another link has ended its last one."""
        with self.lock:
            old = [link for link in self._links if link.peer == channel.peer]
            link = IncomingLink(self, channel)
            if self._closing:
                # The link has no buffers yet.
                channel.close()
                return link
            self._links.add(link)
            self.counters.links += 1
        for other in old:
            other.end()
        link.prepare()
        return link

    def make_room(self) -> None:
        """Called before a link takes buffers. If too many links hold some, ask a peer without open
        rooms to close its link, the one that was used longest ago."""
        with self.lock:
            holding = [link for link in self._links if link.takes_buffers]
            busy = {receiver.peer for receiver in self._receivers.values()}
            idle = [link for link in holding if link.live and link.peer not in busy]
        if len(holding) >= MAX_LINKS and idle:
            min(idle, key=lambda link: link.used_at).end()

    def prepared(self, peer: str) -> bool:
        """Whether a link of this peer needs nothing but buffers for the first room."""
        with self.lock:
            return any(link.peer == peer and link.prepared for link in self._links)

    def refusal(self, link: IncomingLink) -> str:
        """Reason to make no buffers for a link; empty if there is none.

        Twice as many lost links are allowed if the peer cannot write into their buffers any more.
        The peer's end of such a link is over, so it opens the next one, and does so before the
        buffers are freed here.
        """
        with self.lock:
            lost = [x for x in self._links if x.peer == link.peer and x.in_quarantine]
            writable = sum(x.may_be_written for x in lost)
        if writable < MAX_LOST_LINKS and len(lost) < 2 * MAX_LOST_LINKS:
            return ""
        return f"the buffers of {len(lost)} lost links of {link.peer} are still in quarantine"

    def land(self, link: IncomingLink, notes: list[Filled]) -> None:
        """Empty buffers; returns when they are empty and P was notified.

        The thread that read the notes does it: handing them to another costs more than the copies
        of a GPU take.
        """
        begun: deque[_Scatter] = deque()
        for note in notes:
            scatter = self._try(link, note)
            if scatter is not None:
                begun.append(scatter)
            while begun and (len(begun) >= self.copier.depth or begun[0].ticket.done()):
                self._complete(begun.popleft())
            if link.many_read:
                link.acknowledge()
        while begun:
            self._complete(begun.popleft())
        link.acknowledge()

    def lost(self, link: IncomingLink, reason: str) -> None:
        """Fail the rooms that received something over a link, and those that have no other link to
        wait for. No room waits for a link that D itself has ended."""
        with self.lock:
            awaited = link.live
            others = [x for x in self._links if x.peer == link.peer and x is not link and x.live]
            receivers = [r for r in self._receivers.values() if r.peer == link.peer]
        link.end()
        for receiver in receivers:
            if (awaited and not others) or link in receiver.sources:
                receiver.lost(reason)
        link.finish_unused()

    def _try(self, link: IncomingLink, note: Filled) -> _Scatter | None:
        try:
            return self._begin(link, note)
        except PeerDataError as error:
            link.reject(str(error))
        except Exception as error:
            # For example a CUDA error: it ends this link only.
            logger.exception("failed to take a block of %s", link.peer)
            link.reject(str(error))
        link.done_reading(note.buffer)
        return None

    def _begin(self, link: IncomingLink, note: Filled) -> _Scatter | None:
        with self.lock:
            receiver = self._receivers.get((note.room, note.epoch))
            views = link.views
        block = note.block
        good = False
        if receiver is not None and receiver.peer == link.peer:
            good = receiver.claim(block, link)
            self.counters.duplicate_frames += not good
        if not good or not views or receiver is None or not receiver.enter():
            self._discard(link, note)
            link.done_reading(note.buffer)
            return None
        try:
            ticket = self.copier.scatter(receiver.table, block, views[note.buffer])
        except BaseException:
            receiver.leave(0)
            raise
        return _Scatter(link, note, receiver, ticket)

    def _complete(self, scatter: _Scatter) -> None:
        arrived = self.copier.shape.num_bytes(scatter.note.block)
        try:
            scatter.ticket.wait()
            self.counters.frames += 1
            self.counters.bytes += arrived
        except Exception as error:
            logger.exception("failed to take a block of %s", scatter.link.peer)
            scatter.receiver.fail(TransferError(f"cannot write to the pool: {error}"))
            arrived = 0
        finally:
            scatter.receiver.leave(arrived)
            scatter.link.done_reading(scatter.note.buffer)

    def _discard(self, link: IncomingLink, note: Filled) -> None:
        self.counters.discarded_frames += 1
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_INTERVAL
            logger.info(
                "discarded a block of %s: room %s, epoch %d is unknown, over or has it already "
                "(%d discarded so far)",
                link.peer,
                note.room.hex(),
                note.epoch,
                self.counters.discarded_frames,
            )

    # ---- set-up threads and the pump's

    def make_buffers(self, wishes: Open) -> tuple[torch.Tensor, bool]:
        """Make buffers as the peer wishes, but not more or larger ones than D's own shape. Returns
        them and whether they lie in CUDA memory."""
        own = self.shape
        count = min(wishes.count, own.count)
        size = max(min(wishes.buffer_bytes, own.buffer_bytes), self.copier.shape.max_cell_bytes)
        device = own.device and wishes.device and own.host == wishes.host
        if not device and (own.device or wishes.device):
            # P or D chose this size for copies between GPUs.
            size = max(min(size, _PINNED_BUFFER_BYTES), self.copier.shape.max_cell_bytes)
        return self.copier.make_buffers(count, size, on_device=device), device

    def over(self, link: IncomingLink) -> None:
        with self._changed:
            self._links.discard(link)
            self._changed.notify_all()
