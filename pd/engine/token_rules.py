"""Rules for a choice's next token. The host evaluates them while the forward pass runs."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.engine.draft_tree import DraftTree
    from pd.engine.rule_budget import RuleBudget

    IntArray = npt.NDArray[np.int32]


# Limit for the processor time of the first mask, which is tried before a grammar is used, times the
# number of choices of the request.
MASK_SECONDS = 0.5
# A grammar is quick if that mask takes at most this processor time.
QUICK_SECONDS = 2e-3
# Limit for the processor time of adding tokens when a grammar is tried, and how much each token
# adds. Ordinary grammars take a twentieth of that per token.
_ADVANCE_SECONDS, _SECONDS_PER_TOKEN = 0.5, 1e-3
# With this many threads, the masks of a large batch are ready long before its forward pass ends.
_MASK_THREADS = 12


@cache
def count_mask_threads() -> int:
    """Return the number of threads that fill masks together: three quarters of this process's
    processors, at most twelve."""
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    return max(1, min(_MASK_THREADS, 3 * cores // 4))


def limit_advance_seconds(tokens: int) -> float:
    """Return the processor time that adding this many tokens to an output may take."""
    return _ADVANCE_SECONDS + _SECONDS_PER_TOKEN * tokens


def explain_slow_masks(seconds: float, choices: int = 1) -> str | None:
    """Return why a grammar is too slow for this many choices, given the seconds of one mask; None
    if it is fast enough."""
    if seconds * choices <= MASK_SECONDS:
        return None
    of_all = "" if choices == 1 else f" for each of {choices} choices"
    return (
        f"finding the tokens that may come next takes {seconds:.2f} s of processor time{of_all}; "
        f"at most {MASK_SECONDS:g} may be taken"
    )


class TokenRules(Protocol):
    """The state of one choice. A mask is int32 ``[ceil(vocab_size / 32)]``. Bit ``i % 32`` of
    element ``i // 32`` is set if token ``i`` may come next."""

    @property
    def budget(self) -> RuleBudget:
        """Usage of the request's rules, shared with the results of :meth:`fork_rules`."""

    @property
    def first_mask(self) -> IntArray | None:
        """The mask of an empty output, if known; read-only."""

    @property
    def is_quick(self) -> bool:
        """Whether masks took little time when the grammar was tried."""

    @property
    def jumps_forward(self) -> bool:
        """Whether :meth:`find_forced` may find tokens."""

    @property
    def has_ended(self) -> bool:
        """Whether the output is complete and nothing may follow."""

    def ends_with(self, token: int) -> bool:
        """Whether the output would be complete with this token, if it may come."""

    def fork_rules(self) -> TokenRules:
        """Return the state of another choice of the same request, without output."""

    def fill_mask(self, mask: IntArray) -> None:
        """Write which tokens may come next. Not to be called once :attr:`has_ended` is set."""

    @staticmethod
    def fill_together(rules: Sequence[Any], masks: IntArray, rows: Sequence[int]) -> None:
        """Do :meth:`fill_mask` for several states of this class, each with its row of ``masks``, on
        :func:`count_mask_threads` threads."""

    def accept_token(self, token: int) -> bool:
        """Add a token to the output. If it may not come next, change nothing and return False."""

    def roll_back(self, count: int) -> None:
        """Take back the last ``count`` tokens."""

    def find_forced(self, ids: IntArray) -> list[int]:
        """Return the tokens that must come next, as the tokenizer would write them; empty unless
        :attr:`jumps_forward`.

        Args:
            ids: the last tokens of prompt and output so far, int32.
        """


def fill_masks(
    rules: TokenRules, masks: IntArray, tree: DraftTree | None, guesses: Sequence[int]
) -> None:
    """Write which tokens may come after the known tokens, and after each guess of a draft.

    Args:
        masks: ``[1 + tree.size, ...]``, all bits set. Rows after forbidden guesses keep all bits,
            because nobody uses their tokens.
        guesses: the drafted tokens.
    """
    if rules.has_ended:
        return
    rules.fill_mask(masks[0])
    if tree is None:
        return
    path: list[int] = []
    for guess, wanted in enumerate(tree.paths):
        common = len(path)
        while tuple(path[:common]) != wanted[:common]:
            common -= 1
        rules.roll_back(len(path) - common)
        del path[common:]
        for each in wanted[common:]:
            if rules.has_ended or not rules.accept_token(guesses[each]):
                break
            path.append(each)
        else:
            if not rules.has_ended:
                rules.fill_mask(masks[1 + guess])
    rules.roll_back(len(path))
