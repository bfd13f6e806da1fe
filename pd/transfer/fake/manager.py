"""One-sided writes between processes, with faults from a script: the backend of the fault tests.

It moves real bytes over sockets but behaves like RDMA at its most inconvenient: D's card performs
each write that arrives, by slot, without a look at rooms or epochs, and D is not told. The faults
are those of :mod:`pd.transfer.fake.script`.

Guarantees, and what they rest on:

- A write carries the key that D gave to this peer and that ``disconnect`` takes away under the lock
  that each write holds. So after D's ``disconnect`` or ``close`` nothing of the peer lands, not
  even what P sends later for reservations that it got before.
- ``Sender.poll`` is DONE, and ``Sender.drained`` true, when D's card acknowledged each write and
  each duplicate of it, or P's link will not issue it any more, or D closed its end of the link.
- ``Receiver.drained`` is therefore false after an abort until ``peer_drained`` or ``disconnect``:
  within one key, only the protocol (drain, quarantine, commit after data) protects the pages.
- After P's ``disconnect`` a thread gives D up to a second to read what is on the wire, and
  ``Sender.drained`` is false meanwhile. A node does not send ``Drained`` to a peer that it
  disconnected; that peer is protected by its own ``disconnect``.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.core.starvation import Patience
from pd.transfer.base import Receiver, Sender, TransferManager
from pd.transfer.computed import Computed
from pd.transfer.fake.link import FakeLink
from pd.transfer.fake.nic import FakeNic, FakeReceiver
from pd.transfer.fake.script import FaultScript, RoomCounter
from pd.transfer.fake.sender import FakeSender
from pd.transfer.pool_memory import PoolMemory
from pd.transfer.pool_shape import missing_tokens, wanted_tokens
from pd.transfer.wire.greeting import peer_address, require_loopback, transfer_key

if TYPE_CHECKING:
    from pd.core.messages import Reservation
    from pd.core.node_info import NodeInfo
    from pd.transfer.base import IntArray, KVBuffer


class FakeManager(TransferManager):
    """See the module's docstring. Arguments as for :class:`~pd.transfer.tcp.manager.TcpManager`,
    and:

    Args:
        script: what goes wrong; nothing by default.
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
        self.patience = patience or Patience()
        self._instance, self._key = instance_id, transfer_key(cluster_key)
        self._host = advertise_host or host
        self._script = script or FaultScript()
        self._rooms, self._reservations = RoomCounter(), RoomCounter()
        self._memory = PoolMemory(pool)
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
            old.end(f"{peer.instance_id} has a new address")

    def disconnect(self, instance_id: str) -> None:
        with self._lock:
            link = self._links.pop(instance_id, None)
        self.nic.disconnect(instance_id)
        if link is not None:
            link.end(f"{instance_id} was disconnected")

    def sender(
        self, peer: str, reservation: Reservation, pages: IntArray, num_tokens: int
    ) -> Sender:
        with self._lock:
            link = self._links.get(peer)
            if self._began is None:
                self._began = time.monotonic()
        if link is None:
            raise TransferError(f"{peer} is not connected")
        tokens = wanted_tokens(self._memory.shape, reservation, num_tokens)
        sender = FakeSender(
            link, self._memory, self._computed, self._rooms.next(), reservation, pages, tokens
        )
        link.open(sender, self._began)
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
        tokens = missing_tokens(self._memory.shape, cached, num_tokens)
        return FakeReceiver(self.nic, self._memory.shape, peer, pages, tokens)

    def reservation_delay(self) -> float:
        return self._script.reservation_delay(self._reservations.next())

    def close(self) -> None:
        self.nic.close()
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close("the transfer manager was closed")
        self._computed.close()
