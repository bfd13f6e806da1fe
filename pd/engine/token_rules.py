"""Rules on a choice's next token that the host decides, while the forward pass runs."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.engine.draft_tree import DraftTree

    IntArray = npt.NDArray[np.int32]


# Processor time that finding out which tokens may come next may take; all other requests of a step
# wait for it.
MASK_SECONDS = 0.5
# Processor time that adding tokens to an output may take in all, and what each token adds to that;
# the whole node waits for it. Ordinary grammars take a twentieth of it for a token.
_ADVANCE_SECONDS, _SECONDS_PER_TOKEN = 0.5, 1e-3
# With so many, the masks of a large batch are ready long before the end of its forward pass.
_MASK_THREADS = 12


@cache
def mask_threads() -> int:
    """Threads that fill masks together: three quarters of the processors of this process, twelve at
    most."""
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    return max(1, min(_MASK_THREADS, 3 * cores // 4))


def most_seconds(tokens: int) -> float:
    """Processor time that adding so many tokens to an output may take."""
    return _ADVANCE_SECONDS + _SECONDS_PER_TOKEN * tokens


class TokenRules(Protocol):
    """The state of one choice. A mask is int32 ``[ceil(vocab_size / 32)]``; bit ``i % 32`` of
    element ``i // 32`` says whether token ``i`` may come next."""

    @property
    def jumps_forward(self) -> bool:
        """Whether :meth:`forced` may find tokens."""

    @property
    def ended(self) -> bool:
        """Whether the output is complete and nothing may follow."""

    def fresh(self) -> TokenRules:
        """The state of another choice of the same request, without output."""

    def fill_mask(self, mask: IntArray) -> None:
        """Write which tokens may come next; not if :attr:`ended`."""

    @staticmethod
    def fill_together(rules: Sequence[Any], masks: IntArray, rows: Sequence[int]) -> None:
        """Do :meth:`fill_mask` for several states of this class, each with its row of ``masks``, on
        :func:`mask_threads` threads."""

    def advance(self, token: int) -> bool:
        """Add a token to the output. False if it may not come next; then nothing changes."""

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens."""

    def forced(self, ids: IntArray) -> list[int]:
        """Tokens with which the output goes on in any case, as the tokenizer would write them;
        empty unless :attr:`jumps_forward`.

        Args:
            ids: the prompt and the output so far, int32.
        """


def fill_masks(
    rules: TokenRules, masks: IntArray, tree: DraftTree | None, guesses: Sequence[int]
) -> None:
    """Write which tokens may come next after the known ones, and after each guess of a draft.

    Args:
        masks: ``[1 + tree.size, ...]``, all bits set. Rows after guesses that may not come stay so:
            what is drawn there is not used.
        guesses: the drafted tokens.
    """
    if rules.ended:
        return
    rules.fill_mask(masks[0])
    if tree is None:
        return
    path: list[int] = []
    for guess, wanted in enumerate(tree.paths):
        common = len(path)
        while tuple(path[:common]) != wanted[:common]:
            common -= 1
        rules.rollback(len(path) - common)
        del path[common:]
        for each in wanted[common:]:
            if rules.ended or not rules.advance(guesses[each]):
                break
            path.append(each)
        else:
            if not rules.ended:
                rules.fill_mask(masks[1 + guess])
    rules.rollback(len(path))
