"""Transfers of prefilled prompts (queue "in_flight"), from the last byte to the acknowledgement."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.core.messages import HEARTBEAT_INTERVAL, Commit, CommitAck
from pd.engine.digests import Digests
from pd.prefill_node.outgoing import outgoing_of
from pd.scheduling.request import RequestState
from pd.transfer.base import TransferState
from pd.transfer.contained import Contained

if TYPE_CHECKING:
    from pd.prefill_node.outgoing import OutgoingRoom
    from pd.scheduling.core import NodeCore
    from pd.scheduling.peer_table import PeerTable
    from pd.scheduling.request import Request
    from pd.transfer.base import Sender, TransferManager


class Commits:
    """Commits transfers whose last byte has left. The caller holds the node's lock.

    Backends do not call us when a transfer completes. Instead the control thread polls in every
    turn of its loop (:meth:`pd.node.node.Node.on_poll`), and waits for at most a millisecond
    between turns while a transfer is about to complete.

    Attributes:
        in_flight: rooms whose prompt is prefilled, oldest first.
    """

    def __init__(
        self,
        core: NodeCore,
        transfer: TransferManager,
        peers: PeerTable,
        digests: Digests | None,
    ) -> None:
        self._core, self._requests, self._transfer = core, core.requests, transfer
        self._peers, self._digests = peers, digests
        self.in_flight: list[OutgoingRoom] = []

    def commit_complete(self) -> bool:
        """Commit complete transfers; True while one is about to complete."""
        busy = False
        now = time.monotonic()
        for outgoing in list(self.in_flight):
            if outgoing.sender is None:
                continue
            with self.contain_errors(outgoing.request):
                busy = self._advance_transfer(outgoing, outgoing.sender, now) or busy
        return busy

    def check_transfer(self, outgoing: OutgoingRoom, sender: Sender) -> None:
        """End the request if its transfer has failed."""
        with self.contain_errors(outgoing.request):
            self._transfer_state(outgoing, sender)

    def contain_errors(self, request: Request) -> Contained[Request]:
        """Return a context that fails only this request if the backend raises."""
        return Contained(self._requests.fail_request, request, "cannot send to")

    def _advance_transfer(self, outgoing: OutgoingRoom, sender: Sender, now: float) -> bool:
        """Commit a complete transfer; True while it is about to complete."""
        state = self._transfer_state(outgoing, sender)
        if state is TransferState.DONE:
            outgoing.sent = outgoing.sent or now
            if outgoing.commit_sent is None or now > outgoing.commit_sent + HEARTBEAT_INTERVAL:
                self._send_commit(outgoing, sender, now)
        return state is TransferState.ACTIVE

    def _transfer_state(self, outgoing: OutgoingRoom, sender: Sender) -> TransferState:
        """Return the state of the transfer. If it failed, fail the request."""
        state = sender.poll()
        if state is TransferState.FAILED:
            error = sender.error or TransferError("the transfer failed")
            self._requests.fail_request(outgoing.request, error)
        return state

    def _send_commit(self, outgoing: OutgoingRoom, sender: Sender, now: float) -> None:
        """Send the commit, since all bytes have left. If there is a digest, wait until it is
        computed."""
        request = outgoing.request
        assert outgoing.reservation is not None
        digest = b""
        if outgoing.digest is not None:
            if not outgoing.digest.done():
                return  # its completion wakes the control thread
            try:
                digest = Digests.get_result(outgoing.digest)
            except TransferError as error:
                self._requests.fail_request(request, error)
                return
        outgoing.complete = outgoing.complete or now
        outgoing.commit_sent = now
        times = outgoing.transfer_times()
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
        self._peers.send_message(message)

    def start_digest(self, outgoing: OutgoingRoom) -> None:
        """Compute the digest while the rest is sent. The KV is computed or queued on the stream."""
        if self._digests is None or outgoing.digest is not None:
            return
        assert outgoing.reservation is not None
        cached, request = outgoing.reservation.cached, outgoing.request
        outgoing.digest = self._digests.start_digest(
            request.sequence.tables, cached, len(request.prompt)
        )

    def on_commit_ack(self, identity: bytes, message: CommitAck) -> None:
        """Finish the request, because the peer has committed."""
        peer, request = message.sender, self._requests.find_request(message.room)
        if request is None or request.state is not RequestState.SENDING or request.peer != peer:
            return
        outgoing = outgoing_of(request)
        if outgoing is None or outgoing.commit_sent is None or outgoing.reservation is None:
            return
        if outgoing.reservation.epoch == message.epoch:
            outgoing.acknowledged = True
            self._count_transfer(outgoing)
            self._requests.finish_request(request)

    def _count_transfer(self, outgoing: OutgoingRoom) -> None:
        request, metrics = outgoing.request, self._core.metrics
        num_bytes = outgoing.sender.bytes_sent if outgoing.sender else 0
        metrics.transferred_bytes.inc(num_bytes)
        metrics.transfers.observe_transfer(
            self._transfer.backend_of(request.peer), num_bytes, outgoing.transfer_times()
        )
        metrics.observe_stage("transfer", time.monotonic() - (request.times.first_token or 0.0))

    def close(self) -> None:
        """Stop computing digests."""
        if self._digests is not None:
            self._digests.close()
