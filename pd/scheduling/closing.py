"""Ended requests whose pages may still be in use."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pd.scheduling.request import Request, Sequence


class ClosingQueue:
    """Holds ended requests until their pages are free. The caller holds the node's lock.

    A request that just ended is *due*, so the event checks it when it settles. If its pages are in
    use, we defer it until a step or a transfer may have released them. An event therefore costs
    time only for the requests it changed.
    """

    def __init__(self) -> None:
        self._due: deque[tuple[float, Request]] = deque()
        self._in_step: deque[tuple[float, Request]] = deque()
        self._in_transfer: deque[tuple[float, Request]] = deque()

    def __len__(self) -> int:
        return len(self._due) + len(self._in_step) + len(self._in_transfer)

    def __iter__(self) -> Iterator[Request]:
        for queue in (self._due, self._in_step, self._in_transfer):
            yield from (request for _, request in queue)

    def add_request(self, request: Request) -> None:
        """Add a request that just ended. It is due."""
        self._due.append((time.monotonic(), request))

    def take_due(self) -> tuple[float, Request] | None:
        """Take the next due request and the time at which it ended; None if no request is due."""
        return self._due.popleft() if self._due else None

    def defer_request(self, ended: float, request: Request) -> None:
        """Put back a request whose pages are still in use."""
        queue = self._in_step if request.is_in_step else self._in_transfer
        queue.append((ended, request))

    def recheck_after_step(self) -> None:
        """Make all requests due that wait for the end of a step."""
        self._due.extend(self._in_step)
        self._in_step.clear()

    def recheck_transfers(self, since: float = -math.inf) -> None:
        """Make all requests due that ended after ``since`` and wait for a transfer.

        We only check the end of the queue, so we may miss a request if an older one follows it. The
        next tick checks all of them.
        """
        rested = self._in_transfer
        while rested and rested[-1][0] > since:
            self._due.appendleft(rested.pop())

    def has_transferring(self, since: float) -> bool:
        """Return whether a request that ended after ``since`` waits for a transfer."""
        return any(ended > since for ended, _ in self._in_transfer)

    def has_ended_since(self, since: float) -> bool:
        """Return whether a request ended after ``since``."""
        queues = (self._due, self._in_step, self._in_transfer)
        return any(ended > since for queue in queues for ended, _ in queue)


def check_queues(
    requests: Iterable[Request], closing: ClosingQueue, queued: Iterable[Sequence]
) -> None:
    """Check that every request is in exactly the queues demanded by its state.

    An ended request is only in the closing queue. Each other sequence is in one queue of the node's
    role.

    Args:
        requests: all registered requests.
        queued: one sequence for each place in the role's queues.

    Raises:
        AssertionError: a queue holds too much or too little.
    """
    left = Counter(queued)
    ended = Counter(closing)
    for request in requests:
        room, places = request.room.hex(), 0
        assert ended.pop(request, 0) == int(request.state.is_terminal), f"{room}: closing queue"
        for sequence in request.sequences:
            count = left.pop(sequence, 0)
            places += count
            # A finished choice keeps its place while a launched step computes it once more.
            needed = not (request.state.is_terminal or sequence.is_finished)
            assert int(needed) <= count <= 1, f"{room}: {count} places in {request.state.name}"
        assert (places == 0) == request.state.is_terminal, f"{room}: {places} places when ended"
    assert not left and not ended, "queues hold unregistered requests"
