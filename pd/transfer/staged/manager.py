"""Managers of libraries with one-sided writes, which never write into pool pages.

Each link from P to D owns as many staging buffers on P as on D. P gathers a block into a buffer,
the library writes it into one of D's buffers, and P notifies D over the channel of what that holds.
D's own thread scatters it into the pages and gives the buffer back. This guarantees:

- Pages on both sides are protected locally, as over ``tcp``. D's thread does every write into D's
  pool, after a lookup of (room, epoch) and a check of the block against the reservation, each
  (layer, token) once. ``Receiver.drained`` and ``Sender.drained`` are local facts, and no
  ``Drained`` message is needed.
- Only staging buffers can be written late, and a buffer serves one link in its life. When a link is
  lost, P keeps its buffers until the library reports that all writes are over. D keeps its own
  until the channel's end proves that P drained or is gone (:mod:`pd.transfer.wire.channel`). If P
  did not report that it drained, D keeps buffers in GPU memory for two more seconds, in which
  copies that a killed P had begun end. A time-out is no proof, and 20 minutes of quarantine follow
  it. Meanwhile a new link has new buffers; a peer may have four lost links at a time.
- P notifies D of a buffer after the library reported the write complete, so D reads whole blocks.
- D notices a killed peer by the end of its channel, and the rooms of the link fail at once.

Threads: on P, one thread drives all links, gathers and writes (:mod:`.link_thread`); other threads
post to it. On D, the hub's thread scatters what its channels announce, and the pump's thread calls
the library and frees the buffers of ended links (:mod:`.incoming_link`).

Why not write where the pages are: a page of one layer is 32 KiB, and a descriptor costs NIXL 4 µs
(``nixl_blocks_gpu``). Buffers of megabytes cost a gather and a scatter, which run beside the
library's copy. A pool whose pages hold all layers side by side would have larger pieces, yet none
that could leave before the last layer is computed, and none larger than the smaller page of two
nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.starvation import Patience
from pd.transfer.base import Receiver, Sender, TransferManager
from pd.transfer.computed import Computed
from pd.transfer.copier_choice import copier_for
from pd.transfer.host_id import host_id
from pd.transfer.pool_shape import missing_tokens, wanted_tokens
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
# Links that could not be closed in time: memory that a library may still write stays allocated.
_ABANDONED: list[object] = []


class StagedManager(TransferManager):
    """Manager of one library; see the module's docstring.

    Args:
        mover: the library.
        buffers, buffer_bytes: number and size of each link's staging buffers, on each side. The
            smaller values of the two nodes count; a buffer holds at least one token of one layer.
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
        buffers: int,
        buffer_bytes: int,
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
        self._computed = Computed(pool.memory.device, self.name)
        device = mover.device_buffers and pool.memory.device.type == "cuda"
        size = min(MAX_BUFFER_BYTES, max(buffer_bytes, self._copier.shape.max_cell_bytes))
        self._shape = StagingShape(buffers, size, device, host_id() if device else "")
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
    def quarantined_buffers(self) -> int:
        """Staging buffers of lost links, P's and D's, that a library may still read or write."""
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
        tokens = wanted_tokens(self._copier.shape, reservation, num_tokens)
        to = self._outgoing.peer(peer)
        sender = StagedSender(to, self._copier, self._computed, reservation, pages, tokens)
        self._outgoing.open(sender)
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
        tokens = missing_tokens(self._copier.shape, cached, num_tokens)
        receiver = StagedReceiver(self._incoming, peer, room, epoch, pages, tokens)
        self._incoming.add(receiver)
        return receiver

    def is_linked(self, peer: str) -> bool:
        return self._incoming.prepared(peer)

    def close(self) -> None:
        """Takes at most some seconds; links that are not over by then are kept until the process
        ends."""
        left: list[object] = [*self._outgoing.close(_CLOSE_SECONDS)]
        left += self._incoming.close(_CLOSE_SECONDS)
        self._pump.close()
        self._hub.close()
        self._mover.close()
        self._computed.close()
        _ABANDONED.extend(left)
