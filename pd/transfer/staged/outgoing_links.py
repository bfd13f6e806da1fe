"""P's side of a staged manager: decode nodes, their rooms and the links to them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.staged.link_thread import LinkThread
from pd.transfer.staged.messages import VERSION, Open
from pd.transfer.staged.mover import MoverError
from pd.transfer.staged.outgoing_link import OutgoingLink
from pd.transfer.staged.outgoing_peer import OutgoingPeer

if TYPE_CHECKING:
    import torch

    from pd.transfer.copier import Copier
    from pd.transfer.staged.messages import BuffersReady
    from pd.transfer.staged.mover import Mover
    from pd.transfer.staged.sender import StagedSender
    from pd.transfer.wire.hub import ChannelHub

# Lost links to or from one peer whose buffers may be in quarantine.
MAX_LOST_LINKS = 4
# Links of one node that may hold buffers. When another one needs some, a link that no room uses is
# closed.
MAX_LINKS = 16
# Peers whose channels are opened as soon as they are connected. A channel to any further peer is
# opened for its first room.
MAX_CHANNELS = 64
_SETTLED_SECONDS = 5.0
_MAX_DELAY = 1.0


class TooManyLostLinks(TransferError):
    """Lost links to a peer hold too many staging buffers."""


@dataclass(frozen=True, slots=True)
class StagingShape:
    """Staging buffers of a link: how many, how large, and whether they may lie in CUDA memory.

    ``host``: identity of the host, which must be equal on both ends for buffers in CUDA memory.
    """

    count: int
    buffer_bytes: int
    device: bool
    host: str


@dataclass(slots=True, eq=False)
class _Current:
    """The link that serves a peer's rooms. ``delay``: before the next try to open one, seconds."""

    peer: OutgoingPeer
    link: OutgoingLink
    delay: float = 0.0


