"""Caches the token ids of pieces of long texts, for texts with the same beginning.

We cut a text only where its tokens are provably those of the pieces: between a small Latin letter
and a space before another such letter. We read from the tokenizer's configuration whether that
holds (:func:`find_cuts`):

- The pre-tokenizer splits there, by one of the regular expressions below. In each of them, a match
  with the letter ends after it, whatever follows. No match looks back, so the rest is split as if
  it were alone.
- Or there is no such expression, but no token of the vocabulary has a space after a small letter,
  so no merge crosses the cut. This is sentencepiece's kind, where the space is ``▁``.

In addition, the normalizer must change nothing at the cut, and no added token may cross it. We
never cut texts of other tokenizers.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from tokenizers import Tokenizer

    IntArray = npt.NDArray[np.int32]

# Minimum length of a piece. Texts of up to twice this length are not cut.
PIECE_CHARACTERS = 4096
# Limit on the texts of one call. Together they are at most as long as an uncut text, because we
# cannot refuse any of them before the whole call is complete.
MAX_TOGETHER = 64
# Memory limit for one tokenizer's cached pieces.
MAX_KEPT_BYTES = 32 << 20
# We scan this many characters, and convert this many token ids, at a time, because other threads
# wait meanwhile; this takes a millisecond at most.
_AT_ONCE = 1 << 16
_CUT = re.compile("(?<=[a-z])(?= [a-z])")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SMALL = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LARGE = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_LARGE}]*[{_SMALL}]+"
_UPPER = rf"[^\r\n\p{{L}}\p{{N}}]?[{_LARGE}]+[{_SMALL}]*"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN_EXPRESSIONS = frozenset(
    [
        # GPT-2; Llama 3; Qwen 2 and 3; Mistral's Tekken; GPT-4o; the embedded model.
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
        rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
        rf"{_CASED}|{_UPPER}|\p{{N}}|{_CASED_REST}",
        rf"{_CASED}{_CONTRACTIONS}?|{_UPPER}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_REST}",
        r" ?(?:\p{Lu}{2,}(?![\p{L}\p{N}])|\p{Lu}?\p{Ll}+|\p{Lu}(?![\p{L}\p{N}]))|\p{N}"
        r"| ?[^\s\p{L}\p{N}]|\s|\p{L}",
    ]
)


class Cuts(NamedTuple):
    """How to cut a tokenizer's texts.

    Attributes:
        drops_space: pieces after the first begin after their space, because the tokenizer's
            normalizer puts a space before every text.
    """

    drops_space: bool


def find_cuts(tokenizer: Tokenizer) -> Cuts | None:
    """Find out how a tokenizer's texts may be cut; None unless cutting is certainly safe."""
    config: dict[str, Any] = json.loads(tokenizer.to_str())
    model = config["model"]
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    normalizers = _list_parts(config["normalizer"], "normalizers")
    drops_space = _is_sentencepiece(normalizers)
    if not drops_space and any(part["type"] != "NFC" for part in normalizers):
        return None
    splitters = _list_parts(config["pre_tokenizer"], "pretokenizers")
    if drops_space and splitters:
        return None
    by_expression = _splits_at_cuts(splitters)
    # Without an expression, a text is one word, or words that begin with ``▁``.
    is_plain = len(splitters) < 2 and all(part["type"] == "Metaspace" for part in splitters)
    if not by_expression and not (is_plain and _has_no_crossing(model)):
        return None
    if not all(_stays_aside(token, drops_space) for token in config["added_tokens"]):
        return None
    return Cuts(drops_space)


