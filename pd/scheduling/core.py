"""Objects that all parts of one node share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.config import NodeConfig
    from pd.core.errors import PDError
    from pd.core.messages import Message
    from pd.core.request import Request
    from pd.engine.engine import Engine
    from pd.grammar.grammars import Grammars
    from pd.scheduling.cost_model import CostModel
    from pd.scheduling.events import Events
    from pd.scheduling.memory import Memory
    from pd.scheduling.metrics import RequestMetrics
    from pd.scheduling.rooms import Rooms
    from pd.speculative.adaptation import DraftLengths
    from pd.speculative.drafter import Drafter


@dataclass(frozen=True, slots=True)
class NodeCore:
    """Given to schedulers and transfer ends when they are built, so that none needs the node.

    Attributes:
        drafter: drafts tokens for sequences that decode; None without speculation.
        draft_lengths: says how many.
        grammars: compiles the grammars of requests.
        costs: predicts how long steps take, on elastic nodes; None on others.
        post: sends a message to the process with an identity, which connected here; any thread.
        wake: has transfers polled soon; any thread.
    """

    config: NodeConfig
    instance_id: str
    engine: Engine
    memory: Memory
    events: Events
    rooms: Rooms
    metrics: RequestMetrics
    drafter: Drafter | None
    draft_lengths: DraftLengths
    grammars: Grammars
    costs: CostModel | None
    post: Callable[[bytes, Message], None]
    wake: Callable[[], None]

    def fail_choice(self, request: Request, error: PDError) -> None:
        """Fail a request because of a token of it. A grammar whose fault that is will be refused
        from now on."""
        grammar = request.params.grammar
        if grammar is not None and isinstance(error, InvalidRequestError):
            self.grammars.refuse(grammar, error)
        self.rooms.fail(request, error)
