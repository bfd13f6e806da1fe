"""What a prefill node knows of one room's hand-off."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd.node.metrics import TransferTimes

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pd.core.messages import FirstToken, Reservation
    from pd.transfer.base import Sender


@dataclass(eq=False, slots=True)
class Outgoing:
    """State of the hand-off, on ``Request.hand_off``.

    Attributes:
        pushed: leading tokens whose KV of all layers was given to the sender (or is D's already).
        first_tokens: token 1 of each choice once sampled.
        parked: computed, then evicted for others before D reserved; computed again when it does.
        digest: being computed since the whole prompt is here and D has reserved.
        reserved_at, computed_at, first_sent, sent, complete: when D's reservation came, the prompt
            was computed (token 1 known), KV first went out, the last byte had left, and the digest
            was known too.
    """

    reservation: Reservation | None = None
    sender: Sender | None = None
    pushed: int = 0
    first_tokens: list[FirstToken] = field(default_factory=list)
    parked: bool = False
    digest: Future[bytes] | None = None
    commit_sent: float | None = None
    acknowledged: bool = False
    reserved_at: float = 0.0
    computed_at: float = 0.0
    first_sent: float | None = None
    sent: float | None = None
    complete: float | None = None

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        """Push KV that is in the pool, or queued on the current stream."""
        assert self.sender is not None
        if self.first_sent is None:
            self.first_sent = time.monotonic()
        self.sender.send(token_start, token_stop, layer_start, layer_stop)

    def times(self, arrived: float) -> TransferTimes:
        """What it took, once everything is complete; ``arrived``: when the request came."""
        assert self.sent is not None and self.complete is not None
        wire = 0.0 if self.first_sent is None else self.sent - self.first_sent
        return TransferTimes(
            wait=max(0.0, self.reserved_at - arrived),
            wire=wire,
            exposed=max(0.0, self.complete - self.computed_at),
        )
