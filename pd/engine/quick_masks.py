"""Advances trusted choices and fills their masks in the thread that launches steps."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from pd.engine.ruled_choice import SLOW_SECONDS
from pd.engine.token_rules import count_mask_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.engine.draft_tree import DraftTree
    from pd.engine.ruled_choice import RuledChoice
    from pd.engine.token_rules import TokenRules

    IntArray = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

# Rows that each thread fills before we check the time.
ROWS_AT_ONCE = 16
# Rows filled together are suspicious from this time on, plus the second time for each row of a
# thread. Masks of bounded strings take up to half a millisecond with a vocabulary of 131k tokens.
SUSPICIOUS_SECONDS, _ROW_SECONDS = SLOW_SECONDS, 1e-3


class MaskRequest(NamedTuple):
    """Masks that a step needs for one choice.

    Attributes:
        row: first of the choice's rows among the step's masks.
        tree: shape of the draft; None without one.
        guesses: the drafted tokens.
    """

    choice: RuledChoice
    row: int
    tree: DraftTree | None = None
    guesses: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        return 1 if self.tree is None else 1 + self.tree.size

    def select_rows(self, masks: IntArray) -> IntArray:
        """Return the part of a step's masks that belongs to this choice."""
        return masks[self.row : self.row + self.num_rows]


def fill_quickly(
    requests: Sequence[MaskRequest], masks: IntArray, remember_slow: Callable[[RuledChoice], None]
) -> Sequence[MaskRequest]:
    """Fill the masks of trusted choices until some take long. These lose our trust.

    Args:
        remember_slow: called with a choice that turns out to be slow.

    Returns:
        The requests that we did not get to.
    """
    size = ROWS_AT_ONCE * count_mask_threads()
    for start in range(0, len(requests), size):
        some = _RowBatch(requests[start : start + size], masks)
        some.follow_outputs()
        some.fill_masks()
        if some.slow is not None:
            remember_slow(some.slow)
        if not some.were_quick:
            return requests[start + some.num_followed :]
    return ()


class _RowBatch:
    """Rows to fill before we check the time.

    Attributes:
        num_followed: how many requests were handled; all, unless one was slow.
        were_quick: whether none was slow.
        slow: the slow choice, if we know which one it was.
    """

    def __init__(self, requests: Sequence[MaskRequest], masks: IntArray) -> None:
        self._requests, self._masks = requests, masks
        self._watch = _Stopwatch(time.thread_time())
        self._plain = list[MaskRequest]()
        self.num_followed, self.were_quick = 0, True
        self.slow: RuledChoice | None = None

    def follow_outputs(self) -> None:
        """Advance the rules over the outputs, and fill the masks of drafts."""
        watch = _Stopwatch(self._watch.processor)
        for request in self._requests:
            self.num_followed += 1
            choice = request.choice
            steps = choice.follow_untimed()
            if request.tree is not None and choice.error is None and not choice.forced:
                choice.fill_untimed(request.select_rows(self._masks), request.tree, request.guesses)
                steps += request.num_rows
            if spent := watch.read_lap(SLOW_SECONDS * steps):
                self._blame_choice(choice, spent, steps)
            if (
                choice.error is not None
                or choice.forced
                or (choice.is_slow and request.tree is None)
            ):
                choice.is_late = True  # nothing is drawn for it
            elif request.tree is None:
                self._plain.append(request)
            if self.slow is not None:
                return

    def fill_masks(self) -> None:
        """Fill the other masks."""
        choices = [request.choice for request in self._plain]
        if len(choices) > 1:
            self._fill_together(choices)
        elif choices:
            choices[0].fill_untimed(self._plain[0].select_rows(self._masks))
        if self.slow is not None:
            return
        threads = count_mask_threads() if len(choices) > 1 else 1
        limit = SUSPICIOUS_SECONDS + _ROW_SECONDS * len(choices) / threads
        if not (spent := self._watch.read_lap(limit, is_of_threads=threads > 1)):
            return
        self.were_quick = False
        if len(self._requests) == 1:
            self._blame_choice(self._requests[0].choice, spent, 1)
        else:
            for choice in choices:
                choice.mark_untrusted()

    def _blame_choice(self, choice: RuledChoice, seconds: float, steps: int) -> None:
        choice.charge_time(seconds, steps)
        self.were_quick, self.slow = False, choice

    def _fill_together(self, choices: list[RuledChoice]) -> None:
        kinds: defaultdict[type[TokenRules], list[tuple[TokenRules, int]]] = defaultdict(list)
        for choice, request in zip(choices, self._plain, strict=True):
            kinds[type(choice.rules)].append((choice.rules, request.row))
        try:
            for kind, pairs in kinds.items():
                kind.fill_together([r for r, _ in pairs], self._masks, [row for _, row in pairs])
        except Exception:
            # One of them is the reason. Filled one at a time, each records its own error.
            logger.exception("masks could not be filled together")
            for request in self._plain:
                request.choice.fill_untimed(request.select_rows(self._masks))


class _Stopwatch:
    """Reads the processor time only if much time has passed on the clock, because reading it takes
    longer than many masks.

    Attributes:
        processor: processor time of this thread at the start or at the last reading.
    """

    def __init__(self, processor: float) -> None:
        self.processor, self._clock = processor, time.perf_counter()

    def read_lap(self, limit: float, *, is_of_threads: bool = False) -> float:
        """Return the processor time since the last call if it exceeds ``limit``, else 0.

        Args:
            is_of_threads: whether other threads did the work. Then only the clock can tell the
                time.
        """
        now = time.perf_counter()
        passed, self._clock = now - self._clock, now
        if passed <= limit or is_of_threads:
            return passed if passed > limit else 0.0
        spent = time.thread_time() - self.processor
        self.processor += spent
        return spent if spent > limit else 0.0
