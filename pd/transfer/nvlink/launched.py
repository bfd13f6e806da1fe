"""Stores that were launched and may not be complete."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd.transfer.nvlink.device import StoreTicket

# Stores launched and not complete at most. Enough that the GPU always has one at hand; few, because
# they cannot be called back when their room is aborted or the peer dies.
LAUNCHED_AHEAD = 4
# Smaller stores say little about the link.
_TIMED_BYTES = 16 << 20


class LaunchedStores:
    """Tickets of one link's stores, in the order of their launches, in which they complete.
    Accessed only by the thread that launches.

    Attributes:
        bytes_per_second: the best that a store was seen to do; 0 before the first of some size. Any
            thread may read it.
    """

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._tickets: deque[tuple[StoreTicket, int]] = deque()

    @property
    def full(self) -> bool:
        """Whether enough is launched."""
        return len(self._tickets) >= LAUNCHED_AHEAD

    @property
    def incomplete(self) -> int:
        """Stores that are not complete."""
        return sum(not ticket.done() for ticket, _ in self._tickets)

    def add(self, ticket: StoreTicket, num_bytes: int) -> None:
        self._tickets.append((ticket, num_bytes))

    def collect(self) -> None:
        """Drop the stores that are complete, and learn from them how fast the link is."""
        while self._tickets and self._tickets[0][0].done():
            ticket, num_bytes = self._tickets.popleft()
            if num_bytes >= _TIMED_BYTES and (seconds := ticket.seconds()) > 0:
                self.bytes_per_second = max(self.bytes_per_second, num_bytes / seconds)

    def wait_for_room(self) -> None:
        """Wait until the oldest store is complete, if enough is launched. Raises the GPU's
        error."""
        if self.full:
            self._tickets[0][0].wait()

    def wait(self) -> None:
        """Wait until all are complete. Raises the GPU's error."""
        if self._tickets:
            self._tickets[-1][0].wait()
