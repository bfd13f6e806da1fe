"""Receiving end of hand-offs: queue "transfer", which follows "preallocation"."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
from itertools import chain
from typing import TYPE_CHECKING

from pd.core.errors import (
    AbortedError,
    HandshakeError,
    NodeFailedError,
    PDError,
    PeerFailedError,
    TransferError,
    error_of_peer,
)
from pd.core.messages import (
    FINISHED,
    HEARTBEAT_INTERVAL,
    LEASE_SECONDS,
    AbortRoom,
    Commit,
    CommitAck,
    Drained,
    ErrorInfo,
    GrammarReady,
    PeerHeartbeat,
    PromptExpected,
    Reservation,
    Returned,
)
from pd.decode_node.handshakes import Handshakes
from pd.decode_node.incoming import IncomingRoom, incoming_of
from pd.decode_node.preallocation import Preallocation
from pd.decode_node.verification import DigestCheck
from pd.engine.digests import Digests
from pd.scheduling.metrics import TransferTimes
from pd.scheduling.peer_table import PeerTable
from pd.scheduling.request import RequestState
from pd.scheduling.transfer_end import PromptReceiver
from pd.transfer import contained
from pd.transfer.base import TransferState
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from pd.core.node_info import NodeInfo
    from pd.decode_node.handshakes import PeerSockets
    from pd.scheduling.core import NodeCore
    from pd.scheduling.decode import DecodeScheduler
    from pd.scheduling.handlers import Handlers
    from pd.scheduling.request import Request, Sequence
    from pd.scheduling.transfer_end import PromptSender
    from pd.transfer.base import TransferManager

    IntArray = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)


class ReceivingEnd(PromptReceiver):
    """Manages all rooms whose KV this node receives: reserves, receives, commits.

    The caller holds the node's lock. No step uses KV before it was committed for exactly this room
    and epoch. Pages stay RESERVED until the receiver reports all of it, and only then enter the
    radix tree.

    Args:
        own: introduces this node in handshakes.
        sockets: connect to prefill nodes.
        decode: gets the committed requests.
        digests: verifies the digests of commits; None without ``--kv-digest``.
        sending: the end sending KV from the same memory; None on a node that only receives.
        owes_memory: whether free pages are owed to a local prompt instead of a request that arrived
            at the given time.
    """

    def __init__(
        self,
        core: NodeCore,
        transfer: TransferManager,
        own: NodeInfo,
        sockets: PeerSockets,
        decode: DecodeScheduler,
        digests: Digests | None = None,
        sending: PromptSender | None = None,
        owes_memory: Callable[[float], bool] = lambda arrived: False,
    ) -> None:
        self._core, self._requests, self._memory = core, core.requests, core.memory
        self._transfer, self._decode = transfer, decode
        self._check = None if digests is None else DigestCheck(core, digests)
        self.peers = PeerTable(core.instance_id, sockets.post_to_prefill, transfer.patience)
        self.handshakes = Handshakes(
            core, own, transfer, sockets, self.peers, self._on_peer_dropped
        )
        self._broken = WarningLimit(logger)
        # Starts at random, so that we never repeat an epoch of an earlier process at this address.
        self._epochs = itertools.count(secrets.randbits(40) << 20)
        # Epochs of rooms committed within the last lease, and when we forget them.
        self._recent: dict[bytes, tuple[float, int]] = {}
        self.incoming: list[IncomingRoom] = []
        self.preallocation = Preallocation(
            core,
            decode,
            self.peers,
            sending,
            owes_memory,
            self.incoming,
            self._begin_receiving,
        )

    def register_handlers(self, handlers: Handlers) -> None:
        handlers.add_handler(GrammarReady, self._on_grammar_ready)
        handlers.add_handler(PromptExpected, self._on_prompt_expected)
        handlers.add_handler(Commit, self._on_commit)
        handlers.add_handler(AbortRoom, self._on_abort_room)
        handlers.add_handler(Drained, self._on_drained)
        handlers.add_handler(Returned, self._on_returned)
        handlers.add_handler(PeerHeartbeat, self._on_peer_heartbeat)

    def _find_incoming(self, room: bytes) -> IncomingRoom | None:
        request = self._requests.find_request(room)
        return None if request is None else incoming_of(request)

    # ---- peers

    def connect_peers(self, peers: Mapping[str, str]) -> None:
        self.handshakes.meet_peers(peers, time.monotonic())

    def list_linked_peers(self) -> list[str]:
        return self.handshakes.list_linked()

    def backend_of(self, instance: str) -> str:
        return self._transfer.backend_of(instance)

    def send_heartbeats(self) -> None:
        self.peers.send_heartbeats()
        for incoming in self.preallocation:
            self._tell_grammar(incoming)

    def drop_peer(self, instance: str, why: str) -> bool:
        """Forget a prefill node and fail its uncommitted hand-offs. Nothing else is affected
        (control thread)."""
        with self._core.events.event():
            return self.handshakes.drop_peer(instance, why)

    def _on_peer_dropped(self, instance: str, error: PDError) -> None:
        waiting = (RequestState.PREALLOCATING, RequestState.RECEIVING)
        for request in self._requests:
            if request.incoming is None or request.peer != instance:
                continue
            if request.state in waiting:
                self._requests.fail_request(request, error)

    def _on_peer_heartbeat(self, identity: bytes, message: PeerHeartbeat) -> None:
        self._transfer.patience.note_delay(message.sender, message.run_delay)

    # ---- preallocation

    def accept_request(self, request: Request) -> None:
        """Accept a new request: connect to its prefill node, let that compile its grammar, if any,
        then find memory."""
        request.state = RequestState.PREALLOCATING
        request.incoming = incoming = IncomingRoom(
            request, awaits_grammar=request.params.grammar is not None
        )
        self.preallocation.add_request(incoming)

        def on_connected(error: PDError | None) -> None:
            if request.state.is_terminal:
                self._tell_peer(incoming)  # there was no connection when the request ended
                return
            if error is not None:
                self._requests.fail_request(request, PeerFailedError(error.message))
                return
            incoming.connected = True
            self._tell_grammar(incoming)
            self._core.events.want_reservations()

        self.handshakes.connect_peer(request.peer_bootstrap, request.peer, on_connected)

    def _tell_grammar(self, incoming: IncomingRoom) -> None:
        """Report our compiled grammar to the peer, until it reports the same."""
        if incoming.connected and incoming.awaits_grammar:
            peer, room = incoming.request.peer, incoming.request.room
            own = self._core.instance_id
            self.peers.send_message(GrammarReady(to=peer, sender=own, room=room))

    def _on_grammar_ready(self, identity: bytes, message: GrammarReady) -> None:
        incoming = self._find_incoming(message.room)
        if incoming is not None and incoming.request.peer == message.sender:
            incoming.awaits_grammar = False
            self._core.events.want_reservations()

    def reserve_waiting(self) -> None:
        self.preallocation.reserve_waiting()

    def owes_memory(self, arrived: float) -> bool:
        return self.preallocation.owes_memory(arrived)

    # ---- transfer

    def _begin_receiving(self, incoming: IncomingRoom, cached: int) -> None:
        """Receive into the pages of a request, and send the reservation.

        Args:
            cached: number of the prompt's tokens whose KV is in the pages already.
        """
        request = incoming.request
        sequence, length = request.sequence, len(request.prompt)
        layout = self._core.engine.layout
        held = self._memory.count_held(sequence, cached, layout.group_windows)
        incoming.epoch = next(self._epochs)
        with self._contain_errors(request):
            receiver = self._transfer.receiver(
                request.peer, request.room, incoming.epoch, sequence.tables, held, length
            )
            destination, incoming.receiver = receiver.destination, receiver
        if incoming.receiver is None:
            self._memory.own_reserved(sequence)
            return
        incoming.reservation = Reservation(
            to=request.peer,
            sender=self._core.instance_id,
            room=request.room,
            epoch=incoming.epoch,
            cached=held,
            destination=destination,
        )
        self.preallocation.remove_request(incoming)
        request.state = RequestState.RECEIVING
        request.times.reserved = time.monotonic()
        incoming.send_at = request.times.reserved + self._transfer.reservation_delay()
        incoming.num_bytes = layout.missing_bytes(held, length)
        self.incoming.append(incoming)
        self._send_reservation(incoming)

    def _send_reservation(self, incoming: IncomingRoom) -> None:
        if not incoming.sent and time.monotonic() >= incoming.send_at:
            assert incoming.reservation is not None
            incoming.sent = True
            self.peers.send_message(incoming.reservation)

    def _on_prompt_expected(self, identity: bytes, message: PromptExpected) -> None:
        incoming = self._find_incoming(message.room)
        if incoming is not None and incoming.is_from_peer(message.sender, message.epoch):
            incoming.expected_at = time.monotonic() + message.seconds

    def reserved_sequences(self) -> list[Sequence]:
        return [incoming.request.sequence for incoming in self.incoming]

    @property
    def awaits_kv(self) -> bool:
        return bool(self.incoming)

    @property
    def is_stalled(self) -> bool:
        begun = any(incoming.expected_at is not None for incoming in self.incoming)
        return self.awaits_kv and not begun

    def iter_expected(self, seconds: float, late: float = math.inf) -> Iterator[Request]:
        now = time.monotonic()
        for incoming in self.incoming:
            expected_at = incoming.expected_at
            if expected_at is not None and now - late <= expected_at < now + seconds:
                yield incoming.request

    def _on_commit(self, identity: bytes, message: Commit) -> None:
        """Handle the commit: the peer has sent everything, some of which may not have landed
        yet."""
        incoming = self._find_incoming(message.room)
        recent = self._recent.get(message.room)
        if incoming is not None and not incoming.is_from_peer(message.sender, message.epoch):
            incoming = None
        committed = incoming is not None and incoming.committed
        if committed or (recent is not None and recent[1] == message.epoch):
            self._send_acknowledgement(message.sender, message.room, message.epoch)
            return
        if incoming is None or incoming.request.state is not RequestState.RECEIVING:
            error = ErrorInfo(NodeFailedError.kind, "the decode node does not hold the reservation")
            self._post_abort(message.sender, message.room, message.epoch, error)
            return
        if incoming.commit is None and self._is_acceptable(incoming.request, message):
            incoming.commit = message
            incoming.commit_at = time.monotonic()
            assert incoming.receiver is not None
            with self._contain_errors(incoming.request):
                incoming.receiver.commit(message.num_bytes)

    def _is_acceptable(self, request: Request, commit: Commit) -> bool:
        expected = self._core.engine.drafter_state_bytes
        # Without a state, the first step has no draft.
        if len(commit.drafter_state) not in (0, expected):
            size = len(commit.drafter_state)
            error = f"the commit has a drafter state of {size} bytes; expected {expected}"
            self._requests.fail_request(request, TransferError(error))
            return False
        indices = [token.index for token in commit.first_tokens]
        vocab_size = self._core.engine.model_config.vocab_size
        if sorted(indices) == list(range(request.params.n)) and all(
            0 <= token.token_id < vocab_size for token in commit.first_tokens
        ):
            return True
        self._requests.fail_request(
            request, TransferError(f"commit names choices {indices} or bad tokens")
        )
        return False

    def poll_transfers(self) -> bool:
        """Advance rooms; True while a commit waits for its last bytes."""
        busy = False
        for incoming in list(self.incoming):
            self._send_reservation(incoming)
            with self._contain_errors(incoming.request):
                busy = self._advance_room(incoming) or busy
        return busy

    def _advance_room(self, incoming: IncomingRoom) -> bool:
        """Advance one room; True while it waits for bytes after the commit or for its
        ``send_at``."""
        receiver, commit = incoming.receiver, incoming.commit
        assert receiver is not None
        state = receiver.poll()
        if state is TransferState.FAILED:
            error = receiver.error or TransferError("the transfer failed")
            self._requests.fail_request(incoming.request, error)
        elif state is TransferState.DONE:
            if commit is None:
                raise TransferError("the transfer backend reports an end before the commit")
            if self._check is None or self._check.is_intact(incoming, commit):
                self._commit_pages(incoming, commit)
        else:
            return commit is not None or not incoming.sent
        return False

    def _contain_errors(self, request: Request) -> contained.Contained[Request]:
        """Return a context that fails only this request if the backend raises."""
        return contained.Contained(self._requests.fail_request, request, "cannot receive from")

    def _commit_pages(self, incoming: IncomingRoom, commit: Commit) -> None:
        """Give the pages to the request, because all of its KV is here, and start to decode it."""
        request = incoming.request
        self.incoming.remove(incoming)
        incoming.committed = True
        sequence = request.sequence
        self._memory.own_reserved(sequence)
        sequence.num_computed = len(request.prompt)
        self._memory.cache_tokens(sequence)
        eagle = self._core.engine.runner.eagle
        if eagle is not None and commit.drafter_state:
            sequence.carried_state = eagle.receive_state(commit.drafter_state, len(request.prompt))
        self._recent[request.room] = (time.monotonic() + LEASE_SECONDS, incoming.epoch)
        self._send_acknowledgement(request.peer, request.room, incoming.epoch)
        self._count_transfer(incoming, commit)
        self._decode.add_request(request, commit.first_tokens, repeat=True)
        self._core.events.work_available.set()

    def _count_transfer(self, incoming: IncomingRoom, commit: Commit) -> None:
        request, metrics = incoming.request, self._core.metrics
        times, now = request.times, time.monotonic()
        assert times.reserved is not None
        wait = times.reserved - times.arrived
        metrics.transferred_bytes.inc(incoming.num_bytes)
        metrics.observe_stage("bootstrap", wait)
        metrics.observe_stage("transfer", now - times.reserved)
        exposed = commit.exposed_seconds + now - incoming.commit_at
        backend = self._transfer.backend_of(request.peer)
        times_taken = TransferTimes(wait, commit.wire_seconds, exposed)
        metrics.transfers.observe_transfer(backend, incoming.num_bytes, times_taken)

    def _send_acknowledgement(self, peer: str, room: bytes, epoch: int) -> None:
        own = self._core.instance_id
        self.peers.send_message(CommitAck(to=peer, sender=own, room=room, epoch=epoch))

    def _on_returned(self, identity: bytes, message: Returned) -> None:
        """Requeue a request for memory, because the peer sends nothing for now."""
        incoming = self._find_incoming(message.room)
        if incoming is None or not incoming.is_from_peer(message.sender, message.epoch):
            return
        request, receiver = incoming.request, incoming.receiver
        if request.state is not RequestState.RECEIVING or receiver is None:
            return
        contained.abort_transfer(receiver, request.peer)
        receiver.on_peer_drained()
        drained = contained.is_drained(receiver, request.peer, self._broken)
        if incoming.commit is not None or not drained:
            error = TransferError(f"prefill node {request.peer} returned memory that it uses")
            self._requests.fail_request(request, error)
            return
        self._memory.own_reserved(request.sequence)
        self._memory.release_pages(request.sequence)
        self.incoming.remove(incoming)
        incoming.receiver = incoming.reservation = incoming.expected_at = None
        incoming.sent, incoming.epoch = False, 0
        request.state = RequestState.PREALLOCATING
        self.preallocation.put_back(incoming)
        self._core.events.work_available.set()
        self._core.events.want_reservations()

    # ---- the end of a room

    def _on_abort_room(self, identity: bytes, message: AbortRoom) -> None:
        """Handle a peer that ended the room, maybe because of token 1, or does not know this
        node."""
        if message.error.kind == HandshakeError.kind:
            self.handshakes.drop_peer(message.sender, message.error.message)
            return
        if message.room not in self._requests:
            self._requests.add_tombstone(message.room)
            return
        incoming = self._find_incoming(message.room)
        if incoming is None or incoming.request.state.is_terminal:
            return
        # NOTE: the peer knows no epoch before it has the reservation.
        if not incoming.is_from_peer(message.sender, message.epoch or incoming.epoch):
            return
        if incoming.committed:
            # The peer ended before it had the acknowledgement. We need nothing more of it.
            self._send_acknowledgement(message.sender, message.room, incoming.epoch)
            return
        if message.error.kind == FINISHED:
            self._requests.finish_request(incoming.request)
            return
        error = error_of_peer(message.error.kind, message.error.message)
        by_proxy = message.error.kind == AbortedError.kind
        self._requests.fail_request(incoming.request, error, tell_proxy=not by_proxy)

    def end_hand_off(self, request: Request, before: RequestState) -> None:
        """Quarantine pages that the peer may still write to, and ask it to drain."""
        incoming = incoming_of(request)
        if incoming is None:
            return
        if before is RequestState.PREALLOCATING:
            self.preallocation.remove_request(incoming)
        if incoming in self.incoming:
            self.incoming.remove(incoming)
        if incoming.committed:
            return
        error = request.error
        kind, text = (AbortedError.kind, "done") if error is None else (error.kind, error.message)
        incoming.abort_error = ErrorInfo(kind, text)
        if before is RequestState.RECEIVING:
            assert incoming.receiver is not None
            incoming.quarantine = self._memory.quarantine_pages(request.sequence)
            contained.abort_transfer(incoming.receiver, request.peer)
            if not incoming.sent:
                incoming.receiver.on_peer_drained()
        self._tell_peer(incoming)

    def _tell_peer(self, incoming: IncomingRoom) -> None:
        request = incoming.request
        if request.peer not in self.peers:
            return
        assert incoming.abort_error is not None
        incoming.abort_sent = time.monotonic()
        self._post_abort(request.peer, request.room, incoming.epoch, incoming.abort_error)

    def _post_abort(self, peer: str, room: bytes, epoch: int, error: ErrorInfo) -> None:
        own = self._core.instance_id
        message = AbortRoom(to=peer, sender=own, room=room, epoch=epoch, error=error)
        self.peers.send_message(message)

    def _on_drained(self, identity: bytes, message: Drained) -> None:
        """Note the end of an epoch: nothing of it can land any more."""
        incoming = self._find_incoming(message.room)
        if incoming is None or not incoming.is_from_peer(message.sender, message.epoch):
            return
        if incoming.quarantine is not None and incoming.receiver is not None:
            incoming.receiver.on_peer_drained()
        elif incoming.request.state is RequestState.RECEIVING:
            # We lost the peer's abort, but not its drain.
            error = PeerFailedError(f"prefill node {message.sender} dropped the room")
            self._requests.fail_request(incoming.request, error)

    def may_release(self, request: Request) -> bool:
        """Whether nothing can land in the request's pages and no digest reads them any more."""
        incoming = incoming_of(request)
        if incoming is None:
            return True
        if not Digests.try_release(incoming.digest):
            return False
        if incoming.quarantine is None or incoming.receiver is None:
            return True
        if contained.is_drained(incoming.receiver, request.peer, self._broken):
            return True
        if time.monotonic() > incoming.abort_sent + HEARTBEAT_INTERVAL:
            self._tell_peer(incoming)
        return False

    def finish_release(self, request: Request) -> None:
        """Free the pages in quarantine."""
        incoming = incoming_of(request)
        if incoming is not None and incoming.quarantine is not None:
            self._memory.end_quarantine(incoming.quarantine)
            incoming.quarantine = None

    def drop_expired(self, now: float) -> None:
        self.handshakes.drop_silent_peers(now)
        self._recent = {r: e for r, e in self._recent.items() if e[0] > now}
        self._core.events.want_reservations()

    # ---- administration

    @property
    def queued_tokens(self) -> int:
        return sum(len(incoming.request.prompt) for incoming in self.preallocation)

    def iter_queued(self) -> Iterator[Sequence]:
        waiting = chain(self.preallocation, self.incoming)
        return (incoming.request.sequence for incoming in waiting)

    def count_queues(self) -> dict[str, int]:
        return {"preallocation": len(self.preallocation), "transfer": len(self.incoming)}

    def quarantined_pages(self) -> Iterator[IntArray]:
        for request in self._requests:
            incoming = incoming_of(request)
            if incoming is not None and incoming.quarantine is not None:
                yield incoming.quarantine

    def close(self) -> None:
        """Start no more handshakes and stop computing digests."""
        self.handshakes.close()
        if self._check is not None:
            self._check.close()