class OutgoingLinks:
    """Links to every D, one current one to each, besides those that still end.

    Which peers are connected is guarded by ``changed``. Links change on ``thread`` alone.

    Attributes:
        changed: also guards rooms and senders. Reentrant: a sender that ends removes itself.
    """

    def __init__(self, copier: Copier, mover: Mover, hub: ChannelHub, shape: StagingShape) -> None:
        self.copier, self.mover, self.hub, self.shape = copier, mover, hub, shape
        self.changed = threading.Condition(threading.RLock())
        self.thread = LinkThread(f"pd-{mover.name}-links", copier)
        self._peers: dict[str, _Current] = {}
        # Links that are not over.
        self._alive: set[OutgoingLink] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False

    # ---- any thread

    def connect(self, peer: str, address: tuple[str, int], *, dial: bool) -> None:
        with self.changed:
            old = self._peers.get(peer)
            if old is not None and old.peer.address == address and old.peer.refusal is None:
                return
            to = OutgoingPeer(peer, address, self.changed, self.hub.patience, self.thread.wake)
            current = self._peers[peer] = _Current(to, self._new_link(to))
            dial = dial and len(self._peers) <= MAX_CHANNELS
        if old is not None:
            self._end(old, f"{peer} has a new address")
        if dial:
            self.thread.post(lambda: current.link.start())

    def disconnect(self, peer: str, reason: str) -> None:
        with self.changed:
            old = self._peers.pop(peer, None)
        if old is not None:
            self._end(old, reason)

    def peer(self, peer: str) -> OutgoingPeer:
        """Raises TransferError when the peer is not connected."""
        return self._current(peer).peer

    def link(self, peer: str) -> OutgoingLink:
        """The current link to a peer. Raises TransferError when the peer is not connected."""
        return self._current(peer).link

    def open(self, sender: StagedSender) -> None:
        """Admit a room, and have its link take buffers. Raises TransferError."""
        peer = sender.to
        peer.open(sender)

        def ask() -> None:
            current = self._serving(peer)
            if current is not None:
                current.link.ask()

        self.thread.post(ask)

    def close(self, seconds: float) -> list[OutgoingLink]:
        """End all links; returns those of which something may still land after this time."""
        with self.changed:
            self._closing = True
            peers, self._peers = list(self._peers.values()), {}
        for current in peers:
            self._end(current, "the transfer manager was closed")
        deadline = time.monotonic() + seconds
        with self.changed:
            self.changed.wait_for(lambda: not self._alive, timeout=seconds)
            threads = list(self._threads)
        for thread in threads:
            # A library whose objects are freed while the process ends may abort it.
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        self.thread.close()
        return list(self._alive)

    def add_thread(self, thread: threading.Thread) -> None:
        """Have :meth:`close` wait for a thread that calls the library. Those that ended are
        forgotten."""
        with self.changed:
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    @property
    def quarantined(self) -> int:
        """P's buffers that the library may still read although their link has ended."""
        with self.changed:
            return sum(link.quarantined for link in self._alive)

    @property
    def held(self) -> int:
        """D's buffers that hold a block which D has not read yet."""
        with self.changed:
            writes = [link.writes for link in self._alive]
        return sum(w.pool.held for w in writes if w is not None)

    def _current(self, peer: str) -> _Current:
        with self.changed:
            current = self._peers.get(peer)
            if current is None:
                raise TransferError(f"{peer} is not connected")
            return current

    def _end(self, old: _Current, reason: str) -> None:
        """End the link to a peer that is not connected any more, or not at this address."""
        old.peer.close(reason)
        self.thread.post(lambda: old.link.end(reason))

    def _new_link(self, to: OutgoingPeer) -> OutgoingLink:
        with self.changed:
            link = OutgoingLink(self, to)
            self._alive.add(link)
            return link

    def _serving(self, to: OutgoingPeer) -> _Current | None:
        """The peer's current link; None if the peer is not connected any more."""
        with self.changed:
            current = self._peers.get(to.peer)
            return current if current is not None and current.peer is to else None

    # ---- called by links

    def wishes(self) -> Open:
        shape = self.shape
        return Open(VERSION, shape.count, shape.buffer_bytes, shape.device, shape.host)

    def make_buffers(self, ready: BuffersReady) -> torch.Tensor:
        """Any thread. Raises MoverError when D's buffers are not what was asked for."""
        shape = self.shape
        if ready.count > shape.count or ready.buffer_bytes > shape.buffer_bytes:
            raise MoverError(
                f"{ready.count} buffers of {ready.buffer_bytes} bytes were not asked for"
            )
        if ready.buffer_bytes < self.copier.shape.max_cell_bytes:
            raise MoverError(f"buffers of {ready.buffer_bytes} bytes hold no token")
        if ready.device and not shape.device:
            raise MoverError("this pool is not in CUDA memory")
        return self.copier.make_buffers(ready.count, ready.buffer_bytes, on_device=ready.device)

    def make_room(self) -> None:
        """Called before a link takes buffers. If too many links hold some, end the idle one that
        was used longest ago. Its peer stays connected."""
        with self.changed:
            links = [current.link for current in self._peers.values()]
        holding = [link for link in links if link.holds_buffers]
        idle = [link for link in holding if link.idle]
        if len(holding) >= MAX_LINKS and idle:
            link = min(idle, key=lambda link: link.to.progress)
            link.end("another link needs its buffers", move=True)

    def renew(self, link: OutgoingLink) -> bool:
        """Open another link if the peer of a link that has begun to end is still wanted. Returns
        whether rooms can wait for the new link."""
        current = self._serving(link.to)
        if current is None or current.link is not link or link.to.refusal is not None:
            return False
        settled = link.writes is not None and time.monotonic() - link.up_since > _SETTLED_SECONDS
        current.delay = 0.0 if settled else min(_MAX_DELAY, 2 * current.delay or 0.05)
        return self._open_next(current)

    def over(self, link: OutgoingLink) -> None:
        with self.changed:
            self._alive.discard(link)
            self.changed.notify_all()
        current = self._serving(link.to)
        if current is not None and isinstance(current.peer.refusal, TooManyLostLinks):
            with self.changed:
                current.peer.refusal = None
            current.delay = 0.0
            self._open_next(current)

    def _open_next(self, current: _Current) -> bool:
        to = current.peer
        with self.changed:
            name = to.peer
            lost = [x for x in self._alive if x.name == name and x.quarantined]
            if len(lost) >= MAX_LOST_LINKS:
                to.refusal = TooManyLostLinks(
                    f"{len(lost)} links to {name} were lost while something was being written; "
                    "another has to wait until one of them is over"
                )
                return False
            current.link = self._new_link(to)
        current.link.start(current.delay)
        return True
