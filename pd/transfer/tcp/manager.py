"""KV over plain TCP sockets, the backend that works everywhere.

Guarantees, and why they hold:

- D's own thread does every write into D's pool. It first looks up (room, epoch) and checks the
  frame against the reservation, so nothing lands outside a live reservation. After
  ``Receiver.abort`` D knows by itself when nothing can land any more (:meth:`Receiver.drained`),
  whatever P does. So it needs no ``Drained`` message.
- A receiver is DONE only when each reserved (layer, token) arrived once and P committed the same
  number of bytes. We discard a frame as a whole if it repeats any of them.
- ``Sender.poll`` is DONE when the kernel has taken every byte. If the connection breaks later, D
  misses bytes and fails the room, when the connection ends or at the latest a lease after the
  commit.
- ``Sender.drained`` means only that we have stopped reading the source pages. Bytes on the wire may
  still reach D, where the first point deals with them.
- A pool on a GPU goes through pinned host buffers, two for each connection and side
  (:mod:`pd.transfer.tcp.host_buffers`). Bytes count as received, and a receiver or sender as
  drained, only when the host observed the end of the copies, not when they were queued. The copies
  and the stream of the forward pass never wait for each other.
- We authenticate the start of each connection with the cluster key
  (:mod:`pd.transfer.wire.greeting`). Without one, both ends must be loopback addresses. Data is not
  encrypted.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.base import Receiver, Sender, TransferManager
from pd.transfer.computed import Computed
from pd.transfer.pool_memory import PoolMemory
from pd.transfer.tcp.inbox import TcpInbox
from pd.transfer.tcp.lane import TcpLane
from pd.transfer.tcp.link import TcpLink
from pd.transfer.tcp.receiver import TcpReceiver
from pd.transfer.tcp.sender import TcpSender
from pd.transfer.wire.greeting import peer_address, require_loopback, transfer_key
from pd.util.starvation import Patience

if TYPE_CHECKING:
    from pd.core.messages import Reservation
    from pd.core.node_info import NodeInfo
    from pd.transfer.kv_buffer import IntArray, KVBuffer
    from pd.transfer.pool_shape import MissingTokens

logger = logging.getLogger(__name__)

# A second connection fills the gaps between the frames of the first, if there are cores for its
# threads. More connections change nothing (`pd-bench transfer --backend tcp --connections N`).
DEFAULT_CONNECTIONS = 2 if (os.cpu_count() or 1) > 2 else 1


class TcpManager(TransferManager):
    """See the module's docstring.

    Args:
        host: address to listen on.
        advertise_host: address for peers to connect to; ``host`` if empty.
        cluster_key: required unless ``host`` is a loopback address.
        connections: data connections to each peer.
        staged: copy through host buffers even if the pool is in host memory (for tests).
    """

    name = "tcp"

    def __init__(
        self,
        pool: KVBuffer,
        instance_id: str,
        host: str = "127.0.0.1",
        *,
        advertise_host: str = "",
        cluster_key: bytes | None = None,
        connections: int = DEFAULT_CONNECTIONS,
        staged: bool | None = None,
        patience: Patience | None = None,
    ) -> None:
        if cluster_key is None:
            require_loopback(host, "the data address")
        memory = PoolMemory(pool, staged=staged)
        super().__init__(memory.shape, patience or Patience())
        self._instance, self._key = instance_id, transfer_key(cluster_key)
        self._host = advertise_host or host
        self._num_lanes = connections
        self._memory = memory
        self._computed = Computed(pool.memory.device, self.name)
        self._inbox = TcpInbox(self._memory, instance_id, host, self._key, self.patience)
        self._lock = threading.Lock()
        self._links: dict[str, TcpLink] = {}
        # Links that have ended while a lane may still send a block.
        self._ending: list[TcpLink] = []
        self.counters = self._inbox.counters

    def address(self) -> dict[str, str]:
        return {"host": self._host, "port": str(self._inbox.port)}

    def connect(self, peer: NodeInfo) -> None:
        address = peer_address(peer.address_of(self.name), peer.instance_id, self._key)
        with self._lock:
            old = self._links.get(peer.instance_id)
            if old is not None and old.address == address and old.refusal is None:
                return
            link = TcpLink(
                self._instance,
                peer.instance_id,
                address,
                self._key,
                lambda link, number: TcpLane(link, number, self._memory),
                self._num_lanes,
                self.patience,
            )
            self._links[peer.instance_id] = link
        if old is not None:
            self._end_link(old, f"{peer.instance_id} has a new address")
        if peer.role != "prefill":
            try:
                link.start()
            except TransferError as error:
                logger.warning("%s; the next room tries again", error)

    def disconnect(self, instance_id: str) -> None:
        with self._lock:
            link = self._links.pop(instance_id, None)
        self._inbox.disconnect_peer(instance_id)
        if link is not None:
            self._end_link(link, f"{instance_id} was disconnected")

    def _end_link(self, link: TcpLink, reason: str) -> None:
        with self._lock:
            self._ending = [old for old in self._ending if not old.is_over] + [link]
        link.end_link(reason)

    def open_sender(
        self, peer: str, reservation: Reservation, pages: IntArray, tokens: MissingTokens
    ) -> Sender:
        with self._lock:
            link = self._links.get(peer)
        if link is None:
            raise TransferError(f"{peer} is not connected")
        sender = TcpSender(link, self._memory, self._computed, reservation, pages, tokens)
        link.add_sender(sender)
        return sender

    def open_receiver(
        self, peer: str, room: bytes, epoch: int, pages: IntArray, tokens: MissingTokens
    ) -> Receiver:
        receiver = TcpReceiver(
            self._inbox.receivers, self._memory, peer, room, epoch, pages, tokens
        )
        self._inbox.receivers.add_receiver(receiver)
        return receiver

    def is_linked(self, peer: str) -> bool:
        return self._inbox.has_connection(peer)

    def close(self) -> None:
        with self._lock:
            links, self._links = [*self._links.values(), *self._ending], {}
        for link in links:
            link.close("the transfer manager was closed")
        self._inbox.close()
        self._computed.close()
