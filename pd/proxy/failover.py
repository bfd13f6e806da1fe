"""Sends what nodes have lost to others, behind the tokens that clients have."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from pd.core.errors import NodeFailedError, UnavailableError
from pd.core.messages import HEARTBEAT_INTERVAL
from pd.proxy.attempt import Attempt, History
from pd.proxy.attempts import connection_lost
from pd.proxy.breaker import STUCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.errors import PDError
    from pd.proxy.attempts import Attempts
    from pd.proxy.generation import Generation
    from pd.proxy.metrics import Metrics
    from pd.proxy.worker import Worker

log = logging.getLogger(__name__)

# How long a request that lost its nodes waits for others: a node that is started again loads its
# model meanwhile.
WAIT_SECONDS = 60.0
# An answer that got no further than this between the deaths of two nodes, in whose steps it was,
# may be what they died of.
STEP_TOKENS = 1


class Failovers:
    """Takes over attempts that were lost. Everything runs on the event loop.

    Args:
        max_failovers: times that a choice goes on elsewhere after a failure, at most; 0 turns off
            failover, breakers and moves.
        fail: ends a generation that cannot go on.
    """

    def __init__(
        self,
        attempts: Attempts,
        metrics: Metrics,
        max_failovers: int,
        fail: Callable[[Generation, PDError], None],
    ) -> None:
        self._attempts = attempts
        self._metrics = metrics
        self._max_failovers = max_failovers
        self._fail = fail
        # Attempts for which there is no node: the error of those before them, and when they began
        # to wait.
        self._waiting: dict[Attempt, tuple[PDError, float]] = {}
        self._look: asyncio.TimerHandle | None = None

    # ---- what happens to attempts

    def died(self, attempt: Attempt, worker: Worker, error: NodeFailedError) -> None:
        """A node that an attempt needs died, or is stuck in a step."""
        died_at, tokens = attempt.history.died_at, attempt.num_tokens
        if attempt.is_computed_by(worker):
            if died_at is not None and tokens - died_at <= STEP_TOKENS:
                message = "; the request was in the step in which a node died, twice"
                self._give_up(attempt, NodeFailedError(error.message + message), "suspected")
                return
            died_at = tokens
        self.lost(attempt, error, worker, died_at=died_at)

    def failed(
        self, attempt: Attempt, worker: Worker, error: PDError, *, of_peer: bool = False
    ) -> None:
        """A node ended an attempt without success.

        Args:
            of_peer: by the fault of the other node, as this one says.
        """
        if self._max_failovers and isinstance(error, NodeFailedError):
            others = [node for node in attempt.nodes if node is not worker]
            for node in others if of_peer else [worker]:
                node.breaker.failed(attempt, error.message)
        self.lost(attempt, error, died_at=attempt.history.died_at)

    def lost(
        self,
        attempt: Attempt,
        error: PDError,
        at: Worker | None = None,
        *,
        died_at: int | None = None,
    ) -> None:
        """An attempt is over without success: go on elsewhere, or fail its generation.

        Args:
            at: the node that failed; None if it may have been any.
            died_at: see :class:`pd.proxy.attempt.Attempt`.
        """
        if not self._is_wanted(attempt):
            return
        if not isinstance(error, NodeFailedError | UnavailableError) or not self._max_failovers:
            self._fail(attempt.generation, error)
            return
        if attempt.history.losses >= self._max_failovers:
            self._give_up(attempt, error, "exhausted")
            return
        history = History(
            losses=attempt.history.losses + 1,
            reason=error.message,
            died_at=died_at,
            avoided=attempt.history.avoided | ({at} if at is not None else set(attempt.nodes)),
        )
        self._go_on(attempt, error, history)

    def _move(self, attempt: Attempt, worker: Worker) -> None:
        """Have other nodes go on with an attempt, if there are any; this one need not fail for
        it."""
        if not self._is_wanted(attempt) or not self._attempts.have_nodes(attempt):
            return
        error = NodeFailedError(f"{worker.role} node {worker.instance_id} is to be empty")
        history = History(
            losses=attempt.history.losses,
            reason=error.message,
            died_at=attempt.history.died_at,
            avoided=attempt.history.avoided | {worker},
        )
        self._go_on(attempt, error, history)

    @staticmethod
    def _is_wanted(attempt: Attempt) -> bool:
        return not attempt.generation.done and attempt in attempt.generation.attempts

    def _give_up(self, attempt: Attempt, error: PDError, outcome: str) -> None:
        if self._is_wanted(attempt):
            self._metrics.failovers.labels(outcome).inc()
            self._fail(attempt.generation, error)

    def _go_on(self, attempt: Attempt, error: PDError, history: History) -> None:
        generation = attempt.generation
        log.info("%s goes on elsewhere: %s", generation.spec.rid, error.message)
        self._attempts.abort(attempt, error.message)
        self._attempts.close(attempt)
        for successor in _successors(attempt, history):
            self._metrics.failovers.labels("moved").inc()
            generation.attempts.append(successor)
            self._open(successor, error)

    # ---- attempts that go on

    def _open(self, attempt: Attempt, error: PDError) -> None:
        """Send an attempt, now or as soon as there are nodes for it."""
        try:
            self._attempts.open(attempt, _sibling(attempt.generation))
        except UnavailableError:
            self._waiting.setdefault(attempt, (error, time.monotonic()))
            self._look_later()
            return
        self._waiting.pop(attempt, None)
        unreached = self._attempts.send(attempt)
        if unreached is not None:
            error = connection_lost(unreached)
            self.lost(attempt, error, unreached, died_at=attempt.history.died_at)

    def nodes_changed(self) -> None:
        """A node became ready, or is no more."""
        for attempt, (error, since) in list(self._waiting.items()):
            if not self._is_wanted(attempt):
                del self._waiting[attempt]
            elif time.monotonic() - since > WAIT_SECONDS:
                del self._waiting[attempt]
                text = f"{error.message}; no other node could go on within {WAIT_SECONDS:g} s"
                self._give_up(attempt, NodeFailedError(text), "no_node")
            else:
                self._open(attempt, error)

    def _look_later(self) -> None:
        """Try again without a change of nodes: a breaker lets one in when time has passed."""
        if self._look is None:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(HEARTBEAT_INTERVAL, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self.nodes_changed()
        if self._waiting:
            self._look_later()

    # ---- nodes

    def heard_from(self, worker: Worker) -> None:
        """A node has told its state: move what it does not get on with, or is asked to give up."""
        if not self._max_failovers:
            return
        worker.breaker.stuck = worker.stuck
        if worker.stuck:
            error = NodeFailedError(f"{worker.role} node {worker.instance_id}: {STUCK}")
            for attempt in list(worker.active):
                self.died(attempt, worker, error)
        elif worker.leaving:
            for attempt in list(worker.active):
                self._move(attempt, worker)


def _successors(attempt: Attempt, history: History) -> list[Attempt]:
    """Attempts that go on with the choices of one that is over."""
    generation = attempt.generation
    if attempt.is_whole and not generation.has_output:
        generation.begin_again()
        return [Attempt(generation, generation.choices, history)]
    going_on = [choice for choice in attempt.choices if choice.finish is None]
    for choice in going_on:
        choice.go_on_elsewhere()
    return [Attempt(generation, [choice], history, is_whole=False) for choice in going_on]


def _sibling(generation: Generation) -> Worker | None:
    """The node of the other prompts of a job that belong together."""
    if not generation.job.together:
        return None
    others = (a for g in generation.job.generations for a in g.attempts if a.history.reason)
    return next((other.first for other in others if other.first is not None), None)
