"""Token ids of pieces of long texts, kept for other texts that begin alike.

A long text is cut where its tokens are provably those of its pieces one after the other: between a
small Latin letter and a space that another such letter follows. What makes this certain is read
from the tokenizer's configuration (:func:`cuts_of`):

- Its pre-tokenizer splits there. The regular expressions that are known to do so are listed below:
  in each of them a match that has the letter ends with it, whether or not something follows, and
  no match looks back, so that the rest is split as it would be alone.
- Or it has no such expression, but no token of the vocabulary has a space behind a small letter, so
  that no merge crosses the cut (sentencepiece's kind; the space is ``▁`` there).

The normalizer is one that changes nothing at the cut, and no added token reaches across it. A
tokenizer of which this is not known is never cut.
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

# Characters of a piece at least. A text that is not longer than two of them is not cut.
PIECE_CHARACTERS = 4096
# Texts that are tokenized by one call at most. Together they are no longer than a text that is not
# cut, for what one call makes is complete before any of it can be refused.
MAX_TOGETHER = 64
# Memory of what is kept for one tokenizer.
MAX_KEPT_BYTES = 32 << 20
# Characters that are looked through, and token ids that are converted, in one go: other threads
# wait for a millisecond at most.
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
    """Rule by which texts of a tokenizer are cut.

    Attributes:
        drops_space: a piece after the first begins behind its space, which the tokenizer's
            normalizer puts before every text.
    """

    drops_space: bool


def cuts_of(tokenizer: Tokenizer) -> Cuts | None:
    """Return the rule by which texts may be cut; None if it is not known that they may."""
    config: dict[str, Any] = json.loads(tokenizer.to_str())
    model = config["model"]
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    normalizers = _parts(config["normalizer"], "normalizers")
    drops_space = _is_sentencepiece(normalizers)
    if not drops_space and any(part["type"] != "NFC" for part in normalizers):
        return None
    splitters = _parts(config["pre_tokenizer"], "pretokenizers")
    if drops_space and splitters:
        return None
    by_expression = _splits(splitters)
    if not by_expression and not (_has_no_expression(splitters) and _has_no_crossing(model)):
        return None
    if not all(_stays_aside(token, drops_space) for token in config["added_tokens"]):
        return None
    return Cuts(drops_space)


def _parts(config: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The members of a sequence, or the only one."""
    if config is None:
        return []
    return list(config[name]) if config["type"] == "Sequence" else [config]


def _is_sentencepiece(normalizers: list[dict[str, Any]]) -> bool:
    """Whether a text gets a space before it, and spaces become ``▁``."""
    return normalizers == [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]


def _splits(splitters: list[dict[str, Any]]) -> bool:
    """Whether known expressions split at a cut. What follows them works on the parts alone."""
    found = False
    for part in splitters:
        if part["type"] == "Split":
            expression = part["pattern"].get("Regex")
            isolates = part["behavior"] == "Isolated" and not part["invert"]
            if expression not in KNOWN_EXPRESSIONS or not isolates:
                return False
            found = True
        elif part["type"] == "ByteLevel":
            found = found or part["use_regex"]
        elif part["type"] != "Digits":
            return False
    return found


def _has_no_expression(splitters: list[dict[str, Any]]) -> bool:
    """Whether the text is one word, or words that begin with ``▁``."""
    return all(part["type"] == "Metaspace" for part in splitters) and len(splitters) < 2


