"""The interface of transfer backends.

The decode node (D) owns the destination, and the prefill node (P) pushes. One :class:`Sender` on P
and one :class:`Receiver` on D hand a room over. Both speak of token and layer ranges, never of
pages, so the two nodes may have different page sizes. Control messages (reservation, commit, abort,
drained) travel on the nodes' message sockets; a backend moves only KV bytes.

You may call every method from any thread. Calls of one sender keep their order. The node holds its
lock during most calls, so no method waits for the network or a GPU. There are two exceptions: D
calls :meth:`TransferManager.connect` without the lock, from a thread that shakes hands, and
:meth:`TransferManager.close` runs without the lock and may wait for threads.

States only move forward, and the first recorded error wins. An exception that a method does not
document ends only the request it concerns (:mod:`pd.transfer.contained`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import TYPE_CHECKING

from pd.core.errors import TransferError

if TYPE_CHECKING:
    from pd.core.errors import PDError
    from pd.core.messages import Reservation
    from pd.core.node_info import NodeInfo
    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.pool_shape import MissingTokens, PoolShape
    from pd.util.starvation import Patience


class TransferState(IntEnum):
    """State of a sender or receiver. DONE and FAILED are final."""

    ACTIVE = 0
    DONE = 1
    FAILED = 2


class Sender(ABC):
    """Sending side of one room and epoch, on P. The caller must not change the source pages before
    :meth:`drained` is True."""

    error: PDError | None = None

    @property
    def flops_per_byte(self) -> float:
        """Operations that the GPU computes while one byte is sent, or 0 to send KV at any time.

        Return more than 0 if every use of the link slows the forward pass, however little is sent.
        The node then collects KV and sends it at once, as late as the remaining operations can
        still hide the transfer.
        """
        return 0.0

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """KV bytes accepted by :meth:`send` so far. :class:`Commit` reports the final number."""

    @abstractmethod
    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        """Queue a half-open token range of a half-open layer range. Never blocks.

        Layers are numbered through all planes, so the range may cover several. In each plane we
        skip the tokens that D has cached.

        On a GPU the KV need not be computed yet. The backend records an event on the calling
        thread's current stream, and reads the pool on its own streams after that event.

        Raises:
            ValueError: the range exceeds the pool's layers, or the tokens that D lacks in some
                plane.
        """

    @abstractmethod
    def finish(self) -> None:
        """Announce that nothing more will be sent."""

    @abstractmethod
    def poll(self) -> TransferState:
        """Return the state: DONE once finished and every byte has left for good, so that you may
        send a commit. Only polling detects a stuck peer."""

    @abstractmethod
    def abort(self) -> None:
        """Drop the KV not issued yet. Idempotent; the state becomes FAILED unless it is DONE."""

    @abstractmethod
    def drained(self) -> bool:
        """Whether this epoch has stopped reading the source pages and writing the destination.

        Ask after an abort, a failure or DONE. On a GPU, True means that the host observed the end
        of the last kernel or copy on these pages. True is final. The answer stays False as long as
        a write cannot be stopped, even after ``TransferManager.disconnect``. If D itself keeps late
        bytes out of its pages, as over ``tcp``, only reads have to end.
        """


class Receiver(ABC):
    """Receiving side of one room and epoch, on D."""

    error: PDError | None = None

    @property
    @abstractmethod
    def destination(self) -> bytes:
        """Bytes for ``Reservation.destination``: everything the sender needs besides room and
        epoch."""

    @property
    @abstractmethod
    def bytes_received(self) -> int:
        """KV bytes that arrived, or 0 for a backend whose writes D cannot see."""

    @abstractmethod
    def commit(self, num_bytes: int) -> None:
        """Note that the sender has written ``num_bytes`` in all.

        The state becomes DONE when they are here, which is at once if the sender's completion
        proves arrival. It becomes FAILED if the number differs from the reservation.
        """

    @abstractmethod
    def poll(self) -> TransferState:
        """Return the state: DONE when committed and complete."""

    @abstractmethod
    def abort(self) -> None:
        """Refuse all further KV. Idempotent; the state becomes FAILED unless it is DONE."""

    @abstractmethod
    def drained(self) -> bool:
        """Whether D can tell that this epoch will not write its pages any more.

        A backend whose writes land without D's involvement answers False until
        :meth:`on_peer_drained`, or until it has proof that the peer stopped or is gone.
        Disconnecting the peer is no such proof. True is final.
        """

    @abstractmethod
    def on_peer_drained(self) -> None:
        """Note the sender's ``Drained`` message."""


