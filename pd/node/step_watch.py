"""Notices a step that does not end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.compiling import COMPILING
from pd.core.starvation import RUN_DELAY

if TYPE_CHECKING:
    from pd.core.compiling import Compiling
    from pd.core.starvation import Delay
    from pd.core.step_cost import StepShape

# A step is stuck after so many times the time that steps of its size usually take, and no earlier
# than after MIN_SECONDS in which the process had a CPU.
MULTIPLE = 20.0
MIN_SECONDS = 10.0
# The longest time that was seen counts, and is forgotten by this share with each step of its size.
_FORGOTTEN = 0.01


class _UsualTimes:
    """The longest times of steps, for each power of two of a size."""

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}

    def observe(self, size: int, seconds: float) -> None:
        power = size.bit_length()
        known = self._longest.get(power, 0.0)
        self._longest[power] = max(seconds, known * (1 - _FORGOTTEN))

    def usual(self, size: int) -> float:
        """The time of a step of this size. Where none was seen: the longer one of the next smaller
        and larger ones, or in proportion to the size if there are no larger ones."""
        # A thread that asks must not see the sizes change.
        longest, power = self._longest.copy(), size.bit_length()
        if power in longest:
            return longest[power]
        below = max((known for known in longest if known < power), default=None)
        above = min((known for known in longest if known > power), default=None)
        if above is None:
            return 0.0 if below is None else longest[below] * 2.0 ** (power - below)
        return max(longest[above], 0.0 if below is None else longest[below])


class StepWatch:
    """Compares the time of the step that is under way with that of those before it.

    The step loop's thread calls :meth:`begin`, :meth:`observe` and :meth:`end`; any may ask.

    Attributes:
        since: when the steps that are under way began, or the older of them; None without any.
    """

    def __init__(self, delay: Delay = RUN_DELAY, compiling: Compiling = COMPILING) -> None:
        self.since: float | None = None
        self._delay, self._compiling = delay, compiling
        self._shape: StepShape | None = None
        # A step takes its time for its tokens, for what these attend to, or for both.
        self._by_tokens, self._by_pairs = _UsualTimes(), _UsualTimes()
        self._observed = False

    def begin(self, since: float, shape: StepShape) -> None:
        """Steps of this shape, in all, are under way since ``since``."""
        self._shape, self.since = shape, since

    def end(self) -> None:
        """No step is under way."""
        self.since = None

    def observe(self, began: float, ended: float, shape: StepShape) -> None:
        """A step of this shape has ended."""
        seconds = ended - began
        # Shorter steps have the shortest limit in any case, so asking for them would be in vain.
        if seconds > MIN_SECONDS / MULTIPLE:
            if self._compiling.since(began):
                return
            seconds = max(0.0, seconds - self._delay.growth(began))
        self._by_tokens.observe(_tokens(shape), seconds)
        self._by_pairs.observe(_pairs(shape), seconds)
        self._observed = True

    def is_stuck(self, now: float) -> bool:
        """Whether the step that is under way takes far longer than it should. Never before one has
        ended, and not where kernels were compiled meanwhile."""
        since, shape = self.since, self._shape
        if since is None or shape is None or not self._observed or now - since <= MIN_SECONDS:
            return False
        if self._compiling.since(since):
            return False
        usual = max(self._by_tokens.usual(_tokens(shape)), self._by_pairs.usual(_pairs(shape)))
        limit = max(MIN_SECONDS, MULTIPLE * usual)
        return now - since - self._delay.growth(since) > limit


def _tokens(shape: StepShape) -> int:
    return shape.tokens + shape.streams


def _pairs(shape: StepShape) -> int:
    return int(shape.pairs + shape.context)
