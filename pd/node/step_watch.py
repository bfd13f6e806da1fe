"""Notices a step that does not end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.compiling import COMPILING
from pd.core.starvation import RUN_DELAY

if TYPE_CHECKING:
    from pd.core.compiling import Compiling
    from pd.core.starvation import Delay

# A step is stuck after so many times the time that its tokens usually take, and no earlier than
# after MIN_SECONDS in which the process had a CPU.
MULTIPLE = 20.0
MIN_SECONDS = 10.0
# The slowest rate that was seen counts, and is forgotten by this share with each step.
_FORGOTTEN = 0.01


class StepWatch:
    """Compares the time of the step that is under way with that of those before it.

    The step loop's thread calls :meth:`begin`, :meth:`observe` and :meth:`end`; any may ask.

    Attributes:
        since: when the steps that are under way began, or the older of them; None without any.
    """

    def __init__(self, delay: Delay = RUN_DELAY, compiling: Compiling = COMPILING) -> None:
        self.since: float | None = None
        self._delay, self._compiling = delay, compiling
        self._tokens = 0
        self._seconds_per_token: float | None = None

    def begin(self, since: float, tokens: int) -> None:
        """Steps over ``tokens`` in all are under way since ``since``."""
        self._tokens, self.since = tokens, since

    def end(self) -> None:
        """No step is under way."""
        self.since = None

    def observe(self, seconds: float, tokens: int) -> None:
        """A step over ``tokens`` has taken ``seconds``."""
        rate = seconds / max(tokens, 1)
        known = self._seconds_per_token or 0.0
        self._seconds_per_token = max(rate, known * (1 - _FORGOTTEN))

    def is_stuck(self, now: float) -> bool:
        """Whether the step that is under way takes far longer than it should. Never before one has
        ended, and not where kernels were compiled meanwhile."""
        since, rate = self.since, self._seconds_per_token
        if since is None or rate is None or now - since <= MIN_SECONDS:
            return False
        if self._compiling.since(since):
            return False
        limit = max(MIN_SECONDS, MULTIPLE * rate * self._tokens)
        return now - since - self._delay.growth(since) > limit
