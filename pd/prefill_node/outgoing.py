"""State of one hand-off on the node sending the KV."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.scheduling.metrics import TransferTimes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from pd.core.messages import Reservation
    from pd.scheduling.request import Request
    from pd.transfer.base import Sender


# After the last layer we still have to send one group, so groups should be small. Each group costs
# a launch or a frame per request, so there should be few.
_LAYER_GROUP = 4
_MAX_GROUPS = 32


def layers_per_group(num_layers: int) -> int:
    """Return the number of layers whose KV is sent together.

    It is 4, but fewer in shallow models (at most four groups) and more in deep ones (at most 32).
    """
    return max(min(_LAYER_GROUP, -(-num_layers // 4)), -(-num_layers // _MAX_GROUPS))


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Cost of computing and sending a prompt's tokens.

    Attributes:
        num_layers: layers of the model.
        kv_bytes: bytes of one token in all layers of all planes.
        token_flops: operations per GPU to multiply one token with the layers' weights.
        pair_flops: operations per GPU for the attention of one token to one earlier token.
        extra_layers: layers of further planes, numbered after those of the model. They are computed
            last, and their operations count as none.
        windows: see :class:`pd.models.config.ModelConfig`.
        pool_layers: number of each of the model's layers in the pool; empty if they are the same.
    """

    num_layers: int
    kv_bytes: int
    token_flops: float
    pair_flops: float
    extra_layers: int = 0
    windows: tuple[int, ...] = ()
    pool_layers: tuple[int, ...] = ()

    @property
    def all_layers(self) -> int:
        """Layers of all planes."""
        return self.num_layers + self.extra_layers

    def remaining_flops(self, start: int, stop: int, layers_done: int = 0) -> float:
        """Return the operations left for tokens ``[start, stop)`` after ``layers_done`` layers.

        The last layer counts as none, because hardly more than its K and V are computed. The result
        is therefore negative after all layers.
        """
        kinds = Counter(self.windows or (0,))
        pairs = (
            sum(count * _count_pairs(start, stop, window) for window, count in kinds.items())
            / kinds.total()
        )
        whole = (stop - start) * self.token_flops + pairs * self.pair_flops
        left = self.num_layers - 1 - min(layers_done, self.num_layers)
        return whole * left / self.num_layers

    def find_pool_layers(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of the pool's layers, which together are layers ``[start, stop)`` in the
        order of computation."""
        if not self.pool_layers:
            yield start, stop
            return
        numbers = sorted(self.pool_layers[start : min(stop, self.num_layers)])
        numbers += range(max(start, self.num_layers), stop)
        first = 0
        for index in range(1, len(numbers) + 1):
            if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
                yield numbers[first], numbers[index - 1] + 1
                first = index


def _count_pairs(start: int, stop: int, window: int) -> float:
    """Count pairs of a token in ``[start, stop)`` and an earlier one that it sees."""
    middle = min(max(window, start), stop) if window else stop
    return (middle - start) * (middle + start) / 2 + (stop - middle) * window


@dataclass(eq=False, slots=True)
class OutgoingRoom:
    """State of one request's hand-off, from its arrival until its pages are released.

    Attributes:
        cost: cost of the prompt's tokens.
        peer_has_grammar: whether the peer has compiled the request's grammar, as it reported.
        reservation: the peer's reservation, once it arrived.
        pushed: number of leading tokens whose KV of all layers was given to the sender, or which
            the peer has cached in all planes.
        partial: token and layer up to which we gave the sender KV of tokens after ``pushed``; None
            if we gave none.
        parked: whether the pages were released to the prefix cache before the peer reserved. When
            it does, we compute evicted tokens again.
        digest: digest being computed, once the whole prompt is prefilled and the peer has reserved.
        expected_at: predicted end of the prefill, on the monotonic clock; None without a
            prediction.
        reserved_at, computed_at: when the reservation arrived; when token 1 was known.
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

    def send_range(
        self, token_start: int, token_stop: int, layer_start: int, layer_stop: int
    ) -> None:
        """Push KV from the pool, or queued on the current stream. Layers are numbered in the order
        of computation."""
        assert self.sender is not None
        if self.first_sent is None:
            self.first_sent = time.monotonic()
        for first, stop in self.cost.find_pool_layers(layer_start, layer_stop):
            self.sender.send(token_start, token_stop, first, stop)

    def push_until(self, stop: int) -> None:
        """Push the unsent KV of tokens before ``stop`` in all planes.

        It must be in the pool or queued on the current stream.
        """
        layers = self.cost.all_layers
        if self.partial is not None:
            token_stop, layer = self.partial
            self.send_range(self.pushed, token_stop, layer, layers)
            self.pushed, self.partial = token_stop, None
        if stop > self.pushed:
            self.send_range(self.pushed, stop, 0, layers)
            self.pushed = stop

    def may_wait(self, unsent: float, ahead: float) -> bool:
        """Whether to send the KV of ``unsent`` tokens later.

        Sending slows the forward pass, so we wait while the remaining ``ahead`` operations (see
        :meth:`PromptCost.remaining_flops`) are enough to hide the transfer.
        """
        assert self.sender is not None
        hidden = unsent * self.cost.kv_bytes * self.sender.flops_per_byte
        return 0 < hidden <= ahead

    def transfer_times(self) -> TransferTimes:
        """Return the durations of a complete transfer."""
        assert self.sent is not None and self.complete is not None
        wire = 0.0 if self.first_sent is None else self.sent - self.first_sent
        return TransferTimes(
            wait=max(0.0, self.reserved_at - self.request.times.arrived),
            wire=wire,
            exposed=max(0.0, self.complete - self.computed_at),
        )


def outgoing_of(request: Request) -> OutgoingRoom | None:
    """Return the state of a request's hand-off, or None if this node does not send its KV."""
    outgoing = request.outgoing
    assert outgoing is None or isinstance(outgoing, OutgoingRoom)
    return outgoing


@dataclass(eq=False, slots=True)
class Chunk:
    """Tokens ``[start, stop)`` of a prompt of ``num_tokens``, while a step computes them.

    Attributes:
        sent: number of leading layers of the chunk given to the sender.
    """

    outgoing: OutgoingRoom
    start: int
    stop: int
    num_tokens: int
    sent: int = 0

    def layers_done(self, first: int, stop: int) -> None:
        """Send the KV due after layers ``[first, stop)`` were computed or queued on the
        stream.

        We send each complete group of layers, unless it may wait for the next group of this chunk
        or the next chunk. Once KV has waited, we may send it after any layer, so that it does not
        leave earlier than it must. Layers are numbered through all planes. Layers of further planes
        that no call reports are sent after the step or with the next chunk.
        """
        outgoing = self.outgoing
        if outgoing.sender is None or outgoing.pushed >= self.stop:
            return
        cost, all_layers = outgoing.cost, outgoing.cost.all_layers
        group = layers_per_group(cost.num_layers)
        in_groups = self.sent > 0 or outgoing.sender.flops_per_byte == 0
        if in_groups and stop % group and stop < cost.num_layers:
            return
        # Number of layers done at the next call that may send something.
        then = stop + max(stop - first, group if in_groups else 1)
        earlier, new = self.start - outgoing.pushed, self.stop - max(self.start, outgoing.pushed)
        unsent = max(0, earlier) + new * (then - self.sent) / all_layers
        ahead = cost.remaining_flops(self.start, self.stop, then) + cost.remaining_flops(
            self.stop, self.num_tokens
        )
        # A chunk sent in part is sent to its end, because ``pushed`` covers whole tokens only.
        may_stay = stop < all_layers or self.sent == 0
        if may_stay and outgoing.may_wait(unsent, ahead):
            return
        if earlier > 0:
            outgoing.push_until(self.start)
        outgoing.send_range(outgoing.pushed, self.stop, self.sent, stop)
        self.sent = stop
        if stop < all_layers:
            outgoing.partial = (self.stop, stop)
        else:
            outgoing.pushed, outgoing.partial = self.stop, None
