"""Slots for prompts that prefill nodes compute: queues "preallocation" and "transfer"."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING

from pd.core.errors import HandshakeError, NodeFailedError, PDError, TransferError, error_from_kind
from pd.core.messages import (
    HEARTBEAT_INTERVAL,
    LEASE_SECONDS,
    AbortRoom,
    Commit,
    CommitAck,
    ErrorInfo,
    Reservation,
)
from pd.core.request import RequestState
from pd.decode_node.incoming import Incoming
from pd.engine.digests import Digests
from pd.engine.page_allocator import PageState
from pd.scheduling.metrics import TransferTimes
from pd.transfer.base import TransferState

if TYPE_CHECKING:
    from pd.core.request import Request
    from pd.decode_node.node import DecodeNode

logger = logging.getLogger(__name__)


class Receiving:
    """Reserves, receives, commits. The caller holds the node's lock.

    D never runs on KV that was not committed for exactly this room and epoch: pages stay RESERVED
    until the receiver says that all of it is here, and only then enter the radix tree.
    """

    def __init__(self, node: DecodeNode) -> None:
        self._node = node
        self._memory = node.memory
        # Random start: an epoch of an earlier life of this address is never repeated.
        self._epochs = itertools.count(secrets.randbits(40) << 20)
        self._recent: dict[bytes, tuple[float, int]] = {}
        self._digests: Digests | None = None
        if node.config.kv_digest:
            self._digests = Digests(node.engine.pool, done=node.control.wake)
        self.preallocation: deque[Request] = deque()
        self.transfer: list[Request] = []

    # ---- preallocation

    def accept(self, request: Request) -> None:
        """A new request: find its prefill node, then memory."""
        request.state = RequestState.PREALLOCATING
        request.hand_off = Incoming()
        self.preallocation.append(request)

        def connected(error: PDError | None) -> None:
            if request.state.terminal:
                self._tell_peer(request)  # it could not be told when the request ended
                return
            if error is not None:
                self._node.fail(request, NodeFailedError(error.message))
                return
            request.hand_off.connected = True
            self._node.want_pump()

        self._node.peers.want(request.peer_bootstrap, request.peer, connected)

    def pump(self) -> None:
        """Reserve for whoever fits, in order of arrival; whose peer is not ready yet is passed."""
        decode = self._node.decode
        if decode.retracted or decode.lacks_memory:
            return
        # NOTE: a copy, since requests that get memory, or fail for want of a receiver, leave it.
        for request in list(self.preallocation):
            if self._may_reserve(request) and not self._reserve(request):
                return

    def _may_reserve(self, request: Request) -> bool:
        # NOTE: nothing may be promised to a peer that was disconnected after the handshake.
        waiting = request.state is RequestState.PREALLOCATING and request.hand_off.connected
        return waiting and self._node.peers.connected(request.peer)

    def _reserve(self, request: Request) -> bool:
        memory, sequence = self._memory, request.sequence
        length, growth = len(request.prompt), self._growth(request)
        if memory.available < memory.missing(sequence, length, length) + growth:
            return False
        # NOTE: matching locks pages; whatever stops us after this must release them.
        cached = memory.match(sequence, length)
        missing = memory.pages_for(length) - len(sequence.pages)
        room_left = memory.available >= missing + growth
        if not room_left or not memory.grow(sequence, length, PageState.RESERVED):
            memory.release(sequence)
            return False
        incoming: Incoming = request.hand_off
        incoming.epoch = next(self._epochs)
        try:
            incoming.receiver = self._node.transfer.receiver(
                request.peer, request.room, incoming.epoch, sequence.pages, cached, length
            )
        except Exception as error:
            # A PDError, or whatever torch raises without memory.
            if not isinstance(error, PDError):
                logger.exception("cannot receive from %s", request.peer)
                error = TransferError(f"cannot receive from {request.peer}: {error}")
            memory.commit(sequence)
            self._node.fail(request, error)
            return True
        incoming.reservation = Reservation(
            to=request.peer,
            sender=self._node.instance_id,
            room=request.room,
            epoch=incoming.epoch,
            cached_prefix_len=cached,
            destination=incoming.receiver.destination,
        )
        self.preallocation.remove(request)
        request.state = RequestState.RECEIVING
        request.times.reserved = time.monotonic()
        incoming.send_at = request.times.reserved + self._node.transfer.reservation_delay()
        incoming.num_bytes = (length - cached) * self._node.engine.layout.token_bytes
        self.transfer.append(request)
        self._send_reservation(request)
        return True

    def _growth(self, request: Request) -> int:
        """Pages to leave for others; none when nobody else is here, so that all make progress."""
        others = [r.sequence for r in self.transfer]
        decode = self._node.decode
        if not others and not decode.running and not decode.waiting:
            return 0
        growth = decode.reserve.growth([*others, request.sequence], self._memory.page_size)
        return growth + decode.growth

    def _send_reservation(self, request: Request) -> None:
        incoming: Incoming = request.hand_off
        if not incoming.sent and time.monotonic() >= incoming.send_at:
            assert incoming.reservation is not None
            incoming.sent = True
            self._node.control.post(request.peer.encode(), incoming.reservation)

    # ---- transfer

    def on_commit(self, message: Commit) -> None:
        """P has sent everything; maybe not all of it is here yet."""
        request = self._node.requests.get(message.room)
        recent = self._recent.get(message.room)
        mine = request is not None and self._is_from_peer(request, message.sender, message.epoch)
        committed = request is not None and mine and request.hand_off.committed
        if committed or (recent is not None and recent[1] == message.epoch):
            self._acknowledge(message.sender, message.room, message.epoch)
            return
        if request is None or not mine or request.state is not RequestState.RECEIVING:
            error = ErrorInfo("node_failed", "the decode node does not hold this reservation")
            self._post_abort(message.sender, message.room, message.epoch, error)
            return
        incoming: Incoming = request.hand_off
        if incoming.commit is None and self._acceptable(request, message):
            incoming.commit = message
            incoming.commit_at = time.monotonic()
            assert incoming.receiver is not None
            incoming.receiver.commit(message.num_bytes)

    @staticmethod
    def _is_from_peer(request: Request, sender: str, epoch: int) -> bool:
        return request.peer == sender and request.hand_off.epoch == epoch

    def _acceptable(self, request: Request, commit: Commit) -> bool:
        indices = [token.index for token in commit.first_tokens]
        vocab_size = self._node.engine.model_config.vocab_size
        if sorted(indices) == list(range(request.params.n)) and all(
            0 <= token.token_id < vocab_size for token in commit.first_tokens
        ):
            return True
        self._node.fail(request, TransferError(f"commit names choices {indices} or bad tokens"))
        return False

    def poll(self) -> bool:
        """Move rooms along; True while a commit waits for its last bytes."""
        busy = False
        for request in list(self.transfer):
            incoming: Incoming = request.hand_off
            self._send_reservation(request)
            assert incoming.receiver is not None
            state = incoming.receiver.poll()
            if state is TransferState.FAILED:
                error = incoming.receiver.error or TransferError("the transfer failed")
                self._node.fail(request, error)
            elif state is TransferState.DONE:
                if self._is_intact(request):
                    self._committed(request)
            else:
                busy = busy or incoming.commit is not None or not incoming.sent
        return busy

    def _is_intact(self, request: Request) -> bool:
        """Whether what is here is known to have the digest that P computed; starts to compute it,
        and fails the request if it differs."""
        incoming: Incoming = request.hand_off
        if self._digests is None:
            return True
        assert incoming.commit is not None and incoming.reservation is not None
        start, stop = incoming.reservation.cached_prefix_len, len(request.prompt)
        if incoming.digest is None:
            with self._node.engine.beside_steps():
                incoming.digest = self._digests.start(request.sequence.pages, start, stop)
        if not incoming.digest.done():
            return False  # its end wakes the control thread
        try:
            found = Digests.result(incoming.digest)
        except TransferError as failure:
            self._node.fail(request, failure)
            return False
        if found == incoming.commit.digest:
            return True
        error = TransferError(
            f"the KV of tokens {start} to {stop} was damaged on its way from prefill node "
            f"{request.peer}: its digest is {found.hex()}, not {incoming.commit.digest.hex()}"
        )
        self._node.fail(request, error)
        return False

    def _committed(self, request: Request) -> None:
        incoming: Incoming = request.hand_off
        assert incoming.commit is not None
        self.transfer.remove(request)
        incoming.committed = True
        sequence = request.sequence
        self._memory.commit(sequence)
        sequence.num_computed = len(request.prompt)
        self._memory.cache(sequence)
        self._recent[request.room] = (time.monotonic() + LEASE_SECONDS, incoming.epoch)
        self._acknowledge(request.peer, request.room, incoming.epoch)
        self._count(request, incoming.commit)
        self._node.decode.add(request, incoming.commit.first_tokens, repeat=True)
        self._node.work_available.set()

    def _count(self, request: Request, commit: Commit) -> None:
        incoming: Incoming = request.hand_off
        times, metrics, now = request.times, self._node.metrics, time.monotonic()
        assert times.reserved is not None
        wait = times.reserved - times.arrived
        metrics.transferred_bytes.inc(incoming.num_bytes)
        metrics.observe("bootstrap", wait)
        metrics.observe("transfer", now - times.reserved)
        exposed = commit.exposed_seconds + now - incoming.commit_at
        backend = self._node.transfer.backend_of(request.peer)
        found = TransferTimes(wait, commit.wire_seconds, exposed)
        metrics.transfers.observe(backend, incoming.num_bytes, found)

    def _acknowledge(self, peer: str, room: bytes, epoch: int) -> None:
        message = CommitAck(to=peer, sender=self._node.instance_id, room=room, epoch=epoch)
        self._node.control.post(peer.encode(), message)

    # ---- the end

    def on_abort(self, message: AbortRoom) -> None:
        """P gave the room up, or token 1 ended it, or P believes that this node was gone."""
        if message.error.kind == HandshakeError.kind:
            self._node.peers.lose(message.sender, message.error.message)
            return
        request = self._node.requests.get(message.room)
        if request is None:
            self._node.bury(message.room)
            return
        # NOTE: P knows no epoch until it has the reservation.
        epoch = message.epoch or request.hand_off.epoch
        if request.state.terminal or not self._is_from_peer(request, message.sender, epoch):
            return
        if message.error.kind == "finished":
            self._node.finish(request)
            return
        error = error_from_kind(message.error.kind, message.error.message)
        self._node.fail(request, error, tell_proxy=message.error.kind != "aborted")

    def ended(self, request: Request, before: RequestState) -> None:
        """Give up slots that P may still be writing to, and ask it to drain."""
        incoming: Incoming = request.hand_off
        if before is RequestState.PREALLOCATING:
            self.preallocation.remove(request)
        if request in self.transfer:
            self.transfer.remove(request)
        if incoming.committed:
            return
        error = request.error
        kind, text = ("aborted", "done") if error is None else (error.kind, error.message)
        incoming.abort_error = ErrorInfo(kind, text)
        if before is RequestState.RECEIVING:
            assert incoming.receiver is not None
            incoming.quarantine = self._memory.quarantine(request.sequence)
            incoming.receiver.abort()
            if not incoming.sent:
                incoming.receiver.peer_drained()
        self._tell_peer(request)

    def _tell_peer(self, request: Request) -> None:
        incoming: Incoming = request.hand_off
        if not self._node.peers.connected(request.peer):
            return
        assert incoming.abort_error is not None
        incoming.abort_sent = time.monotonic()
        self._post_abort(request.peer, request.room, incoming.epoch, incoming.abort_error)

    def _post_abort(self, peer: str, room: bytes, epoch: int, error: ErrorInfo) -> None:
        own = self._node.instance_id
        message = AbortRoom(to=peer, sender=own, room=room, epoch=epoch, error=error)
        self._node.control.post(peer.encode(), message)

    def drained(self, room: bytes, epoch: int, peer: str) -> None:
        """P says that nothing of this epoch can land any more."""
        request = self._node.requests.get(room)
        if request is None or not self._is_from_peer(request, peer, epoch):
            return
        incoming: Incoming = request.hand_off
        if incoming.quarantine is not None and incoming.receiver is not None:
            incoming.receiver.peer_drained()
        elif request.state is RequestState.RECEIVING:
            # Its abort was lost, its drain was not.
            self._node.fail(request, NodeFailedError(f"prefill node {peer} gave the room up"))

    def may_release(self, request: Request) -> bool:
        """Whether nothing can land in the request's pages, or reads them for a digest, any more."""
        incoming: Incoming = request.hand_off
        if not Digests.over(incoming.digest):
            return False
        if incoming.quarantine is None or incoming.receiver is None:
            return True
        if incoming.receiver.drained():
            return True
        if time.monotonic() > incoming.abort_sent + HEARTBEAT_INTERVAL:
            self._tell_peer(request)
        return False

    def release(self, request: Request) -> None:
        """Pages in quarantine become free."""
        incoming: Incoming = request.hand_off
        if incoming.quarantine is not None:
            self._memory.end_quarantine(incoming.quarantine)
            incoming.quarantine = None

    def close(self) -> None:
        """Stop computing digests."""
        if self._digests is not None:
            self._digests.close()

    def sweep(self, now: float) -> None:
        """Forget old commits."""
        self._recent = {r: e for r, e in self._recent.items() if e[0] > now}
