"""One-sided writes between processes, with faults from a script: the backend of the fault tests.

It moves real bytes over sockets but behaves like RDMA at its most inconvenient: D's card performs
each arriving write by slot, without checking rooms or epochs, and D does not learn of it.
:mod:`pd.transfer.fake.script` describes the faults.

Guarantees, and why they hold:

- A write carries a key for its peer from D. ``disconnect`` revokes the key under the lock held by
  each write. So after D's ``disconnect`` or ``close`` nothing of the peer lands, not even later
  writes for earlier reservations.
- ``Sender.poll`` is DONE, and ``Sender.drained`` true, when D's card acknowledged each write and
  its duplicate, or P's link will not issue it any more, or D closed its end of the link.
- So ``Receiver.drained`` stays False after an abort until ``on_peer_drained`` or ``disconnect``.
  Within one key, only the protocol (drain, quarantine, commit after data) protects the pages.
- After P's ``disconnect`` a thread gives D up to a second to read the wire, and ``Sender.drained``
  is False meanwhile. A node sends no ``Drained`` to a peer after disconnecting it; the peer is
  protected by its own ``disconnect``.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.base import Receiver, Sender, TransferManager
from pd.transfer.computed import Computed
from pd.transfer.fake.link import FakeLink
from pd.transfer.fake.nic import FakeNic, FakeReceiver
from pd.transfer.fake.script import FaultScript, RoomCounter
from pd.transfer.fake.sender import FakeSender
from pd.transfer.pool_memory import PoolMemory
from pd.transfer.wire.greeting import peer_address, require_loopback, transfer_key
from pd.util.starvation import Patience

if TYPE_CHECKING:
    from pd.core.messages import Reservation
    from pd.core.node_info import NodeInfo
    from pd.transfer.kv_buffer import IntArray, KVBuffer
    from pd.transfer.pool_shape import MissingTokens


class FakeManager(TransferManager):
    """See the module's docstring. It takes the arguments of
    :class:`~pd.transfer.tcp.manager.TcpManager`, and:

    Args:
        script: the faults; none by default.
    """

    name = "fake"

    def __init__(
        self,
        pool: KVBuffer,
        instance_id: str,
        host: str = "127.0.0.1",
        *,
        script: FaultScript | None = None,
        advertise_host: str = "",
        cluster_key: bytes | None = None,
        patience: Patience | None = None,
    ) -> None:
        if cluster_key is None:
            require_loopback(host, "the data address")
        self._memory = PoolMemory(pool)
        super().__init__(self._memory.shape, patience or Patience())
        self._instance, self._key = instance_id, transfer_key(cluster_key)
        self._host = advertise_host or host
        self._script = script or FaultScript()
        self._rooms, self._reservations = RoomCounter(), RoomCounter()
        self._computed = Computed(pool.memory.device, self.name)
        self.nic = FakeNic(self._memory, instance_id, host, self._key, self.patience)
        self._lock = threading.Lock()
        self._links: dict[str, FakeLink] = {}
        self._began: float | None = None

    def address(self) -> dict[str, str]:
        return {"host": self._host, "port": str(self.nic.port)}

    def connect(self, peer: NodeInfo) -> None:
        address = peer_address(peer.address_of(self.name), peer.instance_id, self._key)
        with self._lock:
            old = self._links.get(peer.instance_id)
            if old is not None and old.address == address:
                return
            self._links[peer.instance_id] = FakeLink(
                self._instance, peer.instance_id, address, self._key, self._script, self.patience
            )
        if old is not None:
            old.end_link(f"{peer.instance_id} has a new address")

    def disconnect(self, instance_id: str) -> None:
        with self._lock:
            link = self._links.pop(instance_id, None)
        self.nic.disconnect_peer(instance_id)
        if link is not None:
            link.end_link(f"{instance_id} was disconnected")

    def open_sender(
        self, peer: str, reservation: Reservation, pages: IntArray, tokens: MissingTokens
    ) -> Sender:
        with self._lock:
            link = self._links.get(peer)
            if self._began is None:
                self._began = time.monotonic()
        if link is None:
            raise TransferError(f"{peer} is not connected")
        number = self._rooms.next_number()
        sender = FakeSender(link, self._memory, self._computed, number, reservation, pages, tokens)
        link.add_sender(sender, self._began)
        return sender

    def open_receiver(
        self, peer: str, room: bytes, epoch: int, pages: IntArray, tokens: MissingTokens
    ) -> Receiver:
        return FakeReceiver(self.nic, self.shape, peer, pages, tokens)

    def reservation_delay(self) -> float:
        return self._script.reservation_delay(self._reservations.next_number())

    def close(self) -> None:
        self.nic.close()
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close("the transfer manager was closed")
        self._computed.close()
