"""The state of one choice whose output a grammar constrains."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

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
    """See :class:`pd.engine.token_rules.TokenRules`.

    Args:
        compiled: a compiled grammar.
        characters: of all tokens, if the grammar counts them.
        retokenizer: for jump-forward; None without.
        stop_ids: tokens that end the output where the grammar allows it to end.
    """

    def __init__(
        self,
        compiled: Compiled,
        characters: TokenCharacters | None,
        retokenizer: Retokenizer | None,
        stop_ids: Collection[int],
    ) -> None:
        from pd.grammar.xgrammar_library import matcher

        self._compiled, self._stop_ids = compiled, list(stop_ids)
        self._characters, self._retokenizer = characters, retokenizer
        self._matcher = matcher(compiled.free, self._stop_ids)
        self._counted: Any = None if compiled.counted is None else matcher(compiled.counted)
        # Where the output was after each of its tokens, as far as that is known, if characters are
        # counted.
        self._places: list[CountedPlace | None] = [None]

    @property
    def jumps_forward(self) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return self._retokenizer is not None

    @property
    def ended(self) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return bool(self._matcher.is_terminated())

    def fresh(self) -> GrammarRules:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        return GrammarRules(self._compiled, self._characters, self._retokenizer, self._stop_ids)

    def fill_mask(self, mask: IntArray) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None], 0)
        self._narrow(mask)

    @staticmethod
    def fill_together(rules: Sequence[GrammarRules], masks: IntArray, rows: Sequence[int]) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        from pd.grammar.xgrammar_library import batch_matcher

        matchers = [each._matcher for each in rules]
        together = batch_matcher()
        together.batch_fill_next_token_bitmask(matchers, torch.from_numpy(masks), list(rows))
        for each, row in zip(rules, rows, strict=True):
            if each._characters is not None:
                each._narrow(masks[row])

    def _narrow(self, mask: IntArray) -> None:
        if self._characters is not None:
            self._places[-1] = self._characters.narrow(
                mask,
                self._matcher,
                self._counted,
                self._stop_ids,
                self._compiled.gates,
                self._places[-1],
            )

    def advance(self, token: int) -> bool:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if not self._matcher.accept_token(token):
            return False
        # The token that ends an output is no text.
        if self._characters is None or self.ended:
            return True
        if self._counted.accept_string(self._characters.tokens[token]):
            place = self._characters.after(self._places[-1], token, self._compiled.gates)
            self._places.append(place)
            return True
        self._matcher.rollback(1)
        return False

    def rollback(self, count: int) -> None:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if not count:
            return
        texts = count - self.ended
        self._matcher.rollback(count)
        if self._counted is not None and texts:
            self._counted.rollback(texts)
            del self._places[-texts:]

    def forced(self, ids: IntArray) -> list[int]:
        """See :class:`pd.engine.token_rules.TokenRules`."""
        if self._retokenizer is None or self.ended:
            return []
        text = self._forced_text()
        if len(text) <= LEAST_TOKENS:  # of at least a character each, and the last is left out
            return []
        tokens = self._retokenizer.tokens(ids[-CONTEXT_TOKENS:].tolist(), text)
        allowed = list(takewhile(self.advance, tokens))
        self.rollback(len(allowed))
        return allowed if len(allowed) >= LEAST_TOKENS else []

    def _forced_text(self) -> str:
        """The beginning of the text that comes next in any case.

        xgrammar finds all of it, but does not return where it has no end: the grammar
        ``root ::= "a" root`` forces one byte after the other.
        """
        forced = b""
        while len(forced) < MAX_BYTES and (byte := self._forced_byte()) is not None:
            self._matcher.accept_string(byte)
            forced += byte
        if forced:
            self._matcher.rollback(len(forced))
        try:
            return forced.decode()
        except UnicodeDecodeError as error:  # it ends inside a character
            return forced[: error.start].decode()

    def _forced_byte(self) -> bytes | None:
        """The byte that comes next in any case; None if several may, or the output may end."""
        if self._matcher.is_completed():
            return None
        found = None
        for byte in _BYTES:
            if self._matcher.accept_string(byte):
                self._matcher.rollback(1)
                if found is not None:
                    return None
                found = byte
        return found
