"""Where the payload of a frame goes: into the pool, or into a buffer from which we unpack it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pd.core.errors import TransferError
from pd.transfer.pool_memory import wrap_buffer

if TYPE_CHECKING:
    import socket

    import torch

    from pd.transfer.pool_memory import Stretches
    from pd.transfer.ranges import Block
    from pd.transfer.tcp.host_buffers import Scatters, StagingBuffers
    from pd.transfer.tcp.receiver import TcpReceiver


class Landing(Protocol):
    """Receives the payload of one frame. For the inbox's thread."""

    def is_ready(self) -> bool:
        """Whether you may call :meth:`receive_some`. If not, the connection's
        :class:`~pd.transfer.tcp.host_buffers.StagingBuffers` call back later."""

    def receive_some(self, sock: socket.socket) -> int | None:
        """Receive the bytes at hand.

        Returns:
            number of bytes, 0 at the end of the stream, or None if the room is over and needs no
            more of the frame. Raises OSError.
        """

    def give_up(self) -> None:
        """Return the buffer, if there is one. Nothing more will be received."""


class DirectLanding:
    """Receives into the pages, in place."""

    def __init__(self, receiver: TcpReceiver, block: Block) -> None:
        self._receiver = receiver
        self._stretches = receiver.in_place.locate_block(block)

    def is_ready(self) -> bool:
        return True

    def receive_some(self, sock: socket.socket) -> int | None:
        if not self._receiver.enter_pages():
            return None
        stretches, whole = self._stretches, 0
        try:
            arrived = stretches.receive_from(sock)
            if stretches.done == stretches.total:
                whole = stretches.total
                self._receiver.on_frame_arrived(whole)
        finally:
            self._receiver.leave_pages(whole)
        return arrived

    def give_up(self) -> None:
        """Do nothing, because each call has left the pages."""


class StagedLanding:
    """Receives into a buffer of the connection. We unpack a complete frame while the next one
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

    def is_ready(self) -> bool:
        if self._buffer is None:
            self._buffer = self._buffers.take_buffer()
            if self._buffer is None:
                return False
            self._stretches = wrap_buffer(self._buffer[: self._size])
        return True

    def receive_some(self, sock: socket.socket) -> int | None:
        stretches = self._stretches
        assert stretches is not None, "receive without a buffer"
        if not self._receiver.is_active:
            self.give_up()
            return None
        arrived = stretches.receive_from(sock)
        if stretches.done == stretches.total:
            self._begin_unpacking()
        return arrived

    def give_up(self) -> None:
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)
        self._buffer = self._stretches = None

    def _begin_unpacking(self) -> None:
        if not self._receiver.enter_pages():
            self.give_up()
            return
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        receiver, buffers, size = self._receiver, self._buffers, self._size

        def over(reason: str) -> None:
            if reason:
                receiver.fail(TransferError(f"cannot write to the pool: {reason}"))
            receiver.leave_pages(0 if reason else size)
            buffers.give_back(buffer)

        receiver.on_frame_arrived(size)
        self._scatters.begin_scatter(receiver.tables, self._block, buffer, over)
