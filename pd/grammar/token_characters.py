"""Finds the tokens allowed by a grammar that counts the characters of strings.

:mod:`pd.grammar.lengths` explains the two grammars. The first one's mask includes all tokens
accepted by the second. It also includes tokens that make a string too long or end it too early, and
this module removes them.

We ask the second grammar about few tokens, because the two differ only inside strings of bounded
length. There only the number of characters matters, and we have tables of the tokens' lengths. When
a string has begun, we try texts to find how many characters may and must follow. We then subtract
each token's characters, up to a token with a quote, because no string begins or ends without one.
Outside strings, some tokens begin a string with the same text and differ only in the number of
characters after it. For all of these, one try is enough.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pd.grammar.lengths import CONTROL, PROBE, PROBES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import numpy.typing as npt

    IntArray = npt.NDArray[np.int32]
    IndexArray = npt.NDArray[np.intp]
    Gates = tuple[bytes, ...]

_QUOTE = '"'
# Up to this many tokens, trying one by one is faster than trying together.
_FEW = 12
# One of these completes a character, whatever its first bytes are.
_CONTINUING = tuple(
    first + b"\x90" * more for more in range(3) for first in (b"\x90", b"\xa0", b"\x80")
)
# Bytes that begin no character.
_INSIDE_CHARACTERS = bytes(range(0x80, 0xC0))
# Sets of gates with cached tokens.
_MAX_GATES = 32


class CountedPlace(NamedTuple):
    """A place in a string, or in free text of a structural tag.

    Attributes:
        is_text: whether it is in free text.
        left: number of characters that may follow in the string; a lower bound unless
            ``is_left_exact``.
        needed: number of characters that must follow before the string may end; a lower bound
            unless ``is_needed_exact``.
    """

    is_text: bool
    left: int
    is_left_exact: bool = False
    needed: int = 0
    is_needed_exact: bool = True

    def advance_by(self, count: int) -> CountedPlace:
        """Return the place ``count`` characters later in the same string or text."""
        return self._replace(left=self.left - count, needed=max(0, self.needed - count))

    def is_decisive(self, characters: int) -> bool:
        """Return whether the place decides about all tokens of up to ``characters``."""
        return (self.is_left_exact or self.left >= characters) and (
            self.is_needed_exact or self.needed > characters
        )


class TokenCharacters:
    """The numbers of characters of all tokens. Any thread may use it.

    We cache a mask for each number of characters, up to the longest token.

    Args:
        tokens: the bytes of each token.
        control: tokens without text.
    """

    def __init__(self, tokens: Sequence[bytes], control: Collection[int]) -> None:
        self.tokens = tokens
        counts, ends = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), bool)
        tried, reopening = list[int](), list[int]()
        for token, text in enumerate(tokens):
            if token in control or not text:
                continue
            ends[token] = b'"' in text
            if _begins_inside_character(text) or b'"' in text[:-1]:
                tried.append(token)
            if ends[token] and _reopens_string(text):
                reopening.append(token)
            else:
                counts[token] = _count_characters(text.partition(b'"')[0])
        ends[reopening] = False
        # Number of each token's characters in the current string, and whether the token ends this
        # string. Both are zero for tokens that also have characters of a next string.
        self._counts, self._ends = counts, ends
        # Number of characters of tokens without a quote, and -1 for others.
        self._inside = array(
            "i", (-1 if b'"' in text else _count_characters(text) for text in tokens)
        )
        self._tried, self._reopening = _TokenBits(tried), _TokenBits(reopening)
        self._openings = _Openings([tokens[token] for token in tried])
        self._quoted = [token for token in tried if b'"' in tokens[token]]
        self._after_gates: dict[Gates, dict[bytes, _TokenBits]] = {}
        texts = (text for token, text in enumerate(tokens) if token not in control)
        self._most = max(PROBES, max(map(_count_characters, texts), default=0))
        # We try twice as many characters as a token has, because that lasts for several tokens.
        self._reach = (1 << (2 * self._most).bit_length()) - 1
        self._at_most: dict[int, IntArray] = {}
        self._at_least: dict[int, IntArray] = {}

    def find_place_after(
        self, place: CountedPlace | None, token: int, gates: Gates | None
    ) -> CountedPlace | None:
        """Return the place of an output after one more token.

        Args:
            place: place before the token; None if unknown.
            gates: see :meth:`narrow_mask`.

        Returns:
            None if unknown, or outside strings and free text.
        """
        if place is None:
            return None
        if place.is_text:
            text = self.tokens[token]
            is_over = any(gate[-1] in text for gate in gates or ())
            return None if is_over else place.advance_by(len(text))
        count = self._inside[token]
        return None if count < 0 else place.advance_by(count)

    def narrow_mask(
        self,
        mask: IntArray,
        free: Any,
        counted: Any,
        passed: Collection[int],
        gates: Gates | None = None,
        place: CountedPlace | None = None,
    ) -> CountedPlace | None:
        """Remove tokens from a mask that would make a string too long or end it too early.

        Args:
            mask: of the grammar without lengths; see :class:`pd.engine.token_rules.TokenRules`.
            free: matcher of that grammar.
            counted: matcher of the grammar with lengths.
            passed: tokens to keep, whatever their text.
            gates: of a structural tag; see :class:`pd.grammar.tag_lengths.SplitTag`.
            place: place of the output, from this method or :meth:`find_place_after`; None if
                unknown.

        Returns:
            The place of the output; None outside strings and free text.
        """
        if place is None or not place.is_decisive(self._most):
            place = self._find_place(free, counted, gates)
        if place is None:
            numbers = self._tried.find_allowed(mask)
            if len(numbers) and _begins_inside_character(
                self.tokens[self._tried.tokens[numbers[0]]]
            ):
                place = self._find_place_after_character(free, counted, gates)
        if place is None:
            refused = self._list_refused_outside(numbers, free, counted, gates)
        elif place.is_text:
            refused = []
            for head, tokens in self._group_by_head(gates or ()).items():
                if not _is_text_after(free, head):
                    refused += self._list_refused(tokens.list_allowed(mask), counted)
        else:
            if place.needed:
                mask &= self._mask_at_least(min(place.needed, self._most + 1))
            if place.left < self._most:
                mask &= self._mask_at_most(place.left)
            refused = self._list_refused(self._reopening.list_allowed(mask), counted)
        if refused:
            _remove_tokens(mask, [token for token in refused if token not in passed])
        return place

    def _find_place(self, free: Any, counted: Any, gates: Gates | None) -> CountedPlace | None:
        """Find the place of an output by trying texts."""
        if not may_follow(free, PROBE):
            return None
        if gates is not None and may_follow(free, CONTROL):
            lengths = (self._reach, self._most)
            left = next((each for each in lengths if may_follow(free, PROBE * each)), None)
            return None if left is None else CountedPlace(True, left)
        left = _count_probes(counted, self._reach)
        # A string with a pattern of its own has the same length in both grammars.
        is_exact = left < self._reach and may_follow(free, PROBE * (left + 1))
        if left < self._most and not is_exact:
            return None
        if may_follow(counted, _QUOTE) or not may_follow(free, _QUOTE):
            return CountedPlace(False, left, is_exact)
        needed = 1 + _count_probes(counted, self._reach, lambda: not may_follow(counted, _QUOTE))
        return CountedPlace(False, left, is_exact, needed, needed <= self._reach)

    def _find_place_after_character(
        self, free: Any, counted: Any, gates: Gates | None
    ) -> CountedPlace | None:
        """Find the place of an output that ends inside a character of a string.

        We return the place after the whole character.
        """
        for text in _CONTINUING:
            place = self._find_place_after_text(text, free, counted, gates)
            # NOTE: An alternative of free text may begin with the same byte.
            if place is not None and not place.is_text:
                return place
        return None

    def _find_place_after_text(
        self, text: bytes, free: Any, counted: Any, gates: Gates | None
    ) -> CountedPlace | None:
        """Find the place of an output after a text; None also if the text is not allowed."""
        place = None
        if counted.accept_string(text):
            if free.accept_string(text):
                place = self._find_place(free, counted, gates)
                free.rollback(1)
            counted.rollback(1)
        return place

    def _list_refused(self, tokens: Sequence[int], counted: Any) -> list[int]:
        return [token for token in tokens if not may_follow(counted, self.tokens[token])]

    def _list_refused_outside(
        self, numbers: IndexArray, free: Any, counted: Any, gates: Gates | None
    ) -> list[int]:
        """List refused tokens outside strings and free text.

        Args:
            numbers: indices of the tokens in ``_tried``.
        """
        if len(numbers) <= _FEW:
            return self._list_refused(self._tried.tokens[numbers].tolist(), counted)
        of_opening = self._openings.of[numbers]
        refused = self._list_refused(self._tried.tokens[numbers[of_opening < 0]].tolist(), counted)
        for opening in np.unique(of_opening[of_opening >= 0]).tolist():
            own = numbers[of_opening == opening]
            tokens = self._tried.tokens[own]
            text = self._openings.texts[opening]
            if len(own) <= _FEW or not may_follow(counted, text):
                refused += self._list_refused(tokens.tolist(), counted)
                continue
            place = self._find_place_after_text(text, free, counted, gates)
            if place is None or place.is_text:
                unknown = self._openings.has_more[own]
                refused += self._list_refused(tokens[unknown].tolist(), counted)
            else:
                refused += tokens[self._openings.find_unfit(own, place)].tolist()
        return refused

    def _group_by_head(self, gates: Gates) -> dict[bytes, _TokenBits]:
        """Group tokens that may end free text and then begin a string.

        The keys are the tokens' heads, up to the end of a gate.
        """
        groups = self._after_gates.get(gates)
        if groups is None:
            tokens: defaultdict[bytes, list[int]] = defaultdict(list)
            for token in self._quoted:
                for head in _split_heads(self.tokens[token], gates):
                    tokens[head].append(token)
            groups = {head: _TokenBits(each) for head, each in tokens.items()}
            if len(self._after_gates) >= _MAX_GATES:
                self._after_gates.clear()
            self._after_gates[gates] = groups
        return groups

    def _mask_at_most(self, count: int) -> IntArray:
        """Return the mask of tokens with at most ``count`` characters."""
        if count not in self._at_most:
            self._at_most[count] = _pack_mask(self._counts <= count)
        return self._at_most[count]

    def _mask_at_least(self, count: int) -> IntArray:
        """Return the mask of tokens that do not end a string before ``count`` characters."""
        if count not in self._at_least:
            self._at_least[count] = _pack_mask(~self._ends | (self._counts >= count))
        return self._at_least[count]


class _Openings:
    """Common beginnings, up to the first quote, of tokens with one or two quotes.

    Args:
        tokens: the bytes of the tokens.

    Attributes:
        texts: the beginnings.
        of: for each token, the index of its beginning in ``texts``; -1 if we try it alone.
        has_more: for each token, whether text follows a second quote.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        begins = [_find_opening(text) for text in tokens]
        number_of = Counter(each for each in begins if each is not None)
        self.texts = [text for text, number in number_of.items() if number > _FEW]
        places = {text: place for place, text in enumerate(self.texts)}
        self.of = np.array([-1 if t is None else places.get(t, -1) for t in begins], np.int32)
        parts = [[*text.split(b'"', 2)[1:], b"", b""] for text in tokens]
        self._counts = np.array([_count_characters(each[0]) for each in parts], np.int32)
        self._closes = np.array([text.count(b'"') == 2 for text in tokens], bool)
        self.has_more = np.array([bool(each[1]) for each in parts], bool)

    def find_unfit(self, numbers: IndexArray, place: CountedPlace) -> npt.NDArray[np.bool_]:
        """Return for each token whether it does not fit into a string that begins at ``place``."""
        counts = self._counts[numbers]
        short = self._closes[numbers] & (counts < place.needed)
        return short | (counts > place.left) if place.is_left_exact else short


