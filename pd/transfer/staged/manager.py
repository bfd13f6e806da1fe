"""Managers of libraries with one-sided writes, which never write into pool pages.

Each link from P to D owns as many staging slots on one side as on the other. P gathers a block into
a slot, the library writes it into one of D's, P says over the channel what that holds, D's own
thread scatters it into the pages and gives the slot back. What that guarantees:

- Pages on both sides are protected locally, as over ``tcp``: D's thread does every write into D's
  pool, after a lookup of (room, epoch) and a check of the block against the reservation, each
  (layer, token) once. ``Receiver.drained`` and ``Sender.drained`` are local facts, and no
  ``Drained`` message is needed.
- Only slots can be written late, and a slot serves one link in its life. When a link is lost, its
  slots stay as they are until the library says that P's writes are over (on P), and until the
  channel's end proves that P drained or is gone (on D, see :mod:`pd.transfer.wire.channel`; if P
  did not say that it drained, slots in GPU memory stay for two more seconds, in which what a killed
  P had begun ends); a time-out is no proof, and is followed by 20 minutes of quarantine. Meanwhile
  a new link has new slots; a peer may have four lost links at a time.
- The note of a slot is sent after the library reported the write complete, so what D reads is
  whole.
- A killed peer is noticed by the end of its channel, and the rooms of the link fail at once.

Why not write where the pages are: a page of one layer is 32 KiB, and a descriptor costs NIXL 4 µs
(``nixl_blocks_gpu``). Slots of megabytes cost a gather and a scatter, which run beside the
library's copy. A pool whose pages hold all layers side by side would have
larger pieces, yet none that could leave before the last layer is computed, and none larger than the
smaller page of two nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.starvation import Patience
from pd.transfer.base import Receiver, Sender, TransferManager
from pd.transfer.computed import Computed
from pd.transfer.copier import copier_for
from pd.transfer.host_id import host_id
from pd.transfer.ranges import wanted_tokens
from pd.transfer.staged.incoming_links import IncomingLinks
from pd.transfer.staged.messages import MAX_BUFFER_BYTES, decoder
from pd.transfer.staged.outgoing_links import OutgoingLinks, StagingShape
from pd.transfer.staged.pump import Pump
from pd.transfer.staged.receiver import StagedReceiver
from pd.transfer.staged.sender import StagedSender
from pd.transfer.wire.greeting import peer_address, require_loopback, transfer_key
from pd.transfer.wire.hub import ChannelHub

if TYPE_CHECKING:
    from pd.core.messages import Reservation
    from pd.core.node_info import NodeInfo
    from pd.transfer.base import IntArray, KVBuffer
    from pd.transfer.staged.mover import Mover

_CLOSE_SECONDS = 2.0
# What could not be closed in time: memory that a library may still write stays allocated.
_ABANDONED: list[object] = []


class StagedManager(TransferManager):
    """See the module's docstring.

    Args:
        mover: the library.
        slots, slot_bytes: of each link, on each side; the smaller numbers of the two nodes count.
            A slot holds at least one token of one layer.
        host: address to listen on.
        advertise_host: address that peers connect to; ``host`` if empty.
        cluster_key: needed as soon as ``host`` is not a loopback address.
    """

    def __init__(
        self,
        pool: KVBuffer,
        instance_id: str,
        host: str,
        *,
        mover: Mover,
        slots: int,
        slot_bytes: int,
        advertise_host: str = "",
        cluster_key: bytes | None = None,
        patience: Patience | None = None,
    ) -> None:
        if cluster_key is None:
            require_loopback(host, "the data address")
        self.name, self._mover = mover.name, mover
        self.patience = patience or Patience()
        self._host, self._key = advertise_host or host, transfer_key(cluster_key)
        self._copier = copier_for(pool)
        self._computed = Computed(pool.buffer.device, self.name)
        device = mover.device_slots and pool.buffer.device.type == "cuda"
        size = min(MAX_BUFFER_BYTES, max(slot_bytes, self._copier.cell_bytes))
        self._shape = StagingShape(slots, size, device, host_id() if device else "")
        self._pump = Pump(f"pd-{self.name}-pump")
        self._incoming = IncomingLinks(self._copier, mover, self._pump, self._shape, self.patience)
        self._hub = ChannelHub(
            self.name,
            instance_id,
            host,
            self._key,
            decoder,
            self._incoming.accept,
            self.patience,
        )
        self._outgoing = OutgoingLinks(self._copier, mover, self._hub, self._shape)
        self.counters = self._incoming.counters

    @property
    def quarantined_slots(self) -> int:
        """Slots of lost links, own and as a target, that are not safe to use yet."""
        return self._outgoing.quarantined + self._incoming.quarantined

    def address(self) -> dict[str, str]:
        return {"host": self._host, "port": str(self._hub.port)}

    def connect(self, peer: NodeInfo) -> None:
        address = peer_address(peer.address_of(self.name), peer.instance_id, self._key)
        self._outgoing.connect(peer.instance_id, address, dial=peer.role != "prefill")

    def disconnect(self, instance_id: str) -> None:
        self._outgoing.disconnect(instance_id, f"{instance_id} was disconnected")
        self._incoming.disconnect(instance_id)

    def sender(
        self, peer: str, reservation: Reservation, pages: IntArray, num_tokens: int
    ) -> Sender:
        tokens = wanted_tokens(reservation, num_tokens)
        to = self._outgoing.peer(peer)
        sender = StagedSender(to, self._copier, self._computed, reservation, pages, tokens)
        self._outgoing.open(sender)
        return sender

    def receiver(
        self, peer: str, room: bytes, epoch: int, pages: IntArray, token_start: int, token_stop: int
    ) -> Receiver:
        receiver = StagedReceiver(
            self._incoming, peer, room, epoch, pages, range(token_start, token_stop)
        )
        self._incoming.add(receiver)
        return receiver

    def is_linked(self, peer: str) -> bool:
        return self._incoming.prepared(peer)

    def close(self) -> None:
        """May take two seconds; what cannot be closed by then is kept until the process ends."""
        left: list[object] = [*self._outgoing.close(_CLOSE_SECONDS)]
        left += self._incoming.close(_CLOSE_SECONDS)
        self._pump.close()
        self._hub.close()
        self._mover.close()
        self._computed.close()
        _ABANDONED.extend(left)
