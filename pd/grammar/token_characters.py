"""Which tokens a grammar takes that counts the characters of strings.

See :mod:`pd.grammar.lengths` for the two grammars: the mask of the first allows all tokens that the
second takes, and some that make a string too long or end it too early.

The second grammar is asked about few tokens. The grammars differ only inside strings of bounded
length, where one character counts as much as another: tables say which tokens have how many
characters. How many characters may follow, and how many have to, is found by trying texts when a
string has begun. From then on every token is subtracted, up to a token with a quote, without which
no string begins or ends. Outside strings, tokens that begin a string with the same text differ only
in the number of characters behind it, so that one try for all of them is enough.
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
# So many tokens are tried one by one in less time than together.
_FEW = 12
# Bytes of which one list or another completes a character, whatever its first bytes are.
_CONTINUING = tuple(
    first + b"\x90" * more for more in range(3) for first in (b"\x90", b"\xa0", b"\x80")
)
# Bytes with which no character begins.
_INSIDE_CHARACTERS = bytes(range(0x80, 0xC0))
# Sets of texts that end free text, whose tokens are remembered.
_MAX_GATES = 32


class CountedPlace(NamedTuple):
    """A place in a string, or in free text of a structural tag.

    Attributes:
        is_text: whether it is in free text.
        left: how many characters may follow in the string; if not ``is_left_exact``, at least so
            many where there is a limit.
        needed: how many characters have to follow before the string may end; if not
            ``is_needed_exact``, at least so many.
    """

    is_text: bool
    left: int
    is_left_exact: bool = False
    needed: int = 0
    is_needed_exact: bool = True

    def after(self, count: int) -> CountedPlace:
        """The place so many characters later, in the same string or text."""
        return self._replace(left=self.left - count, needed=max(0, self.needed - count))

    def decides(self, most: int) -> bool:
        """Whether nothing more has to be known about tokens of at most so many characters."""
        return (self.is_left_exact or self.left >= most) and (
            self.is_needed_exact or self.needed > most
        )


class TokenCharacters:
    """How many characters the tokens of a vocabulary have. Any thread may use it.

    Masks are kept for each number of characters up to that of the longest token.

    Args:
        tokens: the bytes of each.
        control: tokens that are no text.
    """

    def __init__(self, tokens: Sequence[bytes], control: Collection[int]) -> None:
        self.tokens = tokens
        counts, ends = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), bool)
        tried, reopening = list[int](), list[int]()
        for token, text in enumerate(tokens):
            if token in control or not text:
                continue
            ends[token] = b'"' in text
            if _continues(text) or b'"' in text[:-1]:
                tried.append(token)
            if ends[token] and _reopens(text):
                reopening.append(token)
            else:
                counts[token] = _characters(text.partition(b'"')[0])
        ends[reopening] = False
        # Characters of each token that are in the string that is being written, and whether its end
        # is in the token; of those that have characters of a next string, none.
        self._counts, self._ends = counts, ends
        # Characters of each token without a quote, and -1 for others.
        self._inside = array("i", (-1 if b'"' in text else _characters(text) for text in tokens))
        self._tried, self._reopening = _Places(tried), _Places(reopening)
        self._openings = _Openings([tokens[token] for token in tried])
        self._quoted = [token for token in tried if b'"' in tokens[token]]
        self._behind: dict[Gates, dict[bytes, _Places]] = {}
        texts = (text for token, text in enumerate(tokens) if token not in control)
        self._most = max(PROBES, max(map(_characters, texts), default=0))
        # A try with twice as many characters as a token has is enough for several tokens.
        self._reach = (1 << (2 * self._most).bit_length()) - 1
        self._at_most: dict[int, IntArray] = {}
        self._at_least: dict[int, IntArray] = {}

    def after(
        self, place: CountedPlace | None, token: int, gates: Gates | None
    ) -> CountedPlace | None:
        """Where an output is behind a token more.

        Args:
            place: where it was before; None where that is not known.
            gates: see :meth:`narrow`.

        Returns:
            None if it is not known, or neither in a string nor in free text.
        """
        if place is None:
            return None
        if place.is_text:
            text = self.tokens[token]
            is_over = any(gate[-1] in text for gate in gates or ())
            return None if is_over else place.after(len(text))
        count = self._inside[token]
        return None if count < 0 else place.after(count)

    def narrow(
        self,
        mask: IntArray,
        free: Any,
        counted: Any,
        passed: Collection[int],
        gates: Gates | None = None,
        place: CountedPlace | None = None,
    ) -> CountedPlace | None:
        """Take tokens out of a mask that would make a string too long, or end it too early.

        Args:
            mask: of the grammar without lengths; see :class:`pd.engine.token_rules.TokenRules`.
            free: matcher of that grammar.
            counted: matcher of the grammar with lengths.
            passed: tokens that stay, whatever their text.
            gates: of a structural tag; see :class:`pd.grammar.tag_lengths.SplitTag`.
            place: where the output is, from this method and :meth:`after`; None if not known.

        Returns:
            Where the output is; None if neither in a string nor in free text.
        """
        if place is None or not place.decides(self._most):
            place = self._find(free, counted, gates)
        if place is None:
            numbers = self._tried.numbers_in_mask(mask)
            if len(numbers) and _continues(self.tokens[self._tried.tokens[numbers[0]]]):
                place = self._find_behind_character(free, counted, gates)
        if place is None:
            refused = self._refused_outside(numbers, free, counted, gates)
        elif place.is_text:
            refused = []
            for head, places in self._behind_gates(gates or ()).items():
                if not _stays_text(free, head):
                    refused += self._refused(places.in_mask(mask), counted)
        else:
            if place.needed:
                mask &= self._no_shorter(min(place.needed, self._most + 1))
            if place.left < self._most:
                mask &= self._no_longer(place.left)
            refused = self._refused(self._reopening.in_mask(mask), counted)
        if refused:
            _clear(mask, [token for token in refused if token not in passed])
        return place

    def _find(self, free: Any, counted: Any, gates: Gates | None) -> CountedPlace | None:
        """Where an output is, by trying texts."""
        if not _takes(free, PROBE):
            return None
        if gates is not None and _takes(free, CONTROL):
            lengths = (self._reach, self._most)
            left = next((each for each in lengths if _takes(free, PROBE * each)), None)
            return None if left is None else CountedPlace(True, left)
        left = _count_probes(counted, self._reach)
        # A string with a pattern of its own has the same length in both grammars.
        is_exact = left < self._reach and _takes(free, PROBE * (left + 1))
        if left < self._most and not is_exact:
            return None
        if _takes(counted, _QUOTE) or not _takes(free, _QUOTE):
            return CountedPlace(False, left, is_exact)
        needed = 1 + _count_probes(counted, self._reach, lambda: not _takes(counted, _QUOTE))
        return CountedPlace(False, left, is_exact, needed, needed <= self._reach)

    def _find_behind_character(
        self, free: Any, counted: Any, gates: Gates | None
    ) -> CountedPlace | None:
        """Where an output in a string is that ends inside a character, as if it had all of it."""
        for text in _CONTINUING:
            place = self._find_behind(text, free, counted, gates)
            # NOTE: what begins instead of free text may begin with the same byte.
            if place is not None and not place.is_text:
                return place
        return None

    def _find_behind(
        self, text: bytes, free: Any, counted: Any, gates: Gates | None
    ) -> CountedPlace | None:
        """Where an output would be behind a text; None also if it may not come."""
        place = None
        if counted.accept_string(text):
            if free.accept_string(text):
                place = self._find(free, counted, gates)
                free.rollback(1)
            counted.rollback(1)
        return place

    def _refused(self, tokens: Sequence[int], counted: Any) -> list[int]:
        """Those of some tokens that a matcher does not take."""
        return [token for token in tokens if not _takes(counted, self.tokens[token])]

    def _refused_outside(
        self, numbers: IndexArray, free: Any, counted: Any, gates: Gates | None
    ) -> list[int]:
        """Those of some tokens that a matcher does not take in no string and no free text.

        Args:
            numbers: places in ``_tried``.
        """
        if len(numbers) <= _FEW:
            return self._refused(self._tried.tokens[numbers].tolist(), counted)
        of_opening = self._openings.of[numbers]
        refused = self._refused(self._tried.tokens[numbers[of_opening < 0]].tolist(), counted)
        for opening in np.unique(of_opening[of_opening >= 0]).tolist():
            own = numbers[of_opening == opening]
            tokens = self._tried.tokens[own]
            text = self._openings.texts[opening]
            if len(own) <= _FEW or not _takes(counted, text):
                refused += self._refused(tokens.tolist(), counted)
                continue
            place = self._find_behind(text, free, counted, gates)
            if place is None or place.is_text:
                unknown = self._openings.has_more[own]
                refused += self._refused(tokens[unknown].tolist(), counted)
            else:
                refused += tokens[self._openings.unfit(own, place)].tolist()
        return refused

    def _behind_gates(self, gates: Gates) -> dict[bytes, _Places]:
        """Tokens that may end free text and have characters of a string behind it, by what they
        have up to the end of a gate."""
        found = self._behind.get(gates)
        if found is None:
            tokens: defaultdict[bytes, list[int]] = defaultdict(list)
            for token in self._quoted:
                for head in _heads(self.tokens[token], gates):
                    tokens[head].append(token)
            found = {head: _Places(each) for head, each in tokens.items()}
            if len(self._behind) >= _MAX_GATES:
                self._behind.clear()
            self._behind[gates] = found
        return found

    def _no_longer(self, count: int) -> IntArray:
        """Tokens of at most so many characters."""
        if count not in self._at_most:
            self._at_most[count] = _packed(self._counts <= count)
        return self._at_most[count]

    def _no_shorter(self, count: int) -> IntArray:
        """Tokens that do not end a string in fewer characters."""
        if count not in self._at_least:
            self._at_least[count] = _packed(~self._ends | (self._counts >= count))
        return self._at_least[count]


class _Openings:
    """Beginnings up to the first quote that tokens with one or two quotes have in common.

    Args:
        tokens: the bytes of some.

    Attributes:
        texts: the beginnings.
        of: for each token the place of its beginning in ``texts``; -1 of those that are tried
            alone.
        has_more: for each token whether it has text behind a second quote.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        begins = [_opening(text) for text in tokens]
        number_of = Counter(each for each in begins if each is not None)
        self.texts = [text for text, number in number_of.items() if number > _FEW]
        places = {text: place for place, text in enumerate(self.texts)}
        self.of = np.array([-1 if t is None else places.get(t, -1) for t in begins], np.int32)
        parts = [[*text.split(b'"', 2)[1:], b"", b""] for text in tokens]
        self._counts = np.array([_characters(each[0]) for each in parts], np.int32)
        self._closes = np.array([text.count(b'"') == 2 for text in tokens], bool)
        self.has_more = np.array([bool(each[1]) for each in parts], bool)

    def unfit(self, numbers: IndexArray, place: CountedPlace) -> npt.NDArray[np.bool_]:
        """Which of some tokens do not fit into a string whose beginning is at ``place``."""
        counts = self._counts[numbers]
        short = self._closes[numbers] & (counts < place.needed)
        return short | (counts > place.left) if place.is_left_exact else short


