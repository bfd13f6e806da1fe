"""Jump-forward: the text that a grammar forces, as the tokenizer would write it.

After compressed finite state machines of SGLang (Zheng et al., 2024). Where a grammar allows one
text only, its tokens need not be sampled one by one: they join the output at once, and one forward
pass computes their KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

# Known tokens whose text is tokenized together with what follows, since tokenizers write a piece of
# text differently at the beginning.
CONTEXT_TOKENS = 8
# Forced text beyond it waits for the next time, so that a long constant holds up no other request:
# finding a byte takes a fraction of a millisecond.
MAX_BYTES = 256
# Tokens that are worth a forward pass of their own shape.
LEAST_TOKENS = 2
_NO_CHARACTER = "\ufffd"


class Retokenizer:
    """Any thread may use it.

    Args:
        path: of ``tokenizer.json``.
    """

    def __init__(self, path: str) -> None:
        self._tokenizer = Tokenizer.from_file(path)

    def tokens(self, context: Sequence[int], text: str) -> list[int]:
        """The tokens that the tokenizer writes for a text which follows known tokens.

        The last one is left out, because it might look different with what comes after the text.

        Args:
            context: the last known tokens, which do not change. Where the tokenizer would write
                them differently with the text behind them, there are no tokens.
        """
        before = self._tokenizer.decode(list(context), skip_special_tokens=False)
        if _NO_CHARACTER in before:  # it ends inside a character
            return []
        known = self._encode(before)
        both = self._encode(before + text)
        return both[len(known) : -1] if both[: len(known)] == known else []

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
