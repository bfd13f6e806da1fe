"""What a prefill, a decode and a unified node have in common.

Two threads share a node's state under one lock. The scheduler thread (:mod:`pd.node.step_loop`)
plans a step, runs it without the lock, and accounts for it. The control thread
(:mod:`pd.node.control`) handles messages and time in between, so that reservations and aborts never
wait for a forward pass.

Every change of the state is part of an *event* (:meth:`Node.event`): a message, a tick of the
clock, a step that was planned or accounted for, an administrative action, a callback of a transfer.
Ending a request in its course only marks and queues it. When the event is over it settles: what
ended is closed, and what that made possible begins, until nothing changes.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pd.core.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidRequestError,
    NodeFailedError,
    PDError,
    UnavailableError,
)
from pd.core.leases import Leases
from pd.core.messages import (
    HEARTBEAT_INTERVAL,
    LEASE_SECONDS,
    ROOM_BYTES,
    Abort,
    AnyMessage,
    Generate,
    NodeHeartbeat,
    ProxyHeartbeat,
    heartbeat_owner,
)
from pd.core.request import Request, RequestState
from pd.core.sampling_params import SamplingDefaults
from pd.core.starvation import RUN_DELAY
from pd.node.control import ControlThread
from pd.node.info import server_info
from pd.node.outbox import Outbox
from pd.node.step_loop import Scheduler
from pd.node.validation import check_length, request_from
from pd.radix import RadixCache
from pd.scheduling.closing import ClosingQueue, check_queues
from pd.scheduling.memory import Memory
from pd.scheduling.metrics import NodeMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pd.core.config import NodeConfig
    from pd.core.messages import Output
    from pd.core.node_info import NodeInfo, Role
    from pd.core.request import Sequence
    from pd.engine.engine import Engine
    from pd.scheduling.step import Work
    from pd.transfer.base import TransferManager

logger = logging.getLogger(__name__)

# Proxies to remember.
_MAX_LOSSES = 1024
# How long the end of a request's transfer is looked for at once rather than ten times a second.
_DRAIN_SECONDS = 1.0


class Node(ABC):
    """One node: requests come in by message, leave when an event settles (:meth:`event`).

    Subclasses say what a step is (:meth:`plan`, :meth:`process`) and what else ends with a request
    (:meth:`ended`, :meth:`may_release`).
    """

    role: Role
    transfer: TransferManager | None = None
    bootstrap_url = ""
    sampling_defaults = SamplingDefaults()

    def __init__(self, config: NodeConfig, engine: Engine, instance_id: str) -> None:
        self.config = config
        self.engine = engine
        self.instance_id = instance_id
        radix = RadixCache(config.page_size, policy=config.eviction_policy)
        self.memory = Memory(engine.pool.num_pages, config.page_size, radix)
        self.metrics = NodeMetrics(self)
        # NOTE: taken by itself only to read; changes are made in an `event`.
        self.lock = threading.RLock()
        self.work_available = threading.Event()
        self.requests: dict[bytes, Request] = {}
        self.draining = False
        # Set when the node drains because the process is about to end.
        self._ending = False
        self.closing = ClosingQueue()
        self._events = 0  # that are under way: more than one where they are nested
        self._pump_wanted = False
        self._tombstones: dict[bytes, float] = {}
        self._proxies: Leases[bytes] = Leases()
        # How often requests of a proxy were given up that it may still wait for.
        self._losses: dict[bytes, int] = {}
        self._next_heartbeat = 0.0
        self.control = ControlThread(self, self.instance_id, config.host, config.cluster_key)
        self.outbox = Outbox(instance_id, self.control.post)
        self._scheduler = Scheduler(self, overlap=engine.overlaps(config.overlap_schedule))
        self._handlers: dict[type, Callable[[bytes, AnyMessage], None]] = {
            Generate: self._on_generate,
            Abort: self._on_abort,
            ProxyHeartbeat: self._on_proxy_heartbeat,
        }

    # ---- life

    @property
    def endpoint(self) -> str:
        """Where proxies and peers send messages."""
        host = self.config.public_host
        return f"tcp://{f'[{host}]' if ':' in host else host}:{self.control.port}"

    @property
    def ready(self) -> bool:
        """Accepts requests."""
        return self._scheduler.running and not self.draining

    @property
    def broken(self) -> bool:
        """Nothing will be computed any more."""
        return self._scheduler.broken

    def start(self) -> None:
        """Begin to serve."""
        self.engine.on_failure(self._scheduler.engine_failed)
        self._scheduler.start()
        self.control.start()

    def stop(self) -> None:
        """End at once; whoever still waits gets an error."""
        with self.event():
            for request in list(self.requests.values()):
                self.fail(request, NodeFailedError(f"{self.role} node {self.instance_id} stopped"))
            self.draining = self._ending = True
        self._scheduler.stop()
        self.control.stop()

    def drain(self, *, to_end: bool = False) -> None:
        """Refuse new requests and finish those that are here. ``to_end``: for good, because the
        process ends then."""
        with self.event():
            self.draining = True
            self._ending = self._ending or to_end

    def undrain(self) -> None:
        """Take new requests again. Raises UnavailableError when the process is about to end."""
        with self.event():
            if self._ending:
                raise UnavailableError(f"{self.role} node {self.instance_id} is about to end")
            self.draining = False

    @property
    def idle(self) -> bool:
        """Nothing is anywhere."""
        return not self.requests and not self.closing

    @property
    def finished(self) -> bool:
        """Nobody waits for this node. Pages may still wait for a peer that is out of reach."""
        live = any(not request.state.terminal for request in self.requests.values())
        return not live and not self.closing.any_since(time.monotonic() - _DRAIN_SECONDS)

    # ---- events

    @contextmanager
    def event(self) -> Iterator[None]:
        """Hold the lock while something happens to the node, and settle before giving it up. Any
        thread. Inside another event of the same thread it is a part of that one."""
        with self.lock:
            self._events += 1
            try:
                yield
            finally:
                try:
                    if self._events == 1:
                        self._settle()
                finally:
                    self._events -= 1

    def _settle(self) -> None:
        """Close what ended and begin what became possible, until nothing changes."""
        while True:
            while (taken := self.closing.take()) is not None:
                self._close(*taken)
            if not self._pump_wanted:
                return
            self._pump_wanted = False
            self.pump()  # which may end requests

    def want_pump(self) -> None:
        """Something changed that waiting requests may have waited for: pump when this event
        settles."""
        self._pump_wanted = True

    def pump(self) -> None:
        """Let waiting requests go on as far as memory and peers allow. Called when an event
        settles, if :meth:`want_pump` was called or pages were released."""

    # ---- a step

    @abstractmethod
    def plan(self) -> list[Work]:
        """What to compute next; empty when there is nothing. Holds the lock."""

    def may_plan_ahead(self, launched: list[Work]) -> bool:
        """Whether :meth:`plan` may be called while a step is launched and not accounted for.
        Holds the lock."""
        return False

    @abstractmethod
    def process(self, works: list[Work]) -> None:
        """Account for a completed step. Holds the lock."""

    def on_layers_done(self, works: list[Work]) -> Callable[[int, int], None] | None:
        """What the forward pass calls when the KV of some layers is in the pool."""
        return None

    @abstractmethod
    def queued(self) -> Iterator[Sequence]:
        """The sequences in this role's queues, one for each place in one."""

    @abstractmethod
    def queues(self) -> dict[str, int]:
        """Requests by queue, as ``/server_info`` shows them."""

    @property
    @abstractmethod
    def queued_tokens(self) -> int:
        """Load that the proxy balances by: prompt tokens that still wait."""

    # ---- requests

    def _on_generate(self, identity: bytes, message: Generate) -> None:
        self._proxies.renew(identity)
        if self.is_buried(message.room):
            return
        existing = self.requests.get(message.room)
        if existing is not None:
            logger.warning("dropped a duplicate of room %s", message.room.hex())
            if existing.proxy == identity:
                return
            error: PDError = InvalidRequestError(f"room {message.room.hex()} is in use")
            self.outbox.failed(identity, message.room, error)
            return
        try:
            if not self.ready:
                raise UnavailableError(f"{self.role} node {self.instance_id} takes no requests")
            request = request_from(message, identity, self.engine.model_config.vocab_size)
            self.check_request(request)
        except PDError as error:
            self.outbox.failed(identity, message.room, error)
            return
        self.requests[request.room] = request
        self.metrics.requests.inc()
        self.accept(request)
        self.work_available.set()

    def check_request(self, request: Request) -> None:
        """Refuse what could never be served here. Raises InvalidRequestError."""
        pool = self.memory.num_pages * self.memory.page_size
        needed = self.tokens_needed(request)
        check_length(request, needed, self.engine.context_length, pool, self.role)

    @abstractmethod
    def tokens_needed(self, request: Request) -> int:
        """Tokens whose KV this node must hold at once for the request."""

    @abstractmethod
    def accept(self, request: Request) -> None:
        """Queue a new request."""

    def _on_abort(self, identity: bytes, message: Abort) -> None:
        request = self.requests.get(message.room)
        if request is None:
            self.bury(message.room)
            return
        if request.state.terminal:
            return
        if request.proxy != identity:
            logger.warning("dropped an abort of room %s by a stranger", message.room.hex())
            return
        if message.index is not None:
            if not 0 <= message.index < request.params.n:
                logger.warning("dropped an abort of choice %d of %s", message.index, request.rid)
                return
            request.ended_choices.add(message.index)
            if self.end_choice(request, message.index):
                return
            if len(request.ended_choices) < request.params.n:
                return
        self.fail(request, AbortedError(message.reason), tell_proxy=False)

    def end_choice(self, request: Request, index: int) -> bool:
        """The proxy wants no more of one choice (its stop string was found). False if the choice
        has not begun here: then its request is aborted once no choice is left."""
        return False

    def bury(self, room: bytes) -> None:
        """Remember for a lease that a room has ended, maybe before its request came."""
        if len(room) == ROOM_BYTES:
            self._tombstones[room] = time.monotonic() + LEASE_SECONDS

    def is_buried(self, room: bytes) -> bool:
        """Whether the room has ended within the last lease."""
        return room in self._tombstones

    def abort(self, rid: str | None) -> int:
        """End the requests with this rid, or all (None); returns how many."""
        live = [r for r in self.requests.values() if not r.state.terminal]
        found = [r for r in live if rid is None or r.rid == rid]
        for request in found:
            self.fail(request, AbortedError("aborted by /abort_request"))
        return len(found)

    def fail(self, request: Request, error: PDError, *, tell_proxy: bool = True) -> None:
        """End a request without success. The first cause wins; abort outranks what comes later.
        Its pages are released when the event settles, or as soon after as nothing uses them."""
        if request.state.terminal:
            return
        if tell_proxy:
            self.outbox.failed(request.proxy, request.room, error)
        self.metrics.failed.labels(error.kind).inc()
        request.error = error
        aborted = isinstance(error, AbortedError)
        self._end(request, RequestState.ABORTED if aborted else RequestState.FAILED)

    def finish(self, request: Request) -> None:
        """End a request with success."""
        self._end(request, RequestState.DONE)

    def _end(self, request: Request, state: RequestState) -> None:
        before = request.state
        assert self._events, "requests end in events only: else nobody would close them"
        assert not before.terminal, f"room {request.room.hex()} ends twice"
        request.state = state
        self.bury(request.room)
        self.closing.add(request)
        self.ended(request, before)

    @abstractmethod
    def ended(self, request: Request, before: RequestState) -> None:
        """Take a terminal request out of its queue, tell the peer, stop its transfer. Ends and
        starts nothing else."""

    def may_release(self, request: Request) -> bool:
        """Whether no transfer touches the request's pages any more."""
        return True

    def _close(self, ended: float, request: Request) -> None:
        """The one way out: pages of ended requests are released when nothing can touch them."""
        if request.in_step or not self.may_release(request):
            self.closing.rest(ended, request)
            return
        del self.requests[request.room]
        self.release(request)
        self.want_pump()
        self.work_available.set()

    def release(self, request: Request) -> None:
        """Give the pages of an ended request back."""
        for sequence in request.sequences:
            self.memory.release(sequence)
            sequence.host_kv = None

    def live_sequences(self) -> Iterator[Sequence]:
        """Sequences that may hold pages."""
        for request in self.requests.values():
            yield from request.sequences

    # ---- outputs

    def emit(self, request: Request, output: Output) -> None:
        """Queue new tokens for the request's proxy; sent once per step."""
        self.metrics.tokens.inc(len(output.token_ids))
        self.outbox.add(request.proxy, output)

    # ---- control thread

    def on_message(self, identity: bytes, message: AnyMessage) -> None:
        """Dispatch one message; what is for another instance is dropped."""
        if message.to != self.instance_id and not isinstance(message, ProxyHeartbeat):
            logger.debug("dropped %s for instance %s", type(message).__name__, message.to)
            return
        handler = self._handlers.get(type(message))
        if handler is None:
            logger.warning("dropped %s: not for a %s node", type(message).__name__, self.role)
            return
        with self.event():
            handler(identity, message)

    def _on_proxy_heartbeat(self, identity: bytes, message: ProxyHeartbeat) -> None:
        proxy = heartbeat_owner(identity)
        self._proxies.renew(proxy)
        if self.transfer is not None:
            patience = self.transfer.patience
            patience.heard(proxy.decode(errors="replace"), message.run_delay)
            for node, run_delay in message.run_delays.items():
                patience.heard(node, run_delay)
        if proxy != identity:
            return  # of the thread that only keeps the lease
        self.meet(message.meet)
        reply = NodeHeartbeat(
            to=message.sender,
            sender=self.instance_id,
            ready=self.ready,
            queued_tokens=self.queued_tokens,
            running=len(self.requests),
            losses=self._losses.get(identity, 0),
            run_delay=RUN_DELAY.total,
            linked=self.linked_peers(),
        )
        self.control.post(identity, reply)

    def meet(self, prefill: Mapping[str, str]) -> None:
        """A proxy names prefill nodes, instance id and registry, whose requests may come here."""
        return

    def linked_peers(self) -> list[str] | None:
        """Prefill nodes to which links are made; None if this node takes no KV from others."""
        return None

    def on_gap(self, identity: bytes) -> None:
        """Messages of a process were lost though it lives, so nobody knows what it waits for."""
        with self.event():
            if not self.peer_gap(identity.decode(errors="replace")):
                logger.warning("messages of proxy %.64r were lost", identity)
                self._give_up_proxy(identity, "messages of its proxy were lost")
                self._count_loss(identity)

    def peer_gap(self, instance: str) -> bool:
        """Messages of a process were lost: give it up if it is a peer; False if it is none."""
        return False

    def on_anew(self, identity: bytes) -> None:
        """A proxy gave up what it had here."""
        with self.event():
            self._give_up_proxy(identity, "its proxy gave it up")

    def _give_up_proxy(self, proxy: bytes, why: str) -> bool:
        """End the requests of a proxy that does not know them any more; whether there were any."""
        found = [r for r in self.requests.values() if r.proxy == proxy and not r.state.terminal]
        for request in found:
            self.fail(request, AbortedError(why), tell_proxy=False)
        return bool(found)

    def _count_loss(self, proxy: bytes) -> None:
        while len(self._losses) >= _MAX_LOSSES:
            del self._losses[next(iter(self._losses))]
        self._losses[proxy] = self._losses.get(proxy, 0) + 1

    def on_tick(self) -> None:
        """Leases, deadlines, heartbeats."""
        now = time.monotonic()
        self._scheduler.check_progress(now)
        with self.event():
            self._tombstones = {r: t for r, t in self._tombstones.items() if t > now}
            for proxy in self._proxies.expired(now):
                self._proxies.drop(proxy)
                if self._give_up_proxy(proxy, "its proxy is gone"):
                    self._count_loss(proxy)  # should it only have stood still
            for request in list(self.requests.values()):
                if request.deadline is not None and now > request.deadline:
                    self.fail(request, DeadlineExceededError("the request's deadline passed"))
            if now >= self._next_heartbeat:
                self._next_heartbeat = now + HEARTBEAT_INTERVAL
                self.on_heartbeat()
            self.sweep(now)
            self.closing.look_at_transfers()

    def on_heartbeat(self) -> None:
        """Twice a second: tell peers that this node lives."""

    def sweep(self, now: float) -> None:
        """End what waited longer than a lease for a peer."""

    def on_poll(self) -> bool:
        """Move transfers along."""
        # A peer that is out of reach may hold pages for minutes: the clock's ticks will do.
        recently = time.monotonic() - _DRAIN_SECONDS
        with self.event():
            busy = self.poll_transfers()
            self.closing.look_at_transfers(recently)
            self.outbox.flush()
        if busy or not len(self.closing):
            return busy
        with self.lock:
            return self.closing.any_in_transfer(recently)

    def poll_transfers(self) -> bool:
        """Look at transfers; True while one is about to complete."""
        return False

    # ---- administration

    def flush_cache(self) -> int:
        """Drop what is cached and unused; returns the pages freed."""
        with self.event():
            return self.memory.flush()

    def check(self) -> None:
        """Raise AssertionError unless every page has the owner that the books say, and every
        request the one place that its state says."""
        with self.lock:
            self.memory.check(self.live_sequences(), self.quarantined_pages())
            check_queues(self.requests.values(), self.closing, self.queued())

    def quarantined_pages(self) -> list[object]:
        """Arrays of pages that wait for a peer's drain."""
        return []

    def transfer_peers(self) -> list[NodeInfo]:
        """The nodes that this one exchanges KV with at present."""
        return []

    def server_info(self) -> dict[str, object]:
        """What ``GET /server_info`` answers."""
        return server_info(self)
