"""Log of a node's steps: when each step was complete and its work."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pd.node.node import Node
    from pd.scheduling.step import Work


class LoggedStep(NamedTuple):
    """One step.

    Attributes:
        at: monotonic time when the host knew its tokens.
        batch: number of works; a prompt's chunk would be the last of them.
        decodes_only: whether no chunk of a prompt is among them.
        context: mean context of its sequences, in tokens.
        tokens: number of new tokens of its sequences.
    """

    at: float
    batch: int
    decodes_only: bool
    context: float
    tokens: int


class Interval(NamedTuple):
    """Seconds between two consecutive steps of the same decode batch, with the context and the
    tokens of the second step."""

    seconds: float
    context: float
    tokens: int


class StepLog:
    """Logs every step of a node when the scheduler accounts for it."""

    def __init__(self, node: Node) -> None:
        self.steps: list[LoggedStep] = []
        self._process = node.scheduler.process_step
        # We replace the method itself, so no caller bypasses the log.
        node.scheduler.process_step = self._log_step  # type: ignore[method-assign]

    def _log_step(self, works: list[Work]) -> None:
        now = time.monotonic()
        last = works[-1]
        # NOTE: read all this before the scheduler accounts for the step, because a finished prompt
        # then becomes a running sequence. Sequences run in the order of their arrival, so the first
        # and the last one stand for all.
        context = (works[0].stop + last.stop) / 2
        decodes_only = last.sequence.sampling is not None
        before = sum(work.sequence.num_tokens for work in works)
        self._process(works)
        tokens = sum(work.sequence.num_tokens for work in works) - before
        self.steps.append(LoggedStep(now, len(works), decodes_only, context, tokens))

    def find_intervals(self, batch: int) -> list[Interval]:
        """Find neighbouring steps that both decoded exactly ``batch`` sequences and no prompt."""
        intervals = []
        for before, after in pairwise(list(self.steps)):
            alike = before.batch == after.batch == batch
            if alike and before.decodes_only and after.decodes_only:
                intervals.append(Interval(after.at - before.at, after.context, after.tokens))
        return intervals
