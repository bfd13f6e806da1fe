"""Jump-forward: tokenizes the text forced by a grammar.

This follows SGLang's compressed finite state machines (Zheng et al., 2024). If a grammar allows
only one text, we need not sample its tokens one by one. We append them to the output at once, and
one forward pass computes their KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

# Number of known tokens to tokenize together with the forced text, because a tokenizer may
# tokenize a text differently at its beginning.
CONTEXT_TOKENS = 8
# Forced text per call. Finding a byte takes a fraction of a millisecond, so a long constant would
# stall other requests.
MAX_BYTES = 256
# Fewer tokens are not worth a forward pass of their own shape.
LEAST_TOKENS = 2
_NO_CHARACTER = "\ufffd"


class Retokenizer:
    """Tokenizes forced text after known tokens. Any thread may use it.

    Args:
        path: path of ``tokenizer.json``.
    """

    def __init__(self, path: str) -> None:
        self._tokenizer = Tokenizer.from_file(path)

    def retokenize_text(self, context: Sequence[int], text: str) -> list[int]:
        """Tokenize a text after known tokens.

        We leave the last token out, because it could differ once more text follows.

        Args:
            context: the last known tokens. We return nothing if the tokenizer would tokenize them
                differently together with the text.
        """
        before = self._tokenizer.decode(list(context), skip_special_tokens=False)
        if _NO_CHARACTER in before:  # the context ends inside a character
            return []
        known = self._encode(before)
        both = self._encode(before + text)
        return both[len(known) : -1] if both[: len(known)] == known else []

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