def _has_no_crossing(model: dict[str, Any]) -> bool:
    """Whether no token has a space behind a small letter, and all of these are tokens."""
    if model["ignore_merges"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    vocabulary = model["vocab"]
    if not all(piece in vocabulary for piece in [*_LETTERS, "▁"]):
        return False
    return not any(re.search("[a-z][▁ ]", piece) for piece in vocabulary)


def _stays_aside(token: dict[str, Any], drops_space: bool) -> bool:
    """Whether an added token has no part in what happens at a cut."""
    text = token["content"]
    at_edge = bool(text) and (text[0] in _LETTERS or text[-1] in _LETTERS)
    if at_edge and (drops_space or token["lstrip"] or token["rstrip"]):
        return False
    return not re.search("[a-z][▁ ]", text)


# The library would share a batch among threads on all cores, which the event loop and other
# processes need. It reads this at each call, and changing it while threads run is not safe.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TooManyTokensError(Exception):
    """A text has ``count`` tokens."""

    def __init__(self, count: int) -> None:
        self.count = count


def tokenize(tokenizer: Tokenizer, text: str, most: int, *, add_special_tokens: bool) -> IntArray:
    """Token ids of a text, int32. Other threads run meanwhile. Raises TooManyTokensError for more
    than ``most``."""
    (ids,) = tokenize_together(tokenizer, [text], most, add_special_tokens=add_special_tokens)
    return ids


def tokenize_together(
    tokenizer: Tokenizer, texts: list[str], most: int, *, add_special_tokens: bool
) -> Iterator[IntArray]:
    """Token ids of texts, one after the other, as of :func:`tokenize`. All of them are found by one
    call, during which other threads run."""
    # The batch calls are those that let go of Python's global lock.
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens):
        count = len(encoding)
        if count > most:
            raise TooManyTokensError(count)
        ids, found = encoding.ids, np.empty(count, np.int32)
        for start in range(0, count, _AT_ONCE):
            found[start : start + _AT_ONCE] = ids[start : start + _AT_ONCE]
        yield found


def short_together(texts: Sequence[str]) -> Iterator[list[str]]:
    """The same texts in lists of those that may be tokenized together. A text which is long enough
    to be cut is alone."""
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
    """Encodes long texts piece by piece. From any thread.

    Attributes:
        found: pieces that did not have to be tokenized, since the encoder was made.
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
    def of(cls, tokenizer: Tokenizer) -> PieceEncoder | None:
        """An encoder, or None for a tokenizer whose texts may not be cut."""
        cuts = cuts_of(tokenizer)
        affixes = None if cuts is None else _affixes(tokenizer)
        return None if cuts is None or affixes is None else cls(tokenizer, cuts, affixes)

    def encode(
        self, text: str, namespace: str, most: int, *, add_special_tokens: bool
    ) -> IntArray | None:
        """Token ids, int32; None for a text that is too short to be cut, or cannot be.

        ``namespace``: pieces are found again only in texts of the same one. Raises
        TooManyTokensError, at the latest when a piece has more than ``most`` tokens.
        """
        pieces = self._cut(text)
        if len(pieces) < 2:
            return None
        found = [self._of_piece(piece, namespace, most) for piece in pieces[:-1]]
        found.append(tokenize(self._tokenizer, pieces[-1], most, add_special_tokens=False))
        if add_special_tokens:
            found = [self._affixes[0], *found, self._affixes[1]]
        return np.concatenate(found)

    def _cut(self, text: str) -> list[str]:
        pieces, start = [], 0
        while len(text) - start > 2 * PIECE_CHARACTERS:
            cut = _find_cut(text, start + PIECE_CHARACTERS)
            if cut is None:
                break
            pieces.append(text[start:cut])
            start = cut + self._cuts.drops_space
        return [*pieces, text[start:]]

    def _of_piece(self, piece: str, namespace: str, most: int) -> IntArray:
        key = (namespace, piece)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                self.found += 1
                return self._kept[key]
        ids = tokenize(self._tokenizer, piece, most, add_special_tokens=False)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = ids
                self._kept_bytes += _size(key, ids)
            while self._kept_bytes > MAX_KEPT_BYTES:
                self._kept_bytes -= _size(*self._kept.popitem(last=False))
        return ids


def _find_cut(text: str, start: int) -> int | None:
    """The first place from ``start`` on where the text may be cut."""
    while start < len(text):
        # The expression looks at a character before the place and two behind it.
        cut = _CUT.search(text, start, start + _AT_ONCE + 2)
        if cut is not None:
            return cut.start()
        start += _AT_ONCE
    return None


def _size(key: tuple[str, str], ids: IntArray) -> int:
    """Bytes of memory of a piece that is kept."""
    return sum(map(sys.getsizeof, key)) + ids.nbytes


def _affixes(tokenizer: Tokenizer) -> tuple[IntArray, IntArray] | None:
    """The special tokens that go before and after a text; None if that is not all that is done."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True)
    mask = whole.special_tokens_mask
    start = mask.index(0) if 0 in mask else 0
    end = start + len(plain)
    if whole.ids[start:end] != plain or any(mask[start:end]) or not all(mask[end:]):
        return None
    before, after = whole.ids[:start], whole.ids[end:]
    return np.array(before, np.int32), np.array(after, np.int32)
