"""KV straight into the pool of a GPU of the same host.

D exports its pool (CUDA IPC), P maps it and stores many tokens of many layers at once into D's
slots, on a stream beside P's forward pass: a copy engine does where the slots lie in long runs, one
launch of a kernel where they are scattered. Page sizes may differ: slots travel.

Guarantees, and what they rest on:

- P maps and stores only while its channel to D is open and only for reservations of the session in
  which D welcomed that channel. A slot was checked against D's pool before any store.
- ``Sender.poll`` is DONE, so that a commit may be sent, and ``Sender.drained`` true, once P's host
  observed the event after the last store: the bytes are in D's memory, and P's pages are not read
  any more. A store that was launched always completes, but none is launched after an abort.
- The forward pass never waits: a store is launched, on its own stream, when the host has observed
  the event that ``Sender.send`` recorded behind the kernels that wrote the KV.
- D cannot see stores. After an abort ``Receiver.drained`` is False until P says so
  (``peer_drained``) or the session is over: its channel was closed, which P does after it drained
  and unmapped, or broke with P's process (then ``LAST_WRITE_SECONDS`` of
  :mod:`pd.transfer.wire.channel` later), or never came. ``disconnect`` on D asks P to close; a
  stopped P does when it goes on.
- When D dies, P's channel ends at once: its rooms fail, what was launched completes in memory that
  the mapping keeps alive, and the pool is unmapped, so that D's successor finds the memory
  free: within a second, since what is launched waits for nothing.
- Both ends authenticate each other with the cluster key (:mod:`pd.transfer.wire.greeting`). KV
  itself never leaves the GPUs.

Refused: pools that are not on a GPU or cannot be exported, peers on another host or in other pid or
ipc namespaces, GPUs that P does not see or has no peer access to.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import TransferError
from pd.core.node_info import plane_differences
from pd.core.starvation import Patience
from pd.core.transfer_choice import nvlink_obstacle
from pd.kernels.paging import token_slots
from pd.transfer.base import Receiver, Sender, TransferManager
from pd.transfer.nvlink.device import CudaDevice
from pd.transfer.nvlink.link import NvlinkLink
from pd.transfer.nvlink.messages import (
    PeerPool,
    parse_destination,
    welcome_decoder,
)
from pd.transfer.nvlink.receiver import NvlinkReceiver
from pd.transfer.nvlink.sender import NvlinkSender
from pd.transfer.nvlink.sessions import NvlinkSessions
from pd.transfer.pool_shape import PoolShape, missing_tokens, wanted_tokens
from pd.transfer.ranges import check_pages
from pd.transfer.wire.greeting import require_loopback, transfer_key
from pd.transfer.wire.hub import ChannelHub

if TYPE_CHECKING:
    from pd.core.messages import Reservation
    from pd.core.node_info import KVLayout, NodeInfo
    from pd.transfer.base import IntArray, KVBuffer
    from pd.transfer.nvlink.device import StoreDevice

logger = logging.getLogger(__name__)

SERVICE = "nvlink"
# How long a node that stops waits for its stores to complete, and for peers to stop theirs.
_DRAIN_SECONDS, _PEER_SECONDS = 10.0, 1.0


class NvlinkManager(TransferManager):
    """See the module's docstring. Arguments as for :class:`~pd.transfer.tcp.manager.TcpManager`,
    and:

    Args:
        device: where the pool lies; its GPU by default.

    Raises:
        SetupError: the pool is not on a GPU, or cannot be exported.
    """

    name = SERVICE

    def __init__(
        self,
        pool: KVBuffer,
        instance_id: str,
        host: str = "127.0.0.1",
        *,
        advertise_host: str = "",
        cluster_key: bytes | None = None,
        device: StoreDevice | None = None,
        patience: Patience | None = None,
    ) -> None:
        if cluster_key is None:
            require_loopback(host, "the data address")
        self.patience = patience or Patience()
        self._layout: KVLayout = pool.layout
        self._shape = PoolShape.of(pool)
        self._device = device or CudaDevice(pool)
        self._key = transfer_key(cluster_key)
        self._sessions = NvlinkSessions()
        self._hub = ChannelHub(
            SERVICE,
            instance_id,
            host,
            self._key,
            welcome_decoder,
            self._sessions.accept,
            self.patience,
        )
        self._address = {
            "host": advertise_host or host,
            "port": str(self._hub.port),
            "num_slots": str(self._shape.num_slots),
            **self._device.published(),
        }
        self._lock = threading.Lock()
        self._links: dict[str, NvlinkLink] = {}
        self._pools: dict[str, PeerPool] = {}
        self._stopping: list[NvlinkLink] = []

    def address(self) -> dict[str, str]:
        return self._address

    def connect(self, peer: NodeInfo) -> None:
        name = peer.instance_id
        published = peer.address_of(self.name)
        pool = PeerPool.parse(published, name, self._key, peer.kv)
        if peer.role == "prefill":
            return  # a prefill node stores into the pool of this one
        obstacle = nvlink_obstacle(self._address, published)
        if obstacle is not None:
            raise TransferError(f"nvlink to {name} is not possible: {obstacle}")
        differences = plane_differences(self._layout, peer.kv)
        if differences:
            field, ours, theirs = differences[0]
            raise TransferError(f"{field} differs: {ours!r} here, {theirs!r} at {name}")
        with self._lock:
            known, link = self._pools.get(name), self._links.get(name)
            if known == pool and link is not None and link.stopped is None:
                return
            self._pools[name] = pool
            self._replace(name)
        if link is not None:
            link.stop(TransferError(f"{name} has a new address"))

    def disconnect(self, instance_id: str) -> None:
        with self._lock:
            self._pools.pop(instance_id, None)
            link = self._links.pop(instance_id, None)
            if link is not None:
                self._retire(link)
        if link is not None:
            link.stop(TransferError(f"{instance_id} was disconnected"))
        self._sessions.disconnect(instance_id)

    def sender(
        self, peer: str, reservation: Reservation, pages: IntArray, num_tokens: int
    ) -> Sender:
        destination = parse_destination(reservation.destination, peer)
        tokens = wanted_tokens(self._shape, reservation, num_tokens)
        start, page_size = tokens.start, self._shape.page_size
        if (destination.token_start, destination.token_stop) != (start, num_tokens):
            raise TransferError(
                f"{peer} reserved tokens [{destination.token_start}, {destination.token_stop}), "
                f"not [{start}, {num_tokens})"
            )
        check_pages(pages, page_size, self._shape.num_slots, start, num_tokens)
        own = token_slots(pages, np.arange(start, num_tokens), page_size)
        with self._lock:
            link, pool = self._link(peer)
        try:
            theirs = destination.slots(pool.num_slots)
        except ValueError as error:
            raise TransferError(f"{peer} sent a destination that cannot be: {error}") from error
        slots: IntArray = np.stack((own.astype(np.int32), theirs))
        sender = NvlinkSender(
            link, self._shape, reservation, pages, tokens, destination.session, slots
        )
        link.add(sender)
        return sender

    def receiver(
        self,
        peer: str,
        room: bytes,
        epoch: int,
        pages: IntArray,
        cached: tuple[int, ...],
        num_tokens: int,
    ) -> Receiver:
        tokens = missing_tokens(self._shape, cached, num_tokens)
        with self._sessions.changed:
            return NvlinkReceiver(self._sessions.session(peer), pages, tokens, self._shape)

    def is_linked(self, peer: str) -> bool:
        return self._sessions.is_bound(peer)

    def close(self) -> None:
        with self._lock:
            links, self._links, self._pools = list(self._links.values()), {}, {}
            links += self._stopping
        for link in links:
            link.stop(TransferError("the transfer manager was closed"))
        deadline = time.monotonic() + _DRAIN_SECONDS
        drained = [link.join(max(0.0, deadline - time.monotonic())) for link in links]
        self._sessions.close(_PEER_SECONDS)
        if not all(drained):
            # The hub leaves their channels open: their end would promise what is not so.
            logger.error("stores did not complete within %g s", _DRAIN_SECONDS)
        self._hub.close()
        self._device.close()

    # ---- with the lock held

    def _link(self, peer: str) -> tuple[NvlinkLink, PeerPool]:
        """A link that has not ended, and the peer's pool. Raises TransferError if the peer is not
        connected."""
        link, pool = self._links.get(peer), self._pools.get(peer)
        if link is None or pool is None:
            raise TransferError(f"{peer} is not connected")
        if link.stopped is not None:
            link = self._replace(peer)
        return link, pool

    def _replace(self, peer: str) -> NvlinkLink:
        old = self._links.get(peer)
        if old is not None:
            self._retire(old)
        link = self._links[peer] = NvlinkLink(self._hub, peer, self._pools[peer], self._device)
        return link

    def _retire(self, link: NvlinkLink) -> None:
        self._stopping = [old for old in self._stopping if not old.join(0.0)] + [link]
