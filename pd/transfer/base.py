"""The interface of transfer backends: what each offers and promises.

D owns the destination and P pushes. A room's hand-off is one :class:`Sender` on P and one
:class:`Receiver` on D; both speak of token and layer ranges, never of pages, so page sizes may
differ. Control messages (reservation, commit, abort, drained) travel on the nodes' message sockets;
a backend moves only KV bytes.

All methods may be called from any thread, and keep order within one sender. The node holds its lock
when it calls them, but for :meth:`TransferManager.close` and, on D, for
:meth:`TransferManager.connect`, which a thread calls that shakes hands. None waits for the network
or a GPU; ``close`` waits for threads.
States only move forward; the first recorded error wins. An exception that a method does not name
ends its request alone (:mod:`pd.transfer.contained`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from pd.core.errors import PDError
    from pd.core.messages import Reservation
    from pd.core.node_info import KVLayout, NodeInfo, Plane
    from pd.core.starvation import Patience

    IntArray = npt.NDArray[np.int32]


class KVPlane(Protocol):
    """One plane of the pool as transfers see it.

    ``buffer``: contiguous tensor ``[num_layers, vectors, num_slots, num_heads, head_dim]`` (K then
    V, or one vector); token t of a sequence whose page table is ``pages`` lies in slot
    ``pages[t // page_size] * page_size + t % page_size``. ``first_layer``: number of its first
    layer through all planes. ``parts``: where tensor-parallel ranks divide the heads, the address
    of each rank's buffer as mapped here, of the same shape as ``buffer``, which is the first of
    them. Only copies between pages and staging buffers know of parts: KV travels with all heads.
    """

    spec: Plane
    first_layer: int
    buffer: torch.Tensor
    parts: Sequence[int]


class KVBuffer(Protocol):
    """The pool as transfers see it: planes in the order in which their layers are numbered, all
    with the same slots, which lie in one allocation.

    ``memory``: uint8 ``[bytes]``, that allocation; :meth:`pd.core.node_info.KVLayout.extents` says
    where each plane lies.
    """

    layout: KVLayout
    memory: torch.Tensor

    @property
    def planes(self) -> Sequence[KVPlane]: ...


class TransferState(IntEnum):
    """State of a sender or a receiver: ACTIVE until it is DONE or has FAILED, for good."""

    ACTIVE = 0
    DONE = 1
    FAILED = 2


class Sender(ABC):
    """Sending side of one room and epoch, on P. The caller keeps the source pages as they are until
    :meth:`drained`."""

    error: PDError | None = None

    @property
    def flops_per_byte(self) -> float:
        """Operations that the GPU computes while one byte is sent; 0 if KV may be sent at any time.

        Above 0 where every use of the link slows the forward pass, however little is sent. KV
        should then be collected and sent at once, as late as the operations that are left still
        hide it.
        """
        return 0.0

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """KV bytes accepted by :meth:`send` so far; what :class:`Commit` reports at the end."""

    @abstractmethod
    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        """Queue what D lacks of a half-open token range of a half-open layer range. Never blocks.

        Layers are numbered through all planes, and the range may have layers of several. Of each
        plane, only tokens from the cached length of its group on are sent. Raises ValueError if
        the range leaves the pool's layers or the tokens that D lacks in any plane.

        On a GPU the KV need only be queued on the calling thread's current stream: the backend
        records an event there and reads the pool on streams of its own, after that event."""

    @abstractmethod
    def finish(self) -> None:
        """Announce that nothing more will be sent."""

    @abstractmethod
    def poll(self) -> TransferState:
        """DONE when finished and every byte has left for good, so that a commit may be sent. Stuck
        peers are noticed here, so poll."""

    @abstractmethod
    def abort(self) -> None:
        """Drop what has not been issued. Idempotent; the state becomes FAILED unless it is DONE."""

    @abstractmethod
    def drained(self) -> bool:
        """Whether, after abort, failure or DONE, nothing of this epoch reads the source pages or
        can land at the destination any more. On a GPU this means that the host saw the end of the
        last kernel or copy that reads or writes them. False is a lasting answer where a write
        cannot be stopped, also after ``TransferManager.disconnect``; True is final. Where D
        itself keeps late bytes out of its pages, as over ``tcp``, the end of reads is enough."""


class Receiver(ABC):
    """Receiving side of one room and epoch, on D."""

    error: PDError | None = None

    @property
    @abstractmethod
    def destination(self) -> bytes:
        """Bytes for ``Reservation.destination``: what the sender needs besides room and epoch."""

    @property
    @abstractmethod
    def bytes_received(self) -> int:
        """KV bytes that arrived, or 0 for a backend whose writes D cannot see."""

    @abstractmethod
    def commit(self, num_bytes: int) -> None:
        """Note that the sender has written ``num_bytes`` in all. The state becomes DONE once they
        are here (at once where the sender's completion proves arrival) and FAILED if the number is
        not what was reserved."""

    @abstractmethod
    def poll(self) -> TransferState:
        """DONE when committed and complete."""

    @abstractmethod
    def abort(self) -> None:
        """Refuse whatever still comes. Idempotent; the state becomes FAILED unless DONE."""

    @abstractmethod
    def drained(self) -> bool:
        """Whether nothing of this epoch can land in its pages any more, as far as D itself can
        tell. A backend whose writes land in pool pages without D's doing answers False until
        :meth:`peer_drained`, or until it has proof that the peer stopped or is gone; disconnecting
        the peer is not that proof. True is final."""

    @abstractmethod
    def peer_drained(self) -> None:
        """The sender acknowledged the drain (``Drained``)."""


class TransferManager(ABC):
    """One per end of hand-offs: knows the pool and the peers. An elastic node has two.

    Attributes:
        patience: extends limits on progress; the node gives it the run delays that peers'
            heartbeats report.
    """

    name: str
    patience: Patience

    @abstractmethod
    def address(self) -> dict[str, str]:
        """Published in the handshake; read by :meth:`connect` of the same backend. Constant."""

    def addresses(self) -> dict[str, dict[str, str]]:
        """``NodeInfo.transfers``: the backends offered, in order of preference."""
        return {self.name: self.address()}

    def backend_of(self, peer: str) -> str:
        """Name of the backend that a connected peer's KV travels by."""
        return self.name

    @abstractmethod
    def connect(self, peer: NodeInfo) -> None:
        """Learn a peer; replaces what was known of it, but keeps connections to the same instance
        at the same address. Does not wait for the network. Raises TransferError on a bad address.

        P holds the node's lock during the call. D does not, so that :meth:`disconnect`, or this
        method for another peer, may run at the same time.
        """

    @abstractmethod
    def disconnect(self, instance_id: str) -> None:
        """Forget a peer: its senders and receivers fail, nothing new is issued to it, and what can
        be stopped is stopped. Returns at once, whatever the peer, a thread or the network does: the
        caller holds a lock that everything else on the node waits for. Threads of the backend see
        to the rest.

        What was already under way may outlast this call: a write that waits in a network card for a
        cut link, a kernel that stores into the peer's memory. So the caller goes on polling
        :meth:`Sender.drained` and :meth:`Receiver.drained` and keeps the pages until they are True,
        which may take as long as the link is cut. Meanwhile the same instance or a new one may
        :meth:`connect`; the backend keeps their memory apart."""

    @abstractmethod
    def sender(
        self, peer: str, reservation: Reservation, pages: IntArray, num_tokens: int
    ) -> Sender:
        """P: open the sending side for a reservation of ``peer``.

        Args:
            pages: int32 page table of the source, covering ``num_tokens`` tokens.

        Raises:
            TransferError: the peer is not connected or the destination does not fit.
        """

    @abstractmethod
    def receiver(
        self,
        peer: str,
        room: bytes,
        epoch: int,
        pages: IntArray,
        cached: tuple[int, ...],
        num_tokens: int,
    ) -> Receiver:
        """D: accept what is missing of a prompt of ``num_tokens`` into ``pages``.

        Args:
            pages: int32 page table of the destination for the whole sequence; entries below
                ``min(cached) // page_size`` are never written.
            cached: leading tokens that are there already, for each group of planes; those of a
                group are never written in its planes.

        Raises:
            ValueError: the page table does not cover the tokens or leaves the pool, or ``cached``
                is not one number up to ``num_tokens`` for each group.
        """

    def is_linked(self, peer: str) -> bool:
        """D: whether the first room of a connected peer finds its connections made."""
        return True

    @property
    def quarantined_buffers(self) -> int:
        """Staging buffers, on either side of a link, that a transfer may still read or write after
        its link was lost; shown by the node. 0 for a backend without staging."""
        return 0

    def reservation_delay(self) -> float:
        """D: seconds by which to hold back the next ``Reservation`` without blocking anything else.

        Above 0 only for ``fake`` under a script; asked once for each reservation.
        """
        return 0.0

    @abstractmethod
    def close(self) -> None:
        """Stop threads and close sockets; everything open fails. Called without the node's lock, it
        may wait some seconds for threads and for peers to drain."""
