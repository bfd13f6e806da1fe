"""Objects shared by all parts of one node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.config import NodeConfig
    from pd.core.errors import PDError
    from pd.core.messages import Message
    from pd.engine.engine import Engine
    from pd.grammar.grammars import Grammars
    from pd.scheduling.cost_model import CostModel
    from pd.scheduling.events import Events
    from pd.scheduling.live_requests import LiveRequests
    from pd.scheduling.memory import Memory
    from pd.scheduling.metrics import RequestMetrics
    from pd.scheduling.request import Request
    from pd.speculative.adaptation import DraftLengths
    from pd.speculative.drafter import Drafter


@dataclass(frozen=True, slots=True)
class NodeCore:
    """Passed to schedulers and transfer ends, so they do not need the node.

    Attributes:
        drafter: drafts tokens for decoding sequences; None without speculation.
        draft_lengths: chooses how many tokens to draft.
        grammars: compiles the grammars of requests.
        costs: predicts how long steps take; None unless the node is elastic.
        post: sends a message to the connected process with this identity; any thread may call it.
        request_poll: polls transfers soon; any thread may call it.
    """

    config: NodeConfig
    instance_id: str
    engine: Engine
    memory: Memory
    events: Events
    requests: LiveRequests
    metrics: RequestMetrics
    drafter: Drafter | None
    draft_lengths: DraftLengths
    grammars: Grammars
    costs: CostModel | None
    post: Callable[[bytes, Message], None]
    request_poll: Callable[[], None]

    def fail_choice(self, request: Request, error: PDError) -> None:
        """Fail a request because of one of its tokens. If the grammar is at fault, we then reject
        it."""
        grammar = request.params.grammar
        if grammar is not None and isinstance(error, InvalidRequestError):
            self.grammars.refuse_grammar(grammar, error, request.owner)
        self.requests.fail_request(request, error)
