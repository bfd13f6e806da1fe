"""Short texts of one request are tokenized together, with the tokens and the refusals of each."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_tokenizers import CORPUS, KINDS

from pd.core.errors import ContextLengthError, InvalidRequestError
from pd.core.sampling_params import SamplingDefaults
from pd.embedded import EMBEDDED_MODEL
from pd.proxy.api.prompts import ModelView, encode_prompts
from pd.proxy.routing.limits import Capacity, Limits
from pd.proxy.text import tokenized_pieces
from pd.proxy.text.tokenized_pieces import (
    MAX_TOGETHER,
    PIECE_CHARACTERS,
    group_short,
    tokenize_text,
    tokenize_texts,
)
from pd.proxy.text.tokenizer import TextModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

MOST = 1 << 20


@pytest.fixture(scope="module")
def text_model() -> TextModel:
    return TextModel(EMBEDDED_MODEL)


def view(text: TextModel, context_length: int = 4096) -> ModelView:
    routes = frozenset([Capacity(context_length, context_length, context_length)])
    return ModelView(Limits("model", routes, routes, 2048, None, SamplingDefaults()), text, 1, "m")


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of texts of each call to the library."""
    found: list[int] = []

    def counted(tokenizer: Tokenizer, texts: list[str], *args: Any, **options: Any) -> Any:
        found.append(len(texts))
        return tokenize_texts(tokenizer, texts, *args, **options)

    monkeypatch.setattr(tokenized_pieces, "tokenize_texts", counted)
    monkeypatch.setattr("pd.proxy.text.tokenizer.tokenize_texts", counted)
    return found


@given(st.lists(st.integers(0, 3 * PIECE_CHARACTERS) | st.integers(0, 9), max_size=200))
def test_a_text_that_may_be_cut_is_alone(lengths: list[int]) -> None:
    texts = ["x" * length for length in lengths]
    found = list(group_short(texts))
    assert [text for together in found for text in together] == texts
    for together in found:
        assert 1 <= len(together) <= MAX_TOGETHER
        assert len(together) == 1 or sum(map(len, together)) <= 2 * PIECE_CHARACTERS


@pytest.mark.parametrize("kind", KINDS)
def test_texts_together_have_the_tokens_of_each(kind: Callable[[], Tokenizer], seed: int) -> None:
    rng, tokenizer = random.Random(seed), kind()
    for _ in range(20):
        texts = ["".join(rng.sample(text, rng.randrange(len(text)))) for text in CORPUS]
        special = rng.random() < 0.5
        found = tokenize_texts(tokenizer, texts, MOST, add_special_tokens=special)
        for text, ids in zip(texts, found, strict=True):
            alone = tokenize_text(tokenizer, text, MOST, add_special_tokens=special)
            assert ids.dtype == np.int32 and ids.tolist() == alone.tolist()


def test_long_texts_among_short_ones_are_cut_and_found_again(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "the quick brown fox " * (PIECE_CHARACTERS // 5)
    texts = ["one", "two", long, "three", "four", long + "jumps", "five"]
    calls = count_calls(monkeypatch)
    found = list(text_model.encode_texts(texts, add_special_tokens=False, namespace="mine"))
    assert [ids.tolist() for ids in found] == [
        text_model.encode(text, add_special_tokens=False, namespace="other").tolist()
        for text in texts
    ]
    assert calls[0] == 2
    assert text_model._pieces is not None and text_model._pieces.found >= 3


def test_each_prompt_is_refused_at_its_turn(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch)
    model = view(text_model, context_length=2)
    too_long = "x" * (2 * text_model.longest_token + 1)
    found = encode_prompts(model, ["one", "two", too_long, ""], "prompt", namespace="")
    assert len(next(found)) and len(next(found))
    with pytest.raises(ContextLengthError, match="too long"):
        next(found)
    found = encode_prompts(model, ["one", "", too_long], "prompt", namespace="")
    assert len(next(found))
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        next(found)
    assert calls == [4, 3]


def test_a_text_of_too_many_tokens_is_refused_at_its_turn(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.proxy.text.tokenizer.MAX_TEXT_TOKENS", 10)
    found = text_model.encode_texts(["one", "1 " * 20, "two"], add_special_tokens=False)
    assert len(next(found))
    with pytest.raises(InvalidRequestError, match="at most 10 are allowed"):
        next(found)


def test_little_is_tokenized_before_a_refusal(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch)
    prompts: list[str | list[int]] = ["one", "", *["word " * 100] * 1000]
    found = encode_prompts(view(text_model), prompts, "prompt", namespace="")
    assert len(next(found))
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        next(found)
    (together,) = calls
    assert together * 100 < 2 * PIECE_CHARACTERS


def test_texts_together_take_no_other_threads() -> None:
    """The library would take all cores, which the event loop and other processes need."""
    program = (
        "import os;"
        "from tokenizers import Tokenizer;"
        "from pd.proxy.text.tokenized_pieces import tokenize_texts;"
        f"tokenizer = Tokenizer.from_file({str(EMBEDDED_MODEL / 'tokenizer.json')!r});"
        "before = len(os.listdir('/proc/self/task'));"
        "found = tokenize_texts(tokenizer, ['hello'] * 64, 9, add_special_tokens=True);"
        "assert len(list(found)) == 64;"
        "assert len(os.listdir('/proc/self/task')) == before"
    )
    env = {name: value for name, value in os.environ.items() if "TOKENIZERS" not in name}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
