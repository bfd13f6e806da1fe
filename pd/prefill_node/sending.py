"""P's half of a hand-off: from the reservation to the acknowledged commit (queue "in flight")."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pd.core.errors import (
    HandshakeError,
    NodeFailedError,
    PDError,
    TransferError,
    error_from_kind,
)
from pd.core.messages import (
    HEARTBEAT_INTERVAL,
    LEASE_SECONDS,
    AbortRoom,
    Commit,
    Drained,
    ErrorInfo,
    Reservation,
)
from pd.core.request import RequestState
from pd.engine.digests import Digests
from pd.prefill_node.outgoing import Chunk, Outgoing, PromptCost
from pd.prefill_node.peers import DecodePeers
from pd.transfer.base import TransferState

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.node_info import NodeInfo
    from pd.core.request import Request
    from pd.prefill_node.node import PrefillNode
    from pd.scheduling.step import Work
    from pd.transfer.base import Sender, TransferManager

logger = logging.getLogger(__name__)

# ``AbortRoom`` with this kind is no failure: token 1 ended the request.
FINISHED = "finished"


class HandOff:
    """All rooms that P hands to decode nodes. The caller holds the node's lock."""

    def __init__(
        self, node: PrefillNode, transfer: TransferManager, resume: Callable[[Request], None]
    ) -> None:
        self._node = node
        self._transfer = transfer
        self._resume = resume
        model, layout = node.engine.model_config, node.engine.layout
        self._cost = PromptCost(
            layout.num_layers,
            layout.token_bytes,
            model.token_flops / layout.tp_size,
            model.pair_flops / layout.tp_size,
        )
        self._digests: Digests | None = None
        if node.config.kv_digest:
            self._digests = Digests(node.engine.pool, done=node.control.wake)
        self._patience = transfer.patience
        self.peers = DecodePeers(node.instance_id, node.control.post, self._patience)
        # Reservations whose requests have not come yet, by room and sender, and when they came.
        self._early: dict[tuple[bytes, str], tuple[float, Reservation]] = {}
        self.in_flight: list[Request] = []

    # ---- peers

    def add_peer(self, peer: NodeInfo) -> None:
        """A decode node shook hands."""
        self._transfer.connect(peer)
        if peer.instance_id not in self.peers:
            backend = self._transfer.backend_of(peer.instance_id)
            logger.info("KV for decode node %s travels by %s", peer.instance_id, backend)
        self.peers.add(peer)

    def lose_peer(self, instance: str, why: str) -> None:
        """A decode node is gone: what it had is lost, nothing else."""
        if not self.peers.drop(instance):
            return
        logger.warning("decode node %s lost: %s", instance, why)
        if self._node.registry is not None:
            self._node.registry.forget(instance)
        self._transfer.disconnect(instance)
        self._early = {key: early for key, early in self._early.items() if key[1] != instance}
        error = NodeFailedError(f"decode node {instance} failed: {why}")
        for request in [r for r in self._node.requests.values() if r.peer == instance]:
            self._node.fail(request, error)
        self.peers.drop(instance)  # there is no point in telling it later

    # ---- the way of a room

    def accept(self, request: Request) -> None:
        """A new request; its reservation may have come first."""
        request.hand_off = Outgoing(self._cost)
        if not request.peer:
            return
        early = self._early.pop((request.room, request.peer), None)
        if early is not None:
            self.reserve(request, early[1])

    def refuse_stranger(self, sender: str, room: bytes = b"", epoch: int = 0) -> None:
        """Tell a decode node that is not known, or not any more, to shake hands (again)."""
        logger.warning("%s is not known here", sender)
        error = ErrorInfo(HandshakeError.kind, f"{sender} did not shake hands")
        self.peers.send(self._abort(sender, room, epoch, error))

    def on_reservation(self, message: Reservation) -> None:
        """D reserved slots, for a room that may be known, unknown yet, or gone."""
        if not self.peers.heard_from(message.sender):
            self.refuse_stranger(message.sender, message.room, message.epoch)
            return
        request = self._node.requests.get(message.room)
        if request is None:
            if self._node.is_buried(message.room):
                self._refuse(message, ErrorInfo(FINISHED, "the room has ended"))
            else:
                self._early[message.room, message.sender] = (time.monotonic(), message)
            return
        first = request.hand_off.reservation
        if message.sender != request.peer:
            self._refuse(message, ErrorInfo("node_failed", "the room is for another node"))
        elif first is not None and first.epoch != message.epoch:
            self._refuse(message, ErrorInfo("node_failed", "the room has a reservation already"))
        elif request.state.terminal:
            error = _reason(request)
            if first is None:
                self._refuse(message, error)
            else:  # its release says when it has drained
                self.peers.tell(self._abort(message.sender, message.room, message.epoch, error))
        elif first is None:
            self.reserve(request, message)
        else:
            logger.warning("dropped a repeated reservation of room %s", message.room.hex())

    def reserve(self, request: Request, reservation: Reservation) -> None:
        """Open the sender and push what is computed already."""
        outgoing: Outgoing = request.hand_off
        if not 0 <= reservation.cached_prefix_len <= len(request.prompt):
            error = TransferError(
                f"decode node {request.peer} claims {reservation.cached_prefix_len} cached tokens "
                f"of a prompt of {len(request.prompt)}"
            )
            self._node.fail(request, error)
            return
        outgoing.reservation = reservation
        outgoing.reserved_at = time.monotonic()
        outgoing.pushed = reservation.cached_prefix_len
        if request.state is RequestState.BOOTSTRAPPING:
            request.state = RequestState.WAITING
        if outgoing.parked:
            outgoing.parked = False
            self.in_flight.remove(request)
            request.state = RequestState.WAITING
            self._resume(request)
        elif request.state in (RequestState.RUNNING, RequestState.SENDING):
            self.open(request)

    def open(self, request: Request) -> None:
        """Begin to send, if D has reserved; pushes what is in the pool and may not wait for what is
        not launched yet."""
        outgoing: Outgoing = request.hand_off
        if outgoing.reservation is None or outgoing.sender is not None:
            return
        sequence = request.sequence
        try:
            outgoing.sender = self._transfer.sender(
                request.peer, outgoing.reservation, sequence.pages, len(request.prompt)
            )
        except Exception as error:
            # A PDError, or whatever torch raises without memory.
            if not isinstance(error, PDError):
                logger.exception("cannot open a transfer to %s", request.peer)
                error = TransferError(f"cannot open a transfer to {request.peer}: {error}")
            self._node.fail(request, error)
            return
        launched = sequence.num_computed if sequence.launched is None else sequence.launched.stop
        ahead = outgoing.cost.flops(launched, len(request.prompt))
        if not outgoing.may_wait(sequence.num_computed - outgoing.pushed, ahead):
            self._push(request)

    def _push(self, request: Request) -> None:
        outgoing, computed = request.hand_off, request.sequence.num_computed
        if outgoing.sender is None:
            return
        if computed > outgoing.pushed:
            layers = self._node.engine.layout.num_layers
            with self._node.engine.beside_steps():
                outgoing.send(outgoing.pushed, computed, 0, layers)
            outgoing.pushed = computed
        if request.state is RequestState.SENDING:
            outgoing.sender.finish()
            with self._node.engine.beside_steps():
                self._start_digest(request)

    def layer_sender(self, works: list[Work]) -> Callable[[int, int], None] | None:
        """For one step: pushes its chunks while their layers are computed, and what D's reservation
        came too late for, also if that comes during the step. The returned callback acquires the
        node's lock."""
        chunks = [
            Chunk(request.hand_off, work.start, work.stop, len(request.prompt))
            for work in works
            if (request := work.sequence.request).peer
        ]
        if not chunks:
            return None

        def layers_done(first: int, stop: int) -> None:
            with self._node.event():
                for chunk in chunks:
                    chunk.layers_done(first, stop)

        return layers_done

    def computed(self, work: Work) -> None:
        """A chunk is in the pool; push it unless the forward pass did, or it may wait."""
        request = work.sequence.request
        outgoing: Outgoing = request.hand_off
        if outgoing.sender is None:
            return
        ahead = outgoing.cost.flops(work.stop, len(request.prompt))
        if not outgoing.may_wait(work.stop - outgoing.pushed, ahead):
            self._push(request)

    def completed(self, request: Request) -> None:
        """The whole prompt is computed and token 1 is known."""
        request.state = RequestState.SENDING
        request.hand_off.computed_at = time.monotonic()
        self.in_flight.append(request)
        self._push(request)

    def poll(self) -> bool:
        """Commit what is complete; True while a transfer is about to be."""
        busy = False
        now = time.monotonic()
        for request in list(self.in_flight):
            outgoing: Outgoing = request.hand_off
            if outgoing.sender is None:
                continue
            state = self._check(request, outgoing.sender)
            if state is TransferState.DONE:
                outgoing.sent = outgoing.sent or now
                if outgoing.commit_sent is None or now > outgoing.commit_sent + HEARTBEAT_INTERVAL:
                    self._commit(request, now)
            elif state is TransferState.ACTIVE:
                busy = True
        return busy

    def _check(self, request: Request, sender: Sender) -> TransferState:
        """What became of its transfer; if that failed, the request ends."""
        state = sender.poll()
        if state is TransferState.FAILED:
            self._node.fail(request, sender.error or TransferError("the transfer failed"))
        return state

    def _commit(self, request: Request, now: float) -> None:
        """All bytes left for good: say so, once the digest is known too."""
        outgoing: Outgoing = request.hand_off
        assert outgoing.reservation is not None and outgoing.sender is not None
        digest = b""
        if outgoing.digest is not None:
            if not outgoing.digest.done():
                return  # its end wakes the control thread
            try:
                digest = Digests.result(outgoing.digest)
            except TransferError as error:
                self._node.fail(request, error)
                return
        outgoing.complete = outgoing.complete or now
        outgoing.commit_sent = now
        times = outgoing.times(request.times.arrived)
        message = Commit(
            to=request.peer,
            sender=self._node.instance_id,
            room=request.room,
            epoch=outgoing.reservation.epoch,
            num_bytes=outgoing.sender.bytes_sent,
            first_tokens=outgoing.first_tokens,
            digest=digest,
            wire_seconds=times.wire,
            exposed_seconds=times.exposed,
        )
        self.peers.send(message)

    def _start_digest(self, request: Request) -> None:
        """Beside the last of the transfer: everything it reads is computed."""
        outgoing: Outgoing = request.hand_off
        if self._digests is None or outgoing.digest is not None:
            return
        assert outgoing.reservation is not None
        start = outgoing.reservation.cached_prefix_len
        outgoing.digest = self._digests.start(request.sequence.pages, start, len(request.prompt))

    def on_commit_ack(self, peer: str, room: bytes, epoch: int) -> None:
        """D has it all."""
        request = self._node.requests.get(room)
        if request is None or request.state is not RequestState.SENDING or request.peer != peer:
            return
        outgoing: Outgoing = request.hand_off
        if outgoing.commit_sent is None or outgoing.reservation is None:
            return
        if outgoing.reservation.epoch == epoch:
            outgoing.acknowledged = True
            metrics = self._node.metrics
            num_bytes = outgoing.sender.bytes_sent if outgoing.sender else 0
            metrics.transferred_bytes.inc(num_bytes)
            backend = self._transfer.backend_of(peer)
            metrics.transfers.observe(backend, num_bytes, outgoing.times(request.times.arrived))
            metrics.observe("transfer", time.monotonic() - (request.times.first_token or 0.0))
            self._node.finish(request)

    def on_abort(self, message: AbortRoom) -> None:
        """D gave the room up, or repeats that it waits for our drain."""
        known = self.peers.heard_from(message.sender)
        self._early.pop((message.room, message.sender), None)
        request = self._node.requests.get(message.room)
        if request is None and known:
            self._node.bury(message.room)
        mine = request is not None and request.peer == message.sender
        reservation = request.hand_off.reservation if request is not None and mine else None
        if reservation is None or reservation.epoch != message.epoch:
            # Nothing was ever sent for this epoch, or all of it has landed.
            self._post_drained(message.sender, message.room, message.epoch)
        if request is None or not mine or request.state.terminal:
            return  # where something may still land, the release answers
        if reservation is not None and reservation.epoch != message.epoch:
            logger.warning("dropped an abort of room %s: wrong epoch", message.room.hex())
            return
        error = error_from_kind(message.error.kind, message.error.message)
        self._node.fail(request, error, tell_proxy=message.error.kind != "aborted")

    # ---- the end

    def ended(self, request: Request) -> None:
        """Stop the transfer of a terminal request and tell D."""
        outgoing: Outgoing = request.hand_off
        if request in self.in_flight:
            self.in_flight.remove(request)
        if outgoing.acknowledged or not request.peer:
            return
        if outgoing.sender is not None:
            outgoing.sender.abort()
        epoch = outgoing.reservation.epoch if outgoing.reservation else 0
        self.peers.tell(self._abort(request.peer, request.room, epoch, _reason(request)))

    def may_release(self, request: Request) -> bool:
        """Whether the sender and the digest have let go of the source pages."""
        outgoing: Outgoing = request.hand_off
        sender = outgoing.sender
        return Digests.over(outgoing.digest) and (sender is None or bool(sender.drained()))

    def released(self, request: Request) -> None:
        """Tell D that nothing of the epoch can land any more."""
        outgoing: Outgoing = request.hand_off
        if outgoing.reservation is not None and not outgoing.acknowledged:
            self._post_drained(request.peer, request.room, outgoing.reservation.epoch)

    def park(self, pages: int) -> None:
        """Free pages of computed requests that D has not reserved for, youngest first.

        They would otherwise wait for D's memory while D's memory waits for prefills that wait for
        theirs. Their KV stays cached as long as nobody needs the room.
        """
        memory = self._node.memory
        for request in reversed(self.in_flight):
            if memory.available >= pages:
                return
            outgoing: Outgoing = request.hand_off
            if outgoing.reservation is None and not outgoing.parked:
                outgoing.parked = True
                memory.release(request.sequence)

    def sweep(self, now: float) -> None:
        """End what waited longer than a lease for a peer."""
        for instance in self.peers.expired(now):
            self.lose_peer(instance, f"no heartbeat for {LEASE_SECONDS} s")
        # NOTE: both wait for something of the proxy too, so the most delayed of all others counts.
        for key, (came, reservation) in list(self._early.items()):
            if self._patience.is_over(came, LEASE_SECONDS):
                del self._early[key]
                self._refuse(reservation, ErrorInfo("node_failed", "prefill node got no request"))
        for request in list(self._node.requests.values()):
            sender = request.hand_off.sender
            if request.state is RequestState.RUNNING and sender is not None:
                self._check(request, sender)
            is_met = not request.peer or request.peer in self.peers
            if not is_met and self._patience.is_over(request.times.arrived, LEASE_SECONDS):
                error = NodeFailedError(f"decode node {request.peer} did not shake hands")
                self._node.fail(request, error)

    def close(self) -> None:
        """Stop computing digests."""
        if self._digests is not None:
            self._digests.close()

    def _refuse(self, reservation: Reservation, error: ErrorInfo) -> None:
        to, room, epoch = reservation.sender, reservation.room, reservation.epoch
        self.peers.tell(self._abort(to, room, epoch, error))
        self._post_drained(to, room, epoch)

    def _abort(self, to: str, room: bytes, epoch: int, error: ErrorInfo) -> AbortRoom:
        own = self._node.instance_id
        return AbortRoom(to=to, sender=own, room=room, epoch=epoch, error=error)

    def _post_drained(self, to: str, room: bytes, epoch: int) -> None:
        # NOTE: what is on its way to a peer that was disconnected may still land, and only that
        # peer's own disconnect ends it.
        if to in self.peers:
            own = self._node.instance_id
            self.peers.send(Drained(to=to, sender=own, room=room, epoch=epoch))


def _reason(request: Request) -> ErrorInfo:
    """Why a terminal request ended."""
    if request.error is None:
        return ErrorInfo(FINISHED, "token 1 ended the request")
    return ErrorInfo(request.error.kind, request.error.message)