class _TokenBits:
    """The bits of some tokens in a mask.

    Attributes:
        tokens: the tokens, as int64.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = np.array(tokens, np.int64)
        self._words, self._shifts = self.tokens // 32, (self.tokens % 32).astype(np.int32)
        self._all_words = np.unique(self._words)
        bits = np.zeros(int(self._words.max(initial=-1)) + 1, np.int32)
        np.bitwise_or.at(bits, self._words, _mask_bits(self.tokens))
        self._all_bits = bits[self._all_words]

    def list_allowed(self, mask: IntArray) -> list[int]:
        """List the tokens that a mask allows."""
        allowed: list[int] = self.tokens[self.find_allowed(mask)].tolist()
        return allowed

    def find_allowed(self, mask: IntArray) -> IndexArray:
        """Return the indices in ``tokens`` of the tokens that a mask allows."""
        if not np.count_nonzero(mask.take(self._all_words) & self._all_bits):
            return _NONE
        return np.flatnonzero((mask.take(self._words) >> self._shifts) & 1)


_NONE = np.empty(0, np.intp)


def _find_opening(text: bytes) -> bytes | None:
    """Return the beginning of a token up to its first quote; None if we must try it alone."""
    if _begins_inside_character(text) or not 1 <= text.count(b'"') <= 2:
        return None
    return text[: text.index(b'"') + 1]


def _begins_inside_character(text: bytes) -> bool:
    return text[0] & 0xC0 == 0x80


def _reopens_string(text: bytes) -> bool:
    """Return whether a token may end a string and contain characters of a next one."""
    quotes = text.count(b'"')
    return quotes > 2 or (quotes == 2 and not text.endswith(b'"'))


def _split_heads(text: bytes, gates: Gates) -> Iterator[bytes]:
    """Yield the beginnings of a token that may end a gate before characters of a string."""
    opened = text.rfind(b'"', 0, -1)
    for end in range(1, opened + 2):
        head = text[:end]
        if any(gate.endswith(head) or head.endswith(gate) for gate in gates):
            yield head


def _is_text_after(free: Any, head: bytes) -> bool:
    """Return whether free text continues after a token's beginning, or the beginning is refused."""
    if not free.accept_string(head):
        return True
    stays = may_follow(free, CONTROL) and may_follow(free, PROBE * PROBES)
    free.rollback(1)
    return stays


