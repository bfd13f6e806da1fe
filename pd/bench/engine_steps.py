"""Log of a node's steps: when each was complete, and what it computed."""

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
        at: monotonic time at which its tokens were known to the host.
        batch: works, of which a chunk of a prompt would be the last.
        decodes_only: no chunk is among them.
        context: tokens that its sequences attend to, on average.
        tokens: that its sequences have more after it.
    """

    at: float
    batch: int
    decodes_only: bool
    context: float
    tokens: int


class Interval(NamedTuple):
    """Seconds between two consecutive steps of the same decode batch, and the latter's context and
    tokens."""

    seconds: float
    context: float
    tokens: int


class StepLog:
    """Notes every step of a node at the moment when the scheduler accounts for it."""

    def __init__(self, node: Node) -> None:
        self.steps: list[LoggedStep] = []
        self._process = node.scheduler.process
        # Every caller of the method is to come by here.
        node.scheduler.process = self._note  # type: ignore[method-assign]

    def _note(self, works: list[Work]) -> None:
        now = time.monotonic()
        last = works[-1]
        # NOTE: before the step is accounted for, which makes a finished prompt a running sequence.
        # Sequences run in the order in which they came, so the first and the last stand for all.
        context = (works[0].stop + last.stop) / 2
        decodes_only = last.sequence.sampling is not None
        before = sum(work.sequence.num_tokens for work in works)
        self._process(works)
        tokens = sum(work.sequence.num_tokens for work in works) - before
        self.steps.append(LoggedStep(now, len(works), decodes_only, context, tokens))

    def intervals(self, batch: int) -> list[Interval]:
        """Between neighbours that both decoded exactly ``batch`` sequences and nothing else."""
        found = []
        for before, after in pairwise(list(self.steps)):
            alike = before.batch == after.batch == batch
            if alike and before.decodes_only and after.decodes_only:
                found.append(Interval(after.at - before.at, after.context, after.tokens))
        return found
