"""Launched stores that may be incomplete."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd.transfer.nvlink.device import StoreTicket

# Limit of incomplete stores. It is large enough for the GPU always to have one at hand. It is small
# because we cannot recall them when their room is aborted or the peer dies.
LAUNCHED_AHEAD = 4
# Smaller stores tell us little about the link.
_TIMED_BYTES = 16 << 20


class LaunchedStores:
    """Tickets of one link's stores, in the order of their launch and completion. Only the launching
    thread may use it.

    Attributes:
        bytes_per_second: the best rate of a store so far, or 0 before the first large one. Any
            thread may read it.
    """

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._tickets: deque[tuple[StoreTicket, int]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether enough stores are launched."""
        return len(self._tickets) >= LAUNCHED_AHEAD

    @property
    def num_incomplete(self) -> int:
        """Number of incomplete stores."""
        return sum(not ticket.is_done() for ticket, _ in self._tickets)

    def add_store(self, ticket: StoreTicket, num_bytes: int) -> None:
        self._tickets.append((ticket, num_bytes))

    def collect_finished(self) -> None:
        """Drop complete stores, and learn from them how fast the link is."""
        while self._tickets and self._tickets[0][0].is_done():
            ticket, num_bytes = self._tickets.popleft()
            if num_bytes >= _TIMED_BYTES and (seconds := ticket.measure_seconds()) > 0:
                self.bytes_per_second = max(self.bytes_per_second, num_bytes / seconds)

    def wait_for_oldest(self) -> None:
        """If enough is launched, wait for the oldest store. Raises the GPU's error."""
        if self.is_full:
            self._tickets[0][0].wait()

    def wait_for_all(self) -> None:
        """Wait until all stores are complete. Raises the GPU's error."""
        if self._tickets:
            self._tickets[-1][0].wait()
