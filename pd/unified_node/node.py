"""The unified node: prefill chunks and the decode batch in one forward pass over one pool.

An honest colocated baseline for the split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.request import RequestState
from pd.node.node import Node
from pd.prefill_node.node import first_outputs
from pd.scheduling.decode import DecodeManager
from pd.scheduling.prefill import PrefillManager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.config import NodeConfig
    from pd.core.request import Request, Sequence
    from pd.engine.engine import Engine
    from pd.scheduling.step import Work


class UnifiedNode(Node):
    """Queues: waiting → prefill → running (→ retracted → running)."""

    role = "unified"

    def __init__(self, config: NodeConfig, engine: Engine, instance_id: str) -> None:
        super().__init__(config, engine, instance_id)
        self.decode = DecodeManager(self)
        self.prefill = PrefillManager(config, engine, self.memory, headroom=self._headroom)

    def _headroom(self, request: Request) -> int:
        """Pages that must be left when this request is admitted, for everybody here to grow; none
        when nobody else is here, so that all make progress."""
        decode, others = self.decode, [r.sequence for r in self.prefill.running]
        if decode.retracted or decode.lacks_memory:
            return self.memory.num_pages
        if not others and not decode.running and not decode.waiting:
            return 0
        growth = decode.reserve.growth([*others, request.sequence], self.memory.page_size)
        return growth + decode.growth

    def plan(self) -> list[Work]:
        works = self.decode.plan()
        budget = max(self.config.chunked_prefill_size - len(works), 1)
        room = self.config.max_running_requests - len(self.decode.running)
        return works + self.prefill.plan(budget, room)

    def may_plan_ahead(self, launched: list[Work]) -> bool:
        return self.decode.may_plan_ahead([w for w in launched if w.sequence.sampling is not None])

    def process(self, works: list[Work]) -> None:
        chunks = [w for w in works if w.sequence.sampling is None]
        self.decode.process([w for w in works if w.sequence.sampling is not None])
        for work in self.prefill.process(chunks):
            request = work.sequence.request
            tokens = first_outputs(self, work)
            if tokens is not None:
                self.decode.add(request, tokens, repeat=False)

    def tokens_needed(self, request: Request) -> int:
        return len(request.prompt) + request.params.max_tokens - 1

    def accept(self, request: Request) -> None:
        request.state = RequestState.WAITING
        self.prefill.waiting.add(request)

    def ended(self, request: Request, before: RequestState) -> None:
        self.prefill.remove(request)
        self.decode.remove(request)

    def end_choice(self, request: Request, index: int) -> bool:
        return self.decode.end_choice(request, index)

    @property
    def queued_tokens(self) -> int:
        return self.prefill.queued_tokens

    def queued(self) -> Iterator[Sequence]:
        yield from self.prefill.queued()
        yield from self.decode.queued()

    def queues(self) -> dict[str, int]:
        return {
            "waiting": len(self.prefill.waiting) + len(self.decode.waiting),
            "prefill": len(self.prefill.running),
            "running": len(self.decode.running),
            "retracted": len(self.decode.retracted),
        }
