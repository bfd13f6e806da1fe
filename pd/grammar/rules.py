"""The state of one choice whose output a grammar constrains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy as np
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int32]


class GrammarRules:
    """See :class:`pd.engine.token_rules.TokenRules`.

    Args:
        compiled: a compiled grammar of xgrammar.
        stop_ids: tokens that end the output where the grammar allows it to end.
    """

    def __init__(self, compiled: Any, stop_ids: Collection[int]) -> None:
        from pd.grammar.xgrammar_library import matcher

        self._compiled, self._stop_ids = compiled, list(stop_ids)
        self._matcher = matcher(compiled, self._stop_ids)

    @property
    def ended(self) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return bool(self._matcher.is_terminated())

    def fresh(self) -> GrammarRules:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return GrammarRules(self._compiled, self._stop_ids)

    def fill_mask(self, mask: IntArray) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None], 0)

    def advance(self, token: int) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if count:
            self._matcher.rollback(count)
