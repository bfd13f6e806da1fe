"""Sending end of hand-offs: reservations, senders, and the end of each room."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pd.core.errors import (
    AbortedError,
    HandshakeError,
    NodeFailedError,
    PeerFailedError,
    TransferError,
    error_of_peer,
)
from pd.core.messages import (
    FINISHED,
    HEARTBEAT_INTERVAL,
    LEASE_SECONDS,
    AbortRoom,
    CommitAck,
    Drained,
    ErrorInfo,
    GrammarReady,
    PeerHeartbeat,
    PromptExpected,
    Reservation,
    Returned,
)
from pd.engine.digests import Digests
from pd.prefill_node.commits import Commits
from pd.prefill_node.outgoing import Chunk, OutgoingRoom, PromptCost, outgoing_of
from pd.scheduling.memory import LACKING_SECONDS
from pd.scheduling.peer_table import PeerTable
from pd.scheduling.request import RequestState
from pd.scheduling.transfer_end import PromptSender
from pd.scheduling.window_pages import find_first_kept
from pd.transfer import contained
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.node_info import NodeInfo
    from pd.scheduling.core import NodeCore
    from pd.scheduling.handlers import Handlers
    from pd.scheduling.request import Request, Sequence
    from pd.scheduling.step import Work
    from pd.transfer.base import TransferManager

logger = logging.getLogger(__name__)


class SendingEnd(PromptSender):
    """Manages all rooms whose KV this node sends. The caller holds the node's lock.

    KV leaves at five moments. All but :meth:`on_prompt_computed` may leave it to a later one
    (:meth:`pd.prefill_node.outgoing.OutgoingRoom.may_wait`).

    - :meth:`start_sending`: a chunk is planned. Cached tokens leave, if the peer has reserved.
    - the callback of :meth:`make_layer_sender`: layers of a chunk are computed.
    - :meth:`on_chunk_computed`: a chunk is accounted for. Layers that no callback sent leave.
    - :meth:`on_prompt_computed`: token 1 is known. Everything else leaves.
    - :meth:`take_reservation`: the reservation arrives after a chunk was planned. Everything
      computed so far leaves.

    Args:
        resume: puts a parked request back into the waiting queue.
        forget: called with each dropped decode node, so that it may shake hands again.
        digests: computes the digests for commits; None without ``--kv-digest``.
    """

    def __init__(
        self,
        core: NodeCore,
        transfer: TransferManager,
        *,
        resume: Callable[[Request], None],
        forget: Callable[[str], None] = lambda instance: None,
        digests: Digests | None = None,
    ) -> None:
        self._core, self._requests, self._transfer = core, core.requests, transfer
        self._resume, self._forget = resume, forget
        model, layout = core.engine.model_config, core.engine.layout
        self._cost = PromptCost(
            model.num_layers,
            layout.token_bytes,
            model.token_flops / layout.tp_size,
            model.pair_flops / layout.tp_size,
            layout.num_layers - model.num_layers,
            model.windows,
            model.pool_layers,
        )
        self._patience = transfer.patience
        self._broken = WarningLimit(logger)
        self.peers = PeerTable(core.instance_id, core.post, self._patience)
        # Messages about requests that have not arrived yet or wait for their grammar, with the time
        # of arrival, by room and sender.
        self._early: dict[tuple[bytes, str], tuple[float, GrammarReady | Reservation]] = {}
        self._commits = Commits(core, transfer, self.peers, digests)

    def register_handlers(self, handlers: Handlers) -> None:
        handlers.add_handler(GrammarReady, self._on_grammar_ready)
        handlers.add_handler(Reservation, self._on_reservation)
        handlers.add_handler(CommitAck, self._commits.on_commit_ack)
        handlers.add_handler(AbortRoom, self._on_abort_room)
        handlers.add_handler(PeerHeartbeat, self._on_peer_heartbeat)

    def _live_outgoing(self) -> Iterator[OutgoingRoom]:
        return (o for o in map(outgoing_of, self._requests) if o is not None)

    # ---- peers

    def add_peer(self, peer: NodeInfo) -> None:
        """Add a decode node as a peer after its handshake. Any thread."""
        with self._core.events.event():
            self._transfer.connect(peer)
            if peer.instance_id not in self.peers:
                backend = self._transfer.backend_of(peer.instance_id)
                logger.info("KV for decode node %s travels by %s", peer.instance_id, backend)
            self.peers.add_peer(peer)

    def drop_peer(self, instance: str, why: str) -> bool:
        """Forget a decode node and fail its requests. Nothing else is affected. Any thread."""
        with self._core.events.event():
            if not self.peers.drop_peer(instance):
                return False
            logger.warning("decode node %s lost: %s", instance, why)
            self._forget(instance)
            contained.disconnect_peer(self._transfer, instance)
            self._early = {key: early for key, early in self._early.items() if key[1] != instance}
            error = PeerFailedError(f"decode node {instance} failed: {why}")
            for outgoing in self._live_outgoing():
                if outgoing.request.peer == instance:
                    self._requests.fail_request(outgoing.request, error)
            # NOTE: again, because the failed requests have queued aborts for the node.
            self.peers.drop_peer(instance)
            return True

    def backend_of(self, instance: str) -> str:
        return self._transfer.backend_of(instance)

    def _on_peer_heartbeat(self, identity: bytes, message: PeerHeartbeat) -> None:
        self._patience.note_delay(message.sender, message.run_delay)
        if not self.peers.renew_lease(message.sender):
            # The node stalled for longer than its lease. We refuse it now, because its next
            # reservation would fail the request. It then shakes hands again.
            self._refuse_unknown(message.sender)

    def _refuse_unknown(self, sender: str, room: bytes = b"", epoch: int = 0) -> None:
        """Ask an unknown decode node to shake hands (again)."""
        logger.warning("decode node %s did not shake hands with this node; it is asked to", sender)
        error = ErrorInfo(HandshakeError.kind, f"{sender} did not shake hands")
        self.peers.send_message(self._make_abort(sender, room, epoch, error))

    def send_heartbeats(self) -> None:
        self.peers.send_heartbeats()

    # ---- reservations

    def accept_request(self, request: Request) -> None:
        """Accept a new request. The peer's messages about it may have arrived earlier."""
        request.state = RequestState.BOOTSTRAPPING
        request.outgoing = outgoing = OutgoingRoom(request, self._cost)
        _, early = self._early.pop((request.room, request.peer), (0.0, None))
        if isinstance(early, GrammarReady):
            self._answer_grammar(outgoing)
        elif early is not None:
            self.take_reservation(outgoing, early)

    def _on_grammar_ready(self, identity: bytes, message: GrammarReady) -> None:
        """Handle a peer that has compiled the grammar of a room and waits for us to have it,
        too."""
        if not self.peers.renew_lease(message.sender):
            self._refuse_unknown(message.sender, message.room)
            return
        request = self._requests.find_request(message.room)
        if request is None or request.state is RequestState.COMPILING:
            self._keep_early(message)
        elif request.state.is_terminal and message.sender == request.peer:
            self._refuse_reservation(message, _end_reason(request))
        elif (outgoing := outgoing_of(request)) is None or message.sender != request.peer:
            self._refuse_reservation(message, _room_misuse_error("the room is for another node"))
        else:
            self._answer_grammar(outgoing)

    def _answer_grammar(self, outgoing: OutgoingRoom) -> None:
        outgoing.peer_has_grammar = True
        request, own = outgoing.request, self._core.instance_id
        self.peers.send_message(GrammarReady(to=request.peer, sender=own, room=request.room))

    def _keep_early(self, message: GrammarReady | Reservation) -> None:
        """Keep a peer's message until its request can be accepted, unless the room has ended."""
        if self._requests.has_tombstone(message.room):
            self._refuse_reservation(message, ErrorInfo(FINISHED, "the room has ended"))
            return
        key = message.room, message.sender
        came, _ = self._early.get(key, (time.monotonic(), None))
        self._early[key] = came, message

    def _on_reservation(self, identity: bytes, message: Reservation) -> None:
        """Handle the peer's reservation for a room, which may be known, unknown yet, or ended."""
        self._core.events.work_available.set()
        if not self.peers.renew_lease(message.sender):
            self._refuse_unknown(message.sender, message.room, message.epoch)
            return
        request = self._requests.find_request(message.room)
        if request is None or request.state is RequestState.COMPILING:
            self._keep_early(message)
            return
        outgoing = outgoing_of(request)
        if outgoing is None or message.sender != request.peer:
            self._refuse_reservation(message, _room_misuse_error("the room is for another node"))
            return
        first = outgoing.reservation
        if first is not None and first.epoch != message.epoch:
            self._refuse_reservation(
                message, _room_misuse_error("the room has a reservation already")
            )
        elif request.state.is_terminal:
            error = _end_reason(request)
            if first is None:
                self._refuse_reservation(message, error)
            else:  # Drained follows the release of its pages
                abort = self._make_abort(message.sender, message.room, message.epoch, error)
                self.peers.send_when_reached(abort)
        elif first is None:
            self.take_reservation(outgoing, message)
        else:
            logger.warning("dropped a repeated reservation of room %s", message.room.hex())

    def take_reservation(self, outgoing: OutgoingRoom, reservation: Reservation) -> None:
        """Accept the reservation of a room. Open the sender and push what is computed already."""
        request = outgoing.request
        invalid = self._describe_invalid_cached(request, reservation.cached)
        if invalid:
            error = TransferError(f"decode node {request.peer} claims {invalid}")
            self._requests.fail_request(request, error)
            return
        outgoing.reservation = reservation
        outgoing.reserved_at = time.monotonic()
        outgoing.pushed = min(reservation.cached)
        if request.state is RequestState.BOOTSTRAPPING:
            request.state = RequestState.WAITING
        if outgoing.parked:
            outgoing.parked = False
            self._commits.in_flight.remove(outgoing)
            request.state = RequestState.WAITING
            self._resume(request)
        elif request.state in (RequestState.RUNNING, RequestState.SENDING):
            self._start_sending(outgoing)
            self._tell_expected(outgoing)

    def _describe_invalid_cached(self, request: Request, cached: tuple[int, ...]) -> str:
        """Describe the error in a peer's numbers of cached tokens; empty if there is none."""
        windows, length = self._core.engine.layout.group_windows, len(request.prompt)
        if len(cached) != len(windows):
            return f"cached tokens in {len(cached)} groups of planes; there are {len(windows)}"
        if not 0 <= min(cached) <= max(cached) <= length:
            return f"{', '.join(map(str, cached))} cached tokens of a prompt of {length}"
        for held, window in zip(cached, windows, strict=True):
            first = find_first_kept(length, window) if window else 0
            if held < first:
                return f"to need token {held} of a prompt of {length}; {first} is the first kept"
        return ""

    def will_leave(self, request: Request) -> bool:
        outgoing = outgoing_of(request)
        if outgoing is None:
            return request.max_new_tokens <= 1
        return outgoing.reservation is not None

    # ---- sending

    def start_sending(self, request: Request) -> None:
        outgoing = outgoing_of(request)
        if outgoing is not None:
            self._start_sending(outgoing)

    def tell_expected(self, request: Request, seconds: float) -> None:
        outgoing = outgoing_of(request)
        if outgoing is not None and not request.state.is_terminal:
            outgoing.expected_at = time.monotonic() + seconds
            self._tell_expected(outgoing)

    def _tell_expected(self, outgoing: OutgoingRoom) -> None:
        """Tell the peer the predicted end of the prefill, if we have one and it has reserved."""
        request, reservation = outgoing.request, outgoing.reservation
        if reservation is None or outgoing.expected_at is None:
            return
        message = PromptExpected(
            to=request.peer,
            sender=self._core.instance_id,
            room=request.room,
            epoch=reservation.epoch,
            seconds=max(0.0, outgoing.expected_at - time.monotonic()),
        )
        self.peers.send_message(message)

    def _start_sending(self, outgoing: OutgoingRoom) -> None:
        """Start to send, if the peer has reserved.

        Pushes the KV in the pool, unless it may wait for work not launched yet.
        """
        if outgoing.reservation is None or outgoing.sender is not None:
            return
        request = outgoing.request
        sequence = request.sequence
        launched = (
            sequence.num_computed if sequence.launched_work is None else sequence.launched_work.stop
        )
        ahead = outgoing.cost.remaining_flops(launched, len(request.prompt))
        with self._commits.contain_errors(request):
            outgoing.sender = self._transfer.sender(
                request.peer, outgoing.reservation, sequence.tables, len(request.prompt)
            )
            if not outgoing.may_wait(sequence.num_computed - outgoing.pushed, ahead):
                self._push_computed(outgoing)

    def _push_computed(self, outgoing: OutgoingRoom) -> None:
        """Send everything computed and unsent. Backends may raise any error here."""
        if outgoing.sender is None:
            return
        request, engine = outgoing.request, self._core.engine
        computed = request.sequence.num_computed
        if computed > outgoing.pushed:
            with engine.use_side_stream():
                outgoing.push_until(computed)
        if request.state is RequestState.SENDING:
            outgoing.sender.finish()
            with engine.use_side_stream():
                self._commits.start_digest(outgoing)

    def make_layer_sender(self, works: list[Work]) -> Callable[[int, int], None] | None:
        """Make a callback for the forward pass of one step; None if the step has no chunks.

        During the step it pushes the chunks while their layers are computed. It also pushes earlier
        tokens if their reservation arrived too late. It acquires the node's lock, as this method
        does.
        """
        with self._core.events.lock:
            chunks = [
                Chunk(outgoing, work.start, work.stop, len(outgoing.request.prompt))
                for work in works
                if (outgoing := outgoing_of(work.sequence.request)) is not None
            ]
        if not chunks:
            return None

        def layers_done(first: int, stop: int) -> None:
            with self._core.events.event():
                for chunk in chunks:
                    request = chunk.outgoing.request
                    if not request.state.is_terminal:
                        with self._commits.contain_errors(request):
                            chunk.layers_done(first, stop)

        return layers_done

    def on_chunk_computed(self, work: Work) -> None:
        """Push a computed chunk, unless the forward pass has pushed it or it may wait."""
        outgoing = outgoing_of(work.sequence.request)
        if outgoing is None or outgoing.sender is None:
            return
        ahead = outgoing.cost.remaining_flops(work.stop, len(outgoing.request.prompt))
        with self._commits.contain_errors(outgoing.request):
            if not outgoing.may_wait(work.stop - outgoing.pushed, ahead):
                self._push_computed(outgoing)

    def on_prompt_computed(self, request: Request) -> None:
        outgoing = outgoing_of(request)
        assert outgoing is not None
        request.state = RequestState.SENDING
        outgoing.computed_at = time.monotonic()
        self._commits.in_flight.append(outgoing)
        with self._commits.contain_errors(request):
            self._push_computed(outgoing)

    def park_prompts(self, pages: int) -> None:
        """See :meth:`PromptSender.park_prompts`. We park the youngest first.

        Otherwise they would wait for the decode node's memory while it waits for prefills that need
        theirs. Their KV stays cached as long as no other request needs the pages.
        """
        for outgoing in reversed(self._commits.in_flight):
            if self._core.memory.num_available >= pages:
                return
            self._park_prompt(outgoing)

    def _park_prompt(self, outgoing: OutgoingRoom) -> None:
        if outgoing.reservation is None and not outgoing.parked:
            outgoing.parked = True
            self._core.memory.release_pages(outgoing.request.sequence)

    def return_reservations(self) -> None:
        """See :meth:`PromptSender.return_reservations`.

        Nodes may wait for each other in a circle. We return the reservations of nodes with a
        smaller instance id, because every circle has one. A peer that is not waiting reserves again
        at once, so we keep each reservation for a while.
        """
        own, kept = self._core.instance_id, time.monotonic() - LACKING_SECONDS
        for outgoing in self._live_outgoing():
            request, reservation = outgoing.request, outgoing.reservation
            waits = request.state is RequestState.WAITING and outgoing.sender is None
            if reservation is None or not waits or request.peer > own:
                continue
            if outgoing.reserved_at > kept:
                continue
            outgoing.reservation = None
            request.state = RequestState.BOOTSTRAPPING
            message = Returned(
                to=request.peer, sender=own, room=request.room, epoch=reservation.epoch
            )
            self.peers.send_message(message)

    def poll_transfers(self) -> bool:
        """Commit complete transfers; True while one is about to complete."""
        return self._commits.commit_complete()

    # ---- the end of a room

    def _on_abort_room(self, identity: bytes, message: AbortRoom) -> None:
        """Handle a peer that ended the room, or repeats that it waits for the drain."""
        known = self.peers.renew_lease(message.sender)
        self._early.pop((message.room, message.sender), None)
        request = self._requests.find_request(message.room)
        if request is None and known:
            self._requests.add_tombstone(message.room)
        outgoing = None
        if request is not None and request.peer == message.sender:
            outgoing = outgoing_of(request)
        reservation = None if outgoing is None else outgoing.reservation
        if reservation is None or reservation.epoch != message.epoch:
            # We never sent anything for this epoch, or all of it has landed.
            self._post_drained(message.sender, message.room, message.epoch)
        if outgoing is None or outgoing.request.state.is_terminal:
            return  # if something may still land, Drained follows the release of the pages
        if reservation is not None and reservation.epoch != message.epoch:
            logger.warning("dropped an abort of room %s: wrong epoch", message.room.hex())
            return
        error = error_of_peer(message.error.kind, message.error.message)
        by_proxy = message.error.kind == AbortedError.kind
        self._requests.fail_request(outgoing.request, error, tell_proxy=not by_proxy)

    def end_hand_off(self, request: Request, before: RequestState) -> None:
        outgoing = outgoing_of(request)
        if outgoing is None:
            return
        if outgoing in self._commits.in_flight:
            self._commits.in_flight.remove(outgoing)
        if outgoing.acknowledged:
            return
        if outgoing.sender is not None:
            contained.abort_transfer(outgoing.sender, request.peer)
        epoch = outgoing.reservation.epoch if outgoing.reservation else 0
        abort = self._make_abort(request.peer, request.room, epoch, _end_reason(request))
        self.peers.send_when_reached(abort)

    def may_release(self, request: Request) -> bool:
        """Whether both the sender and the digest are done with the source pages."""
        outgoing = outgoing_of(request)
        if outgoing is None or not Digests.try_release(outgoing.digest):
            return outgoing is None
        sender = outgoing.sender
        return sender is None or contained.is_drained(sender, request.peer, self._broken)

    def finish_release(self, request: Request) -> None:
        """Tell the peer that nothing of the epoch can land any more."""
        outgoing = outgoing_of(request)
        if outgoing is None or outgoing.reservation is None or outgoing.acknowledged:
            return
        self._post_drained(request.peer, request.room, outgoing.reservation.epoch)

    def drop_expired(self, now: float) -> None:
        for instance in self.peers.find_silent(now):
            self.drop_peer(instance, f"no heartbeat for {LEASE_SECONDS} s")
        # NOTE: a message of the proxy also ends both waits, so we extend them by the run delay of
        # the most delayed process.
        for key, (came, early) in list(self._early.items()):
            request = self._requests.find_request(early.room)
            if request is not None and request.state is RequestState.COMPILING:
                continue
            if self._requests.has_tombstone(early.room):
                del self._early[key]
                self._refuse_reservation(early, ErrorInfo(FINISHED, "the room has ended"))
            elif self._patience.is_over(came, LEASE_SECONDS):
                del self._early[key]
                self._refuse_reservation(early, _room_misuse_error("prefill node got no request"))
        for outgoing in self._commits.in_flight:
            # A request waiting for a grammar holds no pages, on whichever node it is compiled.
            waits = outgoing.request.params.grammar is not None and not outgoing.peer_has_grammar
            if waits and now > outgoing.computed_at + HEARTBEAT_INTERVAL:
                self._park_prompt(outgoing)
        for outgoing in self._live_outgoing():
            request = outgoing.request
            if request.state is RequestState.RUNNING and outgoing.sender is not None:
                self._commits.check_transfer(outgoing, outgoing.sender)
            if request.peer not in self.peers and self._patience.is_over(
                request.times.arrived, LEASE_SECONDS
            ):
                error = PeerFailedError(f"decode node {request.peer} did not shake hands")
                self._requests.fail_request(request, error)

    # ---- administration

    def iter_queued(self) -> Iterator[Sequence]:
        return (outgoing.request.sequence for outgoing in self._commits.in_flight)

    def count_queues(self) -> dict[str, int]:
        waiting = sum(o.request.state is RequestState.BOOTSTRAPPING for o in self._live_outgoing())
        return {"bootstrap": waiting, "in_flight": len(self._commits.in_flight)}

    def close(self) -> None:
        """Stop computing digests."""
        self._commits.close()

    # ---- messages

    def _refuse_reservation(self, message: GrammarReady | Reservation, error: ErrorInfo) -> None:
        to, room = message.sender, message.room
        epoch = message.epoch if isinstance(message, Reservation) else 0
        self.peers.send_when_reached(self._make_abort(to, room, epoch, error))
        if isinstance(message, Reservation):
            self._post_drained(to, room, epoch)

    def _make_abort(self, to: str, room: bytes, epoch: int, error: ErrorInfo) -> AbortRoom:
        own = self._core.instance_id
        return AbortRoom(to=to, sender=own, room=room, epoch=epoch, error=error)

    def _post_drained(self, to: str, room: bytes, epoch: int) -> None:
        # NOTE: bytes on their way to a disconnected peer may still land. Only its own disconnect
        # ends that.
        if to in self.peers:
            own = self._core.instance_id
            self.peers.send_message(Drained(to=to, sender=own, room=room, epoch=epoch))


def _room_misuse_error(text: str) -> ErrorInfo:
    """Make the error for a message that does not fit its room."""
    return ErrorInfo(NodeFailedError.kind, text)


def _end_reason(request: Request) -> ErrorInfo:
    """Return the cause of a terminal request's end."""
    if request.error is None:
        return ErrorInfo(FINISHED, "token 1 ended the request")
    return ErrorInfo(request.error.kind, request.error.message)
