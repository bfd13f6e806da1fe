"""Load of an elastic node now: its last report, and what was sent there since."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pd.core.step_cost import StepShape, slice_tokens

if TYPE_CHECKING:
    from pd.core.node_load import NodeLoad

# Heartbeats whose answers may be under way; older ones were lost.
_MAX_MARKS = 64


class _Sent(NamedTuple):
    """Streams that were sent to a node so far, and their tokens."""

    streams: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _SentPrompt:
    """A prompt that was sent to a node.

    Attributes:
        beat: number of the last heartbeat before.
        at: when it was sent, on the monotonic clock.
        seconds: for which it keeps the node busy; below 0 for one that was asked back.
        left: the same, but 0 once it is computed or not wanted any more.
    """

    beat: int
    at: float
    seconds: float
    left: float


class LoadEstimate:
    """Load of one node between its reports, which are half a second old at most.

    Attributes:
        reported: the last report; None before the first, and of a node that is not elastic.
        promised: seconds of prefill that will be sent there as soon as other nodes give the prompts
            back.
        answers_since: when the first report came, on the monotonic clock, since which each tells of
            answers; None if the last tells of none.
    """

    def __init__(self) -> None:
        self.reported: NodeLoad | None = None
        self.promised = 0.0
        self.answers_since: float | None = None
        self._reported_at = 0.0
        # Prompts that the report does not know of.
        self._prompts: list[_SentPrompt] = []
        self._sent = _Sent()
        # What had been sent before the heartbeat that the report answers, and before later ones.
        self._known = _Sent()
        self._marks: dict[int, _Sent] = {}
        self._beats = 0

    @property
    def last_beat(self) -> int:
        """Number of the last heartbeat that was sent."""
        return self._beats

    def beat(self) -> int:
        """A heartbeat is about to be sent; returns its number."""
        self._beats += 1
        self._marks[self._beats] = self._sent
        if len(self._marks) > _MAX_MARKS:
            del self._marks[next(iter(self._marks))]
        return self._beats

    def heard(self, load: NodeLoad | None, answers: int) -> None:
        """Take the report that answers a heartbeat."""
        self.reported, self._reported_at = load, time.monotonic()
        if load is None or not load.streams:
            self.answers_since = None
        elif self.answers_since is None:
            self.answers_since = self._reported_at
        self._prompts = [prompt for prompt in self._prompts if prompt.beat >= answers]
        self._known = self._marks.get(answers, self._known)
        self._marks = {number: sent for number, sent in self._marks.items() if number > answers}

    def prompt_sent(self, seconds: float) -> int:
        """A prompt was sent there whose computation is expected to take so long, or (below 0) was
        asked back. Returns the number of the last heartbeat, for :meth:`prompt_over`."""
        self._prompts.append(_SentPrompt(self._beats, time.monotonic(), seconds, seconds))
        return self._beats

    def prompt_over(self, seconds: float, beat: int) -> None:
        """A prompt that was sent there is computed, or not wanted any more. One that a report has
        seen is in its time, which passes by itself."""
        for prompt in self._prompts:
            if prompt.beat == beat and prompt.left == seconds:
                prompt.left = 0.0
                return

    def stream_sent(self, streams: int, tokens: int) -> None:
        """A request was sent there, or announced, that will be generated there, or (both below 0)
        it ended: an answer may be over long before the next report.

        Args:
            tokens: of all its streams.
        """
        now = self._sent
        self._sent = now._replace(streams=now.streams + streams, tokens=now.tokens + tokens)

    @property
    def queue_seconds(self) -> float:
        """Seconds until the prompts that were sent there, or are promised, are computed."""
        if self.reported is None:
            return 0.0
        # The node computes what it has while the clock runs, and no more than it has.
        now, at, queue = time.monotonic(), self._reported_at, self.reported.queue_seconds
        left = max(0.0, queue - (now - at))
        for prompt in self._prompts:
            then = max(prompt.at, at)
            queue = max(0.0, max(0.0, queue - (then - at)) + prompt.seconds)
            at, left = then, left + prompt.left
        queue = max(0.0, queue - (now - at))
        return max(0.0, min(queue, left) + self.promised)

    @property
    def decoding(self) -> StepShape:
        """A step of all streams there."""
        if self.reported is None:
            return StepShape()
        # NOTE: an answer that ends between a heartbeat and the report may be taken off twice.
        streams = max(0, self.reported.streams + self._sent.streams - self._known.streams)
        context = max(0, self.reported.context + self._sent.tokens - self._known.tokens)
        return StepShape(streams=streams, context=context if streams else 0)

    @property
    def free_tokens(self) -> int:
        """Tokens for whose KV there is memory."""
        if self.reported is None:
            return 0
        return self.reported.free_tokens - (self._sent.tokens - self._known.tokens)

    def prefill_seconds(self, tokens: int, cached: int) -> float:
        """Seconds from the first to the last step of a prompt with so many cached tokens."""
        assert self.reported is not None
        report, beside = self.reported, self.reported.beside
        left = tokens - cached
        queued, middle = report.queued_tokens + left, cached + left // 2
        chunk = slice_tokens(report.cost, report.itl, beside, middle, report.chunk, queued)
        return report.cost.prefill_seconds(cached, left, chunk, beside)
