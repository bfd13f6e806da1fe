"""Text grows with the tokens, never splits a character, and ends up as the full decode."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_tokenizers import KINDS, byte_fallback, byte_level

from pd.proxy.detokenizer import NoDetokenizer, TokenTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer


@cache
def table(kind: Callable[[], Tokenizer]) -> TokenTable:
    tokenizer = kind()
    return TokenTable(tokenizer, json.loads(tokenizer.to_str())["decoder"])


def pieces(kind: Callable[[], Tokenizer], ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = table(kind).detokenizer(skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_ids_concatenate_to_the_full_decode(
    kind: Callable[[], Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = table(kind).tokenizer
    beyond = tokenizer.get_vocab_size() + 3  # a model's vocabulary is often padded
    ids = data.draw(st.lists(st.integers(0, beyond), max_size=40))
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(kind, ids, skip)) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_no_piece_of_a_valid_text_holds_half_a_character(text: str) -> None:
    for kind in (byte_level, byte_fallback):
        ids = table(kind).tokenizer.encode(text).ids
        shown = pieces(kind, ids)
        assert all(("�" in piece) <= ("�" in text) for piece in shown)
        if kind is byte_level:
            assert "".join(shown) == text


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=30))
def test_random_bytes_decode_as_a_whole(data: bytes) -> None:
    tokenizer = table(byte_level).tokenizer
    by_byte = {table(byte_level).token_bytes(i): i for i in range(400)}
    ids = [by_byte[bytes([byte])] for byte in data]
    assert "".join(pieces(byte_level, ids)) == data.decode(errors="replace")
    assert "".join(pieces(byte_level, ids)) == tokenizer.decode(ids)
    ids = [3 + byte for byte in data]
    assert "".join(pieces(byte_fallback, ids)) == table(byte_fallback).tokenizer.decode(ids)


def test_an_emoji_comes_out_with_its_last_byte_and_not_before() -> None:
    by_byte = {table(byte_level).token_bytes(i): i for i in range(400)}
    ids = [by_byte[bytes([byte])] for byte in "a😀b".encode()]
    assert pieces(byte_level, ids) == ["a", "", "", "", "😀", "b", ""]


def test_a_character_that_never_completes_is_shown_at_the_end() -> None:
    by_byte = {table(byte_level).token_bytes(i): i for i in range(400)}
    assert pieces(byte_level, [by_byte[b"\xf0"], by_byte[b"\x9f"]]) == ["", "", "�"]


def test_the_cost_per_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    real = table(byte_fallback).tokenizer

    class Counting:
        def decode(self, ids: list[int], **options: bool) -> str:
            decoded.append(len(ids))
            return str(real.decode(ids, **options))

        def id_to_token(self, token: int) -> str | None:
            return str(real.id_to_token(token))

    monkeypatch.setattr(table(byte_fallback), "tokenizer", Counting())
    ids = [261, 262, 263] * 200 + [3 + 200] * 500 + [261]
    pieces(byte_fallback, ids)
    assert sum(decoded) < 8 * len(ids)


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert NoDetokenizer().push(5) + NoDetokenizer().flush() == ""


def test_token_bytes_of_both_families() -> None:
    level = table(byte_level)
    assert level.token_bytes(level.tokenizer.token_to_id("Ġthe")) == b" the"
    assert (
        level.token_bytes(level.tokenizer.token_to_id("\uff5c漢\uff5c"))
        == "\uff5c漢\uff5c".encode()
    )
    assert level.token_bytes(10**6) == b""
    fallback = table(byte_fallback)
    assert fallback.token_bytes(3 + 0xF0) == b"\xf0"
    assert fallback.token_bytes(fallback.tokenizer.token_to_id("▁the")) == b" the"
