"""Texts that are tokenized in pieces have the tokens of the whole text, with every tokenizer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from proxy_tokenizers import CORPUS, KINDS
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from pd.embedded import EMBEDDED_MODEL
from pd.proxy.text import tokenized_pieces
from pd.proxy.text.special_tokens import SpecialTokens
from pd.proxy.text.tokenized_pieces import (
    KNOWN_EXPRESSIONS,
    PieceEncoder,
    TooManyTokensError,
    tokenize_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE = 20
MOST = 1 << 20
WORDS = ["hello", "world", "the", "quick", "brown fox", "don't", "I'LL", "über", "naïve", "漢字"]
WORDS += ["x", "Hello", "HTTPServer", "a1b2", "2024", "3.14", "e\u0301a", "\u0301", "😀👩\u200d👧"]
WORDS += ["▁", "a▁b", "<s>", "</s>", "<tool_call>", "\uff5c漢\uff5c", "...", "def f(x):"]
WORDS += ["\u00a0", "\u200b", "\x00"]
GAPS = [" "] * 12 + ["  ", "   ", "\n", "\n\n", "\r\n", "\t", "", ", ", " \n ", " '", "' "]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenized_pieces, "PIECE_CHARACTERS", PIECE)


def trained(
    splitter: pre_tokenizers.PreTokenizer | None, *, metaspace: bool = False, nfc: bool = False
) -> Tokenizer:
    """A BPE tokenizer with merges that reach as far as its pre-tokenizer lets them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if metaspace else None))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    alphabet = [*map(chr, range(97, 123)), "▁"]
    if not metaspace:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=alphabet,
        special_tokens=["<s>", "</s>", *(["<unk>"] if metaspace else [])],
        show_progress=False,
    )
    corpus = [*CORPUS, *(f"{a} {b}" for a in WORDS for b in WORDS)]
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def gpt2() -> Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


def split_by(expression: str) -> Tokenizer:
    parts = [
        pre_tokenizers.Split(Regex(expression), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return trained(pre_tokenizers.Sequence(parts), nfc=True)


def sentencepiece() -> Tokenizer:
    """Llama 2's kind, with merges."""
    tokenizer = trained(pre_tokenizers.Metaspace(prepend_scheme="never"), metaspace=True)
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def metaspace(scheme: str, *, split: bool) -> Tokenizer:
    tokenizer = trained(pre_tokenizers.Metaspace(prepend_scheme="never"), metaspace=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return tokenizer


def embedded() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))


CUT: dict[str, Callable[[], Tokenizer]] = {
    f"expression {number}": lambda expression=expression: split_by(expression)  # type: ignore[misc]
    for number, expression in enumerate(sorted(KNOWN_EXPRESSIONS))
}
CUT |= {
    "GPT-2": lambda: gpt2(),
    "GPT-2 with a space before": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "embedded": embedded,
    "embedded, split special tokens": lambda: SpecialTokens(embedded()).tokenizer,
    "sentencepiece": sentencepiece,
    "metaspace first": lambda: metaspace("first", split=False),
    "metaspace always": lambda: metaspace("always", split=True),
    "metaspace never": lambda: metaspace("never", split=False),
}


def random_text(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=rng.randint(1, 60))
    return "".join(word + rng.choice(GAPS) for word in words)


def whole(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=special).ids)


@pytest.mark.parametrize("kind", CUT)
def test_pieces_have_the_tokens_of_the_whole_text(kind: str, seed: int) -> None:
    rng, tokenizer = random.Random(seed), CUT[kind]()
    encoder = PieceEncoder.from_tokenizer(tokenizer)
    assert encoder is not None
    cut = 0
    beginning = ""
    while len(beginning) < 4 * PIECE:  # what begins with it shares pieces
        beginning += random_text(rng)
    for _ in range(120):
        text = rng.choice(["", beginning]) + random_text(rng)
        special = rng.random() < 0.5
        ids = encoder.encode(text, "", MOST, add_special_tokens=special)
        if ids is not None:
            cut += 1
            assert ids.dtype == np.int32
            assert ids.tolist() == whole(tokenizer, text, special=special), repr(text)
    assert cut > 20
    assert encoder.found


