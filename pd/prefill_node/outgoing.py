"""State of one hand-off on the node that sends the KV."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.scheduling.metrics import TransferTimes

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pd.core.messages import Reservation
    from pd.core.request import Request
    from pd.transfer.base import Sender


# What remains to be sent after the last layer is one group, so groups should be small; but each
# costs a launch or a frame per request, so there should not be many.
_LAYER_GROUP = 4
_MAX_GROUPS = 32


def layers_per_group(num_layers: int) -> int:
    """Return the number of layers whose KV is sent together: 4; fewer in shallow models (at most
    four groups), more in models so deep that 4 would make more than 32 groups."""
    return max(min(_LAYER_GROUP, -(-num_layers // 4)), -(-num_layers // _MAX_GROUPS))


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Cost of a prompt's tokens, to compute and to send.

    Attributes:
        num_layers: layers of the model.
        kv_bytes: bytes of one token in all layers of all planes.
        token_flops: operations on each GPU for the products of one token with the layers' weights.
        pair_flops: operations on each GPU for the attention of one token to one before it.
        extra_layers: layers of further planes, whose numbers follow those of the model. They are
            computed last, and their operations count as none.
    """

    num_layers: int
    kv_bytes: int
    token_flops: float
    pair_flops: float
    extra_layers: int = 0

    @property
    def all_layers(self) -> int:
        """Layers of all planes."""
        return self.num_layers + self.extra_layers

    def flops(self, start: int, stop: int, layers_done: int = 0) -> float:
        """Operations that are left for tokens ``[start, stop)`` when ``layers_done`` layers are
        computed. The last layer counts as none, since hardly more than its K and V are computed;
        so the result is below 0 when all are done."""
        pairs = (stop - start) * (stop + start) / 2
        whole = (stop - start) * self.token_flops + pairs * self.pair_flops
        left = self.num_layers - 1 - min(layers_done, self.num_layers)
        return whole * left / self.num_layers


@dataclass(eq=False, slots=True)
class OutgoingRoom:
    """State of the hand-off of one request, from its arrival until its pages are released.

    Attributes:
        cost: cost of the prompt's tokens.
        peer_has_grammar: whether the peer has said that it has compiled the request's grammar.
        reservation: the peer's, once it came.
        pushed: leading tokens whose KV of all layers was given to the sender (or is the peer's
            already in all planes).
        partial: token and layer up to which the KV of the tokens from ``pushed`` on was given to
            the sender, too; None if nothing of them was.
        parked: whether the computed prompt's pages were released to the prefix cache before the
            peer reserved; tokens that were evicted since are computed again when it does.
        digest: being computed since the whole prompt is here and the peer has reserved.
        expected_at: when the prompt is predicted to be computed, on the monotonic clock; None if
            nothing is predicted.
        reserved_at, computed_at: when the reservation came; when token 1 was known.
        first_sent, sent: when KV first went out; when the last byte had left.
        complete: when the digest was known, too.
    """

    request: Request
    cost: PromptCost
    peer_has_grammar: bool = False
    reservation: Reservation | None = None
    sender: Sender | None = None
    pushed: int = 0
    partial: tuple[int, int] | None = None
    parked: bool = False
    expected_at: float | None = None
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

    def push(self, stop: int) -> None:
        """Push what was not pushed of tokens before ``stop``, which are in the pool, or queued on
        the current stream, in all planes."""
        layers = self.cost.all_layers
        if self.partial is not None:
            token_stop, layer = self.partial
            self.send(self.pushed, token_stop, layer, layers)
            self.pushed, self.partial = token_stop, None
        if stop > self.pushed:
            self.send(self.pushed, stop, 0, layers)
            self.pushed = stop

    def may_wait(self, unsent: float, ahead: float) -> bool:
        """Whether the KV of ``unsent`` tokens should be sent later, since every use of the link
        costs the forward pass something and the ``ahead`` operations that are left (see
        :meth:`PromptCost.flops`) still hide it."""
        assert self.sender is not None
        hidden = unsent * self.cost.kv_bytes * self.sender.flops_per_byte
        return 0 < hidden <= ahead

    def times(self) -> TransferTimes:
        """Durations of the transfer, once everything is complete."""
        assert self.sent is not None and self.complete is not None
        wire = 0.0 if self.first_sent is None else self.sent - self.first_sent
        return TransferTimes(
            wait=max(0.0, self.reserved_at - self.request.times.arrived),
            wire=wire,
            exposed=max(0.0, self.complete - self.computed_at),
        )


@dataclass(eq=False, slots=True)
class Chunk:
    """Tokens ``[start, stop)`` of a prompt of ``num_tokens``, while a step computes them.

    Attributes:
        sent: leading layers of the chunk that the sender was given.
    """

    outgoing: OutgoingRoom
    start: int
    stop: int
    num_tokens: int
    sent: int = 0

    def layers_done(self, first: int, stop: int) -> None:
        """Send what is due, now that the KV of layers ``[first, stop)`` is in the pool or queued on
        the current stream, like that of the layers before and of the tokens before.

        A group of layers is sent when it is complete, unless it may wait for the next group, of
        this chunk or of the next one. KV that waited is sent after any layer, so that it does not
        leave earlier than it must. Layers are numbered through all planes. Layers of further planes
        that no call reports are sent after the step, or with the next chunk.
        """
        outgoing = self.outgoing
        if outgoing.sender is None or outgoing.pushed >= self.stop:
            return
        cost, all_layers = outgoing.cost, outgoing.cost.all_layers
        group = layers_per_group(cost.num_layers)
        in_groups = self.sent > 0 or outgoing.sender.flops_per_byte == 0
        if in_groups and stop % group and stop < cost.num_layers:
            return
        # Layers that are done when this is called next and something may be sent.
        then = stop + max(stop - first, group if in_groups else 1)
        earlier, new = self.start - outgoing.pushed, self.stop - max(self.start, outgoing.pushed)
        unsent = max(0, earlier) + new * (then - self.sent) / all_layers
        ahead = cost.flops(self.start, self.stop, then) + cost.flops(self.stop, self.num_tokens)
        # A chunk that was sent in part is sent to its end: what ``pushed`` leaves out is unsent.
        may_stay = stop < all_layers or self.sent == 0
        if may_stay and outgoing.may_wait(unsent, ahead):
            return
        if earlier > 0:
            outgoing.push(self.start)
        outgoing.send(outgoing.pushed, self.stop, self.sent, stop)
        self.sent = stop
        if stop < all_layers:
            outgoing.partial = (self.stop, stop)
        else:
            outgoing.pushed, outgoing.partial = self.stop, None
