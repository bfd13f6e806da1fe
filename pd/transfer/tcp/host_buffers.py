"""Host buffers between sockets and a pool that sockets cannot reach.

A lane of P and a connection on D have two staging buffers each, made once. While one is on the
socket, the other is filled from the pool or emptied into it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from pd.transfer.copier_choice import copier_for
from pd.transfer.tcp.frames import MAX_PAYLOAD

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.transfer.base import IntArray, KVBuffer
    from pd.transfer.copier import Copier, CopyTicket
    from pd.transfer.ranges import Block

logger = logging.getLogger(__name__)

DEPTH = 2


class Tables:
    """A room's page table in the forms that the copies of different threads want."""

    def __init__(self, pages: IntArray, num_tokens: int) -> None:
        self._pages, self._num_tokens = pages, num_tokens
        self._made: dict[Copier, Any] = {}

    def of(self, copier: Copier) -> Any:
        """The table for one copier, made by the thread that first asks for it."""
        if copier not in self._made:
            self._made[copier] = copier.table(self._pages, self._num_tokens)
        return self._made[copier]


class Gathers:
    """P: packs blocks of a pool into host buffers; for one thread."""

    def __init__(self, pool: KVBuffer) -> None:
        self._copier = copier_for(pool)
        self._buffers = self._copier.make_buffers(DEPTH, MAX_PAYLOAD, on_device=False)
        self._next = 0

    def begin(self, tables: Tables, block: Block) -> tuple[torch.Tensor, CopyTicket]:
        """Pack a block.

        Returns:
            uint8, valid from the end of the ticket's wait until ``DEPTH`` calls later.
        """
        copier, buffer = self._copier, self._buffers[self._next]
        self._next = (self._next + 1) % DEPTH
        ticket = copier.gather(tables.of(copier), block, copier.view(buffer))
        return buffer[: copier.shape.num_bytes(block)], ticket


class StagingBuffers:
    """D: the buffers of one connection.

    Args:
        call_back: called when one is free again after :meth:`take` found none; by any thread.
    """

    def __init__(self, buffers: torch.Tensor, call_back: Callable[[], None]) -> None:
        self._free: deque[torch.Tensor] = deque(buffers)
        self._lock = threading.Lock()
        self._call_back = call_back
        self._wanted = False

    def take(self) -> torch.Tensor | None:
        """A free one, if there is."""
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
    """D: unpacks host buffers into a pool. One thread begins the copies, and a thread of this class
    waits for their ends, in order."""

    def __init__(self, pool: KVBuffer) -> None:
        self._copier, self._device = copier_for(pool), pool.memory.device
        self._begun: queue.SimpleQueue[tuple[CopyTicket, Callable[[str], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="pd-tcp-scatters", daemon=True)
        self._thread.start()

    def buffers(self, call_back: Callable[[], None]) -> StagingBuffers:
        return StagingBuffers(
            self._copier.make_buffers(DEPTH, MAX_PAYLOAD, on_device=False), call_back
        )

    def begin(
        self, tables: Tables, block: Block, buffer: torch.Tensor, over: Callable[[str], None]
    ) -> None:
        """Unpack a block; ``over`` is called when nothing of it can be written any more: with an
        empty text when all of it was, else with what went wrong. Never raises."""
        copier = self._copier
        try:
            ticket = copier.scatter(tables.of(copier), block, copier.view(buffer))
        except Exception as error:
            # Whatever CUDA raises; it ends the room, not the thread.
            logger.exception("cannot write to the pool")
            ticket = _Failed(self._device, error)
        self._begun.put((ticket, over))

    def close(self) -> None:
        """Returns when all that was begun is over."""
        self._begun.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            ticket, over = begun
            try:
                ticket.wait()
                reason = ""
            except Exception as error:
                # After an error CUDA does nothing more for this process.
                logger.exception("cannot write to the pool")
                reason = str(error)
            over(reason)


class _Failed:
    """A copy that raised an error; some of it may have been begun."""

    def __init__(self, device: torch.device, error: Exception) -> None:
        self._device, self._error = device, error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        raise self._error
