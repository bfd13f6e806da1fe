"""Sends what nodes have lost to others, behind the tokens that clients have."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypedDict

from pd.core.errors import NodeFailedError, UnavailableError
from pd.proxy.attempt import Attempt
from pd.proxy.attempts import connection_lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.errors import PDError
    from pd.proxy.attempts import Attempts
    from pd.proxy.generation import Generation
    from pd.proxy.worker import Worker

log = logging.getLogger(__name__)

# How long a request that lost its nodes waits for others: a node that is started again loads its
# model meanwhile.
WAIT_SECONDS = 30.0


class _History(TypedDict):
    losses: int
    reason: str
    avoided: frozenset[Worker]


class Failovers:
    """Takes over attempts that were lost. Everything runs on the event loop.

    Args:
        max_failovers: times that a choice goes on elsewhere, at most; 0 turns it off.
        fail: ends a generation that cannot go on.
    """

    def __init__(
        self,
        attempts: Attempts,
        max_failovers: int,
        fail: Callable[[Generation, PDError], None],
    ) -> None:
        self._attempts = attempts
        self._max_failovers = max_failovers
        self._fail = fail
        # Attempts for which there was no node, with the error of those before them.
        self._waiting: dict[Attempt, PDError] = {}

    def lost(self, attempt: Attempt, error: PDError, at: Worker | None = None) -> None:
        """An attempt is over without success: go on elsewhere, or fail its generation.

        Args:
            at: the node that failed; None if it may have been any.
        """
        generation = attempt.generation
        if generation.done or attempt not in generation.attempts:
            return
        if not self._may_go_on(attempt, error):
            self._fail(generation, error)
            return
        log.info("%s goes on elsewhere: %s", generation.spec.rid, error.message)
        self._attempts.abort(attempt, error.message)
        self._attempts.close(attempt)
        avoided = attempt.avoided | ({at} if at is not None else set(attempt.nodes))
        for successor in self._successors(attempt, error.message, avoided):
            generation.attempts.append(successor)
            self._open(successor, error)

    def _may_go_on(self, attempt: Attempt, error: PDError) -> bool:
        retryable = isinstance(error, NodeFailedError | UnavailableError)
        return retryable and attempt.losses < self._max_failovers

    @staticmethod
    def _successors(attempt: Attempt, reason: str, avoided: frozenset[Worker]) -> list[Attempt]:
        """Attempts that go on with the choices of one that was lost."""
        generation = attempt.generation
        history: _History = {"losses": attempt.losses + 1, "reason": reason, "avoided": avoided}
        if attempt.is_whole and not generation.has_output:
            generation.begin_again()
            return [Attempt(generation, generation.choices, **history)]
        going_on = [choice for choice in attempt.choices if choice.finish is None]
        for choice in going_on:
            choice.go_on_elsewhere()
        return [Attempt(generation, [choice], is_whole=False, **history) for choice in going_on]

    def _open(self, attempt: Attempt, error: PDError) -> None:
        """Send an attempt, now or as soon as there are nodes for it."""
        generation = attempt.generation
        try:
            self._attempts.open(attempt, self._sibling(generation))
        except UnavailableError:
            if attempt not in self._waiting:
                self._waiting[attempt] = error
                asyncio.get_running_loop().call_later(WAIT_SECONDS, self._give_up, attempt)
            return
        self._waiting.pop(attempt, None)
        unreached = self._attempts.send(attempt)
        if unreached is not None:
            self.lost(attempt, connection_lost(unreached), unreached)

    @staticmethod
    def _sibling(generation: Generation) -> Worker | None:
        """The node of the other prompts of a job that belong together."""
        if not generation.job.together:
            return None
        others = (a for g in generation.job.generations for a in g.attempts if a.losses)
        return next((other.first for other in others if other.first is not None), None)

    def nodes_changed(self) -> None:
        """A node became ready, or is no more."""
        for attempt, error in list(self._waiting.items()):
            if attempt in attempt.generation.attempts:
                self._open(attempt, error)
            else:
                del self._waiting[attempt]

    def _give_up(self, attempt: Attempt) -> None:
        error = self._waiting.pop(attempt, None)
        if error is None or attempt not in attempt.generation.attempts:
            return
        message = f"{error.message}; no other node could go on within {WAIT_SECONDS:g} s"
        self._fail(attempt.generation, NodeFailedError(message))
