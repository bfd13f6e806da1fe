"""D's side of a staged manager: links, receivers, and how we empty staging buffers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.common.open_receivers import OpenReceivers
from pd.transfer.staged.incoming_link import IncomingLink
from pd.transfer.staged.outgoing_links import MAX_LINKS, MAX_LOST_LINKS
from pd.transfer.wire.errors import PeerDataError

if TYPE_CHECKING:
    import torch

    from pd.transfer.copier import Copier, CopyTicket
    from pd.transfer.staged.messages import Filled, Open
    from pd.transfer.staged.mover import Mover
    from pd.transfer.staged.outgoing_links import StagingShape
    from pd.transfer.staged.pump import Pump
    from pd.transfer.staged.receiver import StagedReceiver
    from pd.transfer.wire.channel import Channel
    from pd.util.starvation import Patience

logger = logging.getLogger(__name__)

_PINNED_BUFFER_BYTES = 8 << 20


@dataclass
class StagingCounters:
    """Counts of received and discarded blocks since the start."""

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
    """Links from every P and the receivers they may write for."""

    def __init__(
        self, copier: Copier, mover: Mover, pump: Pump, shape: StagingShape, patience: Patience
    ) -> None:
        self.copier, self.mover, self.pump, self.shape = copier, mover, pump, shape
        self.counters = StagingCounters()
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.receivers: OpenReceivers[StagedReceiver] = OpenReceivers(self.lock, patience)
        self._links: set[IncomingLink] = set()
        self._closing = False

    # ---- any thread

    def disconnect_peer(self, peer: str) -> None:
        """Fail the peer's receivers and ask it to drain."""
        self.receivers.fail_receivers(TransferError(f"{peer} was disconnected"), peer)
        with self.lock:
            links = [link for link in self._links if link.peer == peer]
        for link in links:
            link.end_link()

    def close(self, seconds: float) -> list[IncomingLink]:
        """End all links. Return the links whose buffers may still be written after this time.

        Copies may go on until the hub is closed.
        """
        self.receivers.close()
        with self.lock:
            self._closing = True
            links = list(self._links)
        self.receivers.fail_receivers(TransferError("the transfer manager was closed"))
        for link in links:
            link.end_link()
        with self._changed:
            self._changed.wait_for(lambda: not self._links, timeout=seconds)
            return list(self._links)

    @property
    def num_quarantined(self) -> int:
        """Number of D's staging buffers that a lost peer may still write."""
        with self.lock:
            return sum(link.num_quarantined for link in self._links)

    # ---- the hub's thread

    def accept_channel(self, channel: Channel) -> IncomingLink:
        """Make a link for a channel. The peer has ended its earlier link."""
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
            other.end_link()
        link.start_preparing()
        return link

    def end_idle_link(self) -> None:
        """If too many links hold buffers, ask the peer of the least recently used idle one to close
        it. Called before a link takes buffers."""
        with self.lock:
            holding = [link for link in self._links if link.claims_buffers]
            busy = {receiver.peer for receiver in self.receivers.list_receivers()}
            idle = [link for link in holding if link.is_live and link.peer not in busy]
        if len(holding) >= MAX_LINKS and idle:
            min(idle, key=lambda link: link.used_at).end_link()

    def is_prepared(self, peer: str) -> bool:
        """Whether a link of this peer needs only buffers for the first room."""
        with self.lock:
            return any(link.peer == peer and link.is_prepared for link in self._links)

    def find_refusal(self, link: IncomingLink) -> str:
        """Return why a link gets no buffers; empty if it does.

        We allow twice as many lost links if the peer cannot write into their buffers any more. The
        peer has finished with such a link, so it opens the next one before we free the buffers
        here.
        """
        with self.lock:
            lost = [x for x in self._links if x.peer == link.peer and x.is_in_quarantine]
            writable = sum(x.may_be_written for x in lost)
        if writable < MAX_LOST_LINKS and len(lost) < 2 * MAX_LOST_LINKS:
            return ""
        return f"the buffers of {len(lost)} lost links of {link.peer} are still in quarantine"

    def land_blocks(self, link: IncomingLink, notes: list[Filled]) -> None:
        """Empty buffers, and notify P when they are empty.

        The thread that read the notes does this, because handing them to another costs more than
        the copies of a GPU take.
        """
        begun: deque[_Scatter] = deque()
        for note in notes:
            scatter = self._try_scatter(link, note)
            if scatter is not None:
                begun.append(scatter)
            while begun and (len(begun) >= self.copier.depth or begun[0].ticket.is_done()):
                self._complete_scatter(begun.popleft())
            if link.has_many_read:
                link.send_freed()
        while begun:
            self._complete_scatter(begun.popleft())
        link.send_freed()

    def on_link_lost(self, link: IncomingLink, reason: str) -> None:
        """Fail the rooms that received blocks over a link, and the rooms without another link to
        wait for. No room waits for a link ended by D itself."""
        with self.lock:
            awaited = link.is_live
            others = [x for x in self._links if x.peer == link.peer and x is not link and x.is_live]
            receivers = self.receivers.list_receivers(link.peer)
        link.end_link()
        for receiver in receivers:
            if (awaited and not others) or link in receiver.sources:
                receiver.on_link_lost(reason)
        link.finish_unused()

    def _try_scatter(self, link: IncomingLink, note: Filled) -> _Scatter | None:
        try:
            return self._begin_scatter(link, note)
        except PeerDataError as error:
            link.reject_peer(str(error))
        except Exception as error:
            # For example, a CUDA error. It ends only this link.
            logger.exception("failed to take a block of %s", link.peer)
            link.reject_peer(str(error))
        link.done_reading(note.buffer)
        return None

    def _begin_scatter(self, link: IncomingLink, note: Filled) -> _Scatter | None:
        with self.lock:
            receiver = self.receivers.find_receiver(note.room, note.epoch, link.peer)
            views = link.views
        block = note.block
        good = False
        if receiver is not None:
            good = receiver.claim_block(block, link)
            self.counters.duplicate_frames += not good
        if not good or not views or receiver is None or not receiver.enter_pages():
            self.counters.discarded_frames += 1
            count = self.counters.discarded_frames
            self.receivers.log_discarded(link.peer, note.room, note.epoch, count)
            link.done_reading(note.buffer)
            return None
        try:
            ticket = self.copier.scatter_block(receiver.table, block, views[note.buffer])
        except BaseException:
            receiver.leave_pages(0)
            raise
        return _Scatter(link, note, receiver, ticket)

    def _complete_scatter(self, scatter: _Scatter) -> None:
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
            scatter.receiver.leave_pages(arrived)
            scatter.link.done_reading(scatter.note.buffer)

    # ---- set-up threads and the pump's

    def make_buffers(self, wishes: Open) -> tuple[torch.Tensor, bool]:
        """Make buffers as the peer wishes, within the limits of D's own shape. Return them and
        whether they lie in CUDA memory."""
        own = self.shape
        count = min(wishes.count, own.count)
        size = max(min(wishes.buffer_bytes, own.buffer_bytes), self.copier.shape.max_cell_bytes)
        device = own.device and wishes.device and own.host == wishes.host
        if not device and (own.device or wishes.device):
            # P or D chose this size for copies between GPUs.
            size = max(min(size, _PINNED_BUFFER_BYTES), self.copier.shape.max_cell_bytes)
        return self.copier.make_buffers(count, size, on_device=device), device

    def on_link_over(self, link: IncomingLink) -> None:
        with self._changed:
            self._links.discard(link)
            self._changed.notify_all()
