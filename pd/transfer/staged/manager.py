"""Managers of libraries with one-sided writes, which never write into pool pages.

Each link from P to D owns as many staging buffers on P as on D. P gathers a block into a buffer,
the library writes it into one of D's buffers, and P tells D over the channel which block that
buffer holds. D's own thread scatters it into the pages and gives the buffer back. This guarantees:

- Both sides protect their pages locally, as over ``tcp``. D's thread does every write into D's
  pool. It first looks up (room, epoch), checks the block against the reservation, and accepts each
  (layer, token) once. So ``Receiver.drained`` and ``Sender.drained`` are local facts, and no
  ``Drained`` message is needed.
- Only staging buffers can be written late, and a buffer serves one link in its life. When a link is
  lost, P keeps its buffers until the library reports the end of all writes. D keeps its own until
  the channel's end proves that P drained or is gone (:mod:`pd.transfer.wire.channel`). If P did not
  report that it drained, D keeps buffers in GPU memory for two more seconds, because copies of a
  killed P end by then. A time-out is no proof, so 20 minutes of quarantine follow it. Meanwhile a
  new link has new buffers. A peer may have four lost links at a time.
- P notifies D of a buffer after the library reported the write as complete, so D reads whole
  blocks.
- D notices a killed peer by the end of its channel, and the rooms of the link fail at once.

On P, one thread drives all links, gathers and writes (:mod:`.link_thread`), and other threads post
to it. On D, the hub's thread scatters announced blocks, and the pump's thread calls the library and
frees the buffers of ended links (:mod:`.incoming_link`).

Why not write into the pages? A page of one layer is 32 KiB, and a descriptor costs NIXL 4 µs
(``nixl_blocks_gpu``). Buffers of megabytes cost a gather and a scatter, but these run while the
library copies. A pool whose pages hold all layers side by side would have larger pieces. But none
could leave before the last layer is computed, and none could be larger than the smaller page of the
two nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.transfer.base import Receiver, Sender, TransferManager
from pd.transfer.computed import Computed
from pd.transfer.copier_choice import copier_for
from pd.transfer.host_id import host_id
from pd.transfer.staged.incoming_links import IncomingLinks
from pd.transfer.staged.messages import MAX_BUFFER_BYTES, decoder
from pd.transfer.staged.outgoing_links import OutgoingLinks, StagingShape
from pd.transfer.staged.pump import Pump
from pd.transfer.staged.receiver import StagedReceiver
from pd.transfer.staged.sender import StagedSender
from pd.transfer.wire.greeting import peer_address, require_loopback, transfer_key
from pd.transfer.wire.hub import ChannelHub
from pd.util.starvation import Patience

if TYPE_CHECKING:
    from pd.core.messages import Reservation
    from pd.core.node_info import NodeInfo
    from pd.transfer.kv_buffer import IntArray, KVBuffer
    from pd.transfer.pool_shape import MissingTokens
    from pd.transfer.staged.mover import Mover

_CLOSE_SECONDS = 2.0
# Links that did not close in time. We keep memory allocated that a library may still write.
_ABANDONED: list[object] = []


class StagedManager(TransferManager):
    """Manager of one library; see the module's docstring.

    Args:
        mover: the library.
        buffers, buffer_bytes: number and size of each link's staging buffers, on each side. The
            smaller values of the two nodes count. A buffer holds at least one token of one layer.
        host: address to listen on.
        advertise_host: address for peers to connect to; ``host`` if empty.
        cluster_key: required unless ``host`` is a loopback address.
    """

    def __init__(
        self,
        pool: KVBuffer,
        instance_id: str,
        host: str,
        *,
        mover: Mover,
        buffers: int,
        buffer_bytes: int,
        advertise_host: str = "",
        cluster_key: bytes | None = None,
        patience: Patience | None = None,
    ) -> None:
        if cluster_key is None:
            require_loopback(host, "the data address")
        self._copier = copier_for(pool)
        super().__init__(self._copier.shape, patience or Patience())
        self.name, self._mover = mover.name, mover
        self._host, self._key = advertise_host or host, transfer_key(cluster_key)
        self._computed = Computed(pool.memory.device, self.name)
        device = mover.device_buffers and pool.memory.device.type == "cuda"
        size = min(MAX_BUFFER_BYTES, max(buffer_bytes, self._copier.shape.max_cell_bytes))
        self._staging = StagingShape(buffers, size, device, host_id() if device else "")
        self._pump = Pump(f"pd-{self.name}-pump")
        self._incoming = IncomingLinks(
            self._copier, mover, self._pump, self._staging, self.patience
        )
        self._hub = ChannelHub(
            self.name,
            instance_id,
            host,
            self._key,
            decoder,
            self._incoming.accept_channel,
            self.patience,
        )
        self._outgoing = OutgoingLinks(self._copier, mover, self._hub, self._staging)
        self.counters = self._incoming.counters

    @property
    def quarantined_buffers(self) -> int:
        """Staging buffers of lost links, on P and D, that a library may still use."""
        return self._outgoing.num_quarantined + self._incoming.num_quarantined

    def address(self) -> dict[str, str]:
        return {"host": self._host, "port": str(self._hub.port)}

    def connect(self, peer: NodeInfo) -> None:
        address = peer_address(peer.address_of(self.name), peer.instance_id, self._key)
        self._outgoing.connect_peer(peer.instance_id, address, dial=peer.role != "prefill")

    def disconnect(self, instance_id: str) -> None:
        self._outgoing.disconnect_peer(instance_id, f"{instance_id} was disconnected")
        self._incoming.disconnect_peer(instance_id)

    def open_sender(
        self, peer: str, reservation: Reservation, pages: IntArray, tokens: MissingTokens
    ) -> Sender:
        to = self._outgoing.get_peer(peer)
        sender = StagedSender(to, self._copier, self._computed, reservation, pages, tokens)
        self._outgoing.open_sender(to, sender)
        return sender

    def open_receiver(
        self, peer: str, room: bytes, epoch: int, pages: IntArray, tokens: MissingTokens
    ) -> Receiver:
        receiver = StagedReceiver(
            self._incoming.receivers, self._copier, peer, room, epoch, pages, tokens
        )
        self._incoming.receivers.add_receiver(receiver)
        return receiver

    def is_linked(self, peer: str) -> bool:
        return self._incoming.is_prepared(peer)

    def close(self) -> None:
        """Close within some seconds. We keep links that are not over by then until the process
        ends."""
        left: list[object] = [*self._outgoing.close(_CLOSE_SECONDS)]
        left += self._incoming.close(_CLOSE_SECONDS)
        self._pump.close()
        self._hub.close()
        self._mover.close()
        self._computed.close()
        _ABANDONED.extend(left)
