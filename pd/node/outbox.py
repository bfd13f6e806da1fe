"""Messages of a node to its proxies."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pd.core.errors import (
    HandshakeError,
    PeerFailedError,
    RefusedError,
    StepFailedError,
    TransferError,
)
from pd.core.messages import ErrorInfo, Failed, Output, StepFailed, StepOutputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.errors import PDError
    from pd.core.messages import Fault, Message, TokenLogprobs


# Log probabilities in one message, with the alternatives of each: 15 bytes each at most.
_MAX_LOGPROBS = 1 << 19


def _parts(output: Output) -> Iterator[Output]:
    """Log probabilities of a long prompt go ahead of the tokens."""
    logprobs = output.prompt_logprobs
    if logprobs is not None and sum(map(_size, logprobs)) > _MAX_LOGPROBS:
        some = max(1, _MAX_LOGPROBS // max(map(_size, logprobs)))
        for first in range(0, len(logprobs), some):
            part = logprobs[first : first + some]
            yield Output(output.room, output.index, 0, [], prompt_logprobs=part)
        output.prompt_logprobs = None
    yield output


def _messages(outputs: list[Output]) -> Iterator[list[Output]]:
    """Outputs in their order, in messages that are far from ``MAX_MESSAGE_BYTES``."""
    if not any(output.logprobs or output.prompt_logprobs for output in outputs):
        yield outputs
        return
    some: list[Output] = []
    size = 0
    for output in (part for whole in outputs for part in _parts(whole)):
        added = sum(map(_size, [*(output.logprobs or ()), *(output.prompt_logprobs or ())]))
        if some and size + added > _MAX_LOGPROBS:
            yield some
            some, size = [], 0
        some.append(output)
        size += added
    yield some


def _size(logprobs: TokenLogprobs) -> int:
    return 1 + len(logprobs.top_ids)


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
        # Rooms of a step that failed.
        self._lost: defaultdict[bytes, list[bytes]] = defaultdict(list)
        self._lost_by = ErrorInfo("", "")

    def add(self, proxy: bytes, output: Output) -> None:
        """Keep new tokens until :meth:`flush`."""
        self._outputs[proxy].append(output)

    def flush(self) -> None:
        """Send what was collected."""
        for proxy, outputs in self._outputs.items():
            for some in _messages(outputs):
                message = StepOutputs(to=proxy.decode(), sender=self._sender, outputs=some)
                self._post(proxy, message)
        self._outputs.clear()
        for proxy, rooms in self._lost.items():
            to, sender, error = proxy.decode(), self._sender, self._lost_by
            self._post(proxy, StepFailed(to=to, sender=sender, rooms=rooms, error=error))
        self._lost.clear()

    def failed(self, proxy: bytes, room: bytes, error: PDError) -> None:
        """Tell a proxy that a room ended without success: of a step that failed, all together at
        the next :meth:`flush`; others at once."""
        info = ErrorInfo(error.kind, error.message, error.param)
        if isinstance(error, StepFailedError):
            self._lost[proxy].append(room)
            self._lost_by = info
            return
        # NOTE: outputs collected before the failure go first, so that nothing comes after the end.
        self.flush()
        to, sender, fault = proxy.decode(), self._sender, _fault(error)
        self._post(proxy, Failed(to=to, sender=sender, room=room, error=info, fault=fault))


def _fault(error: PDError) -> Fault:
    """The node at fault. A transfer that fails may fail at either end."""
    if isinstance(error, RefusedError):
        return "nobody"
    if isinstance(error, PeerFailedError):
        return "peer"
    return "pair" if isinstance(error, TransferError | HandshakeError) else "node"
