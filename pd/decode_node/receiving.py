"""Receiving end of hand-offs: queue "transfer", behind "preallocation"."""

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
from pd.core.request import RequestState
from pd.core.seldom import Seldom
from pd.decode_node.incoming import IncomingRoom
from pd.decode_node.peers import PrefillPeers
from pd.decode_node.preallocation import Preallocation
from pd.decode_node.verification import DigestCheck
from pd.engine.digests import Digests
from pd.scheduling.metrics import TransferTimes
from pd.scheduling.transfer_end import PromptReceiver
from pd.transfer import contained
from pd.transfer.base import TransferState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from pd.core.node_info import NodeInfo
    from pd.core.request import Request, Sequence
    from pd.decode_node.peers import PeerSockets
    from pd.scheduling.core import NodeCore
    from pd.scheduling.decode import DecodeScheduler
    from pd.scheduling.handlers import Handlers
    from pd.scheduling.transfer_end import PromptSender
    from pd.transfer.base import TransferManager

    IntArray = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)


class ReceivingEnd(PromptReceiver):
    """All rooms whose KV this node receives: reserves, receives, commits. The caller holds the
    node's lock.

    No step runs on KV that was not committed for exactly this room and epoch: pages stay RESERVED
    until the receiver says that all of it is here, and only then enter the radix tree.

    Args:
        own: introduces this node in handshakes.
        sockets: connect to prefill nodes.
        decode: gets the requests that are committed.
        digests: verifies the digests that commits carry; None without ``--kv-digest``.
        sending: the end that sends KV from the same memory; None on a node that only receives.
        owes_memory: whether pages that come free are for a prompt that is computed here, rather
            than for a request that arrived at the given time.
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
        self._core, self._rooms, self._memory = core, core.rooms, core.memory
        self._transfer, self._decode = transfer, decode
        self._check = None if digests is None else DigestCheck(core, digests)
        self.prefill_peers = PrefillPeers(core, own, transfer, sockets, self._peer_dropped)
        self._broken = Seldom(logger)
        # Random start: an epoch of an earlier life of this address is never repeated.
        self._epochs = itertools.count(secrets.randbits(40) << 20)
        # Epochs of rooms that were committed within the last lease, and when that ends.
        self._recent: dict[bytes, tuple[float, int]] = {}
        self.incoming: list[IncomingRoom] = []
        self.preallocation = Preallocation(
            core, decode, self.prefill_peers, sending, owes_memory, self.incoming, self._begin
        )

    def register(self, handlers: Handlers) -> None:
        handlers.on(GrammarReady, self._on_grammar_ready)
        handlers.on(PromptExpected, self._on_prompt_expected)
        handlers.on(Commit, self._on_commit)
        handlers.on(AbortRoom, self._on_abort_room)
        handlers.on(Drained, self._on_drained)
        handlers.on(Returned, self._on_returned)
        handlers.on(PeerHeartbeat, self._on_peer_heartbeat)

    def _incoming(self, room: bytes) -> IncomingRoom | None:
        request = self._rooms.get(room)
        return None if request is None else request.incoming

    # ---- peers

    def note_message(self, instance: str) -> None:
        self.prefill_peers.renew(instance)

    def meet(self, peers: Mapping[str, str]) -> None:
        self.prefill_peers.meet(peers, time.monotonic())

    def linked(self) -> list[str]:
        return self.prefill_peers.linked()

    def peers(self) -> list[NodeInfo]:
        return self.prefill_peers.infos()

    def backend_of(self, instance: str) -> str:
        return self._transfer.backend_of(instance)

    def heartbeat(self) -> None:
        self.prefill_peers.heartbeat()
        for incoming in self.preallocation:
            self._tell_grammar(incoming)

    def drop_peer(self, instance: str, why: str) -> bool:
        """Forget a prefill node: its uncommitted hand-offs fail, everything else goes on (control
        thread)."""
        with self._core.events.event():
            return self.prefill_peers.drop(instance, why)

    def _peer_dropped(self, instance: str, error: PDError) -> None:
        waiting = (RequestState.PREALLOCATING, RequestState.RECEIVING)
        for request in self._rooms:
            if request.incoming is None or request.peer != instance:
                continue
            if request.state in waiting:
                self._rooms.fail(request, error)

    def _on_peer_heartbeat(self, identity: bytes, message: PeerHeartbeat) -> None:
        self._transfer.patience.heard(message.sender, message.run_delay)

    # ---- preallocation

    def accept(self, request: Request) -> None:
        """Take a new request: connect to its prefill node, have that compile its grammar, if it has
        one, then find memory."""
        request.state = RequestState.PREALLOCATING
        request.incoming = incoming = IncomingRoom(
            request, awaits_grammar=request.params.grammar is not None
        )
        self.preallocation.add(incoming)

        def connected(error: PDError | None) -> None:
            if request.state.terminal:
                self._tell_peer(incoming)  # there was no connection when the request ended
                return
            if error is not None:
                self._rooms.fail(request, PeerFailedError(error.message))
                return
            incoming.connected = True
            self._tell_grammar(incoming)
            self._core.events.want_pump()

        self.prefill_peers.want(request.peer_bootstrap, request.peer, connected)

    def _tell_grammar(self, incoming: IncomingRoom) -> None:
        """Tell the peer that the request's grammar is compiled here, until it has said the same."""
        if incoming.connected and incoming.awaits_grammar:
            peer, room = incoming.request.peer, incoming.request.room
            own = self._core.instance_id
            self.prefill_peers.send(GrammarReady(to=peer, sender=own, room=room))

    def _on_grammar_ready(self, identity: bytes, message: GrammarReady) -> None:
        incoming = self._incoming(message.room)
        if incoming is not None and incoming.request.peer == message.sender:
            incoming.awaits_grammar = False
            self._core.events.want_pump()

    def pump(self) -> None:
        self.preallocation.pump()

    def owes(self, arrived: float) -> bool:
        return self.preallocation.owes(arrived)

    # ---- transfer

    def _begin(self, incoming: IncomingRoom, cached: int) -> None:
        """Receive into the pages that a request has now, and send the reservation.

        Args:
            cached: tokens of the prompt whose KV is in them already.
        """
        request = incoming.request
        sequence, length = request.sequence, len(request.prompt)
        # The radix tree holds pages of all planes together.
        layout = self._core.engine.layout
        held = (cached,) * layout.num_groups
        incoming.epoch = next(self._epochs)
        with self._contained(request):
            receiver = self._transfer.receiver(
                request.peer, request.room, incoming.epoch, sequence.pages, held, length
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
        self.preallocation.remove(incoming)
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
            self.prefill_peers.send(incoming.reservation)

    def _on_prompt_expected(self, identity: bytes, message: PromptExpected) -> None:
        incoming = self._incoming(message.room)
        if incoming is not None and incoming.is_from_peer(message.sender, message.epoch):
            incoming.expected_at = time.monotonic() + message.seconds

    @property
    def awaits(self) -> bool:
        return bool(self.incoming)

    @property
    def stalled(self) -> bool:
        begun = any(incoming.expected_at is not None for incoming in self.incoming)
        return self.awaits and not begun

    def expected(self, seconds: float, late: float = math.inf) -> Iterator[Request]:
        now = time.monotonic()
        for incoming in self.incoming:
            expected_at = incoming.expected_at
            if expected_at is not None and now - late <= expected_at < now + seconds:
                yield incoming.request

    def _on_commit(self, identity: bytes, message: Commit) -> None:
        """The peer has sent everything; maybe not all of it is here yet."""
        incoming = self._incoming(message.room)
        recent = self._recent.get(message.room)
        if incoming is not None and not incoming.is_from_peer(message.sender, message.epoch):
            incoming = None
        committed = incoming is not None and incoming.committed
        if committed or (recent is not None and recent[1] == message.epoch):
            self._acknowledge(message.sender, message.room, message.epoch)
            return
        if incoming is None or incoming.request.state is not RequestState.RECEIVING:
            error = ErrorInfo(NodeFailedError.kind, "the decode node does not hold the reservation")
            self._post_abort(message.sender, message.room, message.epoch, error)
            return
        if incoming.commit is None and self._acceptable(incoming.request, message):
            incoming.commit = message
            incoming.commit_at = time.monotonic()
            assert incoming.receiver is not None
            with self._contained(incoming.request):
                incoming.receiver.commit(message.num_bytes)

    def _acceptable(self, request: Request, commit: Commit) -> bool:
        expected = self._core.engine.drafter_state_bytes
        # Without a state the first step has no draft.
        if len(commit.drafter_state) not in (0, expected):
            size = len(commit.drafter_state)
            error = f"the commit has a drafter state of {size} bytes, not of {expected}"
            self._rooms.fail(request, TransferError(error))
            return False
        indices = [token.index for token in commit.first_tokens]
        vocab_size = self._core.engine.model_config.vocab_size
        if sorted(indices) == list(range(request.params.n)) and all(
            0 <= token.token_id < vocab_size for token in commit.first_tokens
        ):
            return True
        self._rooms.fail(request, TransferError(f"commit names choices {indices} or bad tokens"))
        return False

    def poll(self) -> bool:
        """Move rooms along; True while a commit waits for its last bytes."""
        busy = False
        for incoming in list(self.incoming):
            self._send_reservation(incoming)
            with self._contained(incoming.request):
                busy = self._advance(incoming) or busy
        return busy

    def _advance(self, incoming: IncomingRoom) -> bool:
        """Move one room along; True while it waits for its last bytes after the commit, or for the
        time of its reservation."""
        receiver, commit = incoming.receiver, incoming.commit
        assert receiver is not None
        state = receiver.poll()
        if state is TransferState.FAILED:
            error = receiver.error or TransferError("the transfer failed")
            self._rooms.fail(incoming.request, error)
        elif state is TransferState.DONE:
            if commit is None:
                raise TransferError("the transfer backend reports an end before the commit")
            if self._check is None or self._check.is_intact(incoming, commit):
                self._commit(incoming, commit)
        else:
            return commit is not None or not incoming.sent
        return False

    def _contained(self, request: Request) -> contained.Contained:
        """Context in which a backend that is broken ends this request alone."""
        return contained.Contained(self._rooms.fail, request, "cannot receive from")

    def _commit(self, incoming: IncomingRoom, commit: Commit) -> None:
        """All of the KV is here: the pages become the request's, which is decoded from now on."""
        request = incoming.request
        self.incoming.remove(incoming)
        incoming.committed = True
        sequence = request.sequence
        self._memory.own_reserved(sequence)
        sequence.num_computed = len(request.prompt)
        self._memory.cache(sequence)
        eagle = self._core.engine.runner.eagle
        if eagle is not None and commit.drafter_state:
            sequence.carried = eagle.receive(commit.drafter_state, len(request.prompt))
        self._recent[request.room] = (time.monotonic() + LEASE_SECONDS, incoming.epoch)
        self._acknowledge(request.peer, request.room, incoming.epoch)
        self._count(incoming, commit)
        self._decode.add(request, commit.first_tokens, repeat=True)
        self._core.events.work_available.set()

    def _count(self, incoming: IncomingRoom, commit: Commit) -> None:
        request, metrics = incoming.request, self._core.metrics
        times, now = request.times, time.monotonic()
        assert times.reserved is not None
        wait = times.reserved - times.arrived
        metrics.transferred_bytes.inc(incoming.num_bytes)
        metrics.observe("bootstrap", wait)
        metrics.observe("transfer", now - times.reserved)
        exposed = commit.exposed_seconds + now - incoming.commit_at
        backend = self._transfer.backend_of(request.peer)
        found = TransferTimes(wait, commit.wire_seconds, exposed)
        metrics.transfers.observe(backend, incoming.num_bytes, found)

    def _acknowledge(self, peer: str, room: bytes, epoch: int) -> None:
        own = self._core.instance_id
        self.prefill_peers.send(CommitAck(to=peer, sender=own, room=room, epoch=epoch))

    def _on_returned(self, identity: bytes, message: Returned) -> None:
        """The peer sends nothing for now: the request waits for memory again."""
        incoming = self._incoming(message.room)
        if incoming is None or not incoming.is_from_peer(message.sender, message.epoch):
            return
        request, receiver = incoming.request, incoming.receiver
        if request.state is not RequestState.RECEIVING or receiver is None:
            return
        contained.abort(receiver, request.peer)
        receiver.peer_drained()
        drained = contained.is_drained(receiver, request.peer, self._broken)
        if incoming.commit is not None or not drained:
            error = TransferError(f"prefill node {request.peer} returned memory that it uses")
            self._rooms.fail(request, error)
            return
        self._memory.own_reserved(request.sequence)
        self._memory.release(request.sequence)
        self.incoming.remove(incoming)
        incoming.receiver = incoming.reservation = incoming.expected_at = None
        incoming.sent, incoming.epoch = False, 0
        request.state = RequestState.PREALLOCATING
        self.preallocation.put_back(incoming)
        self._core.events.work_available.set()
        self._core.events.want_pump()

    # ---- the end of a room

    def _on_abort_room(self, identity: bytes, message: AbortRoom) -> None:
        """The peer ended the room, maybe since token 1 ended it, or does not know this node."""
        if message.error.kind == HandshakeError.kind:
            self.prefill_peers.drop(message.sender, message.error.message)
            return
        if message.room not in self._rooms:
            self._rooms.add_tombstone(message.room)
            return
        incoming = self._incoming(message.room)
        if incoming is None or incoming.request.state.terminal:
            return
        # NOTE: the peer knows no epoch until it has the reservation.
        if not incoming.is_from_peer(message.sender, message.epoch or incoming.epoch):
            return
        if incoming.committed:
            # The peer ended before it had the acknowledgement; nothing more is needed of it.
            self._acknowledge(message.sender, message.room, incoming.epoch)
            return
        if message.error.kind == FINISHED:
            self._rooms.finish(incoming.request)
            return
        error = error_of_peer(message.error.kind, message.error.message)
        by_proxy = message.error.kind == AbortedError.kind
        self._rooms.fail(incoming.request, error, tell_proxy=not by_proxy)

    def ended(self, request: Request, before: RequestState) -> None:
        """Quarantine pages that the peer may still be writing to, and ask it to drain."""
        incoming = request.incoming
        if incoming is None:
            return
        if before is RequestState.PREALLOCATING:
            self.preallocation.remove(incoming)
        if incoming in self.incoming:
            self.incoming.remove(incoming)
        if incoming.committed:
            return
        error = request.error
        kind, text = (AbortedError.kind, "done") if error is None else (error.kind, error.message)
        incoming.abort_error = ErrorInfo(kind, text)
        if before is RequestState.RECEIVING:
            assert incoming.receiver is not None
            incoming.quarantine = self._memory.quarantine(request.sequence)
            contained.abort(incoming.receiver, request.peer)
            if not incoming.sent:
                incoming.receiver.peer_drained()
        self._tell_peer(incoming)

    def _tell_peer(self, incoming: IncomingRoom) -> None:
        request = incoming.request
        if not self.prefill_peers.connected(request.peer):
            return
        assert incoming.abort_error is not None
        incoming.abort_sent = time.monotonic()
        self._post_abort(request.peer, request.room, incoming.epoch, incoming.abort_error)

    def _post_abort(self, peer: str, room: bytes, epoch: int, error: ErrorInfo) -> None:
        own = self._core.instance_id
        message = AbortRoom(to=peer, sender=own, room=room, epoch=epoch, error=error)
        self.prefill_peers.send(message)

    def _on_drained(self, identity: bytes, message: Drained) -> None:
        """Nothing of this epoch can land any more."""
        incoming = self._incoming(message.room)
        if incoming is None or not incoming.is_from_peer(message.sender, message.epoch):
            return
        if incoming.quarantine is not None and incoming.receiver is not None:
            incoming.receiver.peer_drained()
        elif incoming.request.state is RequestState.RECEIVING:
            # The peer's abort was lost, its drain was not.
            error = PeerFailedError(f"prefill node {message.sender} dropped the room")
            self._rooms.fail(incoming.request, error)

    def may_release(self, request: Request) -> bool:
        """Whether nothing can land in the request's pages, or reads them for a digest, any more."""
        incoming = request.incoming
        if incoming is None:
            return True
        if not Digests.over(incoming.digest):
            return False
        if incoming.quarantine is None or incoming.receiver is None:
            return True
        if contained.is_drained(incoming.receiver, request.peer, self._broken):
            return True
        if time.monotonic() > incoming.abort_sent + HEARTBEAT_INTERVAL:
            self._tell_peer(incoming)
        return False

    def released(self, request: Request) -> None:
        """Free the pages that were in quarantine."""
        incoming = request.incoming
        if incoming is not None and incoming.quarantine is not None:
            self._memory.end_quarantine(incoming.quarantine)
            incoming.quarantine = None

    def sweep(self, now: float) -> None:
        self.prefill_peers.sweep(now)
        self._recent = {r: e for r, e in self._recent.items() if e[0] > now}
        self._core.events.want_pump()

    # ---- administration

    @property
    def queued_tokens(self) -> int:
        return sum(len(incoming.request.prompt) for incoming in self.preallocation)

    def queued(self) -> Iterator[Sequence]:
        waiting = chain(self.preallocation, self.incoming)
        return (incoming.request.sequence for incoming in waiting)

    def queues(self) -> dict[str, int]:
        return {"preallocation": len(self.preallocation), "transfer": len(self.incoming)}

    def quarantined_pages(self) -> Iterator[IntArray]:
        for request in self._rooms:
            if request.incoming is not None and request.incoming.quarantine is not None:
                yield request.incoming.quarantine

    def close(self) -> None:
        """Start no more handshakes and stop computing digests."""
        self.prefill_peers.close()
        if self._check is not None:
            self._check.close()