def test_pieces_are_found_in_texts_that_begin_alike_and_have_the_same_namespace() -> None:
    encoder = PieceEncoder.from_tokenizer(gpt2())
    assert encoder is not None
    text = "the quick brown fox " * 20
    encoder.encode(text, "one", MOST, add_special_tokens=True)
    before = encoder.found
    encoder.encode(text + "and more", "two", MOST, add_special_tokens=True)
    once = encoder.found - before
    encoder.encode(text + "and others", "one", MOST, add_special_tokens=True)
    assert encoder.found - before - once > once


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenized_pieces, "MAX_KEPT_BYTES", 4000)
    tokenizer = gpt2()
    encoder = PieceEncoder.from_tokenizer(tokenizer)
    assert encoder is not None
    for number in range(50):
        text = f"{number} " + "hello world " * 20
        ids = encoder.encode(text, "", MOST, add_special_tokens=False)
        assert ids is not None and ids.tolist() == whole(tokenizer, text, special=False)
        assert encoder._kept_bytes <= 4000
        sizes = [tokenized_pieces._measure_piece(*item) for item in encoder._kept.items()]
        assert encoder._kept_bytes == sum(sizes)


def crossing() -> Tokenizer:
    """A sentencepiece model with a token that has a space inside."""
    letters = [*map(chr, range(97, 123)), "▁"]
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", *letters, "o▁", "o▁w"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("o", "▁"), ("o▁", "w")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def with_token(content: str, **options: bool) -> Tokenizer:
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken(content, special=False, **options)])
    return tokenizer


UNCUT: dict[str, Callable[[], Tokenizer]] = {
    "another expression": lambda: split_by(r"\p{L}+ ?|[^\p{L}]"),
    "no expression": lambda: trained(pre_tokenizers.ByteLevel(use_regex=False)),
    "a merge across a space": crossing,
    "an added token across a space": lambda: with_token("say hello"),
    "an added token that takes spaces": lambda: with_token("hello", rstrip=True),
    "a normalizer that strips": lambda: normalized(normalizers.Strip()),
}
# The first of these has an added token with a space inside; the others are of other kinds.
UNCUT |= {kind.__name__: kind for kind in KINDS}


def normalized(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = gpt2()
    tokenizer.normalizer = normalizer
    return tokenizer


@pytest.mark.parametrize("kind", UNCUT)
def test_tokenizers_that_might_tell_the_difference_are_not_cut(kind: str) -> None:
    assert PieceEncoder.from_tokenizer(UNCUT[kind]()) is None


@pytest.mark.parametrize("at_once", [3, 50])
def test_texts_are_looked_through_and_converted_in_parts(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Otherwise other threads would wait for as long as a text without a place to cut is long."""
    monkeypatch.setattr(tokenized_pieces, "_AT_ONCE", at_once)
    tokenizer, rng = gpt2(), random.Random(4)
    encoder = PieceEncoder.from_tokenizer(tokenizer)
    assert encoder is not None
    for _ in range(50):
        runs = ["QWERTY 12" * rng.randrange(1, 40), "a b c", "the quick fox", " "]
        text = "".join(rng.choice(runs) for _ in range(8))
        expected = whole(tokenizer, text, special=True)
        found = encoder.encode(text, "", MOST, add_special_tokens=True)
        if found is None:
            found = tokenize_text(tokenizer, text, MOST, add_special_tokens=True)
        assert found.tolist() == expected
    with pytest.raises(TooManyTokensError) as refused:
        tokenize_text(tokenizer, "Q W " * 50, 99, add_special_tokens=False)
    assert refused.value.count >= 100
