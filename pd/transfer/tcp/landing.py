"""Destination of the payload of one frame: the pool, or a buffer from which it is unpacked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pd.core.errors import TransferError
from pd.transfer.pool_memory import in_buffer

if TYPE_CHECKING:
    import socket

    import torch

    from pd.transfer.pool_memory import Stretches
    from pd.transfer.ranges import Block
    from pd.transfer.tcp.host_buffers import Scatters, StagingBuffers
    from pd.transfer.tcp.receiver import TcpReceiver


class Landing(Protocol):
    """Takes in the payload of one frame. For the inbox's thread."""

    def ready(self) -> bool:
        """Whether :meth:`receive` may be called. If not, the connection's
        :class:`~pd.transfer.tcp.host_buffers.StagingBuffers` call back when it may."""

    def receive(self, sock: socket.socket) -> int | None:
        """Take what has arrived: how many bytes, 0 at the end of the stream, None when the room is
        over and the rest of the frame is not wanted. Raises OSError."""

    def abandon(self) -> None:
        """Give the buffer back, if there is one; nothing more will be received."""


class DirectLanding:
    """Receives into the pages, in place."""

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
    """Receives into a buffer of the connection. A complete frame is unpacked while the next one
    arrives."""

    def __init__(
        self,
        scatters: Scatters,
        buffers: StagingBuffers,
        receiver: TcpReceiver,
        block: Block,
        size: int,
    ) -> None:
        self._scatters, self._buffers = scatters, buffers
        self._receiver, self._block, self._size = receiver, block, size
        self._buffer: torch.Tensor | None = None
        self._stretches: Stretches | None = None

    def ready(self) -> bool:
        if self._buffer is None:
            self._buffer = self._buffers.take()
            if self._buffer is None:
                return False
            self._stretches = in_buffer(self._buffer[: self._size])
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
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)
        self._buffer = self._stretches = None

    def _unpack(self) -> None:
        if not self._receiver.enter():
            self.abandon()
            return
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        receiver, buffers, size = self._receiver, self._buffers, self._size

        def over(reason: str) -> None:
            if reason:
                receiver.fail(TransferError(f"cannot write to the pool: {reason}"))
            receiver.leave(0 if reason else size)
            buffers.give_back(buffer)

        receiver.arrived(size)
        self._scatters.begin(receiver.tables, self._block, buffer, over)
