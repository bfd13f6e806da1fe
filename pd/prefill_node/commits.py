"""Computed prompts on their way to decode nodes (queue "in flight"): from the last byte to the
acknowledged commit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.core.messages import HEARTBEAT_INTERVAL, Commit, CommitAck
from pd.core.request import RequestState
from pd.engine.digests import Digests
from pd.transfer.base import TransferState
from pd.transfer.contained import Contained

if TYPE_CHECKING:
    from pd.core.request import Request
    from pd.prefill_node.outgoing import OutgoingRoom
    from pd.prefill_node.peers import DecodePeers
    from pd.scheduling.core import NodeCore
    from pd.transfer.base import Sender, TransferManager


class Commits:
    """Commits transfers when their last byte has left. The caller holds the node's lock.

    Attributes:
        in_flight: rooms whose prompt is computed, oldest first.
    """

    def __init__(
        self,
        core: NodeCore,
        transfer: TransferManager,
        peers: DecodePeers,
        digests: Digests | None,
    ) -> None:
        self._core, self._rooms, self._transfer = core, core.rooms, transfer
        self._peers, self._digests = peers, digests
        self.in_flight: list[OutgoingRoom] = []

    def poll(self) -> bool:
        """Commit transfers that are complete; True while one is about to be."""
        busy = False
        now = time.monotonic()
        for outgoing in list(self.in_flight):
            if outgoing.sender is None:
                continue
            with self.contained(outgoing.request):
                busy = self._advance(outgoing, outgoing.sender, now) or busy
        return busy

    def check(self, outgoing: OutgoingRoom, sender: Sender) -> None:
        """End the request if its transfer has failed."""
        with self.contained(outgoing.request):
            self._state(outgoing, sender)

    def contained(self, request: Request) -> Contained:
        """Context in which a backend that is broken ends this request alone."""
        return Contained(self._rooms.fail, request, "cannot send to")

    def _advance(self, outgoing: OutgoingRoom, sender: Sender, now: float) -> bool:
        """Commit a transfer that is complete; True while it is about to be."""
        state = self._state(outgoing, sender)
        if state is TransferState.DONE:
            outgoing.sent = outgoing.sent or now
            if outgoing.commit_sent is None or now > outgoing.commit_sent + HEARTBEAT_INTERVAL:
                self._commit(outgoing, sender, now)
        return state is TransferState.ACTIVE

    def _state(self, outgoing: OutgoingRoom, sender: Sender) -> TransferState:
        """State of the transfer; if that failed, the request ends."""
        state = sender.poll()
        if state is TransferState.FAILED:
            error = sender.error or TransferError("the transfer failed")
            self._rooms.fail(outgoing.request, error)
        return state

    def _commit(self, outgoing: OutgoingRoom, sender: Sender, now: float) -> None:
        """Send the commit: all bytes have left for good. Waits for the digest, if there is one."""
        request = outgoing.request
        assert outgoing.reservation is not None
        digest = b""
        if outgoing.digest is not None:
            if not outgoing.digest.done():
                return  # its end wakes the control thread
            try:
                digest = Digests.result(outgoing.digest)
            except TransferError as error:
                self._rooms.fail(request, error)
                return
        outgoing.complete = outgoing.complete or now
        outgoing.commit_sent = now
        times = outgoing.times()
        message = Commit(
            to=request.peer,
            sender=self._core.instance_id,
            room=request.room,
            epoch=outgoing.reservation.epoch,
            num_bytes=sender.bytes_sent,
            first_tokens=request.progress.first_tokens,
            digest=digest,
            drafter_state=request.progress.drafter_state,
            wire_seconds=times.wire,
            exposed_seconds=times.exposed,
        )
        self._peers.send(message)

    def start_digest(self, outgoing: OutgoingRoom) -> None:
        """Compute the digest beside the last of the transfer; all that it reads is computed."""
        if self._digests is None or outgoing.digest is not None:
            return
        assert outgoing.reservation is not None
        cached, request = outgoing.reservation.cached, outgoing.request
        outgoing.digest = self._digests.start(request.sequence.pages, cached, len(request.prompt))

    def on_commit_ack(self, identity: bytes, message: CommitAck) -> None:
        """The peer has committed: the request is done here."""
        peer, request = message.sender, self._rooms.get(message.room)
        if request is None or request.state is not RequestState.SENDING or request.peer != peer:
            return
        outgoing = request.outgoing
        if outgoing is None or outgoing.commit_sent is None or outgoing.reservation is None:
            return
        if outgoing.reservation.epoch == message.epoch:
            outgoing.acknowledged = True
            self._count(outgoing)
            self._rooms.finish(request)

    def _count(self, outgoing: OutgoingRoom) -> None:
        request, metrics = outgoing.request, self._core.metrics
        num_bytes = outgoing.sender.bytes_sent if outgoing.sender else 0
        metrics.transferred_bytes.inc(num_bytes)
        metrics.transfers.observe(
            self._transfer.backend_of(request.peer), num_bytes, outgoing.times()
        )
        metrics.observe("transfer", time.monotonic() - (request.times.first_token or 0.0))

    def close(self) -> None:
        """Stop computing digests."""
        if self._digests is not None:
            self._digests.close()
