"""KV straight into the pool of a GPU of the same host.

D exports its pool (CUDA IPC). P maps it and stores many tokens of many layers at once into D's
slots, on a stream next to its forward pass. A copy engine stores long runs of slots, and one launch
of a kernel stores scattered ones. Page sizes may differ, because slots travel.

Guarantees, and why they hold:

- P maps and stores only while its channel to D is open, and only for reservations of the session in
  which D welcomed that channel. We check slots against D's pool before any store.
- ``Sender.poll`` is DONE, and ``Sender.drained`` true, once P's host observed the event after the
  last store. The bytes are in D's memory then, so you may send a commit, and nothing reads P's
  pages any more. A launched store always completes, but we launch none after an abort.
- The forward pass never waits. We launch a store on a stream of its own when the host has observed
  the event recorded by ``Sender.send`` after the kernels that wrote the KV.
- D cannot see stores. After an abort ``Receiver.drained`` is False until P says so
  (``on_peer_drained``) or the session is over: its channel was closed, broke, or never came. P
  closes it after it drained and unmapped. If it broke with P's process, D waits for
  ``LAST_WRITE_SECONDS`` of :mod:`pd.transfer.wire.channel`. ``disconnect`` on D asks P to close; a
  stopped P does so when it continues.
- When D dies, P's channel ends at once and its rooms fail. Launched stores complete in memory kept
  alive by the mapping, and then P unmaps the pool. D's successor finds the memory free within a
  second, because launched stores wait for nothing.
- Both ends authenticate each other with the cluster key (:mod:`pd.transfer.wire.greeting`). KV
  itself never leaves the GPUs.

We refuse pools that are not on a GPU or cannot be exported, peers on another host or in other pid
or ipc namespaces, and GPUs that P does not see or has no peer access to.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import TransferError
from pd.core.node_info import plane_differences
from pd.core.transfer_choice import nvlink_obstacle
from pd.transfer.base import Receiver, Sender, TransferManager
from pd.transfer.nvlink.device import CudaDevice
from pd.transfer.nvlink.link import NvlinkLink
from pd.transfer.nvlink.messages import (
    PeerPool,
    find_slots,
    parse_destination,
    welcome_decoder,
)
from pd.transfer.nvlink.receiver import NvlinkReceiver
from pd.transfer.nvlink.sender import NvlinkSender
from pd.transfer.nvlink.sessions import NvlinkSessions
from pd.transfer.pool_shape import PoolShape
from pd.transfer.wire.greeting import require_loopback, transfer_key
from pd.transfer.wire.hub import ChannelHub
from pd.util.starvation import Patience

if TYPE_CHECKING:
    from pd.core.messages import Reservation
    from pd.core.node_info import KVLayout, NodeInfo
    from pd.transfer.kv_buffer import IntArray, KVBuffer
    from pd.transfer.nvlink.device import StoreDevice
    from pd.transfer.pool_shape import MissingTokens

logger = logging.getLogger(__name__)

SERVICE = "nvlink"
# A stopping node waits for so long until its stores complete, and until peers stop theirs.
_DRAIN_SECONDS, _PEER_SECONDS = 10.0, 1.0


class NvlinkManager(TransferManager):
    """See the module's docstring. It takes the arguments of
    :class:`~pd.transfer.tcp.manager.TcpManager`, and:

    Args:
        device: device of the pool; its GPU by default.

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
        super().__init__(PoolShape.from_pool(pool), patience or Patience())
        self._layout: KVLayout = pool.layout
        self._device = device or CudaDevice(pool)
        self._key = transfer_key(cluster_key)
        self._sessions = NvlinkSessions()
        self._hub = ChannelHub(
            SERVICE,
            instance_id,
            host,
            self._key,
            welcome_decoder,
            self._sessions.accept_channel,
            self.patience,
        )
        self._address = {
            "host": advertise_host or host,
            "port": str(self._hub.port),
            "num_slots": str(self.shape.num_slots),
            **self._device.describe_pool(),
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
        pool = PeerPool.from_published(published, name, self._key, peer.kv)
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
            self._replace_link(name)
        if link is not None:
            link.stop(TransferError(f"{name} has a new address"))

    def disconnect(self, instance_id: str) -> None:
        with self._lock:
            self._pools.pop(instance_id, None)
            link = self._links.pop(instance_id, None)
            if link is not None:
                self._retire_link(link)
        if link is not None:
            link.stop(TransferError(f"{instance_id} was disconnected"))
        self._sessions.disconnect_peer(instance_id)

    def open_sender(
        self, peer: str, reservation: Reservation, pages: IntArray, tokens: MissingTokens
    ) -> Sender:
        destination = parse_destination(reservation.destination, peer)
        reserved = destination.token_start, destination.token_stop
        if reserved != (tokens.start, tokens.stop):
            raise TransferError(
                f"{peer} reserved tokens [{reserved[0]}, {reserved[1]}), "
                f"not [{tokens.start}, {tokens.stop})"
            )
        own = find_slots(pages, tokens, self.shape.page_size)
        with self._lock:
            link, pool = self._get_live_link(peer)
        try:
            theirs = destination.compute_slots(pool.num_slots, self.shape, tokens)
        except ValueError as error:
            raise TransferError(f"{peer} sent an impossible destination: {error}") from error
        slots: IntArray = np.stack((own, theirs))
        sender = NvlinkSender(link, self.shape, reservation, tokens, destination.session, slots)
        link.add_sender(sender)
        return sender

    def open_receiver(
        self, peer: str, room: bytes, epoch: int, pages: IntArray, tokens: MissingTokens
    ) -> Receiver:
        with self._sessions.changed:
            return NvlinkReceiver(self._sessions.get_session(peer), pages, tokens, self.shape)

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
            # The hub leaves their channels open, because closing them would promise falsely that
            # they drained.
            logger.error("stores did not complete within %g s", _DRAIN_SECONDS)
        self._hub.close()
        self._device.close()

    # ---- with the lock held

    def _get_live_link(self, peer: str) -> tuple[NvlinkLink, PeerPool]:
        """Return a link that has not ended, and the peer's pool. Raises TransferError if the peer
        is not connected."""
        link, pool = self._links.get(peer), self._pools.get(peer)
        if link is None or pool is None:
            raise TransferError(f"{peer} is not connected")
        if link.stopped is not None:
            link = self._replace_link(peer)
        return link, pool

    def _replace_link(self, peer: str) -> NvlinkLink:
        old = self._links.get(peer)
        if old is not None:
            self._retire_link(old)
        link = self._links[peer] = NvlinkLink(self._hub, peer, self._pools[peer], self._device)
        return link

    def _retire_link(self, link: NvlinkLink) -> None:
        self._stopping = [old for old in self._stopping if not old.join(0.0)] + [link]
