"""What a prefill, a decode and a unified node have in common.

Two threads share a node's state under one lock. The scheduler thread plans a step, runs it without
the lock, and accounts for it. The control thread (see :mod:`pd.node.control`) handles messages and
time in between, so that reservations and aborts never wait for a forward pass.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import TYPE_CHECKING

from pd.core.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidRequestError,
    NodeFailedError,
    PDError,
)
from pd.core.messages import (
    HEARTBEAT_INTERVAL,
    LEASE_SECONDS,
    ROOM_BYTES,
    Abort,
    AnyMessage,
    ErrorInfo,
    Failed,
    Generate,
    NodeHeartbeat,
    Output,
    ProxyHeartbeat,
    StepOutputs,
)
from pd.core.request import Request, RequestState
from pd.node.control import ControlThread
from pd.node.memory import Memory
from pd.node.metrics import NodeMetrics
from pd.node.step import execute
from pd.radix import RadixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.config import NodeConfig
    from pd.core.node_info import Role
    from pd.core.request import Sequence
    from pd.engine.engine import Engine
    from pd.node.step import Work

logger = logging.getLogger(__name__)

_IDLE_WAIT = 0.05


class Node(ABC):
    """One node: requests come in by message, leave through :meth:`_close`.

    Subclasses say what a step is (:meth:`plan`, :meth:`process`) and what else ends with a request
    (:meth:`ended`, :meth:`may_release`).
    """

    role: Role

    def __init__(self, config: NodeConfig, engine: Engine, instance_id: str) -> None:
        self.config = config
        self.engine = engine
        self.instance_id = instance_id
        radix = RadixCache(config.page_size, policy=config.eviction_policy)
        self.memory = Memory(engine.pool.num_pages, config.page_size, radix)
        self.metrics = NodeMetrics(self)
        self.lock = threading.RLock()
        self.work_available = threading.Condition(self.lock)
        self.requests: dict[bytes, Request] = {}
        self.draining = False
        self._closing: list[Request] = []
        self._tombstones: dict[bytes, float] = {}
        self._proxies: dict[bytes, float] = {}
        self._outputs: defaultdict[bytes, list[Output]] = defaultdict(list)
        self._next_heartbeat = 0.0
        self._stopping = False
        self.control = ControlThread(self, config.host, config.cluster_key)
        self._scheduler = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._handlers: dict[type, Callable[[bytes, AnyMessage], None]] = {
            Generate: self._on_generate,
            Abort: self._on_abort,
            ProxyHeartbeat: self._on_proxy_heartbeat,
        }

    # ---- life

    @property
    def endpoint(self) -> str:
        """Where proxies and peers send messages."""
        return f"tcp://{self.config.public_host}:{self.control.port}"

    @property
    def ready(self) -> bool:
        """Accepts requests."""
        return self._scheduler.is_alive() and not self.draining and not self._stopping

    def start(self) -> None:
        """Begin to serve."""
        self.control.start()
        self._scheduler.start()

    def stop(self) -> None:
        """End at once; whoever still waits gets an error."""
        with self.lock:
            for request in list(self.requests.values()):
                self.fail(request, NodeFailedError(f"{self.role} node {self.instance_id} stopped"))
            self._stopping = True
            self.work_available.notify_all()
        if self._scheduler.is_alive():
            self._scheduler.join(timeout=30)
        self.control.stop()

    def drain(self) -> None:
        """Refuse new requests and finish those that are here."""
        self.draining = True

    @property
    def idle(self) -> bool:
        """Nothing is anywhere."""
        return not self.requests and not self._closing

    # ---- the main loop

    def _run(self) -> None:
        while not self._stopping:
            with self.lock:
                works = self.plan()
                if not works:
                    self.work_available.wait(_IDLE_WAIT)
                    continue
            try:
                execute(self.engine.runner, self.engine.sampler, works, self.on_layers_done(works))
            except Exception as error:
                logger.exception("a step failed")
                self._step_failed(works, error)
                continue
            with self.lock:
                self.process(works)
                self._close()
                self._flush_outputs()

    def _step_failed(self, works: list[Work], error: Exception) -> None:
        """Requests of a step that could not be computed fail; the node goes on."""
        with self.lock:
            for work in works:
                work.sequence.in_step = False
                self.fail(work.sequence.request, NodeFailedError(f"the step failed: {error}"))
            self._close()

    @abstractmethod
    def plan(self) -> list[Work]:
        """What to compute next; empty when there is nothing. Holds the lock."""

    @abstractmethod
    def process(self, works: list[Work]) -> None:
        """Account for a completed step. Holds the lock."""

    def on_layers_done(self, works: list[Work]) -> Callable[[int, int], None] | None:
        """What the forward pass calls when the KV of some layers is in the pool."""
        return None

    @abstractmethod
    def queues(self) -> dict[str, int]:
        """Requests by queue, as ``/server_info`` shows them."""

    @property
    @abstractmethod
    def queued_tokens(self) -> int:
        """Load that the proxy balances by: prompt tokens that still wait."""

    # ---- requests

    def _on_generate(self, identity: bytes, message: Generate) -> None:
        self._proxies[identity] = time.monotonic()
        if self.is_buried(message.room):
            return
        existing = self.requests.get(message.room)
        if existing is not None:
            logger.warning("dropped a duplicate of room %s", message.room.hex())
            if existing.proxy == identity:
                return
            error: PDError = InvalidRequestError(f"room {message.room.hex()} is in use")
            self._post_failed(identity, message.room, error)
            return
        try:
            request = self._validated(message, identity)
        except PDError as error:
            self._post_failed(identity, message.room, error)
            return
        self.requests[request.room] = request
        self.metrics.requests.inc()
        self.accept(request)
        self.work_available.notify_all()

    def _validated(self, message: Generate, identity: bytes) -> Request:
        """The proxy checks the same; a node trusts nobody."""
        if len(message.room) != ROOM_BYTES:
            raise InvalidRequestError(f"a room has {ROOM_BYTES} bytes, not {len(message.room)}")
        if self.draining:
            raise NodeFailedError(f"{self.role} node {self.instance_id} is draining")
        if len(message.token_ids) == 0 or len(message.token_ids) % 4:
            raise InvalidRequestError(
                f"token_ids must be a positive multiple of 4 bytes, not {len(message.token_ids)}"
            )
        vocab_size = self.engine.model_config.vocab_size
        message.params.validate(vocab_size)
        request = Request.from_message(message, identity)
        low, high = int(request.prompt.min()), int(request.prompt.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(
                f"token id {bad} is outside the vocabulary of {vocab_size}", param="prompt"
            )
        self._check_fits(request)
        return request

    def _check_fits(self, request: Request) -> None:
        length, context = len(request.prompt), self.engine.context_length
        if length >= context:
            raise InvalidRequestError(
                f"the prompt has {length} tokens; the context of {context} has no room for output",
                param="prompt",
            )
        total = self.tokens_needed(request)
        pool = self.memory.num_pages * self.memory.page_size
        if total > pool:
            raise InvalidRequestError(
                f"the request needs KV for {total} tokens; the {self.role} node holds {pool}",
                param="prompt" if length > pool else "max_tokens",
            )

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
        if request.proxy != identity:
            logger.warning("dropped an abort of room %s by a stranger", message.room.hex())
            return
        if message.index is not None:
            request.ended_choices.add(message.index)
            if len(request.ended_choices) < request.params.n:
                self.end_choice(request, message.index)
                return
        self.fail(request, AbortedError(message.reason), tell_proxy=False)

    def end_choice(self, request: Request, index: int) -> None:
        """The proxy wants no more of one choice of several."""

    def bury(self, room: bytes) -> None:
        """Remember for a lease that a room has ended, maybe before its request came."""
        if len(room) == ROOM_BYTES:
            self._tombstones[room] = time.monotonic() + LEASE_SECONDS

    def is_buried(self, room: bytes) -> bool:
        """Whether the room has ended within the last lease."""
        return room in self._tombstones

    def abort(self, rid: str | None) -> int:
        """End the requests with this rid, or all (None); returns how many."""
        found = [r for r in self.requests.values() if rid is None or r.rid == rid]
        for request in found:
            self.fail(request, AbortedError("aborted by /abort_request"))
        return len(found)

    def fail(self, request: Request, error: PDError, *, tell_proxy: bool = True) -> None:
        """End a request without success. The first cause wins; abort outranks what comes later."""
        if request.state.terminal:
            return
        if tell_proxy:
            self._post_failed(request.proxy, request.room, error)
        self.metrics.failed.labels(error.kind).inc()
        request.error = error
        aborted = isinstance(error, AbortedError)
        self._end(request, RequestState.ABORTED if aborted else RequestState.FAILED)

    def finish(self, request: Request) -> None:
        """End a request with success."""
        self._end(request, RequestState.DONE)

    def _end(self, request: Request, state: RequestState) -> None:
        before = request.state
        request.state = state
        self.ended(request, before)
        self._closing.append(request)
        self._close()

    @abstractmethod
    def ended(self, request: Request, before: RequestState) -> None:
        """Take a terminal request out of its queue, tell the peer, stop its transfer."""

    def may_release(self, request: Request) -> bool:
        """Whether no transfer touches the request's pages any more."""
        return True

    def _close(self) -> None:
        """The one way out: pages of ended requests are released when nothing can touch them."""
        still = []
        for request in self._closing:
            if request.in_step or not self.may_release(request):
                still.append(request)
                continue
            self.release(request)
            self.requests.pop(request.room, None)
        self._closing = still
        if not still:
            self.work_available.notify_all()

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
        self._outputs[request.proxy].append(output)

    def _flush_outputs(self) -> None:
        for proxy, outputs in self._outputs.items():
            message = StepOutputs(to=proxy.decode(), sender=self.instance_id, outputs=outputs)
            self.control.post(proxy, message)
        self._outputs.clear()

    def _post_failed(self, proxy: bytes, room: bytes, error: PDError) -> None:
        # NOTE: outputs queued before the failure go first, so that nothing arrives after the end.
        self._flush_outputs()
        info = ErrorInfo(error.kind, error.message, error.param)
        message = Failed(
            to=proxy.decode(errors="replace"), sender=self.instance_id, room=room, error=info
        )
        self.control.post(proxy, message)

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
        with self.lock:
            handler(identity, message)

    def _on_proxy_heartbeat(self, identity: bytes, message: ProxyHeartbeat) -> None:
        self._proxies[identity] = time.monotonic()
        reply = NodeHeartbeat(
            to=message.sender,
            sender=self.instance_id,
            ready=self.ready,
            queued_tokens=self.queued_tokens,
            running=len(self.requests),
        )
        self.control.post(identity, reply)

    def on_tick(self) -> None:
        """Leases, deadlines, heartbeats."""
        now = time.monotonic()
        with self.lock:
            self._tombstones = {r: t for r, t in self._tombstones.items() if t > now}
            for proxy in [p for p, seen in self._proxies.items() if now > seen + LEASE_SECONDS]:
                del self._proxies[proxy]
                for request in [r for r in self.requests.values() if r.proxy == proxy]:
                    self.fail(request, AbortedError("its proxy is gone"), tell_proxy=False)
            for request in list(self.requests.values()):
                if request.deadline is not None and now > request.deadline:
                    self.fail(request, DeadlineExceededError("the request's deadline passed"))
            if now >= self._next_heartbeat:
                self._next_heartbeat = now + HEARTBEAT_INTERVAL
                self.on_heartbeat()
            self.sweep(now)
            self._close()

    def on_heartbeat(self) -> None:
        """Twice a second: tell peers that this node lives."""

    def sweep(self, now: float) -> None:
        """End what waited longer than a lease for a peer."""

    def on_poll(self) -> bool:
        """Move transfers along."""
        with self.lock:
            busy = self.poll_transfers()
            if self._closing:
                self._close()
            self._flush_outputs()
            return busy or bool(self._closing)

    def poll_transfers(self) -> bool:
        """Look at transfers; True while one is about to complete."""
        return False

    # ---- administration

    def flush_cache(self) -> int:
        """Drop what is cached and unused; returns the pages freed."""
        with self.lock:
            return self.memory.flush()

    def check(self) -> None:
        """Raise AssertionError unless every page has the owner that the books say."""
        with self.lock:
            self.memory.check(self.live_sequences(), self.quarantined_pages())

    def quarantined_pages(self) -> list[object]:
        """Arrays of pages that wait for a peer's drain."""
        return []

    def server_info(self) -> dict[str, object]:
        """What ``GET /server_info`` answers (endpoints are added by the server)."""
        from pd import __version__

        engine = self.engine
        with self.lock:
            return {
                "role": self.role,
                "instance_id": self.instance_id,
                "version": __version__,
                "model": self.config.model_name,
                "model_path": str(self.config.model.resolve()),
                "model_id": engine.model_id,
                "vocab_size": engine.model_config.vocab_size,
                "dtype": engine.layout.dtype,
                "page_size": self.config.page_size,
                "tp_size": self.config.tp_size,
                "transfer_backend": self.transfer_backend,
                "attention_backend": engine.attention_backend,
                "context_length": engine.context_length,
                "ready": self.ready,
                "endpoints": {"zmq": self.endpoint, "bootstrap": self.bootstrap_url},
                "pages": self.memory.counts(),
                "queues": self.queues(),
            }

    transfer_backend = "none"
    bootstrap_url = ""
