"""Tokens that a request forbids: all but ``allowed_token_ids``, and the ends of bad words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd.engine.rule_budget import RuleBudget
from pd.kernels.token_masks import BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.core.sampling_params import SamplingParams
    from pd.engine.token_rules import TokenRules

    IntArray = npt.NDArray[np.int32]

# The bit of each token in its element of a mask.
_BITS = (np.uint32(1) << np.arange(BITS, dtype=np.uint32)).view(np.int32)


class LimitTable:
    """The limits of one request, shared by its choices. Read-only.

    Attributes:
        mask: tokens that may come whatever the output is, int32 ``[ceil(vocab_size / 32)]``.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        words = -(-vocab_size // BITS)
        self.mask: IntArray = np.full(words, 0 if params.allowed_token_ids else -1, np.int32)
        for token in params.allowed_token_ids:
            self.mask[token // BITS] |= _BITS[token % BITS]
        # Forbidden sequences without their last token, by the token before the last one.
        self._sequences: dict[int, list[tuple[list[int], int]]] = {}
        for *before, last in params.bad_sequences:
            if before:
                self._sequences.setdefault(before[-1], []).append((before, last))
            else:
                self.mask[last // BITS] &= ~_BITS[last % BITS]

    @property
    def needs_output(self) -> bool:
        """Whether the output so far decides what may come."""
        return bool(self._sequences)

    def find_completed(self, output: list[int]) -> list[int]:
        """Find the tokens that would complete a forbidden sequence."""
        if not output:
            return []
        return [
            last
            for before, last in self._sequences.get(output[-1], ())
            if output[-len(before) :] == before
        ]


class TokenLimits:
    """Implements :class:`pd.engine.token_rules.TokenRules` with a request's limits.

    Args:
        table: the limits.
        rules: rules that must allow a token, too; None without any.
    """

    # Forced tokens could be forbidden ones, so a choice with limits draws every token.
    jumps_forward = False

    def __init__(self, table: LimitTable, rules: TokenRules | None) -> None:
        self._table, self._rules = table, rules
        self.budget = RuleBudget() if rules is None else rules.budget
        self._output: list[int] = []

    @property
    def first_mask(self) -> IntArray | None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if self._rules is None:
            return self._table.mask
        first = self._rules.first_mask
        return None if first is None else first & self._table.mask

    @property
    def is_quick(self) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return self._rules is None or self._rules.is_quick

    @property
    def has_ended(self) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return self._rules is not None and self._rules.has_ended

    def ends_with(self, token: int) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return self._rules is not None and self._rules.ends_with(token)

    def fork_rules(self) -> TokenLimits:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        rules = None if self._rules is None else self._rules.fork_rules()
        made = TokenLimits(self._table, rules)
        made.budget = self.budget
        return made

    def fill_mask(self, mask: IntArray) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if self._rules is None:
            mask[:] = self._table.mask
        else:
            self._rules.fill_mask(mask)
            mask &= self._table.mask
        for token in self._table.find_completed(self._output):
            mask[token // BITS] &= ~_BITS[token % BITS]

    @staticmethod
    def fill_together(rules: Sequence[TokenLimits], masks: IntArray, rows: Sequence[int]) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        for each, row in zip(rules, rows, strict=True):
            each.fill_mask(masks[row])

    def accept_token(self, token: int) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        table = self._table
        is_allowed = bool(table.mask[token // BITS] & _BITS[token % BITS])
        if not is_allowed or token in table.find_completed(self._output):
            return False
        if self._rules is not None and not self._rules.accept_token(token):
            return False
        if table.needs_output:
            self._output.append(token)
        return True

    def roll_back(self, count: int) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if self._rules is not None:
            self._rules.roll_back(count)
        if self._table.needs_output:
            del self._output[len(self._output) - count :]

    def find_forced(self, ids: IntArray) -> list[int]:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return []
