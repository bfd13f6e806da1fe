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
from pd.core.request import RequestState
from pd.core.seldom import Seldom
from pd.engine.digests import Digests
from pd.prefill_node.commits import Commits
from pd.prefill_node.outgoing import Chunk, OutgoingRoom, PromptCost
from pd.prefill_node.peers import DecodePeers
from pd.scheduling.memory import LACKING_SECONDS
from pd.scheduling.transfer_end import PromptSender
from pd.transfer import contained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.node_info import NodeInfo
    from pd.core.request import Request, Sequence
    from pd.scheduling.core import NodeCore
    from pd.scheduling.handlers import Handlers
    from pd.scheduling.step import Work
    from pd.transfer.base import TransferManager

logger = logging.getLogger(__name__)


class SendingEnd(PromptSender):
    """All rooms whose KV this node sends to decode nodes. The caller holds the node's lock.

    Args:
        resume: puts a parked request back into the waiting queue.
        forget: called with a decode node that is dropped, so that it may shake hands again.
        digests: computes the digests that commits carry; None without ``--kv-digest``.
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
        self._core, self._rooms, self._transfer = core, core.rooms, transfer
        self._resume, self._forget = resume, forget
        model, layout = core.engine.model_config, core.engine.layout
        self._cost = PromptCost(
            layout.model.num_layers,
            layout.token_bytes,
            model.token_flops / layout.tp_size,
            model.pair_flops / layout.tp_size,
            layout.num_layers - layout.model.num_layers,
        )
        self._patience = transfer.patience
        self._broken = Seldom(logger)
        self.decode_peers = DecodePeers(core.instance_id, core.post, self._patience)
        # What peers said of requests that have not come yet, or wait for their grammar, by room and
        # sender, and when it came.
        self._early: dict[tuple[bytes, str], tuple[float, GrammarReady | Reservation]] = {}
        self._commits = Commits(core, transfer, self.decode_peers, digests)

    def register(self, handlers: Handlers) -> None:
        handlers.on(GrammarReady, self._on_grammar_ready)
        handlers.on(Reservation, self._on_reservation)
        handlers.on(CommitAck, self._commits.on_commit_ack)
        handlers.on(AbortRoom, self._on_abort_room)
        handlers.on(PeerHeartbeat, self._on_peer_heartbeat)

    def _outgoing(self) -> Iterator[OutgoingRoom]:
        return (r.outgoing for r in self._rooms if r.outgoing is not None)

    # ---- peers

    def add_peer(self, peer: NodeInfo) -> None:
        """Take a decode node that shook hands as a peer. Any thread."""
        with self._core.events.event():
            self._transfer.connect(peer)
            if peer.instance_id not in self.decode_peers:
                backend = self._transfer.backend_of(peer.instance_id)
                logger.info("KV for decode node %s travels by %s", peer.instance_id, backend)
            self.decode_peers.add(peer)

    def drop_peer(self, instance: str, why: str) -> bool:
        """Forget a decode node: requests for it fail, everything else goes on. Any thread."""
        with self._core.events.event():
            if not self.decode_peers.drop(instance):
                return False
            logger.warning("decode node %s lost: %s", instance, why)
            self._forget(instance)
            contained.disconnect(self._transfer, instance)
            self._early = {key: early for key, early in self._early.items() if key[1] != instance}
            error = PeerFailedError(f"decode node {instance} failed: {why}")
            for outgoing in self._outgoing():
                if outgoing.request.peer == instance:
                    self._rooms.fail(outgoing.request, error)
            # NOTE: again, since the requests that failed have left aborts for the node.
            self.decode_peers.drop(instance)
            return True

    def peers(self) -> list[NodeInfo]:
        return self.decode_peers.infos()

    def backend_of(self, instance: str) -> str:
        return self._transfer.backend_of(instance)

    def _on_peer_heartbeat(self, identity: bytes, message: PeerHeartbeat) -> None:
        self._patience.heard(message.sender, message.run_delay)
        if not self.decode_peers.renew(message.sender):
            # The node stood still for longer than its lease. Refused now, it shakes hands again
            # before its next reservation, whose request would fail.
            self._refuse_unknown(message.sender)

    def _refuse_unknown(self, sender: str, room: bytes = b"", epoch: int = 0) -> None:
        """Have a decode node that is not known, or not any more, shake hands (again)."""
        logger.warning("decode node %s did not shake hands with this node; it is asked to", sender)
        error = ErrorInfo(HandshakeError.kind, f"{sender} did not shake hands")
        self.decode_peers.send(self._abort(sender, room, epoch, error))

    def heartbeat(self) -> None:
        self.decode_peers.heartbeat()

    # ---- reservations

    def accept(self, request: Request) -> None:
        """Take a new request, of which the peer may have spoken before."""
        request.state = RequestState.BOOTSTRAPPING
        request.outgoing = outgoing = OutgoingRoom(request, self._cost)
        _, early = self._early.pop((request.room, request.peer), (0.0, None))
        if isinstance(early, GrammarReady):
            self._answer_grammar(outgoing)
        elif early is not None:
            self.take_reservation(outgoing, early)

    def _on_grammar_ready(self, identity: bytes, message: GrammarReady) -> None:
        """The peer has the grammar of a room, and waits until this node has it, too."""
        if not self.decode_peers.renew(message.sender):
            self._refuse_unknown(message.sender, message.room)
            return
        request = self._rooms.get(message.room)
        if request is None or request.state is RequestState.COMPILING:
            self._keep_early(message)
        elif request.state.terminal and message.sender == request.peer:
            self._refuse(message, _reason(request))
        elif request.outgoing is None or message.sender != request.peer:
            self._refuse(message, _misused("the room is for another node"))
        else:
            self._answer_grammar(request.outgoing)

    def _answer_grammar(self, outgoing: OutgoingRoom) -> None:
        outgoing.peer_has_grammar = True
        request, own = outgoing.request, self._core.instance_id
        self.decode_peers.send(GrammarReady(to=request.peer, sender=own, room=request.room))

    def _keep_early(self, message: GrammarReady | Reservation) -> None:
        """Keep what a peer says of a room until its request can be accepted, unless that has
        ended."""
        if self._rooms.has_tombstone(message.room):
            self._refuse(message, ErrorInfo(FINISHED, "the room has ended"))
            return
        key = message.room, message.sender
        came, _ = self._early.get(key, (time.monotonic(), None))
        self._early[key] = came, message

    def _on_reservation(self, identity: bytes, message: Reservation) -> None:
        """The peer reserved pages for a room, which may be known, unknown yet, or ended."""
        self._core.events.work_available.set()
        if not self.decode_peers.renew(message.sender):
            self._refuse_unknown(message.sender, message.room, message.epoch)
            return
        request = self._rooms.get(message.room)
        if request is None or request.state is RequestState.COMPILING:
            self._keep_early(message)
            return
        outgoing = request.outgoing
        if outgoing is None or message.sender != request.peer:
            self._refuse(message, _misused("the room is for another node"))
            return
        first = outgoing.reservation
        if first is not None and first.epoch != message.epoch:
            self._refuse(message, _misused("the room has a reservation already"))
        elif request.state.terminal:
            error = _reason(request)
            if first is None:
                self._refuse(message, error)
            else:  # Drained follows when its pages are released
                abort = self._abort(message.sender, message.room, message.epoch, error)
                self.decode_peers.send_when_reached(abort)
        elif first is None:
            self.take_reservation(outgoing, message)
        else:
            logger.warning("dropped a repeated reservation of room %s", message.room.hex())

    def take_reservation(self, outgoing: OutgoingRoom, reservation: Reservation) -> None:
        """Take the reservation of a room; open the sender and push what is computed already."""
        request = outgoing.request
        wrong = self._complaint(request, reservation.cached)
        if wrong:
            error = TransferError(f"decode node {request.peer} claims {wrong}")
            self._rooms.fail(request, error)
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
            self._open(outgoing)
            self._tell_expected(outgoing)

    def _complaint(self, request: Request, cached: tuple[int, ...]) -> str:
        """Describe what is wrong with a peer's numbers of cached tokens; empty if nothing is."""
        groups, length = self._core.engine.layout.num_groups, len(request.prompt)
        if len(cached) != groups:
            return f"cached tokens in {len(cached)} groups of planes; there are {groups}"
        if not 0 <= min(cached) <= max(cached) <= length:
            return f"{', '.join(map(str, cached))} cached tokens of a prompt of {length}"
        return ""

    def will_leave(self, request: Request) -> bool:
        """Whether a request, once computed, waits for no memory of another node."""
        if request.outgoing is None:
            return request.max_new_tokens <= 1
        return request.outgoing.reservation is not None

    # ---- sending

    def open(self, request: Request) -> None:
        if request.outgoing is not None:
            self._open(request.outgoing)

    def tell_expected(self, request: Request, seconds: float) -> None:
        outgoing = request.outgoing
        if outgoing is not None and not request.state.terminal:
            outgoing.expected_at = time.monotonic() + seconds
            self._tell_expected(outgoing)

    def _tell_expected(self, outgoing: OutgoingRoom) -> None:
        """Tell the peer when the prompt will be computed, if it is predicted and the peer has
        reserved."""
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
        self.decode_peers.send(message)

    def _open(self, outgoing: OutgoingRoom) -> None:
        """Begin to send, if the peer has reserved. Pushes KV that is in the pool, unless it may
        wait for work that is not launched yet."""
        if outgoing.reservation is None or outgoing.sender is not None:
            return
        request = outgoing.request
        sequence = request.sequence
        launched = sequence.num_computed if sequence.launched is None else sequence.launched.stop
        ahead = outgoing.cost.flops(launched, len(request.prompt))
        with self._commits.contained(request):
            outgoing.sender = self._transfer.sender(
                request.peer, outgoing.reservation, sequence.pages, len(request.prompt)
            )
            if not outgoing.may_wait(sequence.num_computed - outgoing.pushed, ahead):
                self._push(outgoing)

    def _push(self, outgoing: OutgoingRoom) -> None:
        """Send all that is computed and not sent. Raises what the backend raises."""
        if outgoing.sender is None:
            return
        request, engine = outgoing.request, self._core.engine
        computed = request.sequence.num_computed
        if computed > outgoing.pushed:
            with engine.beside_steps():
                outgoing.push(computed)
        if request.state is RequestState.SENDING:
            outgoing.sender.finish()
            with engine.beside_steps():
                self._commits.start_digest(outgoing)

    def layer_sender(self, works: list[Work]) -> Callable[[int, int], None] | None:
        """Make a function that the forward pass of one step calls; None if the step has no chunks.

        The function pushes the step's chunks while their layers are computed. It also pushes tokens
        before them whose reservation came too late, even during the step. It acquires the node's
        lock, as this method does.
        """
        with self._core.events.lock:
            chunks = [
                Chunk(outgoing, work.start, work.stop, len(outgoing.request.prompt))
                for work in works
                if (outgoing := work.sequence.request.outgoing) is not None
            ]
        if not chunks:
            return None

        def layers_done(first: int, stop: int) -> None:
            with self._core.events.event():
                for chunk in chunks:
                    request = chunk.outgoing.request
                    if not request.state.terminal:
                        with self._commits.contained(request):
                            chunk.layers_done(first, stop)

        return layers_done

    def chunk_computed(self, work: Work) -> None:
        """Push a chunk that is in the pool, unless the forward pass has done so, or it may wait."""
        outgoing = work.sequence.request.outgoing
        if outgoing is None or outgoing.sender is None:
            return
        ahead = outgoing.cost.flops(work.stop, len(outgoing.request.prompt))
        with self._commits.contained(outgoing.request):
            if not outgoing.may_wait(work.stop - outgoing.pushed, ahead):
                self._push(outgoing)

    def prompt_computed(self, request: Request) -> None:
        outgoing = request.outgoing
        assert outgoing is not None
        request.state = RequestState.SENDING
        outgoing.computed_at = time.monotonic()
        self._commits.in_flight.append(outgoing)
        with self._commits.contained(request):
            self._push(outgoing)

    def park(self, pages: int) -> None:
        """See :meth:`PromptSender.park`. The youngest are parked first.

        They would otherwise wait for the decode node's memory, while that waits for prefills that
        wait for theirs. Their KV stays cached as long as no other request needs the pages.
        """
        for outgoing in reversed(self._commits.in_flight):
            if self._core.memory.available >= pages:
                return
            self._park(outgoing)

    def _park(self, outgoing: OutgoingRoom) -> None:
        if outgoing.reservation is None and not outgoing.parked:
            outgoing.parked = True
            self._core.memory.release(outgoing.request.sequence)

    def give_back(self) -> None:
        """See :meth:`PromptSender.give_back`. Nodes may wait for each other in a circle, so those
        of nodes with a smaller instance id are given back: in every circle there is one. A peer
        that does not wait reserves again at once, so each is kept for a while."""
        own, kept = self._core.instance_id, time.monotonic() - LACKING_SECONDS
        for outgoing in self._outgoing():
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
            self.decode_peers.send(message)

    def poll(self) -> bool:
        """Commit transfers that are complete; True while one is about to be."""
        return self._commits.poll()

    # ---- the end of a room

    def _on_abort_room(self, identity: bytes, message: AbortRoom) -> None:
        """The peer ended the room, or repeats that it waits for the drain."""
        known = self.decode_peers.renew(message.sender)
        self._early.pop((message.room, message.sender), None)
        request = self._rooms.get(message.room)
        if request is None and known:
            self._rooms.add_tombstone(message.room)
        outgoing = None
        if request is not None and request.peer == message.sender:
            outgoing = request.outgoing
        reservation = None if outgoing is None else outgoing.reservation
        if reservation is None or reservation.epoch != message.epoch:
            # Nothing was ever sent for this epoch, or all of it has landed.
            self._post_drained(message.sender, message.room, message.epoch)
        if outgoing is None or outgoing.request.state.terminal:
            return  # where something may still land, Drained follows the release of the pages
        if reservation is not None and reservation.epoch != message.epoch:
            logger.warning("dropped an abort of room %s: wrong epoch", message.room.hex())
            return
        error = error_of_peer(message.error.kind, message.error.message)
        by_proxy = message.error.kind == AbortedError.kind
        self._rooms.fail(outgoing.request, error, tell_proxy=not by_proxy)

    def ended(self, request: Request, before: RequestState) -> None:
        outgoing = request.outgoing
        if outgoing is None:
            return
        if outgoing in self._commits.in_flight:
            self._commits.in_flight.remove(outgoing)
        if outgoing.acknowledged:
            return
        if outgoing.sender is not None:
            contained.abort(outgoing.sender, request.peer)
        epoch = outgoing.reservation.epoch if outgoing.reservation else 0
        abort = self._abort(request.peer, request.room, epoch, _reason(request))
        self.decode_peers.send_when_reached(abort)

    def may_release(self, request: Request) -> bool:
        """Whether neither the sender nor the digest reads the source pages any more."""
        outgoing = request.outgoing
        if outgoing is None or not Digests.over(outgoing.digest):
            return outgoing is None
        sender = outgoing.sender
        return sender is None or contained.is_drained(sender, request.peer, self._broken)

    def released(self, request: Request) -> None:
        """Tell the peer that nothing of the epoch can land any more."""
        outgoing = request.outgoing
        if outgoing is None or outgoing.reservation is None or outgoing.acknowledged:
            return
        self._post_drained(request.peer, request.room, outgoing.reservation.epoch)

    def sweep(self, now: float) -> None:
        for instance in self.decode_peers.expired(now):
            self.drop_peer(instance, f"no heartbeat for {LEASE_SECONDS} s")
        # NOTE: both waits also end by a message of the proxy, so the run delay of the most delayed
        # process extends them.
        for key, (came, early) in list(self._early.items()):
            request = self._rooms.get(early.room)
            if request is not None and request.state is RequestState.COMPILING:
                continue
            if self._rooms.has_tombstone(early.room):
                del self._early[key]
                self._refuse(early, ErrorInfo(FINISHED, "the room has ended"))
            elif self._patience.is_over(came, LEASE_SECONDS):
                del self._early[key]
                self._refuse(early, _misused("prefill node got no request"))
        for outgoing in self._commits.in_flight:
            # A request holds no pages while it waits for a grammar, wherever that is compiled.
            waits = outgoing.request.params.grammar is not None and not outgoing.peer_has_grammar
            if waits and now > outgoing.computed_at + HEARTBEAT_INTERVAL:
                self._park(outgoing)
        for outgoing in self._outgoing():
            request = outgoing.request
            if request.state is RequestState.RUNNING and outgoing.sender is not None:
                self._commits.check(outgoing, outgoing.sender)
            if request.peer not in self.decode_peers and self._patience.is_over(
                request.times.arrived, LEASE_SECONDS
            ):
                error = PeerFailedError(f"decode node {request.peer} did not shake hands")
                self._rooms.fail(request, error)

    # ---- administration

    def queued(self) -> Iterator[Sequence]:
        return (outgoing.request.sequence for outgoing in self._commits.in_flight)

    def queues(self) -> dict[str, int]:
        waiting = sum(o.request.state is RequestState.BOOTSTRAPPING for o in self._outgoing())
        return {"bootstrap": waiting, "in_flight": len(self._commits.in_flight)}

    def close(self) -> None:
        """Stop computing digests."""
        self._commits.close()

    # ---- messages

    def _refuse(self, message: GrammarReady | Reservation, error: ErrorInfo) -> None:
        to, room = message.sender, message.room
        epoch = message.epoch if isinstance(message, Reservation) else 0
        self.decode_peers.send_when_reached(self._abort(to, room, epoch, error))
        if isinstance(message, Reservation):
            self._post_drained(to, room, epoch)

    def _abort(self, to: str, room: bytes, epoch: int, error: ErrorInfo) -> AbortRoom:
        own = self._core.instance_id
        return AbortRoom(to=to, sender=own, room=room, epoch=epoch, error=error)

    def _post_drained(self, to: str, room: bytes, epoch: int) -> None:
        # NOTE: bytes on their way to a peer that was disconnected may still land, and only that
        # peer's own disconnect ends it.
        if to in self.decode_peers:
            own = self._core.instance_id
            self.decode_peers.send(Drained(to=to, sender=own, room=room, epoch=epoch))


def _misused(text: str) -> ErrorInfo:
    """The error of a message about a room that the node cannot use."""
    return ErrorInfo(NodeFailedError.kind, text)


def _reason(request: Request) -> ErrorInfo:
    """Cause of the end of a terminal request."""
    if request.error is None:
        return ErrorInfo(FINISHED, "token 1 ended the request")
    return ErrorInfo(request.error.kind, request.error.message)
