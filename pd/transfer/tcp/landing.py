"""Where the payload of one frame goes: into the pool, or into a buffer and from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pd.core.errors import TransferError
from pd.transfer.pool_memory import in_buffer

if TYPE_CHECKING:
    import socket

    import torch

    from pd.transfer.pool_memory import Stretches
    from pd.transfer.ranges import Block
    from pd.transfer.tcp.host_buffers import Scatters, Slots
    from pd.transfer.tcp.receiver import TcpReceiver


class Landing(Protocol):
    """For the inbox's thread."""

    def ready(self) -> bool:
        """Whether :meth:`receive` may be called. If not, the connection's :class:`Slots` call back
        when it may."""

    def receive(self, sock: socket.socket) -> int | None:
        """Take what has arrived: how many bytes, 0 at the end of the stream, None when the room is
        over and the rest of the frame is not wanted. Raises OSError."""

    def abandon(self) -> None:
        """Nothing more will be received."""


class DirectLanding:
    """Into the pages, in place."""

    def __init__(self, receiver: TcpReceiver, block: Block) -> None:
        self._receiver = receiver
        self._stretches = receiver.in_place.stretches(block)

    def ready(self) -> bool:
        return True

    def receive(self, sock: socket.socket) -> int | None:
        if not self._receiver.enter():
            return None
        stretches, whole = self._stretches, 0
        try:
            arrived = stretches.receive(sock)
            if stretches.done == stretches.total:
                whole = stretches.total
                self._receiver.arrived(whole)
        finally:
            self._receiver.leave(whole)
        return arrived

    def abandon(self) -> None:
        """The pages were left after each call."""


class StagedLanding:
    """Into a buffer of the connection; a complete frame is unpacked while the next one arrives."""

    def __init__(
        self, scatters: Scatters, slots: Slots, receiver: TcpReceiver, block: Block, size: int
    ) -> None:
        self._scatters, self._slots = scatters, slots
        self._receiver, self._block, self._size = receiver, block, size
        self._slot: torch.Tensor | None = None
        self._stretches: Stretches | None = None

    def ready(self) -> bool:
        if self._slot is None:
            self._slot = self._slots.take()
            if self._slot is None:
                return False
            self._stretches = in_buffer(self._slot[: self._size])
        return True

    def receive(self, sock: socket.socket) -> int | None:
        stretches = self._stretches
        assert stretches is not None, "receive without a buffer"
        if not self._receiver.active:
            self.abandon()
            return None
        arrived = stretches.receive(sock)
        if stretches.done == stretches.total:
            self._unpack()
        return arrived

    def abandon(self) -> None:
        if self._slot is not None:
            self._slots.give_back(self._slot)
        self._slot = self._stretches = None

    def _unpack(self) -> None:
        if not self._receiver.enter():
            self.abandon()
            return
        slot, self._slot = self._slot, None
        assert slot is not None
        receiver, slots, size = self._receiver, self._slots, self._size

        def over(reason: str) -> None:
            if reason:
                receiver.fail(TransferError(f"cannot write to the pool: {reason}"))
            receiver.leave(0 if reason else size)
            slots.give_back(slot)

        receiver.arrived(size)
        self._scatters.begin(receiver.tables, self._block, slot, over)
