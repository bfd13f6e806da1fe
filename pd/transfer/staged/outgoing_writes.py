"""P's staging buffers of one link and the library's writes from them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd.transfer.staged.buffer_pool import BufferPair, BufferPool
from pd.transfer.staged.messages import Filled

if TYPE_CHECKING:
    import torch

    from pd.transfer.copier import Copier
    from pd.transfer.ranges import Block
    from pd.transfer.staged.mover import Path
    from pd.transfer.staged.sender import StagedSender

# We assume that a longer write needs D's library.
_ALONE_SECONDS = 1e-3


@dataclass(slots=True)
class StagedBlock:
    """A block of a room and the buffers for its transfer."""

    sender: StagedSender
    block: Block
    pair: BufferPair

    def make_note(self) -> Filled:
        """Make the message to D for an arrived block."""
        sender, block = self.sender, self.block
        return Filled(
            self.pair.target,
            sender.room,
            sender.epoch,
            block.token_start,
            block.token_stop,
            block.layer_start,
            block.layer_stop,
        )


class OutgoingWrites:
    """Staging buffers of P, their owners, and the writes under way. For one thread.

    Args:
        buffers: uint8 ``[count, buffer_bytes]``.
        path: the library's way from them to D's. The caller closes it.

    Attributes:
        views: each buffer as converted for the copier.
        buffer_bytes: size of one buffer.
    """

    def __init__(self, buffers: torch.Tensor, path: Path, copier: Copier) -> None:
        self.buffers, self.path = buffers, path
        self.views: list[Any] = [copier.make_view(buffer) for buffer in buffers]
        self.buffer_bytes: int = buffers.shape[1]
        self.pool = BufferPool(len(buffers))
        self._shape = copier.shape
        self._blocks: dict[int, StagedBlock] = {}
        self._moved_at = 0.0

    @property
    def is_quiet(self) -> bool:
        """Whether neither a copy from the pool nor the library uses a buffer of P."""
        return not self.pool.num_taken and not self.pool.num_flying

    def begin_probe(self) -> None:
        """Write a byte without notifying D, to check that the way is open."""
        self._begin_write(self.pool.take_pair(), 1)

    def begin_write(self, staged: StagedBlock) -> None:
        """Begin to write a gathered block."""
        self._blocks[staged.pair.target] = staged
        self._begin_write(staged.pair, self._shape.num_bytes(staged.block))

    def poll_writes(self) -> tuple[list[StagedBlock], bool, str]:
        """Collect the writes that are over since the last call.

        Returns:
            arrived blocks, in buffers that D holds from now on; whether the probe arrived; why a
            write failed, or empty.
        """
        arrived, probed, error = [], False, ""
        for written in self.path.poll():
            self._moved_at = time.monotonic()
            self.pool.end_write(written.target)
            staged = self._blocks.pop(written.target, None)
            if written.error:
                error = error or written.error
            elif staged is not None:
                arrived.append(staged)
            else:
                self.pool.release_targets([written.target])
                probed = True
        return arrived, probed, error

    def needs_peer(self, *, helped: bool) -> bool:
        """Whether D should drive its library.

        Args:
            helped: whether D does already.
        """
        if not self.path.needs_peer or not self.pool.num_flying:
            return False
        return helped or self.stuck_seconds() > _ALONE_SECONDS

    def stuck_seconds(self) -> float:
        """Return the seconds since a write last ended, or began when none was under way."""
        return time.monotonic() - self._moved_at

    @property
    def moved_at(self) -> float:
        return self._moved_at

    def next_pause(self) -> float | None:
        """Return the seconds until the next poll, or None if it is not needed."""
        if not self.pool.num_flying or self.path.poll_seconds is None:
            return None
        return self.path.poll_seconds * (1 + min(100.0, 20.0 * self.stuck_seconds()))

    def _begin_write(self, pair: BufferPair, num_bytes: int) -> None:
        if not self.pool.num_flying:
            self._moved_at = time.monotonic()
        self.pool.begin_write(pair)
        self.path.begin_write(pair.source, pair.target, num_bytes)
