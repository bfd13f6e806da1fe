"""The prefill node: computes prompts, samples token 1, hands the KV to a decode node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.errors import InvalidRequestError, NodeFailedError
from pd.core.messages import (
    AbortRoom,
    CommitAck,
    Finish,
    FirstToken,
    Output,
    PeerHeartbeat,
    Reservation,
    Stages,
)
from pd.core.request import Request, RequestState
from pd.node.node import Node
from pd.prefill_node.sending import HandOff
from pd.scheduling.prefill import PrefillManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.bootstrap.registry import Registry
    from pd.core.config import NodeConfig
    from pd.core.messages import AnyMessage
    from pd.core.node_info import NodeInfo
    from pd.core.request import Sequence
    from pd.engine.engine import Engine
    from pd.prefill_node.outgoing import Outgoing
    from pd.scheduling.step import Work
    from pd.transfer.base import TransferManager


def first_outputs(node: Node, work: Work) -> list[FirstToken] | None:
    """Deliver token 1 of every choice of a completed prompt; None if the model gave no number."""
    request = work.sequence.request
    request.times.first_token = time.monotonic()
    times = request.times
    admitted = times.admitted or times.arrived
    stages = Stages(queue=admitted - times.arrived, prefill=times.first_token - admitted)
    node.metrics.observe("queue", stages.queue or 0.0)
    node.metrics.observe("prefill", stages.prefill or 0.0)
    tokens = []
    for index, (state, sampled) in enumerate(zip(request.choices, work.sampled, strict=True)):
        if sampled.error is not None:
            node.fail(request, NodeFailedError(sampled.error))
            return None
        finish: Finish | None = state.observe(sampled.token_id)
        tokens.append(FirstToken(index, sampled.token_id, sampled.logprobs, finish))
        output = Output(
            room=request.room,
            index=index,
            position=0,
            token_ids=[sampled.token_id],
            finish=finish,
            logprobs=None if sampled.logprobs is None else [sampled.logprobs],
            cached_tokens=request.cached_tokens,
            stages=stages,
        )
        if index == 0 and request.params.prompt_logprobs_start is not None:
            output.prompt_logprobs = request.prompt_logprobs
        node.emit(request, output)
    return tokens


class PrefillNode(Node):
    """Queues: bootstrap (waits, D has not reserved) → waiting → running → in flight."""

    role = "prefill"

    def __init__(
        self, config: NodeConfig, engine: Engine, instance_id: str, transfer: TransferManager
    ) -> None:
        super().__init__(config, engine, instance_id)
        self.transfer: TransferManager = transfer
        self.registry: Registry | None = None
        self.hand_off = HandOff(self, transfer, resume=lambda r: self.prefill.waiting.add_first(r))
        self.prefill = PrefillManager(
            config,
            engine,
            self.memory,
            will_leave=lambda r: not r.peer or r.hand_off.reservation is not None,
            reclaim=self.hand_off.park,
        )
        self._handlers |= {
            Reservation: self._on_reservation,
            CommitAck: self._on_commit_ack,
            AbortRoom: self._on_abort_room,
            PeerHeartbeat: self._on_peer_heartbeat,
        }

    # ---- the loop

    def plan(self) -> list[Work]:
        works = self.prefill.plan(
            self.config.chunked_prefill_size, self.config.max_running_requests
        )
        for work in works:
            self.hand_off.open(work.sequence.request)
        return works

    def may_plan_ahead(self, launched: list[Work]) -> bool:
        return True  # what a chunk brings is known when it is launched

    def on_layers_done(self, works: list[Work]) -> Callable[[int, int], None] | None:
        with self.lock:
            return self.hand_off.layer_sender(works)

    def process(self, works: list[Work]) -> None:
        completed = self.prefill.process(works)
        for work in works:
            if work not in completed and not work.sequence.request.state.terminal:
                self.hand_off.computed(work)
        for work in completed:
            self._completed(work)

    def _completed(self, work: Work) -> None:
        request = work.sequence.request
        outgoing: Outgoing = request.hand_off
        if not outgoing.first_tokens:
            tokens = first_outputs(self, work)
            if tokens is None:
                return
            outgoing.first_tokens = tokens
        if all(token.finish for token in outgoing.first_tokens):
            self.finish(request)
        else:
            self.hand_off.completed(request)

    # ---- requests

    def tokens_needed(self, request: Request) -> int:
        return len(request.prompt)

    def check_request(self, request: Request) -> None:
        super().check_request(request)
        if not request.peer and request.params.max_tokens > 1:
            raise InvalidRequestError("more than one token needs a decode node")

    def accept(self, request: Request) -> None:
        request.state = RequestState.BOOTSTRAPPING if request.peer else RequestState.WAITING
        self.hand_off.accept(request)
        if not request.state.terminal:
            self.prefill.waiting.add(request)

    def ended(self, request: Request, before: RequestState) -> None:
        self.prefill.remove(request)
        self.hand_off.ended(request)

    def may_release(self, request: Request) -> bool:
        return self.hand_off.may_release(request)

    def release(self, request: Request) -> None:
        super().release(request)
        self.hand_off.released(request)

    # ---- peers

    def add_peer(self, peer: NodeInfo) -> None:
        """A decode node shook hands at the registry (any thread)."""
        with self.event():
            self.hand_off.add_peer(peer)

    def lose_peer(self, instance: str, why: str) -> None:
        """A decode node was replaced (any thread)."""
        with self.event():
            self.hand_off.lose_peer(instance, why)

    def _on_reservation(self, identity: bytes, message: AnyMessage) -> None:
        assert isinstance(message, Reservation)
        self.hand_off.on_reservation(message)
        self.work_available.set()

    def _on_commit_ack(self, identity: bytes, message: AnyMessage) -> None:
        assert isinstance(message, CommitAck)
        self.hand_off.on_commit_ack(message.sender, message.room, message.epoch)

    def _on_abort_room(self, identity: bytes, message: AnyMessage) -> None:
        assert isinstance(message, AbortRoom)
        self.hand_off.on_abort(message)

    def _on_peer_heartbeat(self, identity: bytes, message: AnyMessage) -> None:
        assert isinstance(message, PeerHeartbeat)
        self.transfer.patience.heard(message.sender, message.run_delay)
        if not self.hand_off.peers.heard_from(message.sender):
            # The node stood still for longer than its lease. Told now, it shakes hands again before
            # its next reservation, whose request would fail.
            self.hand_off.refuse_stranger(message.sender)

    def peer_gap(self, instance: str) -> bool:
        known = instance in self.hand_off.peers
        if known:
            self.hand_off.lose_peer(instance, "messages from it were lost")
        return known

    def on_heartbeat(self) -> None:
        self.hand_off.peers.heartbeat()

    def sweep(self, now: float) -> None:
        self.hand_off.sweep(now)

    def transfer_peers(self) -> list[NodeInfo]:
        return self.hand_off.peers.infos()

    def poll_transfers(self) -> bool:
        return self.hand_off.poll()

    # ---- administration

    @property
    def queued_tokens(self) -> int:
        return self.prefill.queued_tokens

    def queued(self) -> Iterator[Sequence]:
        yield from self.prefill.queued()
        yield from (request.sequence for request in self.hand_off.in_flight)

    def queues(self) -> dict[str, int]:
        waiting = sum(r.state is RequestState.WAITING for r in self.prefill.waiting)
        return {
            "bootstrap": len(self.prefill.waiting) - waiting,
            "waiting": waiting,
            "running": len(self.prefill.running),
            "in_flight": len(self.hand_off.in_flight),
        }

    def stop(self) -> None:
        super().stop()
        self.hand_off.close()
        self.transfer.close()
