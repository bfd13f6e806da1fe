"""Computes the lengths of normalized texts without normalizing them.

A compatibility form (NFKC) may turn one character into 18, and the tokenizers library keeps some 50
bytes for each. So a body of 8 MiB could take gigabytes before its tokens are counted.
"""

from __future__ import annotations

import sys
import unicodedata
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer

# Limit on the normalized characters of a text. Longer texts may triple.
MAX_CHARACTERS = 8 << 20
_MAX_GROWTH = 3
# Other threads wait while we count this many characters.
_AT_ONCE = 1 << 16
# The character with the longest compatibility form.
_LONGEST = "\ufdfa"
# Code points below this one are letters with signs. Some have longer lower cases or are replaced.
_FIRST = 0x250


class NormalizedLengths:
    """Lengths of texts after one tokenizer's normalizer."""

    def __init__(self, growth: npt.NDArray[np.uint8]) -> None:
        """``growth``: number of characters that each character becomes."""
        self._growth = growth
        self._max_growth = int(growth.max())

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> NormalizedLengths | None:
        """Measure a tokenizer's normalizer; None if it hardly lengthens texts."""
        normalizer = tokenizer.normalizer
        if normalizer is None or _measure_growth(normalizer, _LONGEST) <= _MAX_GROWTH:
            return None
        growth = np.ones(sys.maxunicode + 1, np.uint8)
        for code in (*range(_FIRST), *_list_composed()):
            growth[code] = _measure_growth(normalizer, chr(code))
        return cls(growth)

    def find_excess(self, text: str) -> int | None:
        """Return the normalized length of a text if it exceeds the limit, else None."""
        limit = max(MAX_CHARACTERS, _MAX_GROWTH * len(text))
        if text.isascii() or len(text) * self._max_growth <= limit:
            return None
        length = 0
        for start in range(0, len(text), _AT_ONCE):
            part = text[start : start + _AT_ONCE].encode("utf-32-le", "surrogatepass")
            length += int(self._growth[np.frombuffer(part, "<u4")].sum())
        return length if length > limit else None


def _measure_growth(normalizer: Normalizer, character: str) -> int:
    """Measure how many normalized characters one more of these characters adds."""
    one, two = (len(normalizer.normalize_str(character * count)) for count in (1, 2))
    return min(max(two - one, 1), 255)


@cache
def _list_composed() -> tuple[int, ...]:
    """List the code points replaced by normal forms."""
    codes = range(_FIRST, sys.maxunicode + 1)
    return tuple(code for code in codes if unicodedata.decomposition(chr(code)))