class _Places:
    """Where some tokens are in a mask.

    Attributes:
        tokens: int64.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = np.array(tokens, np.int64)
        self._words, self._shifts = self.tokens // 32, (self.tokens % 32).astype(np.int32)
        self._all_words = np.unique(self._words)
        bits = np.zeros(int(self._words.max(initial=-1)) + 1, np.int32)
        np.bitwise_or.at(bits, self._words, _bits(self.tokens))
        self._all_bits = bits[self._all_words]

    def in_mask(self, mask: IntArray) -> list[int]:
        """The tokens that a mask allows."""
        found: list[int] = self.tokens[self.numbers_in_mask(mask)].tolist()
        return found

    def numbers_in_mask(self, mask: IntArray) -> IndexArray:
        """The places in ``tokens`` of those that a mask allows."""
        if not np.count_nonzero(mask.take(self._all_words) & self._all_bits):
            return _NONE
        return np.flatnonzero((mask.take(self._words) >> self._shifts) & 1)


_NONE = np.empty(0, np.intp)


def _opening(text: bytes) -> bytes | None:
    """The beginning of a token up to its first quote; None if it has to be tried alone."""
    if _continues(text) or not 1 <= text.count(b'"') <= 2:
        return None
    return text[: text.index(b'"') + 1]


def _continues(text: bytes) -> bool:
    """Whether a token begins inside a character."""
    return text[0] & 0xC0 == 0x80


def _reopens(text: bytes) -> bool:
    """Whether a token may end a string and have characters of a next one."""
    quotes = text.count(b'"')
    return quotes > 2 or (quotes == 2 and not text.endswith(b'"'))


def _heads(text: bytes, gates: Gates) -> Iterator[bytes]:
    """Parts of a token up to what may be the end of a gate, with characters of a string behind."""
    opened = text.rfind(b'"', 0, -1)
    for end in range(1, opened + 2):
        head = text[:end]
        if any(gate.endswith(head) or head.endswith(gate) for gate in gates):
            yield head


def _stays_text(free: Any, head: bytes) -> bool:
    """Whether free text goes on behind the beginning of a token; also if that may not come."""
    if not free.accept_string(head):
        return True
    stays = _takes(free, CONTROL) and _takes(free, PROBE * PROBES)
    free.rollback(1)
    return stays


def _characters(text: bytes) -> int:
    """How many characters begin in a text."""
    return len(text.translate(None, _INSIDE_CHARACTERS))


def _count_probes(counted: Any, most: int, go_on: Callable[[], bool] | None = None) -> int:
    """How many characters more a matcher takes as long as ``go_on`` is true behind them.

    Args:
        most: so many at most, a power of two less one.
        go_on: once it is false, it is so behind any more characters.
    """
    count = texts = 0
    step = (most + 1) // 2
    while step:
        if counted.accept_string(PROBE * step):
            if go_on is None or go_on():
                count, texts = count + step, texts + 1
            else:
                counted.rollback(1)
        step //= 2
    if texts:
        counted.rollback(texts)
    return count


def _takes(matcher: Any, text: str | bytes) -> bool:
    if not matcher.accept_string(text):
        return False
    matcher.rollback(1)
    return True


def _clear(mask: IntArray, tokens: Sequence[int]) -> None:
    """Take tokens out of a mask."""
    places = np.array(tokens, np.int64)
    np.bitwise_and.at(mask, places // 32, ~_bits(places))


def _bits(tokens: npt.NDArray[np.int64]) -> IntArray:
    """The bit of each token in its element of a mask."""
    return (1 << (tokens % 32).astype(np.uint32)).astype(np.uint32).view(np.int32)


def _packed(chosen: npt.NDArray[np.bool_]) -> IntArray:
    """The mask of these tokens."""
    bits = np.zeros(-(-len(chosen) // 32) * 32, bool)
    bits[: len(chosen)] = chosen
    return np.packbits(bits, bitorder="little").view(np.int32)
