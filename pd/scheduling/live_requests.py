"""The live requests of a node, and the one way out for each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from pd.core.errors import AbortedError
from pd.core.messages import LEASE_SECONDS, ROOM_BYTES
from pd.scheduling.closing import ClosingQueue
from pd.scheduling.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.errors import PDError
    from pd.core.messages import Output
    from pd.scheduling.events import Events
    from pd.scheduling.metrics import RequestMetrics
    from pd.scheduling.request import Request


class ProxyOutputs(Protocol):
    """Delivers answers to proxies: :class:`pd.node.step_outputs.StepOutputBuffer`."""

    def add_output(self, proxy: bytes, output: Output) -> None:
        """Buffer new tokens until :meth:`send_outputs`."""

    def send_outputs(self) -> None:
        """Send the buffered tokens in one message per proxy."""

    def report_failure(self, proxy: bytes, room: bytes, error: PDError) -> None:
        """Tell a proxy that a request failed."""


class LiveRequests:
    """Requests by their room, from arrival until nothing can access their pages.

    The caller holds the node's lock. Requests end inside events, by :meth:`fail_request` or
    :meth:`finish_request`. Both mark the request, call the listeners, and put it into the closing
    queue. The node closes it when the event settles. The first cause wins, so an abort outranks any
    later success.

    Attributes:
        closing: ended requests waiting to be closed.
        outputs: delivers tokens and errors to proxies.
    """

    def __init__(self, events: Events, metrics: RequestMetrics, outputs: ProxyOutputs) -> None:
        self._events, self._metrics, self.outputs = events, metrics, outputs
        self._requests: dict[bytes, Request] = {}
        self._tombstones: dict[bytes, float] = {}
        self._end_listeners: list[Callable[[Request, RequestState], None]] = []
        self.closing = ClosingQueue()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over a copy of all requests, including ended ones in the closing queue."""
        return iter(list(self._requests.values()))

    def __contains__(self, room: object) -> bool:
        return room in self._requests

    def find_request(self, room: bytes) -> Request | None:
        """Return the request of a room, even if it has ended, or None."""
        return self._requests.get(room)

    def iter_live(self) -> Iterator[Request]:
        """Iterate over all requests except ended ones."""
        return (request for request in self if not request.state.is_terminal)

    def add_end_listener(self, inform: Callable[[Request, RequestState], None]) -> None:
        """Call ``inform`` with each ending request, and with its state before.

        ``inform`` may take the request out of a queue, tell a peer and stop a transfer. It must not
        end another request.
        """
        self._end_listeners.append(inform)

    # ---- in

    def add_request(self, request: Request) -> None:
        """Register a new request."""
        self._requests[request.room] = request
        self._metrics.requests.inc()

    # ---- out

    def emit_output(self, request: Request, output: Output) -> None:
        """Buffer new tokens for the request's proxy. We send them once per step."""
        self._metrics.tokens.inc(len(output.token_ids))
        self.outputs.add_output(request.proxy, output)

    def fail_request(self, request: Request, error: PDError, *, tell_proxy: bool = True) -> None:
        """Fail a request, unless it has ended already.

        The node releases the pages when the event settles, or later if something still uses them.
        """
        if request.state.is_terminal:
            return
        if tell_proxy:
            self.outputs.report_failure(request.proxy, request.room, error)
        self._metrics.failed.labels(error.kind).inc()
        request.error = error
        aborted = isinstance(error, AbortedError)
        self._end_request(request, RequestState.ABORTED if aborted else RequestState.FAILED)

    def finish_request(self, request: Request) -> None:
        """End a request successfully."""
        self._end_request(request, RequestState.DONE)

    def _end_request(self, request: Request, state: RequestState) -> None:
        before = request.state
        assert self._events.is_under_way, "requests end in events only, because those close them"
        assert not before.is_terminal, f"room {request.room.hex()} ends twice"
        request.state = state
        self.add_tombstone(request.room)
        self.closing.add_request(request)
        for inform in self._end_listeners:
            inform(request, before)

    def remove_request(self, request: Request) -> None:
        """Forget an ended request, because nothing can access its pages any more."""
        del self._requests[request.room]

    # ---- tombstones

    def add_tombstone(self, room: bytes) -> None:
        """Remember the end of a room for one lease. Its request may arrive later."""
        if len(room) == ROOM_BYTES:
            self._tombstones[room] = time.monotonic() + LEASE_SECONDS

    def has_tombstone(self, room: bytes) -> bool:
        """Whether the room has ended within the last lease."""
        return room in self._tombstones

    def sweep_tombstones(self, now: float) -> None:
        """Remove tombstones older than a lease."""
        self._tombstones = {r: t for r, t in self._tombstones.items() if t > now}
