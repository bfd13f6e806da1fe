"""The decode node: receives the KV of prompts and generates the tokens after token 1."""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING

from pd.core.errors import InvalidRequestError
from pd.core.messages import AbortRoom, Commit, Drained, PeerHeartbeat
from pd.core.request import RequestState
from pd.decode_node.peers import PrefillPeers
from pd.decode_node.receiving import Receiving
from pd.node.node import Node
from pd.scheduling.decode import DecodeManager

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pd.core.config import NodeConfig
    from pd.core.errors import PDError
    from pd.core.messages import AnyMessage
    from pd.core.node_info import NodeInfo
    from pd.core.request import Request, Sequence
    from pd.engine.engine import Engine
    from pd.scheduling.step import Work
    from pd.transfer.base import TransferManager


class DecodeNode(Node):
    """Queues: preallocation → transfer → waiting → running (→ retracted → running)."""

    role = "decode"

    def __init__(
        self, config: NodeConfig, engine: Engine, instance_id: str, transfer: TransferManager
    ) -> None:
        super().__init__(config, engine, instance_id)
        self.transfer: TransferManager = transfer
        self.decode = DecodeManager(self)
        self.receiving = Receiving(self)
        self._handlers |= {
            Commit: self._on_commit,
            AbortRoom: self._on_abort_room,
            Drained: self._on_drained,
            PeerHeartbeat: self._on_peer_heartbeat,
        }

    def introduce(self, own: NodeInfo) -> None:
        """Say who we are to prefill nodes; before :meth:`start`."""
        self.peers = PrefillPeers(self, own)

    # ---- the loop

    def plan(self) -> list[Work]:
        return self.decode.plan()

    def may_plan_ahead(self, launched: list[Work]) -> bool:
        return self.decode.may_plan_ahead(launched)

    def process(self, works: list[Work]) -> None:
        self.decode.process(works)
        self.want_pump()

    def pump(self) -> None:
        self.receiving.pump()

    # ---- requests

    def tokens_needed(self, request: Request) -> int:
        return len(request.prompt) + request.params.max_tokens - 1

    def check_request(self, request: Request) -> None:
        super().check_request(request)
        if not request.peer or not request.peer_bootstrap:
            raise InvalidRequestError("a decode node needs the prefill node's address")

    def accept(self, request: Request) -> None:
        self.receiving.accept(request)

    def ended(self, request: Request, before: RequestState) -> None:
        self.decode.remove(request)
        self.receiving.ended(request, before)

    def end_choice(self, request: Request, index: int) -> bool:
        self.want_pump()
        return self.decode.end_choice(request, index)

    def may_release(self, request: Request) -> bool:
        return self.receiving.may_release(request)

    def release(self, request: Request) -> None:
        self.receiving.release(request)
        super().release(request)

    # ---- peers

    def peer_lost(self, instance: str, error: PDError) -> None:
        """What a prefill node had not committed fails."""
        waiting = (RequestState.PREALLOCATING, RequestState.RECEIVING)
        for request in list(self.requests.values()):
            if request.peer == instance and request.state in waiting:
                self.fail(request, error)

    def _on_commit(self, identity: bytes, message: AnyMessage) -> None:
        assert isinstance(message, Commit)
        self.receiving.on_commit(message)

    def _on_abort_room(self, identity: bytes, message: AnyMessage) -> None:
        assert isinstance(message, AbortRoom)
        self.receiving.on_abort(message)

    def _on_drained(self, identity: bytes, message: AnyMessage) -> None:
        assert isinstance(message, Drained)
        self.receiving.drained(message.room, message.epoch, message.sender)

    def _on_peer_heartbeat(self, identity: bytes, message: AnyMessage) -> None:
        assert isinstance(message, PeerHeartbeat)
        self.transfer.patience.heard(message.sender, message.run_delay)

    def on_message(self, identity: bytes, message: AnyMessage) -> None:
        with self.event():
            self.peers.heard_from(identity.decode(errors="replace"))
            super().on_message(identity, message)

    def peer_gap(self, instance: str) -> bool:
        known = self.peers.connected(instance)
        if known:
            self.peers.lose(instance, "messages from it were lost")
        return known

    def meet(self, prefill: Mapping[str, str]) -> None:
        if self.ready:
            self.peers.meet(prefill, time.monotonic())

    def linked_peers(self) -> list[str] | None:
        return self.peers.linked()

    def on_heartbeat(self) -> None:
        self.peers.heartbeat()

    def sweep(self, now: float) -> None:
        self.peers.sweep(now)
        self.receiving.sweep(now)
        self.want_pump()

    def transfer_peers(self) -> list[NodeInfo]:
        return self.peers.infos()

    def poll_transfers(self) -> bool:
        return self.receiving.poll()

    # ---- administration

    def quarantined_pages(self) -> list[object]:
        pages = [r.hand_off.quarantine for r in self.requests.values()]
        return [quarantine for quarantine in pages if quarantine is not None]

    @property
    def queued_tokens(self) -> int:
        return sum(len(r.prompt) for r in self.receiving.preallocation)

    def queued(self) -> Iterator[Sequence]:
        waiting, receiving = self.receiving.preallocation, self.receiving.transfer
        yield from (request.sequence for request in chain(waiting, receiving))
        yield from self.decode.queued()

    def queues(self) -> dict[str, int]:
        return {
            "preallocation": len(self.receiving.preallocation),
            "transfer": len(self.receiving.transfer),
            "waiting": len(self.decode.waiting),
            "running": len(self.decode.running),
            "retracted": len(self.decode.retracted),
        }

    def stop(self) -> None:
        super().stop()
        self.peers.close()
        self.receiving.close()
        self.transfer.close()
