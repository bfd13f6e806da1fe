"""Messages from a node to its proxies."""

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


# Log probabilities per message, counting alternatives: at most 15 bytes each.
_MAX_LOGPROBS = 1 << 19


def _split_output(output: Output) -> Iterator[Output]:
    """Send the log probabilities of a long prompt before the tokens."""
    logprobs = output.prompt_logprobs
    if logprobs is not None and sum(map(_logprobs_size, logprobs)) > _MAX_LOGPROBS:
        some = max(1, _MAX_LOGPROBS // max(map(_logprobs_size, logprobs)))
        for first in range(0, len(logprobs), some):
            part = logprobs[first : first + some]
            yield Output(output.room, output.index, 0, [], prompt_logprobs=part)
        output.prompt_logprobs = None
    yield output


def _pack_messages(outputs: list[Output]) -> Iterator[list[Output]]:
    """Group outputs, in order, into messages far below ``MAX_MESSAGE_BYTES``."""
    if not any(output.logprobs or output.prompt_logprobs for output in outputs):
        yield outputs
        return
    some: list[Output] = []
    size = 0
    for output in (part for whole in outputs for part in _split_output(whole)):
        added = sum(
            map(_logprobs_size, [*(output.logprobs or ()), *(output.prompt_logprobs or ())])
        )
        if some and size + added > _MAX_LOGPROBS:
            yield some
            some, size = [], 0
        some.append(output)
        size += added
    yield some


def _logprobs_size(logprobs: TokenLogprobs) -> int:
    return 1 + len(logprobs.top_ids)


class StepOutputBuffer:
    """Collects outputs, so that each proxy gets one message per step. The caller holds the node's
    lock.

    Args:
        sender: instance id of the node.
        post: sends a message to the process with an identity.
    """

    def __init__(self, sender: str, post: Callable[[bytes, Message], None]) -> None:
        self._sender = sender
        self._post = post
        self._outputs: defaultdict[bytes, list[Output]] = defaultdict(list)
        # Rooms whose step failed, and the error.
        self._lost: defaultdict[bytes, list[bytes]] = defaultdict(list)
        self._lost_by = ErrorInfo("", "")

    def add_output(self, proxy: bytes, output: Output) -> None:
        """Keep new tokens until :meth:`send_outputs`."""
        self._outputs[proxy].append(output)

    def send_outputs(self) -> None:
        """Send everything collected."""
        for proxy, outputs in self._outputs.items():
            for some in _pack_messages(outputs):
                message = StepOutputs(to=proxy.decode(), sender=self._sender, outputs=some)
                self._post(proxy, message)
        self._outputs.clear()
        for proxy, rooms in self._lost.items():
            to, sender, error = proxy.decode(), self._sender, self._lost_by
            self._post(proxy, StepFailed(to=to, sender=sender, rooms=rooms, error=error))
        self._lost.clear()

    def report_failure(self, proxy: bytes, room: bytes, error: PDError) -> None:
        """Tell a proxy that a room failed.

        Rooms of a failed step are reported together in the next :meth:`send_outputs`, others at
        once.
        """
        info = ErrorInfo(error.kind, error.message, error.param)
        if isinstance(error, StepFailedError):
            self._lost[proxy].append(room)
            self._lost_by = info
            return
        # NOTE: we first send the outputs collected before the failure, because nothing may come
        # after it.
        self.send_outputs()
        to, sender, fault = proxy.decode(), self._sender, _find_fault(error)
        self._post(proxy, Failed(to=to, sender=sender, room=room, error=info, fault=fault))


def _find_fault(error: PDError) -> Fault:
    """Tell which node is at fault. Either end may cause a failed transfer."""
    if isinstance(error, RefusedError):
        return "nobody"
    if isinstance(error, PeerFailedError):
        return "peer"
    return "pair" if isinstance(error, TransferError | HandshakeError) else "node"
