"""Lengths of strings, counted beside the grammar.

For every character that a string of bounded length may have, xgrammar makes a state of the grammar
and finds out which tokens of the vocabulary may come in it. With 131,072 tokens a hundred
characters take seconds. So a schema is compiled twice. In the first grammar, which knows all
tokens, strings are as long as they like. In the second, which knows no tokens and is compiled in
milliseconds, they have their lengths. A token may come if it is in the mask of the first grammar
and the second takes its bytes.

Few tokens have to be tried. The two grammars differ only inside strings of bounded length, where
one character counts as much as another: a probe finds out how many characters are left, and a table
says which tokens have more. Only tokens that end a string, or begin inside a character, are tried
one by one, and in a string only those of them that go on in a next one.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from pd.core.json_schemas import referenced, subschemas
from pd.grammar.patterns import PLAIN_CHARACTER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import numpy.typing as npt

    IntArray = npt.NDArray[np.int32]

_ANY_LENGTH = f"^{PLAIN_CHARACTER}*$"
_BOUNDED = re.compile(re.escape(f"^{PLAIN_CHARACTER}") + r"\{(\d+),(\d*)\}\$")
_KINDS = frozenset({"object", "array", "string", "number", "boolean", "null"})
# Characters that are repeated together.
_PIECE = 32
# A character that stands in every string.
PROBE, _QUOTE = "x", '"'
# One that no string of JSON has as it is, and free text has.
CONTROL = "\x01"


def split_lengths(schema: object) -> tuple[object, object] | None:
    """A schema without the lengths of its strings, and one with them, written so that a grammar of
    no tokens is compiled quickly.

    Args:
        schema: from :func:`pd.grammar.json_schemas.prepare`. It is not changed.

    Returns:
        None if no string has a length, or if it may be unknown which of several strings is being
        written, since then their characters cannot be counted.
    """
    if not has_lengths(schema) or not is_clear(schema):
        return None
    return without_lengths(schema), with_lengths(schema)


def has_lengths(schema: object) -> bool:
    """Whether a string of a schema has a length."""
    return any(_BOUNDED.fullmatch(str(part.get("pattern"))) for part in _objects(schema))


def is_clear(schema: object) -> bool:
    """Whether it is always known which string of a schema is being written."""
    return not any(
        "propertyNames" in part or not _is_clear(schema, part) for part in _objects(schema)
    )


def without_lengths(schema: object) -> object:
    """A copy in which strings are as long as they like."""
    return _changed(schema, lambda *_: _ANY_LENGTH)


def with_lengths(schema: object) -> object:
    """A copy of which a grammar of no tokens is compiled quickly."""
    return _changed(schema, _in_pieces)


def _changed(schema: object, pattern: Callable[[int, int | None], str]) -> object:
    changed = copy.deepcopy(schema)
    for part in _objects(changed):
        found = _BOUNDED.fullmatch(str(part.get("pattern")))
        if found is not None:
            part["pattern"] = pattern(int(found[1]), int(found[2]) if found[2] else None)
    return changed


def _objects(schema: object) -> list[dict[str, Any]]:
    return [part for _, part in subschemas(schema) if isinstance(part, dict)]


def _in_pieces(low: int, high: int | None) -> str:
    """Strings of so many characters. xgrammar takes time with the square of a repetition."""
    needed = f"({PLAIN_CHARACTER}{{{_PIECE}}}){{{low // _PIECE}}}" if low >= _PIECE else ""
    needed += f"{PLAIN_CHARACTER}{{{low % _PIECE}}}" if low % _PIECE else ""
    if high is None:
        return f"^{needed}{PLAIN_CHARACTER}*$"
    # Whole pieces, and so many characters more that every length up to the last can be written.
    pieces = max((high - low + 1) // _PIECE - 1, 0)
    rest = f"{PLAIN_CHARACTER}{{0,{high - low - pieces * _PIECE}}}"
    more = f"({PLAIN_CHARACTER}{{{_PIECE}}}){{0,{pieces}}}" if pieces else ""
    return f"^{needed}{more}{rest}$"


def _is_clear(root: object, part: dict[str, Any]) -> bool:
    """Whether the first character of an instance tells of which alternative it is."""
    taken: set[str] = set()
    for each in part.get("anyOf", ()):
        kinds = _kinds(root, each)
        if kinds & taken:
            return False
        taken |= kinds
    return True


def _kinds(root: object, schema: object) -> frozenset[str]:
    """The types that instances of a schema may have."""
    for _ in range(len(_KINDS)):  # a longer way of references counts as leading to any
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = referenced(root, schema["$ref"])
    if not isinstance(schema, dict) or "$ref" in schema:
        return _KINDS
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({"number" if kind == "integer" else kind})
    if set(schema) == {"enum"} and all(isinstance(each, str) for each in schema["enum"]):
        return frozenset({"string"})
    if set(schema) == {"enum"} and not any(isinstance(each, str) for each in schema["enum"]):
        return _KINDS - {"string"}
    return _KINDS


class TokenCharacters:
    """How many characters the tokens of a vocabulary have. Any thread may use it.

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
            if ends[token] or text[0] & 0xC0 == 0x80:
                tried.append(token)
            if ends[token] and _reopens(text):
                reopening.append(token)
            else:
                counts[token] = sum(byte & 0xC0 != 0x80 for byte in text.partition(b'"')[0])
        ends[reopening] = False
        # Characters of each token that are in the string that is being written, and whether its end
        # is in the token; of those that have characters of a next string, none.
        self._counts, self._ends = counts, ends
        self._tried, self._reopening = _Places(tried), _Places(reopening)
        self._quoted = [token for token in tried if b'"' in tokens[token]]
        self._behind: dict[bytes, _Places] = {}
        self._most = int(counts.max(initial=0))
        self._at_most: dict[int, IntArray] = {}
        self._at_least: dict[int, IntArray] = {}

    def narrow(
        self,
        mask: IntArray,
        free: Any,
        counted: Any,
        passed: Collection[int],
        gates: bytes | None = None,
    ) -> None:
        """Take tokens out of a mask that would make a string too long, or end it too early.

        Args:
            mask: of the grammar without lengths; see :class:`pd.engine.token_rules.TokenRules`.
            free: matcher of that grammar.
            counted: matcher of the grammar with lengths.
            passed: tokens that stay, whatever their text.
            gates: of a structural tag; see :class:`pd.grammar.tag_lengths.SplitTag`.
        """
        tried = self._tried
        if not _takes(free, PROBE * self._most):
            pass
        elif gates is not None and _takes(free, CONTROL):
            tried = self._behind_gates(gates)
        else:  # a string is being written
            tried = self._reopening
            left = _largest(lambda count: _takes(counted, PROBE * count), self._most)
            # A string with a pattern of its own has the same in both grammars.
            if not _takes(counted, _QUOTE) and _takes(free, _QUOTE):
                short = _largest(lambda n: not _takes(counted, PROBE * n + _QUOTE), left)
                mask &= self._no_shorter(short + 1)
            if left < self._most:
                mask &= self._no_longer(left)
        for token in tried.in_mask(mask):
            if token in passed:
                continue
            if counted.accept_string(self.tokens[token]):
                counted.rollback(1)
            else:
                mask[token // 32] ^= np.array(1 << token % 32, np.uint32).view(np.int32)

    def _behind_gates(self, gates: bytes) -> _Places:
        """Tokens that may end free text and have characters of a string behind it."""
        if gates not in self._behind:
            found = []
            for token in self._quoted:
                text = self.tokens[token]
                opened = text.rfind(b'"', 0, -1)
                if any(0 <= text.find(gate) <= opened for gate in gates):
                    found.append(token)
            self._behind[gates] = _Places(found)
        return self._behind[gates]

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


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` for which something holds that does for 0 and, if for a
    number, for all below it."""
    if holds(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class _Places:
    """Where some tokens are in a mask."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.array(tokens, np.int64)
        self._words, self._shifts = self._tokens // 32, (self._tokens % 32).astype(np.int32)

    def in_mask(self, mask: IntArray) -> list[int]:
        """The tokens that a mask allows."""
        allowed = (mask[self._words] >> self._shifts) & 1
        found: list[int] = self._tokens[allowed.astype(bool)].tolist()
        return found


def _reopens(text: bytes) -> bool:
    """Whether a token may end a string and have characters of a next one."""
    quotes = text.count(b'"')
    return quotes > 2 or (quotes == 2 and not text.endswith(b'"'))


def _takes(matcher: Any, text: str) -> bool:
    if not matcher.accept_string(text):
        return False
    matcher.rollback(1)
    return True


def _packed(chosen: npt.NDArray[np.bool_]) -> IntArray:
    """The mask of these tokens."""
    bits = np.zeros(-(-len(chosen) // 32) * 32, bool)
    bits[: len(chosen)] = chosen
    return np.packbits(bits, bitorder="little").view(np.int32)
