"""The state of one choice whose output a grammar constrains."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from pd.grammar.jump_forward import CONTEXT_TOKENS, LEAST_TOKENS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.grammar.jump_forward import Retokenizer

    IntArray = npt.NDArray[np.int32]


class GrammarRules:
    """See :class:`pd.engine.token_rules.TokenRules`.

    Args:
        compiled: a compiled grammar of xgrammar.
        retokenizer: for jump-forward; None without.
        stop_ids: tokens that end the output where the grammar allows it to end.
    """

    def __init__(
        self, compiled: Any, retokenizer: Retokenizer | None, stop_ids: Collection[int]
    ) -> None:
        from pd.grammar.xgrammar_library import matcher

        self._compiled, self._stop_ids = compiled, list(stop_ids)
        self._retokenizer = retokenizer
        self._matcher = matcher(compiled, self._stop_ids)

    @property
    def ended(self) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return bool(self._matcher.is_terminated())

    def fresh(self) -> GrammarRules:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return GrammarRules(self._compiled, self._retokenizer, self._stop_ids)

    def fill_mask(self, mask: IntArray) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None], 0)

    @staticmethod
    def fill_together(rules: Sequence[GrammarRules], masks: IntArray, rows: Sequence[int]) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        from pd.grammar.xgrammar_library import batch_matcher

        matchers = [each._matcher for each in rules]
        together = batch_matcher()
        together.batch_fill_next_token_bitmask(matchers, torch.from_numpy(masks), list(rows))

    def advance(self, token: int) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if count:
            self._matcher.rollback(count)

    def forced(self, ids: IntArray) -> list[int]:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if self._retokenizer is None or self.ended:
            return []
        text = self._forced_text()
        if len(text) <= LEAST_TOKENS:  # of at least a character each, and the last is left out
            return []
        tokens = self._retokenizer.tokens(ids[-CONTEXT_TOKENS:].tolist(), text)
        allowed = list(takewhile(self._matcher.accept_token, tokens))
        self.rollback(len(allowed))
        return allowed if len(allowed) >= LEAST_TOKENS else []

    def _forced_text(self) -> str:
        try:
            text: str = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError as error:  # it ends inside a character
            found: bytes = error.object
            text = found[: error.start].decode()
        return text
