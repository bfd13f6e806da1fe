"""A node: schedulers that share a page pool, the ends of hand-offs, and the node's threads.

The step loop (:mod:`pd.node.step_loop`) plans a step, computes it without the node's lock, and
accounts for it. The control thread (:mod:`pd.node.control`) handles messages and ticks meanwhile,
so reservations and aborts never wait for a forward pass. Every change of the node's state happens
in an event (:class:`pd.scheduling.events.Events`) and settles at the end of the event.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from pd.core.errors import AbortedError, DeadlineExceededError, NodeFailedError, UnavailableError
from pd.core.messages import (
    HEARTBEAT_INTERVAL,
    NodeHeartbeat,
    PreferRole,
    ProxyHeartbeat,
    heartbeat_owner,
)
from pd.core.release import RELEASE
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
from pd.util.starvation import RUN_DELAY
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.core.messages import AnyMessage
    from pd.core.node_info import NodeInfo, Role
    from pd.engine.engine import Engine
    from pd.node.control import ControlLink, ControlThread
    from pd.node.kv_events.publisher import KVEventPublisher
    from pd.scheduling.combined import CombinedScheduler
    from pd.scheduling.core import NodeCore
    from pd.scheduling.live_requests import LiveRequests
    from pd.scheduling.request import Request, RequestState
    from pd.scheduling.request import Sequence as TokenSequence
    from pd.scheduling.transfer_end import PromptReceiver, PromptSender
    from pd.transfer.base import TransferManager

logger = logging.getLogger(__name__)

# For this long after a request ends, we check its transfer in every turn instead of every tick.
_DRAIN_SECONDS = 1.0
# Queues in the order in which requests pass through them.
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
    """One node. Its parts determine its role.

    It has a prefill scheduler, a decode scheduler or both, and ends that send or receive KV, both
    or none.

    Args:
        own: introduces the node to others.
        control: the node's message sockets; its thread is not started yet.
        transfers: the transfer manager of each end.

    Attributes:
        handlers: for messages from processes that connected here: proxies, and the decode nodes we
            send KV to.
        prefill_handlers: for messages from the prefill nodes we receive KV from.
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
        # Whether the node drains because its process will exit.
        self._exiting = False
        # Whether we ask proxies to move the node's requests elsewhere.
        self._leaving = False
        self._next_heartbeat = 0.0
        self._dropped = WarningLimit(logger)
        self.proxies = Proxies(core.requests)
        self.prefixes = PrefixReports(core)
        self.kv_events: KVEvents | None = None
        self.role_lease = RoleLease() if core.config.is_elastic else None
        self.step_loop = StepLoop(core, scheduler)
        NodeGauges(core, self.count_queues, self.transfers)
        self.handlers, self.prefill_handlers = Handlers(), Handlers()
        self._intake = Intake(
            core, self.role, scheduler, sending, receiving, self.proxies, lambda: self.ready
        )
        self._intake.register_handlers(self.handlers)
        self.handlers.add_handler(ProxyHeartbeat, self._on_proxy_heartbeat)
        if self.role_lease is not None:
            self.handlers.add_handler(PreferRole, self._on_prefer_role)
        if sending is not None:
            sending.register_handlers(self.handlers)
        if receiving is not None:
            receiving.register_handlers(self.prefill_handlers)
        core.requests.add_end_listener(self._on_ended)
        core.events.settle = self._settle_event

    # ---- how a request ends

    def _on_ended(self, request: Request, before: RequestState) -> None:
        """Stop all work for a request marked as ended."""
        self._intake.forget_request(request)
        self.scheduler.remove_request(request)
        for end in self.ends:
            end.end_hand_off(request, before)

    def _settle_event(self) -> None:
        """Close ended requests and reserve memory for waiting ones, until nothing changes."""
        while True:
            while (taken := self.requests.closing.take_due()) is not None:
                self._close_request(*taken)
            if not self.core.events.take_reservation_wish():
                return
            if self.receiving is not None:
                self.receiving.reserve_waiting()  # which may end requests

    def _close_request(self, ended: float, request: Request) -> None:
        """Release the pages of an ended request, unless something can still access them.

        Schedulers and ends release the pages of requests that continue: see "Owners of a page" in
        docs/architecture.md.
        """
        if request.is_in_step or not all(end.may_release(request) for end in self.ends):
            self.requests.closing.defer_request(ended, request)
            return
        self.requests.remove_request(request)
        for sequence in request.sequences:
            self.core.memory.release_pages(sequence)
            sequence.host_kv = None
        for end in self.ends:
            end.finish_release(request)
        self.core.events.want_reservations()
        self.core.events.work_available.set()

    # ---- life of the node

    @property
    def requests(self) -> LiveRequests:
        """The node's requests."""
        return self.core.requests

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
        """Role that the node introduces itself with."""
        return self.own.role

    @property
    def endpoint(self) -> str:
        """Address for messages of proxies and peers."""
        return self.own.endpoint

    @property
    def ready(self) -> bool:
        """Whether the node accepts requests."""
        return self.step_loop.running and not self.draining

    @property
    def broken(self) -> bool:
        """Whether the node can compute nothing any more."""
        return self.step_loop.broken

    def publish_kv_events(self, publisher: KVEventPublisher) -> None:
        """Publish changes of the prefix cache for other routers. Call it before :meth:`start`."""
        self.kv_events = KVEvents(self.core, publisher)

    def start(self) -> None:
        """Start the node's threads."""
        self.engine.set_failure_callback(self.step_loop.engine_failed)
        self.step_loop.start()
        self.control.start_serving(self)

    def stop(self) -> None:
        """End at once, failing all remaining requests."""
        with self.core.events.event():
            error = NodeFailedError(f"{self.role} node {self.instance_id} stopped")
            for request in self.requests:
                self.requests.fail_request(request, error)
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
        """Reject new requests and finish the present ones.

        Args:
            to_end: drain for good, because the process will exit.
            migrate: ask proxies to move the requests to other nodes, if there are any.
        """
        with self.core.events.event():
            self.draining = True
            self._exiting = self._exiting or to_end
            self._leaving = self._leaving or migrate
            for proxy in self.proxies.known_proxies():
                self._answer_heartbeat(proxy)

    def undrain(self) -> None:
        """Accept requests again. Raises UnavailableError if the process is about to exit."""
        with self.core.events.event():
            if self._exiting:
                raise UnavailableError(f"{self.role} node {self.instance_id} is about to exit")
            self.draining = self._leaving = False

    @property
    def idle(self) -> bool:
        """Whether the node has no request, not even one waiting to be closed."""
        return not len(self.requests) and not self.requests.closing

    @property
    def finished(self) -> bool:
        """Whether no proxy waits for this node. Pages may still wait for an unreachable peer."""
        live = any(True for _ in self.requests.iter_live())
        return not live and not self.requests.closing.has_ended_since(
            time.monotonic() - _DRAIN_SECONDS
        )

    # ---- control thread

    def on_message(self, link: ControlLink, message: AnyMessage) -> None:
        """Handle a message, dropping messages for another instance."""
        handlers = self.prefill_handlers if link.dialled else self.handlers
        with self.core.events.event():
            if link.dialled and self.receiving is not None:
                self.receiving.peers.renew_lease(link.identity.decode(errors="replace"))
            if message.to != self.instance_id and not isinstance(message, ProxyHeartbeat):
                logger.debug("dropped %s for instance %s", type(message).__name__, message.to)
            elif message not in handlers:
                kind = type(message).__name__
                self._dropped.log_warning(f"dropped {kind}: not for a {self.role} node")
            else:
                handlers.call_handlers(link.identity, message)

    def _on_proxy_heartbeat(self, identity: bytes, message: ProxyHeartbeat) -> None:
        proxy = heartbeat_owner(identity)
        self.proxies.renew_lease(proxy)
        for transfer in self.transfers:
            transfer.patience.note_delay(proxy.decode(errors="replace"), message.run_delay)
            for node, run_delay in message.run_delays.items():
                transfer.patience.note_delay(node, run_delay)
        if proxy != identity:
            return  # the proxy's heartbeat thread sent it, only to renew the lease
        self.proxies.note_release(proxy, message.release)
        if self.receiving is not None and self.ready:
            self.receiving.connect_peers(message.meet)
        self.prefixes.note_wanted(identity, message.prefixes)
        self.proxies.note_objective(identity, message.itl)
        if self.scheduler.slices is not None:
            self.scheduler.slices.wanted_itl = self.proxies.smallest_itl
        if self.role_lease is not None:
            self.role_lease.note_request(identity, time.monotonic(), wanted=message.decides)
        self._answer_heartbeat(identity, message.number)

    def _on_prefer_role(self, identity: bytes, message: PreferRole) -> None:
        assert self.role_lease is not None
        if self.role_lease.follow_order(identity, message, time.monotonic()):
            if message.role is None:
                logger.info("proxies may choose this node's role again")
            else:
                logger.info("this node prefers to be a %s node", message.role)

    def _answer_heartbeat(self, proxy: bytes, number: int = 0) -> None:
        """Send a heartbeat to a proxy. We tell proxies of other releases that we accept no
        requests.

        ``number``: number of the proxy's heartbeat, if we are answering one.
        """
        other_release = self.proxies.other_release(proxy)
        reply = NodeHeartbeat(
            to=proxy.decode(errors="replace"),
            sender=self.instance_id,
            ready=self.ready and other_release is None,
            queued_tokens=self.queued_tokens,
            running=sum(1 for _ in self.requests.iter_live()),
            losses=self.proxies.count_losses(proxy),
            run_delay=RUN_DELAY.total,
            linked=None if self.receiving is None else self.receiving.list_linked_peers(),
            load=node_load(
                self.core, self.scheduler, self.receiving, self.step_loop.prompt_seconds_left
            ),
            answers=number,
            leaving=self._leaving,
            stuck=self.step_loop.stuck,
            roles=None
            if self.role_lease is None
            else self.role_lease.describe_state(time.monotonic()),
            release=msgspec.UNSET if other_release == "" else RELEASE,
        )
        self.core.post(proxy, reply)

    def on_gap(self, link: ControlLink) -> None:
        """Drop a process after message loss, because it may wait for answers to the lost ones."""
        instance, why = link.identity.decode(errors="replace"), "messages from it were lost"
        end = self.receiving if link.dialled else self.sending
        with self.core.events.event():
            if (end is None or not end.drop_peer(instance, why)) and not link.dialled:
                logger.warning("messages of proxy %.64r were lost", link.identity)
                self.proxies.on_messages_lost(link.identity)

    def on_restart(self, identity: bytes) -> None:
        """End the requests of a proxy that gave them all up."""
        with self.core.events.event():
            self.proxies.on_restart(identity)

    def on_tick(self) -> None:
        """Check leases and deadlines, and send heartbeats."""
        now = time.monotonic()
        self.step_loop.check_progress(now)
        with self.core.events.event():
            self.requests.sweep_tombstones(now)
            self.proxies.drop_silent_proxies(now)
            for request in self.requests:
                if request.deadline is not None and now > request.deadline:
                    error = DeadlineExceededError("the request's deadline passed")
                    self.requests.fail_request(request, error)
            is_beat = now >= self._next_heartbeat
            if is_beat:
                self._next_heartbeat = now + HEARTBEAT_INTERVAL
            for end in self.ends:
                if is_beat:
                    end.send_heartbeats()
                end.drop_expired(now)
            self.prefixes.send_reports(now)
            if self.kv_events is not None:
                self.kv_events.publish_changes(now)
            self.requests.closing.recheck_transfers()

    def on_poll(self) -> bool:
        """Advance transfers; True while one is about to complete."""
        # An unreachable peer may hold pages for minutes, so the ticks are enough.
        recently = time.monotonic() - _DRAIN_SECONDS
        closing = self.requests.closing
        with self.core.events.event():
            busy = any([end.poll_transfers() for end in self.ends])
            closing.recheck_transfers(recently)
            self.requests.outputs.send_outputs()
        if busy or not len(closing):
            return busy
        with self.core.events.lock:
            return closing.has_transferring(recently)

    # ---- administration

    def abort_rid(self, rid: str | None) -> int:
        """End the requests with this rid, or all if it is None; return how many."""
        with self.core.events.event():
            matching = [r for r in self.requests.iter_live() if rid is None or r.rid == rid]
            for request in matching:
                self.requests.fail_request(request, AbortedError("aborted by /abort_request"))
            return len(matching)

    def flush_cache(self) -> int:
        """Drop cached pages that no request uses; return how many."""
        with self.core.events.event():
            return self.core.memory.flush_cache()

    @property
    def queued_tokens(self) -> int:
        """Number of waiting prompt tokens, for proxies to balance load."""
        received = 0 if self.receiving is None else self.receiving.queued_tokens
        return self.scheduler.queued_tokens + received

    def count_queues(self) -> dict[str, int]:
        """Count requests by queue, for ``/server_info``.

        The first queue includes requests waiting for their grammar.
        """
        counts = Counter(self.scheduler.count_queues())
        for end in self.ends:
            counts.update(end.count_queues())
        queues = {queue: counts[queue] for queue in _QUEUES if queue in counts}
        queues[next(iter(queues))] += len(self._intake.compiling)
        return queues

    def transfer_peers(self) -> list[NodeInfo]:
        """List the nodes this one exchanges KV with."""
        return [peer for end in self.ends for peer in end.peers.list_infos()]

    def check_books(self) -> None:
        """Raise AssertionError unless the states of all pages and requests match their owners and
        queues."""
        with self.core.events.lock:
            sequences = [sequence for request in self.requests for sequence in request.sequences]
            quarantined = [pages for end in self.ends for pages in end.quarantined_pages()]
            self.core.memory.check_owners(sequences, quarantined)
            check_queues(self.requests, self.requests.closing, self._count_queued())

    def _count_queued(self) -> Iterator[TokenSequence]:
        for request in self._intake.compiling:
            yield request.sequence
        yield from self.scheduler.iter_queued()
        for end in self.ends:
            yield from end.iter_queued()

    def server_info(self) -> dict[str, object]:
        """Build the answer to ``GET /server_info``."""
        return server_info(self)
