"""The state of one choice, constrained by a grammar."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from pd.engine.rule_budget import RuleBudget
from pd.engine.token_rules import QUICK_SECONDS
from pd.grammar.jump_forward import CONTEXT_TOKENS, LEAST_TOKENS, MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.grammar.jump_forward import Retokenizer
    from pd.grammar.token_characters import CountedPlace, TokenCharacters
    from pd.grammar.xgrammar_library import Compiled

    IntArray = npt.NDArray[np.int32]

_BYTES = [bytes((value,)) for value in range(256)]


class GrammarRules:
    """Implements :class:`pd.engine.token_rules.TokenRules` with a grammar.

    Args:
        compiled: the compiled grammar.
        characters: character counts of all tokens, if the grammar counts characters.
        retokenizer: for jump-forward; None disables it.
        stop_ids: tokens that may end the output where the grammar is complete.
        budget: the request's budget.
    """

    def __init__(
        self,
        compiled: Compiled,
        characters: TokenCharacters | None,
        retokenizer: Retokenizer | None,
        stop_ids: Collection[int],
        budget: RuleBudget | None = None,
    ) -> None:
        from pd.grammar.xgrammar_library import make_matcher

        self._compiled, self._stop_ids = compiled, list(stop_ids)
        self._characters, self._retokenizer = characters, retokenizer
        self.budget = budget or RuleBudget()
        self._matcher = make_matcher(compiled.free, self._stop_ids)
        self._ending = frozenset(self._matcher.stop_token_ids)
        self._counted: Any = None if compiled.counted is None else make_matcher(compiled.counted)
        # Place of the output after each of its tokens, or None if unknown. We extend the list only
        # if we count characters.
        self._places: list[CountedPlace | None] = [None]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end the output."""
        return tuple(self._stop_ids)

    @property
    def first_mask(self) -> IntArray | None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        masks = self._compiled.first_masks
        return None if masks is None else masks.get(self.stop_ids)

    def ends_with(self, token: int) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return token in self._ending

    @property
    def is_quick(self) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        seconds = self._compiled.mask_seconds
        return seconds is not None and seconds <= QUICK_SECONDS

    @property
    def jumps_forward(self) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return self._retokenizer is not None

    @property
    def has_ended(self) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return bool(self._matcher.is_terminated())

    def fork_rules(self) -> GrammarRules:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return GrammarRules(
            self._compiled, self._characters, self._retokenizer, self._stop_ids, self.budget
        )

    def fill_mask(self, mask: IntArray) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None], 0)
        self._narrow_mask(mask)

    @staticmethod
    def fill_together(rules: Sequence[GrammarRules], masks: IntArray, rows: Sequence[int]) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        from pd.grammar.xgrammar_library import get_batch_matcher

        matchers = [each._matcher for each in rules]
        together = get_batch_matcher()
        together.batch_fill_next_token_bitmask(matchers, torch.from_numpy(masks), list(rows))
        for each, row in zip(rules, rows, strict=True):
            if each._characters is not None:
                each._narrow_mask(masks[row])

    def _narrow_mask(self, mask: IntArray) -> None:
        if self._characters is not None:
            self._places[-1] = self._characters.narrow_mask(
                mask,
                self._matcher,
                self._counted,
                self._stop_ids,
                self._compiled.gates,
                self._places[-1],
            )

    def accept_token(self, token: int) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if not self._matcher.accept_token(token):
            return False
        # The token that ends an output has no text.
        if self._characters is None or self.has_ended:
            return True
        if self._counted.accept_string(self._characters.tokens[token]):
            place = self._characters.find_place_after(self._places[-1], token, self._compiled.gates)
            self._places.append(place)
            return True
        self._matcher.rollback(1)
        return False

    def roll_back(self, count: int) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if not count:
            return
        texts = count - self.has_ended
        self._matcher.rollback(count)
        if self._counted is not None and texts:
            self._counted.rollback(texts)
            del self._places[-texts:]

    def find_forced(self, ids: IntArray) -> list[int]:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if self._retokenizer is None or self.has_ended:
            return []
        text = self._find_forced_text()
        # A token has at least one character, and the retokenizer leaves the last one out.
        if len(text) <= LEAST_TOKENS:
            return []
        tokens = self._retokenizer.retokenize_text(ids[-CONTEXT_TOKENS:].tolist(), text)
        allowed = list(takewhile(self.accept_token, tokens))
        self.roll_back(len(allowed))
        return allowed if len(allowed) >= LEAST_TOKENS else []

    def _find_forced_text(self) -> str:
        """Return the beginning of the forced text.

        xgrammar's own search looks for all of it. It never returns for ``root ::= "a" root``, where
        the forced text has no end.
        """
        forced = b""
        while len(forced) < MAX_BYTES and (byte := self._find_forced_byte()) is not None:
            self._matcher.accept_string(byte)
            forced += byte
        if forced:
            self._matcher.rollback(len(forced))
        try:
            return forced.decode()
        except UnicodeDecodeError as error:  # the text ends inside a character
            return forced[: error.start].decode()

    def _find_forced_byte(self) -> bytes | None:
        """Return the only allowed next byte; None if there are several or the output may end."""
        if self._matcher.is_completed():
            return None
        forced = None
        for byte in _BYTES:
            if self._matcher.accept_string(byte):
                self._matcher.rollback(1)
                if forced is not None:
                    return None
                forced = byte
        return forced
