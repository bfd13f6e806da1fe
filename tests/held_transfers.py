"""Hand-offs that stop before or during their transfer and stay there, over any backend.

Prompts of :data:`BEFORE_TOKENS` tokens are reserved and never sent; of :data:`DURING_TOKENS`, half
is sent. Run as a program this is ``pd-launch`` whose prefill node does so.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from pd.prefill_node.sending import SendingEnd

if TYPE_CHECKING:
    from pd.prefill_node.outgoing import OutgoingRoom
    from pd.transfer.base import Sender

BEFORE_TOKENS, DURING_TOKENS = 411, 522
HELD = {"before": BEFORE_TOKENS, "during": DURING_TOKENS}


class HalfSender:
    """A sender that takes the first half of a prompt and never learns that this was all."""

    def __init__(self, sender: Sender, num_tokens: int) -> None:
        self._sender, self._half = sender, num_tokens // 2

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        stop = min(token_stop, self._half)
        if token_start < stop:
            self._sender.send(token_start, stop, layer_start, layer_stop)

    def finish(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)


_open = SendingEnd._start_sending


def open_held(self: SendingEnd, outgoing: OutgoingRoom) -> None:
    """Replace ``SendingEnd._start_sending``."""
    if len(outgoing.request.prompt) == BEFORE_TOKENS:
        return
    make = self._transfer.sender
    if not isinstance(make, functools.partial):
        self._transfer.sender = functools.partial(_make_half, make)  # type: ignore[method-assign]
    _open(self, outgoing)


def _make_half(make: Any, peer: str, reservation: Any, pages: Any, num_tokens: int) -> Any:
    sender = make(peer, reservation, pages, num_tokens)
    return HalfSender(sender, num_tokens) if num_tokens == DURING_TOKENS else sender


if __name__ == "__main__":
    from pd.cli import launch

    SendingEnd._start_sending = open_held  # type: ignore[method-assign]
    sys.exit(launch())
