"""Requests that ended and wait until nothing can touch their pages any more."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pd.core.request import Request, Sequence


class ClosingQueue:
    """Ended requests that are still registered. The caller holds the node's lock.

    A request that just ended is *due*: the event that settles looks at it. While its pages are in
    use it rests, and it is due again when a step or a transfer may have let go of them. So an event
    costs no more than what it changed.
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

    def add(self, request: Request) -> None:
        """A request ended."""
        self._due.append((time.monotonic(), request))

    def take(self) -> tuple[float, Request] | None:
        """The next request that is due and when it ended; None if there is none."""
        return self._due.popleft() if self._due else None

    def rest(self, ended: float, request: Request) -> None:
        """Keep a request that was taken, and whose pages are still in use."""
        queue = self._in_step if request.in_step else self._in_transfer
        queue.append((ended, request))

    def look_after_step(self) -> None:
        """Make requests due that waited for the end of a step."""
        self._due.extend(self._in_step)
        self._in_step.clear()

    def look_at_transfers(self, since: float = -math.inf) -> None:
        """Make resting requests due whose transfers may have released their pages: the last ones in
        the queue that ended after ``since``. A request is left out if one
        that ended earlier rests behind it; the next tick looks at all of them."""
        rested = self._in_transfer
        while rested and rested[-1][0] > since:
            self._due.appendleft(rested.pop())

    def any_in_transfer(self, since: float) -> bool:
        """Whether a transfer uses pages of a request that ended after ``since``."""
        return any(ended > since for ended, _ in self._in_transfer)

    def any_since(self, since: float) -> bool:
        """Whether there is a request that ended after ``since``."""
        queues = (self._due, self._in_step, self._in_transfer)
        return any(ended > since for queue in queues for ended, _ in queue)


def check_queues(
    requests: Iterable[Request], closing: ClosingQueue, queued: Iterable[Sequence]
) -> None:
    """Raise AssertionError unless each ended request is in the closing queue and nowhere else, and
    each sequence that goes on is in exactly one queue of its role.

    Args:
        requests: all that are registered.
        queued: the sequences in the role's queues, one for each place in one.
    """
    left = Counter(queued)
    ended = Counter(closing)
    for request in requests:
        room, places = request.room.hex(), 0
        assert ended.pop(request, 0) == int(request.state.terminal), f"{room}: closing queue"
        for sequence in request.sequences:
            count = left.pop(sequence, 0)
            places += count
            # NOTE: a finished choice that is computed once more for nothing keeps its place.
            needed = not (request.state.terminal or sequence.finished)
            assert int(needed) <= count <= 1, f"{room}: {count} places in {request.state.name}"
        assert (places == 0) == request.state.terminal, f"{room}: {places} places when ended"
    assert not left and not ended, "queues hold what is not registered"
