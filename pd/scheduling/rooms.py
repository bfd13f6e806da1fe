"""The live requests of a node, by room, and the one way out for each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from pd.core.errors import AbortedError
from pd.core.messages import LEASE_SECONDS, ROOM_BYTES
from pd.core.request import RequestState
from pd.scheduling.closing import ClosingQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.errors import PDError
    from pd.core.messages import Output
    from pd.core.request import Request
    from pd.scheduling.events import Events
    from pd.scheduling.metrics import RequestMetrics


class ProxyOutputs(Protocol):
    """Delivers answers to proxies: :class:`pd.node.outbox.Outbox`."""

    def add(self, proxy: bytes, output: Output) -> None:
        """Keep new tokens until :meth:`flush`."""

    def flush(self) -> None:
        """Send the tokens that were kept, one message per proxy."""

    def failed(self, proxy: bytes, room: bytes, error: PDError) -> None:
        """Tell a proxy that a room ended without success."""


class Rooms:
    """Requests from their arrival until nothing can touch their pages. The caller holds the node's
    lock.

    A request ends by :meth:`fail` or :meth:`finish`, in an event. Both only mark it, call the
    functions given to :meth:`when_ended`, and put it into the closing queue; when the event
    settles, the node closes it. The first cause wins, so that an abort outranks every later
    success.

    Attributes:
        closing: requests that ended and are not closed yet.
        outputs: delivers tokens and errors to proxies.
    """

    def __init__(self, events: Events, metrics: RequestMetrics, outputs: ProxyOutputs) -> None:
        self._events, self._metrics, self.outputs = events, metrics, outputs
        self._requests: dict[bytes, Request] = {}
        self._tombstones: dict[bytes, float] = {}
        self._ended: list[Callable[[Request, RequestState], None]] = []
        self.closing = ClosingQueue()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """All requests, also those that ended and are not closed; rooms may change meanwhile."""
        return iter(list(self._requests.values()))

    def __contains__(self, room: object) -> bool:
        return room in self._requests

    def get(self, room: bytes) -> Request | None:
        """The request of a room, which may have ended, or None."""
        return self._requests.get(room)

    def live(self) -> Iterator[Request]:
        """Requests that have not ended."""
        return (request for request in self if not request.state.terminal)

    def when_ended(self, inform: Callable[[Request, RequestState], None]) -> None:
        """Have ``inform`` called with each request that ends, and with its state before. It may
        take the request out of a queue, tell a peer and stop a transfer, but end no other."""
        self._ended.append(inform)

    # ---- in

    def add(self, request: Request) -> None:
        """Register a new request."""
        self._requests[request.room] = request
        self._metrics.requests.inc()

    # ---- out

    def emit(self, request: Request, output: Output) -> None:
        """Queue new tokens for the request's proxy; they are sent once per step."""
        self._metrics.tokens.inc(len(output.token_ids))
        self.outputs.add(request.proxy, output)

    def fail(self, request: Request, error: PDError, *, tell_proxy: bool = True) -> None:
        """End a request without success, unless it has ended already. Its pages are released when
        the event settles, or as soon after as nothing uses them."""
        if request.state.terminal:
            return
        if tell_proxy:
            self.outputs.failed(request.proxy, request.room, error)
        self._metrics.failed.labels(error.kind).inc()
        request.error = error
        aborted = isinstance(error, AbortedError)
        self._end(request, RequestState.ABORTED if aborted else RequestState.FAILED)

    def finish(self, request: Request) -> None:
        """End a request with success."""
        self._end(request, RequestState.DONE)

    def _end(self, request: Request, state: RequestState) -> None:
        before = request.state
        assert self._events.under_way, "requests end in events only, since those close them"
        assert not before.terminal, f"room {request.room.hex()} ends twice"
        request.state = state
        self.add_tombstone(request.room)
        self.closing.add(request)
        for inform in self._ended:
            inform(request, before)

    def remove(self, request: Request) -> None:
        """Close the room of an ended request: nothing can touch its pages any more."""
        del self._requests[request.room]

    # ---- tombstones

    def add_tombstone(self, room: bytes) -> None:
        """Remember for a lease that a room has ended, maybe before its request came."""
        if len(room) == ROOM_BYTES:
            self._tombstones[room] = time.monotonic() + LEASE_SECONDS

    def has_tombstone(self, room: bytes) -> bool:
        """Whether the room has ended within the last lease."""
        return room in self._tombstones

    def sweep(self, now: float) -> None:
        """Remove tombstones that are older than a lease."""
        self._tombstones = {r: t for r, t in self._tombstones.items() if t > now}
