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

# Limit of lost links to or from one peer with buffers in quarantine.
MAX_LOST_LINKS = 4
# Limit of a node's links with buffers. When another one needs some, we close a link without rooms.
MAX_LINKS = 16
# We open channels to so many peers as soon as they are connected. We open a channel to any further
# peer for its first room.
MAX_CHANNELS = 64
_SETTLED_SECONDS = 5.0
_MAX_DELAY = 1.0


class TooManyLostLinks(TransferError):
    """Lost links to a peer hold too many staging buffers."""


@dataclass(frozen=True, slots=True)
class StagingShape:
    """Staging buffers of a link: number, size, and whether they may lie in CUDA memory.

    ``host``: identity of the host. It must be equal on both ends for buffers in CUDA memory.
    """

    count: int
    buffer_bytes: int
    device: bool
    host: str


@dataclass(slots=True, eq=False)
class _Current:
    """The link that serves a peer's rooms. ``delay``: seconds before the next try to open one."""

    peer: OutgoingPeer
    link: OutgoingLink
    delay: float = 0.0


class OutgoingLinks:
    """Links to every D. Each has one current link, and perhaps others that are ending.

    ``changed`` guards which peers are connected. Links change only on ``thread``.

    Attributes:
        changed: also guards rooms and senders. Reentrant, because a sender that ends removes
            itself.
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

    def connect_peer(self, peer: str, address: tuple[str, int], *, dial: bool) -> None:
        with self.changed:
            old = self._peers.get(peer)
            if old is not None and old.peer.address == address and old.peer.refusal is None:
                return
            to = OutgoingPeer(peer, address, self.changed, self.hub.patience, self.thread.wake)
            current = self._peers[peer] = _Current(to, self._new_link(to))
            dial = dial and len(self._peers) <= MAX_CHANNELS
        if old is not None:
            self._end_current(old, f"{peer} has a new address")
        if dial:
            self.thread.post_event(lambda: current.link.start())

    def disconnect_peer(self, peer: str, reason: str) -> None:
        with self.changed:
            old = self._peers.pop(peer, None)
        if old is not None:
            self._end_current(old, reason)

    def get_peer(self, peer: str) -> OutgoingPeer:
        """Return a connected peer. Raises TransferError if it is not connected."""
        return self._get_current(peer).peer

    def get_link(self, peer: str) -> OutgoingLink:
        """Return the current link to a peer. Raises TransferError if it is not connected."""
        return self._get_current(peer).link

    def open_sender(self, peer: OutgoingPeer, sender: StagedSender) -> None:
        """Admit a room, and have its link take buffers. Raises TransferError."""
        peer.add_sender(sender)

        def ask() -> None:
            current = self._find_current(peer)
            if current is not None:
                current.link.ask_for_buffers()

        self.thread.post_event(ask)

    def close(self, seconds: float) -> list[OutgoingLink]:
        """End all links. Return the links of which something may still land after this time."""
        with self.changed:
            self._closing = True
            peers, self._peers = list(self._peers.values()), {}
        for current in peers:
            self._end_current(current, "the transfer manager was closed")
        deadline = time.monotonic() + seconds
        with self.changed:
            self.changed.wait_for(lambda: not self._alive, timeout=seconds)
            threads = list(self._threads)
        for thread in threads:
            # A library may abort the process if its objects are freed while the process ends.
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        self.thread.close()
        return list(self._alive)

    def add_thread(self, thread: threading.Thread) -> None:
        """Have :meth:`close` wait for a thread that calls the library."""
        with self.changed:
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    @property
    def num_quarantined(self) -> int:
        """Number of P's buffers that the library may still read after their link's end."""
        with self.changed:
            return sum(link.num_quarantined for link in self._alive)

    @property
    def num_held(self) -> int:
        """Number of D's buffers with a block that D has not read yet."""
        with self.changed:
            writes = [link.writes for link in self._alive]
        return sum(w.pool.num_held for w in writes if w is not None)

    def _get_current(self, peer: str) -> _Current:
        with self.changed:
            current = self._peers.get(peer)
            if current is None:
                raise TransferError(f"{peer} is not connected")
            return current

    def _end_current(self, old: _Current, reason: str) -> None:
        """End the link to a peer that is no longer connected, or no longer at this address."""
        old.peer.close(reason)
        self.thread.post_event(lambda: old.link.end_link(reason))

    def _new_link(self, to: OutgoingPeer) -> OutgoingLink:
        with self.changed:
            link = OutgoingLink(self, to)
            self._alive.add(link)
            return link

    def _find_current(self, to: OutgoingPeer) -> _Current | None:
        """Return the peer's current link, or None if the peer is no longer connected."""
        with self.changed:
            current = self._peers.get(to.peer)
            return current if current is not None and current.peer is to else None

    # ---- called by links

    def make_wishes(self) -> Open:
        shape = self.shape
        return Open(VERSION, shape.count, shape.buffer_bytes, shape.device, shape.host)

    def make_buffers(self, ready: BuffersReady) -> torch.Tensor:
        """Make P's buffers, from any thread. Raises MoverError if D's answer does not match our
        wishes."""
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

    def end_idle_link(self) -> None:
        """If too many links hold buffers, end the least recently used idle one. Its peer stays
        connected. Called before a link takes buffers."""
        with self.changed:
            links = [current.link for current in self._peers.values()]
        holding = [link for link in links if link.holds_buffers]
        idle = [link for link in holding if link.is_idle]
        if len(holding) >= MAX_LINKS and idle:
            link = min(idle, key=lambda link: link.to.progress)
            link.end_link("another link needs its buffers", move=True)

    def open_successor(self, link: OutgoingLink) -> bool:
        """Open another link when one begins to end, if we still want its peer. Return whether rooms
        can wait for the new link."""
        current = self._find_current(link.to)
        if current is None or current.link is not link or link.to.refusal is not None:
            return False
        settled = link.writes is not None and time.monotonic() - link.up_since > _SETTLED_SECONDS
        current.delay = 0.0 if settled else min(_MAX_DELAY, 2 * current.delay or 0.05)
        return self._open_next(current)

    def on_link_over(self, link: OutgoingLink) -> None:
        with self.changed:
            self._alive.discard(link)
            self.changed.notify_all()
        current = self._find_current(link.to)
        if current is not None and isinstance(current.peer.refusal, TooManyLostLinks):
            with self.changed:
                current.peer.refusal = None
            current.delay = 0.0
            self._open_next(current)

    def _open_next(self, current: _Current) -> bool:
        to = current.peer
        with self.changed:
            name = to.peer
            lost = [x for x in self._alive if x.name == name and x.num_quarantined]
            if len(lost) >= MAX_LOST_LINKS:
                to.refusal = TooManyLostLinks(
                    f"{len(lost)} links to {name} were lost while something was being written; "
                    "another has to wait until one of them is over"
                )
                return False
            current.link = self._new_link(to)
        current.link.start(current.delay)
        return True
