"""What a prefill node knows of one room's hand-off."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd.node.metrics import TransferTimes

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pd.core.messages import FirstToken, Reservation
    from pd.core.node_info import KVLayout
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

    def may_wait(self, computed: int, num_tokens: int, layout: KVLayout) -> bool:
        """Whether KV of the first ``computed`` of a prompt's tokens had better be sent with more of
        it: it is no burst yet (:attr:`Sender.burst_bytes`), and as much again is still to be
        computed, so that it will leave behind that."""
        assert self.sender is not None
        unsent = computed - self.pushed
        small = unsent * layout.token_bytes < self.sender.burst_bytes
        return small and unsent <= num_tokens - computed

    def times(self, arrived: float) -> TransferTimes:
        """What it took, once everything is complete; ``arrived``: when the request came."""
        assert self.sent is not None and self.complete is not None
        wire = 0.0 if self.first_sent is None else self.sent - self.first_sent
        return TransferTimes(
            wait=max(0.0, self.reserved_at - arrived),
            wire=wire,
            exposed=max(0.0, self.complete - self.computed_at),
        )


@dataclass(eq=False, slots=True)
class Chunk:
    """Tokens ``[start, stop)`` of a prompt of ``num_tokens``, on their way through the layers.

    Attributes:
        sent: layers of this chunk that were given to the sender.
    """

    outgoing: Outgoing
    start: int
    stop: int
    num_tokens: int
    sent: int = 0

    def push(self, layers: int, layout: KVLayout) -> None:
        """The KV of so many layers is in the pool, or queued on the current stream, and all of the
        tokens before. Where bursts are wanted, it is kept: until the chunk's end, or longer while
        it may wait; of a chunk that ends the prompt until only the last quarter of the layers is
        left, behind which the burst can hide."""
        outgoing = self.outgoing
        if outgoing.sender is None or outgoing.pushed >= self.stop:
            return
        num_layers = layout.num_layers
        if outgoing.sender.burst_bytes:
            enough = num_layers
            if self.stop == self.num_tokens:
                enough -= num_layers // 4
            elif outgoing.may_wait(self.stop, self.num_tokens, layout):
                return
            if layers < enough:
                return
        if outgoing.pushed < self.start:
            outgoing.send(outgoing.pushed, self.start, 0, num_layers)
            outgoing.pushed = self.start
        outgoing.send(outgoing.pushed, self.stop, self.sent, layers)
        self.sent = layers
        if layers == num_layers:
            outgoing.pushed = self.stop