def _count_characters(text: bytes) -> int:
    """Count the characters that begin in a text."""
    return len(text.translate(None, _INSIDE_CHARACTERS))


def _count_probes(counted: Any, limit: int, holds: Callable[[], bool] | None = None) -> int:
    """Count how many more characters a matcher accepts while ``holds`` is true after them.

    Args:
        limit: a power of two less one.
        holds: once false, it must stay false after more characters, because we bisect.
    """
    count = texts = 0
    step = (limit + 1) // 2
    while step:
        if counted.accept_string(PROBE * step):
            if holds is None or holds():
                count, texts = count + step, texts + 1
            else:
                counted.rollback(1)
        step //= 2
    if texts:
        counted.rollback(texts)
    return count


def may_follow(matcher: Any, text: str | bytes) -> bool:
    """Whether a text may come next. The matcher stays where it is."""
    if not matcher.accept_string(text):
        return False
    matcher.rollback(1)
    return True


def _remove_tokens(mask: IntArray, tokens: Sequence[int]) -> None:
    numbers = np.array(tokens, np.int64)
    np.bitwise_and.at(mask, numbers // 32, ~_mask_bits(numbers))


def _mask_bits(tokens: npt.NDArray[np.int64]) -> IntArray:
    """Return the bit of each token in its element of a mask."""
    return (1 << (tokens % 32).astype(np.uint32)).astype(np.uint32).view(np.int32)


def _pack_mask(chosen: npt.NDArray[np.bool_]) -> IntArray:
    """Pack a boolean per token into a mask."""
    bits = np.zeros(-(-len(chosen) // 32) * 32, bool)
    bits[: len(chosen)] = chosen
    return np.packbits(bits, bitorder="little").view(np.int32)
