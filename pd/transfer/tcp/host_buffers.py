"""Host buffers between sockets and a pool that sockets cannot reach.

Each lane of P and each connection on D has two staging buffers for life. While one is on the
socket, we fill the other from the pool or empty it into the pool.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pd.transfer.copier_choice import copier_for
from pd.transfer.tcp.frames import MAX_PAYLOAD
from pd.util.call_thread import CallThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.transfer.copier import Copier, CopyTicket
    from pd.transfer.kv_buffer import IntArray, KVBuffer
    from pd.transfer.ranges import Block

logger = logging.getLogger(__name__)

DEPTH = 2


class Tables:
    """A room's page table in the forms that different threads' copies need."""

    def __init__(self, pages: IntArray, num_tokens: int) -> None:
        self._pages, self._num_tokens = pages, num_tokens
        self._made: dict[Copier, Any] = {}

    def get_table(self, copier: Copier) -> Any:
        """Return the table for one copier. The first thread to ask makes it."""
        if copier not in self._made:
            self._made[copier] = copier.make_table(self._pages, self._num_tokens)
        return self._made[copier]


class Gathers:
    """P: packs blocks of a pool into host buffers, for one thread."""

    def __init__(self, pool: KVBuffer) -> None:
        self._copier = copier_for(pool)
        self._buffers = self._copier.make_buffers(DEPTH, MAX_PAYLOAD, on_device=False)
        self._next = 0

    def begin_gather(self, tables: Tables, block: Block) -> tuple[torch.Tensor, CopyTicket]:
        """Begin to pack a block.

        Returns:
            uint8 buffer, valid after the ticket's wait and until ``DEPTH`` calls later; the ticket.
        """
        copier, buffer = self._copier, self._buffers[self._next]
        self._next = (self._next + 1) % DEPTH
        ticket = copier.gather_block(tables.get_table(copier), block, copier.make_view(buffer))
        return buffer[: copier.shape.num_bytes(block)], ticket


class StagingBuffers:
    """D: the buffers of one connection.

    Args:
        call_back: called by any thread when a buffer is free again after :meth:`take_buffer` found
            none.
    """

    def __init__(self, buffers: torch.Tensor, call_back: Callable[[], None]) -> None:
        self._free: deque[torch.Tensor] = deque(buffers)
        self._lock = threading.Lock()
        self._call_back = call_back
        self._wanted = False

    def take_buffer(self) -> torch.Tensor | None:
        """Return a free buffer, or None."""
        with self._lock:
            if self._free:
                return self._free.popleft()
            self._wanted = True
            return None

    def give_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buffer)
            wanted, self._wanted = self._wanted, False
        if wanted:
            self._call_back()


class Scatters:
    """D: unpacks host buffers into a pool. One thread begins the copies, and this class's thread
    waits for each of them in order."""

    def __init__(self, pool: KVBuffer) -> None:
        self._copier, self._device = copier_for(pool), pool.memory.device
        self._thread = CallThread("pd-tcp-scatters")
        self._thread.start()

    def make_buffers(self, call_back: Callable[[], None]) -> StagingBuffers:
        return StagingBuffers(
            self._copier.make_buffers(DEPTH, MAX_PAYLOAD, on_device=False), call_back
        )

    def begin_scatter(
        self, tables: Tables, block: Block, buffer: torch.Tensor, over: Callable[[str], None]
    ) -> None:
        """Begin to unpack a block. Never raises.

        Args:
            over: called when the copy can write nothing more, with an empty text if it succeeded or
                with the reason of its failure.
        """
        copier = self._copier
        try:
            ticket = copier.scatter_block(tables.get_table(copier), block, copier.make_view(buffer))
        except Exception as error:
            # CUDA may raise anything here. It ends the room, not the thread.
            logger.exception("cannot write to the pool")
            ticket = _Failed(self._device, error)
        self._thread.post(partial(_wait_for_copy, ticket, over))

    def close(self) -> None:
        """Wait until every copy is over."""
        self._thread.close()


def _wait_for_copy(ticket: CopyTicket, over: Callable[[str], None]) -> None:
    try:
        ticket.wait()
        reason = ""
    except Exception as error:
        # After an error CUDA does nothing more for this process.
        logger.exception("cannot write to the pool")
        reason = str(error)
    over(reason)


class _Failed:
    """A copy that raised an error. Parts of it may be under way."""

    def __init__(self, device: torch.device, error: Exception) -> None:
        self._device, self._error = device, error

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        raise self._error
