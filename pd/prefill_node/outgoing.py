"""What a prefill node knows of one room's hand-off."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd.scheduling.metrics import TransferTimes

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pd.core.messages import FirstToken, Reservation
    from pd.transfer.base import Sender


# What remains to be sent after the last layer is one group, so groups should be small; but each
# costs a launch or a frame per request, so there should not be many.
_LAYER_GROUP = 4
_MAX_GROUPS = 32


def layers_per_group(num_layers: int) -> int:
    """How many layers' KV is sent together: of 4, fewer in shallow models (at most four groups) and
    more in models so deep that 4 would make more than 32 groups."""
    return max(min(_LAYER_GROUP, -(-num_layers // 4)), -(-num_layers // _MAX_GROUPS))


@dataclass(frozen=True, slots=True)
class PromptCost:
    """What the tokens of a prompt cost.

    Attributes:
        num_layers: that they go through.
        kv_bytes: of one, to send, of all layers.
        token_flops: of one, for the products with the layers' weights, on each of the GPUs.
        pair_flops: of one's attention to one before it, likewise.
    """

    num_layers: int
    kv_bytes: int
    token_flops: float
    pair_flops: float

    def flops(self, start: int, stop: int, layers_done: int = 0) -> float:
        """What is left to compute of tokens ``[start, stop)``, of the last layer hardly more than
        its K and V. Below 0 where more layers are said to be done."""
        pairs = (stop - start) * (stop + start) / 2
        whole = (stop - start) * self.token_flops + pairs * self.pair_flops
        return whole * (self.num_layers - 1 - layers_done) / self.num_layers


@dataclass(eq=False, slots=True)
class Outgoing:
    """State of the hand-off, on ``Request.hand_off``.

    Attributes:
        cost: of the prompt's tokens.
        pushed: leading tokens whose KV of all layers was given to the sender (or is D's already).
        first_tokens: token 1 of each choice once sampled.
        parked: computed, then evicted for others before D reserved; computed again when it does.
        digest: being computed since the whole prompt is here and D has reserved.
        reserved_at, computed_at, first_sent, sent, complete: when D's reservation came, the prompt
            was computed (token 1 known), KV first went out, the last byte had left, and the digest
            was known too.
    """

    cost: PromptCost
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

    def may_wait(self, unsent: float, ahead: float) -> bool:
        """Whether the KV of ``unsent`` tokens had better be sent later: every use of the link costs
        the forward pass something, and ``ahead`` operations (:meth:`PromptCost.flops`) are left to
        send it behind."""
        assert self.sender is not None
        hidden = unsent * self.cost.kv_bytes * self.sender.flops_per_byte
        return 0 < hidden <= ahead

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
        sent: layers of it that the sender was given.
    """

    outgoing: Outgoing
    start: int
    stop: int
    num_tokens: int
    sent: int = 0

    def layers_done(self, first: int, stop: int) -> None:
        """The KV of layers ``[first, stop)`` is in the pool, or queued on the current stream, like
        that of the layers before and of the tokens before. Send what was not sent when a group is
        complete, unless that may wait for the next (of this chunk or of the next one); what waited
        is sent after any layer, so as not to leave early."""
        outgoing = self.outgoing
        if outgoing.sender is None or outgoing.pushed >= self.stop:
            return
        cost, num_layers = outgoing.cost, outgoing.cost.num_layers
        group = layers_per_group(num_layers)
        in_groups = self.sent > 0 or outgoing.sender.flops_per_byte == 0
        if in_groups and stop % group and stop < num_layers:
            return
        # When this is called next and something may be sent.
        then = stop + max(stop - first, group if in_groups else 1)
        earlier, new = self.start - outgoing.pushed, self.stop - max(self.start, outgoing.pushed)
        unsent = max(0, earlier) + new * (then - self.sent) / num_layers
        ahead = cost.flops(self.start, self.stop, then) + cost.flops(self.stop, self.num_tokens)
        # A chunk that was sent in part is sent to its end: what ``pushed`` leaves out is unsent.
        may_stay = stop < num_layers or self.sent == 0
        if may_stay and outgoing.may_wait(unsent, ahead):
            return
        if earlier > 0:
            outgoing.send(outgoing.pushed, self.start, 0, num_layers)
            outgoing.pushed = self.start
        outgoing.send(outgoing.pushed, self.stop, self.sent, stop)
        self.sent = stop
        if stop == num_layers:
            outgoing.pushed = self.stop
