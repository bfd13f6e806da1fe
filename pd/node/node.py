"""A node: schedulers over one pool, the ends of hand-offs that go with them, and
the two threads that change requests most.

The step loop (:mod:`pd.node.step_loop`) plans a step, computes it without the node's lock, and
accounts for it. The control thread (:mod:`pd.node.control`) handles messages and time in between,
so that reservations and aborts never wait for a forward pass. Every change of the node's state
happens in an event (:class:`pd.scheduling.events.Events`) and settles at its end.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from pd.core.errors import AbortedError, DeadlineExceededError, NodeFailedError, UnavailableError
from pd.core.messages import (
    HEARTBEAT_INTERVAL,
    NodeHeartbeat,
    PreferRole,
    ProxyHeartbeat,
    heartbeat_owner,
)
from pd.core.seldom import Seldom
from pd.core.starvation import RUN_DELAY
from pd.node.info import server_info
from pd.node.intake import Intake
from pd.node.kv_events.events import KVEvents
from pd.node.load import node_load
from pd.node.metrics import NodeGauges
from pd.node.prefixes import PrefixReports
from pd.node.proxies import Proxies
from pd.node.role_lease import RoleLease
from pd.node.step_loop import StepLoop
from pd.scheduling.closing import check_queues
from pd.scheduling.handlers import Handlers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.core.messages import AnyMessage
    from pd.core.node_info import NodeInfo, Role
    from pd.core.request import Request, RequestState
    from pd.core.request import Sequence as TokenSequence
    from pd.engine.engine import Engine
    from pd.node.control import ControlLink, ControlThread
    from pd.node.kv_events.publisher import KVEventPublisher
    from pd.scheduling.combined import CombinedScheduler
    from pd.scheduling.core import NodeCore
    from pd.scheduling.rooms import Rooms
    from pd.scheduling.transfer_end import PromptReceiver, PromptSender
    from pd.transfer.base import TransferManager

logger = logging.getLogger(__name__)

# How long the end of a request's transfer is looked for at once rather than ten times a second.
_DRAIN_SECONDS = 1.0
# Queues in the order in which requests go through them.
_QUEUES = (
    "bootstrap",
    "preallocation",
    "transfer",
    "waiting",
    "prefill",
    "running",
    "retracted",
    "in_flight",
)


class Node:
    """One node. Its role is what it is assembled with: a prefill scheduler, a decode scheduler or
    both; ends that send or receive KV, both or none.

    Args:
        own: introduces the node to others.
        control: the node's message sockets; its thread is not started yet.
        transfers: what moves the KV of each end.

    Attributes:
        handlers: of messages from processes that connected here: proxies, and decode nodes to which
            this node sends.
        prefill_handlers: of messages from prefill nodes that this node receives from.
    """

    def __init__(
        self,
        core: NodeCore,
        own: NodeInfo,
        control: ControlThread,
        scheduler: CombinedScheduler,
        *,
        sending: PromptSender | None = None,
        receiving: PromptReceiver | None = None,
        transfers: Sequence[TransferManager] = (),
    ) -> None:
        self.core, self.own, self.control, self.transfers = core, own, control, tuple(transfers)
        self.scheduler, self.sending, self.receiving = scheduler, sending, receiving
        self.ends = tuple(end for end in (sending, receiving) if end is not None)
        self.draining = False
        # Whether the node drains because the process is about to end.
        self._exiting = False
        # Whether proxies are asked to move the requests that are here.
        self._leaving = False
        self._next_heartbeat = 0.0
        self._dropped = Seldom(logger)
        self.proxies = Proxies(core.rooms)
        self.prefixes = PrefixReports(core)
        self.kv_events: KVEvents | None = None
        self.role_lease = RoleLease() if core.config.is_elastic else None
        self.step_loop = StepLoop(core, scheduler)
        NodeGauges(core, self.queues, self.transfers)
        self.handlers, self.prefill_handlers = Handlers(), Handlers()
        self._intake = Intake(
            core, self.role, scheduler, sending, receiving, self.proxies, lambda: self.ready
        )
        self._intake.register(self.handlers)
        self.handlers.on(ProxyHeartbeat, self._on_proxy_heartbeat)
        if self.role_lease is not None:
            self.handlers.on(PreferRole, self._on_prefer_role)
        if sending is not None:
            sending.register(self.handlers)
        if receiving is not None:
            receiving.register(self.prefill_handlers)
        core.rooms.when_ended(self._ended)
        core.events.settle = self._settle

    # ---- how a request ends

    def _ended(self, request: Request, before: RequestState) -> None:
        """A request was marked as ended: stop all that goes on for it."""
        self._intake.ended(request)
        self.scheduler.remove(request)
        for end in self.ends:
            end.ended(request, before)

    def _settle(self) -> None:
        """Close requests that ended and let others go on, until nothing changes."""
        while True:
            while (taken := self.rooms.closing.take()) is not None:
                self._close(*taken)
            if not self.core.events.take_pump():
                return
            if self.receiving is not None:
                self.receiving.pump()  # which may end requests

    def _close(self, ended: float, request: Request) -> None:
        """Release the pages of an ended request, unless something can still touch them.

        Schedulers and ends release pages of requests that go on; the table of owners in
        docs/architecture.md says when.
        """
        if request.in_step or not all(end.may_release(request) for end in self.ends):
            self.rooms.closing.rest(ended, request)
            return
        self.rooms.remove(request)
        for sequence in request.sequences:
            self.core.memory.release(sequence)
            sequence.host_kv = None
        for end in self.ends:
            end.released(request)
        self.core.events.want_pump()
        self.core.events.work_available.set()

    # ---- life of the node

    @property
    def rooms(self) -> Rooms:
        """The node's requests."""
        return self.core.rooms

    @property
    def engine(self) -> Engine:
        """The engine that computes the node's steps."""
        return self.core.engine

    @property
    def instance_id(self) -> str:
        """Identity of this process."""
        return self.core.instance_id

    @property
    def role(self) -> Role:
        """The role under which the node introduces itself."""
        return self.own.role

    @property
    def endpoint(self) -> str:
        """Address to which proxies and peers send messages."""
        return self.own.endpoint

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.step_loop.running and not self.draining

    @property
    def broken(self) -> bool:
        """Whether nothing will be computed any more."""
        return self.step_loop.broken

    def publish_kv_events(self, publisher: KVEventPublisher) -> None:
        """Publish changes of the prefix cache for other routers; before :meth:`start`."""
        self.kv_events = KVEvents(self.core, publisher)

    def start(self) -> None:
        """Begin to serve."""
        self.engine.on_failure(self.step_loop.engine_failed)
        self.step_loop.start()
        self.control.serve(self)

    def stop(self) -> None:
        """End at once; requests that are left fail."""
        with self.core.events.event():
            error = NodeFailedError(f"{self.role} node {self.instance_id} stopped")
            for request in self.rooms:
                self.rooms.fail(request, error)
            self.draining = self._exiting = True
        self.core.grammars.close()
        self._intake.close()
        self.step_loop.stop()
        self.control.stop()
        for end in self.ends:
            end.close()
        for transfer in self.transfers:
            transfer.close()

    def drain(self, *, to_end: bool = False, migrate: bool = False) -> None:
        """Refuse new requests and finish those that are here.

        Args:
            to_end: for good, because the process ends then.
            migrate: ask proxies to move the requests to other nodes, where there are any.
        """
        with self.core.events.event():
            self.draining = True
            self._exiting = self._exiting or to_end
            self._leaving = self._leaving or migrate
            for proxy in self.proxies.known():
                self._answer_heartbeat(proxy)

    def undrain(self) -> None:
        """Accept new requests again. Raises UnavailableError when the process is about to end."""
        with self.core.events.event():
            if self._exiting:
                raise UnavailableError(f"{self.role} node {self.instance_id} is about to end")
            self.draining = self._leaving = False

    @property
    def idle(self) -> bool:
        """Whether there is no request, not even one that waits to be closed."""
        return not len(self.rooms) and not self.rooms.closing

    @property
    def finished(self) -> bool:
        """Whether no proxy waits for this node. Pages may still wait for a peer that is out of
        reach."""
        live = any(True for _ in self.rooms.live())
        return not live and not self.rooms.closing.any_since(time.monotonic() - _DRAIN_SECONDS)

    # ---- control thread

    def on_message(self, link: ControlLink, message: AnyMessage) -> None:
        """Handle one message; those for another instance are dropped."""
        handlers = self.prefill_handlers if link.dialled else self.handlers
        with self.core.events.event():
            if link.dialled and self.receiving is not None:
                self.receiving.note_message(link.identity.decode(errors="replace"))
            if message.to != self.instance_id and not isinstance(message, ProxyHeartbeat):
                logger.debug("dropped %s for instance %s", type(message).__name__, message.to)
            elif message not in handlers:
                kind = type(message).__name__
                self._dropped.warn(f"dropped {kind}: not for a {self.role} node")
            else:
                handlers.handle(link.identity, message)

    def _on_proxy_heartbeat(self, identity: bytes, message: ProxyHeartbeat) -> None:
        proxy = heartbeat_owner(identity)
        self.proxies.renew(proxy)
        for transfer in self.transfers:
            transfer.patience.heard(proxy.decode(errors="replace"), message.run_delay)
            for node, run_delay in message.run_delays.items():
                transfer.patience.heard(node, run_delay)
        if proxy != identity:
            return  # the sender is the proxy's thread that only keeps the lease
        if self.receiving is not None and self.ready:
            self.receiving.meet(message.meet)
        self.prefixes.wanted(identity, message.prefixes)
        self.proxies.note_objective(identity, message.itl)
        if self.scheduler.slices is not None:
            self.scheduler.slices.wanted = self.proxies.itl
        if self.role_lease is not None:
            self.role_lease.asked(identity, time.monotonic(), wanted=message.decides)
        self._answer_heartbeat(identity, message.number)

    def _on_prefer_role(self, identity: bytes, message: PreferRole) -> None:
        assert self.role_lease is not None
        if self.role_lease.ordered(identity, message, time.monotonic()):
            if message.role is None:
                logger.info("this node leaves its role to proxies")
            else:
                logger.info("this node prefers to be a %s node", message.role)

    def _answer_heartbeat(self, proxy: bytes, number: int = 0) -> None:
        """``number``: of the proxy's heartbeat, if this answers one."""
        reply = NodeHeartbeat(
            to=proxy.decode(errors="replace"),
            sender=self.instance_id,
            ready=self.ready,
            queued_tokens=self.queued_tokens,
            running=sum(1 for _ in self.rooms.live()),
            losses=self.proxies.losses(proxy),
            run_delay=RUN_DELAY.total,
            linked=None if self.receiving is None else self.receiving.linked(),
            load=node_load(
                self.core, self.scheduler, self.receiving, self.step_loop.prompt_seconds_left
            ),
            answers=number,
            leaving=self._leaving,
            stuck=self.step_loop.stuck,
            roles=None if self.role_lease is None else self.role_lease.state(time.monotonic()),
        )
        self.core.post(proxy, reply)

    def on_gap(self, link: ControlLink) -> None:
        """Drop a process of which messages were lost: it may wait for answers to them."""
        instance, why = link.identity.decode(errors="replace"), "messages from it were lost"
        end = self.receiving if link.dialled else self.sending
        with self.core.events.event():
            if (end is None or not end.drop_peer(instance, why)) and not link.dialled:
                logger.warning("messages of proxy %.64r were lost", link.identity)
                self.proxies.messages_lost(link.identity)

    def on_anew(self, identity: bytes) -> None:
        """A proxy dropped all that it had here."""
        with self.core.events.event():
            self.proxies.began_anew(identity)

    def on_tick(self) -> None:
        """Leases, deadlines, heartbeats."""
        now = time.monotonic()
        self.step_loop.check_progress(now)
        with self.core.events.event():
            self.rooms.sweep(now)
            self.proxies.sweep(now)
            for request in self.rooms:
                if request.deadline is not None and now > request.deadline:
                    error = DeadlineExceededError("the request's deadline passed")
                    self.rooms.fail(request, error)
            is_beat = now >= self._next_heartbeat
            if is_beat:
                self._next_heartbeat = now + HEARTBEAT_INTERVAL
            for end in self.ends:
                if is_beat:
                    end.heartbeat()
                end.sweep(now)
            self.prefixes.flush(now)
            if self.kv_events is not None:
                self.kv_events.flush(now)
            self.rooms.closing.look_at_transfers()

    def on_poll(self) -> bool:
        """Move transfers along; True while one is about to complete."""
        # A peer that is out of reach may hold pages for minutes: the clock's ticks will do.
        recently = time.monotonic() - _DRAIN_SECONDS
        closing = self.rooms.closing
        with self.core.events.event():
            busy = any([end.poll() for end in self.ends])
            closing.look_at_transfers(recently)
            self.rooms.outputs.flush()
        if busy or not len(closing):
            return busy
        with self.core.events.lock:
            return closing.any_in_transfer(recently)

    # ---- administration

    def abort(self, rid: str | None) -> int:
        """End the requests with this rid, or all (None); returns how many."""
        with self.core.events.event():
            found = [r for r in self.rooms.live() if rid is None or r.rid == rid]
            for request in found:
                self.rooms.fail(request, AbortedError("aborted by /abort_request"))
            return len(found)

    def flush_cache(self) -> int:
        """Drop cached pages that no request uses; returns the pages freed."""
        with self.core.events.event():
            return self.core.memory.flush()

    @property
    def queued_tokens(self) -> int:
        """Load that the proxy balances by: prompt tokens that still wait."""
        received = 0 if self.receiving is None else self.receiving.queued_tokens
        return self.scheduler.queued_tokens + received

    def queues(self) -> dict[str, int]:
        """Requests by queue, as ``/server_info`` shows them; in the first also those that wait for
        their grammar."""
        counts = Counter(self.scheduler.queues())
        for end in self.ends:
            counts.update(end.queues())
        queues = {queue: counts[queue] for queue in _QUEUES if queue in counts}
        queues[next(iter(queues))] += len(self._intake.compiling)
        return queues

    def transfer_peers(self) -> list[NodeInfo]:
        """The nodes that this one exchanges KV with at present."""
        return [peer for end in self.ends for peer in end.peers()]

    def check(self) -> None:
        """Raise AssertionError unless every page has the owner that its state says, and every
        request the one place that its state says."""
        with self.core.events.lock:
            sequences = [sequence for request in self.rooms for sequence in request.sequences]
            quarantined = [pages for end in self.ends for pages in end.quarantined_pages()]
            self.core.memory.check(sequences, quarantined)
            check_queues(self.rooms, self.rooms.closing, self._queued())

    def _queued(self) -> Iterator[TokenSequence]:
        for request in self._intake.compiling:
            yield request.sequence
        yield from self.scheduler.queued()
        for end in self.ends:
            yield from end.queued()

    def server_info(self) -> dict[str, object]:
        """The answer to ``GET /server_info``."""
        return server_info(self)