def _list_parts(config: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the members of a sequence, or the single member."""
    if config is None:
        return []
    return list(config[name]) if config["type"] == "Sequence" else [config]


def _is_sentencepiece(normalizers: list[dict[str, Any]]) -> bool:
    """Tell whether a text gets a leading space, and spaces become ``▁``."""
    return normalizers == [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]


def _splits_at_cuts(splitters: list[dict[str, Any]]) -> bool:
    """Tell whether known expressions split at a cut. Later parts only see the split texts."""
    is_split = False
    for part in splitters:
        if part["type"] == "Split":
            expression = part["pattern"].get("Regex")
            isolates = part["behavior"] == "Isolated" and not part["invert"]
            if expression not in KNOWN_EXPRESSIONS or not isolates:
                return False
            is_split = True
        elif part["type"] == "ByteLevel":
            is_split = is_split or part["use_regex"]
        elif part["type"] != "Digits":
            return False
    return is_split


def _has_no_crossing(model: dict[str, Any]) -> bool:
    """Tell whether all small letters are tokens, and none has a space after it inside a token."""
    if model["ignore_merges"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    vocabulary = model["vocab"]
    if not all(piece in vocabulary for piece in [*_LETTERS, "▁"]):
        return False
    return not any(re.search("[a-z][▁ ]", piece) for piece in vocabulary)


def _stays_aside(token: dict[str, Any], drops_space: bool) -> bool:
    """Tell whether an added token cannot affect a cut."""
    text = token["content"]
    at_edge = bool(text) and (text[0] in _LETTERS or text[-1] in _LETTERS)
    if at_edge and (drops_space or token["lstrip"] or token["rstrip"]):
        return False
    return not re.search("[a-z][▁ ]", text)


# By default the library shares a batch among threads on all cores, but the event loop and other
# processes need these. We set this at import, because the library reads it at each call and
# changing it while threads run is not safe.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TooManyTokensError(Exception):
    """A text has too many tokens, ``count`` or more."""

    def __init__(self, count: int) -> None:
        self.count = count


def tokenize_text(
    tokenizer: Tokenizer, text: str, limit: int, *, add_special_tokens: bool
) -> IntArray:
    """Return the token ids of a text as int32. Other threads can run meanwhile.

    Raises TooManyTokensError for more than ``limit`` tokens.
    """
    (ids,) = tokenize_texts(tokenizer, [text], limit, add_special_tokens=add_special_tokens)
    return ids


def tokenize_texts(
    tokenizer: Tokenizer, texts: list[str], limit: int, *, add_special_tokens: bool
) -> Iterator[IntArray]:
    """Yield the token ids of each text, as :func:`tokenize_text` returns them.

    We tokenize all of them in one call. Other threads can run meanwhile.
    """
    # Only the library's batch calls release the global interpreter lock.
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens):
        count = len(encoding)
        if count > limit:
            raise TooManyTokensError(count)
        ids, array = encoding.ids, np.empty(count, np.int32)
        for start in range(0, count, _AT_ONCE):
            array[start : start + _AT_ONCE] = ids[start : start + _AT_ONCE]
        yield array


def group_short(texts: Sequence[str]) -> Iterator[list[str]]:
    """Group texts to tokenize together. A text is alone if it is long enough to be cut."""
    together: list[str] = []
    left = 0
    for text in texts:
        if together and (len(text) > left or len(together) == MAX_TOGETHER):
            yield together
            together = []
        if not together:
            left = 2 * PIECE_CHARACTERS
        together.append(text)
        left -= len(text)
    if together:
        yield together


class PieceEncoder:
    """Encodes long texts piece by piece. May be called from any thread.

    Attributes:
        found: number of pieces found in the cache so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, cuts: Cuts, affixes: tuple[IntArray, IntArray]
    ) -> None:
        """``affixes``: special tokens before and after a text."""
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._affixes = affixes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], IntArray] = OrderedDict()
        self._kept_bytes = 0
        self.found = 0

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> PieceEncoder | None:
        """Make an encoder; None if the tokenizer's texts may not be cut."""
        cuts = find_cuts(tokenizer)
        affixes = None if cuts is None else _find_affixes(tokenizer)
        return None if cuts is None or affixes is None else cls(tokenizer, cuts, affixes)

    def encode(
        self, text: str, namespace: str, limit: int, *, add_special_tokens: bool
    ) -> IntArray | None:
        """Return token ids as int32; None for a text that is too short or cannot be cut.

        ``namespace``: scope of cached pieces. Raises TooManyTokensError when a piece has more than
        ``limit`` tokens, if not before.
        """
        pieces = self._cut_text(text)
        if len(pieces) < 2:
            return None
        parts = [self._encode_piece(piece, namespace, limit) for piece in pieces[:-1]]
        parts.append(tokenize_text(self._tokenizer, pieces[-1], limit, add_special_tokens=False))
        if add_special_tokens:
            parts = [self._affixes[0], *parts, self._affixes[1]]
        return np.concatenate(parts)

    def _cut_text(self, text: str) -> list[str]:
        pieces, start = [], 0
        while len(text) - start > 2 * PIECE_CHARACTERS:
            cut = _find_cut(text, start + PIECE_CHARACTERS)
            if cut is None:
                break
            pieces.append(text[start:cut])
            start = cut + self._cuts.drops_space
        return [*pieces, text[start:]]

    def _encode_piece(self, piece: str, namespace: str, limit: int) -> IntArray:
        key = (namespace, piece)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                self.found += 1
                return self._kept[key]
        ids = tokenize_text(self._tokenizer, piece, limit, add_special_tokens=False)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = ids
                self._kept_bytes += _measure_piece(key, ids)
            while self._kept_bytes > MAX_KEPT_BYTES:
                self._kept_bytes -= _measure_piece(*self._kept.popitem(last=False))
        return ids


def _find_cut(text: str, start: int) -> int | None:
    """Find the first place from ``start`` on where the text may be cut."""
    while start < len(text):
        # The expression looks at one character before the place and two after it.
        cut = _CUT.search(text, start, start + _AT_ONCE + 2)
        if cut is not None:
            return cut.start()
        start += _AT_ONCE
    return None


def _measure_piece(key: tuple[str, str], ids: IntArray) -> int:
    """Measure the memory of a cached piece."""
    return sum(map(sys.getsizeof, key)) + ids.nbytes


def _find_affixes(tokenizer: Tokenizer) -> tuple[IntArray, IntArray] | None:
    """Find the special tokens before and after a text; None if the tokenizer does more."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True)
    mask = whole.special_tokens_mask
    start = mask.index(0) if 0 in mask else 0
    end = start + len(plain)
    if whole.ids[start:end] != plain or any(mask[start:end]) or not all(mask[end:]):
        return None
    before, after = whole.ids[:start], whole.ids[end:]
    return np.array(before, np.int32), np.array(after, np.int32)
