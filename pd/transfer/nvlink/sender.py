"""Sending side of one room over nvlink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pd.transfer.common.sender import QueuedSender, SenderLink

if TYPE_CHECKING:
    from pd.core.messages import Reservation
    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.nvlink.device import StoreDevice, StoreLane, StoreTicket
    from pd.transfer.nvlink.messages import PeerPool
    from pd.transfer.pool_shape import MissingTokens, PoolShape
    from pd.transfer.ranges import Block

# A GPU's links stay awake for 50 ms after each use (`nvidia-smi nvlink -gLowPwrInfo`). That takes
# power from a long forward pass on a GPU at its limit, which becomes 1 to 2 % slower whether we
# send groups of layers or one token of each (``sending_gpu``). So we collect KV, depending on the
# measured rate of the link and this many operations per second, more than an H200 achieves.
_FLOPS = 1e15


class StoreLink(SenderLink, Protocol):
    """A link whose blocks are stores into the peer's pool."""

    @property
    def device(self) -> StoreDevice: ...
    @property
    def bytes_per_second(self) -> float: ...
    @property
    def is_welcomed(self) -> bool: ...

    def launch_ready(self) -> None:
        """Launch queued stores, if the link can."""


class NvlinkSender(QueuedSender[StoreLink]):
    """Sends blocks as stores. A room's stores complete in the order of their launch, so the last
    one tells us that all are complete.

    Args:
        session: session in which the destination is valid.
        tokens: tokens to send, for each plane.
        slots: int32 ``[2, tables * tokens]``, each token's slot in the own pool and in the peer's,
            from the first token missing in some plane on, for one page table after the other.
    """

    def __init__(
        self,
        link: StoreLink,
        shape: PoolShape,
        reservation: Reservation,
        tokens: MissingTokens,
        session: int,
        slots: IntArray,
    ) -> None:
        super().__init__(link, shape, link.device.when_computed, reservation, tokens)
        self.session = session
        self._slots = slots
        self._table: object = None
        self._last: StoreTicket | None = None

    @property
    def flops_per_byte(self) -> float:
        """0 until the link is known."""
        rate = self._link.bytes_per_second
        return _FLOPS / rate if rate else 0.0

    # ---- called by the thread that launches for the link, without the lock

    def prepare_table(self, lane: StoreLane) -> None:
        """Copy the slot numbers to the device before a store waits for them."""
        if self._table is None:
            self._table = lane.make_table(self._slots)

    def launch_store(
        self, lane: StoreLane, mapped: int, pool: PeerPool, block: Block
    ) -> tuple[StoreTicket, int]:
        """Launch the store of a block into the peer's pool, mapped at address ``mapped``.

        Returns:
            Its ticket and the number of bytes.
        """
        self.prepare_table(lane)
        plane, tokens = self._shape.plane_of(block), self._tokens
        before = plane.table * (tokens.stop - tokens.start) - tokens.start
        columns = slice(before + block.token_start, before + block.token_stop)
        peer = mapped + pool.plane_offsets[plane.index]
        self._last = lane.store_block(self._table, columns, peer, pool.num_slots, block)
        return self._last, self._shape.num_bytes(block)

    # ---- with the lock

    def _on_computed(self, blocks: list[Block], reason: str) -> None:
        super()._on_computed(blocks, reason)
        self._link.launch_ready()

    def _is_quiet(self) -> bool:
        return super()._is_quiet() and (self._last is None or self._last.is_done())

    def _stalled_since(self) -> float | None:
        """A queued store is launched at once, unless the peer has not opened its channel."""
        return self.waiting_since if self.has_queued and not self._link.is_welcomed else None

    def _stall_error(self, seconds: float) -> str:
        return f"{self._link.peer} did not open a channel for {seconds:.1f} s"
