"""What a node says to its proxies."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pd.core.messages import ErrorInfo, Failed, Output, StepOutputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.errors import PDError
    from pd.core.messages import Message


class Outbox:
    """Collects outputs, so that each proxy gets one message per step. Under the node's lock.

    Args:
        sender: instance id of the node.
        post: sends a message to the process with an identity.
    """

    def __init__(self, sender: str, post: Callable[[bytes, Message], None]) -> None:
        self._sender = sender
        self._post = post
        self._outputs: defaultdict[bytes, list[Output]] = defaultdict(list)

    def add(self, proxy: bytes, output: Output) -> None:
        """Keep new tokens until :meth:`flush`."""
        self._outputs[proxy].append(output)

    def flush(self) -> None:
        """Send what was collected."""
        for proxy, outputs in self._outputs.items():
            message = StepOutputs(to=proxy.decode(), sender=self._sender, outputs=outputs)
            self._post(proxy, message)
        self._outputs.clear()

    def failed(self, proxy: bytes, room: bytes, error: PDError) -> None:
        """Say that a room ended without success."""
        # NOTE: outputs collected before the failure go first, so that nothing comes after the end.
        self.flush()
        info = ErrorInfo(error.kind, error.message, error.param)
        self._post(proxy, Failed(to=proxy.decode(), sender=self._sender, room=room, error=info))