class TransferManager(ABC):
    """Knows the pool and the peers. A node has one per end of hand-offs, so an elastic node has
    two.

    Args:
        shape: sizes of the node's pool.
        patience: extends limits on progress. The node tells it the run delays that peers report in
            their heartbeats.
    """

    name: str

    def __init__(self, shape: PoolShape, patience: Patience) -> None:
        self.shape, self.patience = shape, patience

    @abstractmethod
    def address(self) -> dict[str, str]:
        """Return the address for the handshake; :meth:`connect` of the same backend reads it. It
        never changes."""

    def addresses(self) -> dict[str, dict[str, str]]:
        """Return ``NodeInfo.transfers``: the backends offered, in order of preference."""
        return {self.name: self.address()}

    def backend_of(self, peer: str) -> str:
        """Return the name of the backend that a connected peer uses."""
        return self.name

    @abstractmethod
    def connect(self, peer: NodeInfo) -> None:
        """Learn a peer. Does not wait for the network.

        Replaces an earlier address, but keeps connections to the same instance at the same address.
        P holds the node's lock during the call. D does not, so :meth:`disconnect` or a call for
        another peer may run at the same time.

        Raises:
            TransferError: the address is bad.
        """

    @abstractmethod
    def disconnect(self, instance_id: str) -> None:
        """Forget a peer, fail its senders and receivers, and stop as much as can be stopped.

        Returns at once, whatever the peer, a thread or the network does, because the caller holds
        a lock that everything else on the node waits for. The backend's threads do the rest.

        Operations under way may outlast this call, such as a write that waits in a network card
        for a cut link, or a kernel that stores into the peer's memory. So the caller keeps polling
        :meth:`Sender.drained` and :meth:`Receiver.drained`, and keeps the pages until they are
        True. That may take as long as the link is cut. The same instance or a new one may
        :meth:`connect` meanwhile, because the backend keeps their memory apart.
        """

    def sender(
        self, peer: str, reservation: Reservation, pages: IntArray, num_tokens: int
    ) -> Sender:
        """P: check the arguments and open the sending side for a reservation of ``peer``.

        Args:
            pages: int32 ``[n]``, page table of the source, covering ``num_tokens`` tokens. If the
                pool has windows (:attr:`pd.core.node_info.KVLayout.windows`), int32
                ``[tables, n]``, and ``planes[i].table`` says which of them a plane has.

        Raises:
            TransferError: the peer is not connected, or the reservation does not fit.
            ValueError: the page table does not cover the tokens or leaves the pool.
        """
        try:
            tokens = self.shape.missing_tokens(reservation.cached, num_tokens)
        except ValueError as error:
            raise TransferError(
                f"impossible reservation of {reservation.sender}: it holds {error}"
            ) from error
        self.shape.check_pages(pages, tokens)
        return self.open_sender(peer, reservation, pages, tokens)

    def receiver(
        self,
        peer: str,
        room: bytes,
        epoch: int,
        pages: IntArray,
        cached: tuple[int, ...],
        num_tokens: int,
    ) -> Receiver:
        """D: check the arguments and accept the missing part of a prompt into ``pages``.

        Args:
            pages: page table of the destination for the whole sequence, in the form of
                :meth:`sender`. Entries below ``min(cached) // page_size`` are never written.
            cached: for each group of planes, the number of leading tokens already there. They are
                never written in the planes of that group.
            num_tokens: length of the prompt.

        Raises:
            ValueError: the page table does not cover the tokens or leaves the pool, or ``cached``
                is not one number up to ``num_tokens`` for each group.
        """
        tokens = self.shape.missing_tokens(cached, num_tokens)
        self.shape.check_pages(pages, tokens)
        return self.open_receiver(peer, room, epoch, pages, tokens)

    @abstractmethod
    def open_sender(
        self, peer: str, reservation: Reservation, pages: IntArray, tokens: MissingTokens
    ) -> Sender:
        """P: open the sending side. :meth:`sender` has checked ``pages`` and ``tokens``.

        Args:
            pages: belongs to the caller, so copy it if you keep it.

        Raises:
            TransferError: the peer is not connected, or its destination does not fit.
        """

    @abstractmethod
    def open_receiver(
        self, peer: str, room: bytes, epoch: int, pages: IntArray, tokens: MissingTokens
    ) -> Receiver:
        """D: open the receiving side. :meth:`receiver` has checked ``pages`` and ``tokens``."""

    def is_linked(self, peer: str) -> bool:
        """D: whether the first room of a connected peer finds its connections made."""
        return True

    @property
    def quarantined_buffers(self) -> int:
        """Staging buffers, on either side of a link, that a transfer may still use after losing
        its link. The node shows the number; it is 0 for a backend without staging."""
        return 0

    def reservation_delay(self) -> float:
        """D: return the seconds by which to hold back the next ``Reservation``.

        Nothing else may be delayed. Only ``fake`` under a script returns more than 0. Called once
        for each reservation.
        """
        return 0.0

    @abstractmethod
    def close(self) -> None:
        """Stop threads, close sockets and fail everything open.

        Called without the node's lock. May wait some seconds for threads and for peers to drain.
        """
