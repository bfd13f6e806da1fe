"""Sending side of one room over nvlink."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.transfer.rooms.sender import QueuedSender

if TYPE_CHECKING:
    from pd.core.messages import Reservation
    from pd.transfer.base import IntArray
    from pd.transfer.nvlink.device import StoreLane, StoreTicket
    from pd.transfer.nvlink.link import NvlinkLink
    from pd.transfer.nvlink.messages import PeerPool
    from pd.transfer.pool_shape import MissingTokens, PoolShape
    from pd.transfer.ranges import Block

# A GPU's links stay awake for 50 ms after each use (`nvidia-smi nvlink -gLowPwrInfo`). That takes
# power, which a long forward pass on a GPU at its limit then lacks: it takes 1 to 2 % longer,
# whether groups of layers or one token of each were sent (``sending_gpu``). So KV is collected, by
# what the link was seen to do and this many operations per second, more than an H200 gets done.
_FLOPS = 1e15


class NvlinkSender(QueuedSender):
    """A room's stores complete in the order in which they are launched, so when the last one is
    complete, all are.

    Args:
        session: in which the destination is valid.
        pages: int32 page table of the source.
        tokens: those to send, of each plane.
        slots: int32 ``[2, tokens]``: from the first token that is missing in some plane on, each
            token's slot in the own pool and in the peer's.
    """

    def __init__(
        self,
        link: NvlinkLink,
        shape: PoolShape,
        reservation: Reservation,
        pages: IntArray,
        tokens: MissingTokens,
        session: int,
        slots: IntArray,
    ) -> None:
        super().__init__(link, shape, link.device.when_computed, reservation, pages, tokens)
        self.session = session
        self._link, self._slots = link, slots
        self._table: object = None
        self._last: StoreTicket | None = None

    @property
    def flops_per_byte(self) -> float:
        """0 until the link is known."""
        rate = self._link.bytes_per_second
        return _FLOPS / rate if rate else 0.0

    # ---- called by the thread that launches for the link, without the lock

    def prepare(self, lane: StoreLane) -> None:
        """Copy the slot numbers to where stores find them, before one waits for them."""
        if self._table is None:
            self._table = lane.table(self._slots)

    def launch(
        self, lane: StoreLane, mapped: int, pool: PeerPool, block: Block
    ) -> tuple[StoreTicket, int]:
        """Launch the store of a block into the peer's pool, which is mapped at address ``mapped``.

        Returns:
            Its ticket and the number of bytes.
        """
        self.prepare(lane)
        first = self._tokens.start
        columns = slice(block.token_start - first, block.token_stop - first)
        peer = mapped + pool.plane_offsets[self._shape.plane_of(block).index]
        self._last = lane.store(self._table, columns, peer, pool.num_slots, block)
        return self._last, self._shape.num_bytes(block)

    # ---- with the lock

    def _on_computed(self, blocks: list[Block], reason: str) -> None:
        super()._on_computed(blocks, reason)
        self._link.launch_ready()

    def _enqueue(self) -> None:
        self._link.enqueue(self)

    def _leave_link(self) -> None:
        self._link.remove(self)

    def _is_quiet(self) -> bool:
        return super()._is_quiet() and (self._last is None or self._last.done())

    def _stalled_since(self) -> float | None:
        """A queued store is launched at once unless the peer has not opened its channel."""
        return self.waiting_since if self.queued and not self._link.welcomed else None

    def _stall_error(self, seconds: float) -> str:
        return f"{self._peer} did not open a channel for {seconds:.1f} s"
