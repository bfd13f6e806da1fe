"""Detects steps that do not end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.util.compiling import COMPILING
from pd.util.starvation import RUN_DELAY

if TYPE_CHECKING:
    from pd.core.step_cost import StepShape
    from pd.util.compiling import Compiling
    from pd.util.starvation import Delay

# A step is stuck after this multiple of the usual time of steps of its size, but never before the
# process had a CPU for MIN_SECONDS.
MULTIPLE = 20.0
MIN_SECONDS = 10.0
# The usual time is a maximum. It shrinks by this share with each step of its size.
_FORGOTTEN = 0.01


class _UsualTimes:
    """The longest times of steps, by size rounded to powers of two."""

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}

    def observe_time(self, size: int, seconds: float) -> None:
        power = size.bit_length()
        known = self._longest.get(power, 0.0)
        self._longest[power] = max(seconds, known * (1 - _FORGOTTEN))

    def find_usual(self, size: int) -> float:
        """Return the usual time of steps of this size.

        For a size never seen, take the longer of the next smaller and larger ones. If there is no
        larger one, scale the smaller one.
        """
        # Another thread may add sizes meanwhile.
        longest, power = self._longest.copy(), size.bit_length()
        if power in longest:
            return longest[power]
        below = max((known for known in longest if known < power), default=None)
        above = min((known for known in longest if known > power), default=None)
        if above is None:
            return 0.0 if below is None else longest[below] * 2.0 ** (power - below)
        return max(longest[above], 0.0 if below is None else longest[below])


class StepWatch:
    """Compares the running time of the current step with the times of earlier ones.

    The step loop's thread calls :meth:`begin_step`, :meth:`observe_step` and :meth:`end_step`. Any
    thread may call the others.

    Attributes:
        since: when the oldest running step began; None if none runs.
    """

    def __init__(self, delay: Delay = RUN_DELAY, compiling: Compiling = COMPILING) -> None:
        self.since: float | None = None
        self._delay, self._compiling = delay, compiling
        self._shape: StepShape | None = None
        # The time of a step depends on its tokens, on the tokens these attend to, or on both.
        self._by_tokens, self._by_pairs = _UsualTimes(), _UsualTimes()
        self._observed = False

    def begin_step(self, since: float, shape: StepShape) -> None:
        """Note the start of steps with this total shape."""
        self._shape, self.since = shape, since

    def end_step(self) -> None:
        """Note the end of all steps."""
        self.since = None

    def observe_step(self, began: float, ended: float, shape: StepShape) -> None:
        """Learn the time of a step that ended."""
        seconds = ended - began
        # The limit of shorter steps is MIN_SECONDS anyway, so we save the system calls.
        if seconds > MIN_SECONDS / MULTIPLE:
            if self._compiling.was_active_since(began):
                return
            seconds = max(0.0, seconds - self._delay.measure_growth(began))
        self._by_tokens.observe_time(_count_tokens(shape), seconds)
        self._by_pairs.observe_time(_count_pairs(shape), seconds)
        self._observed = True

    def is_stuck(self, now: float) -> bool:
        """Whether the running step takes far longer than usual.

        False before the first step has ended, and while kernels are compiled.
        """
        since, shape = self.since, self._shape
        if since is None or shape is None or not self._observed or now - since <= MIN_SECONDS:
            return False
        if self._compiling.was_active_since(since):
            return False
        usual = max(
            self._by_tokens.find_usual(_count_tokens(shape)),
            self._by_pairs.find_usual(_count_pairs(shape)),
        )
        limit = max(MIN_SECONDS, MULTIPLE * usual)
        return now - since - self._delay.measure_growth(since) > limit


def _count_tokens(shape: StepShape) -> int:
    return shape.tokens + shape.streams


def _count_pairs(shape: StepShape) -> int:
    return int(shape.pairs + shape.context)
