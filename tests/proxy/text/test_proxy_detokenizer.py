"""Text grows with the tokens, never splits a character, and ends up as the full decode."""

from __future__ import annotations

import contextlib
import json
import re
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_tokenizers import BYTE_FALLBACKS, KINDS, byte_fallback, byte_level

from pd.proxy.text.detokenizer import NoDetokenizer, TokenTable
from pd.proxy.text.stop_strings import StopMatcher, StopSearch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@cache
def table(kind: Callable[[], Tokenizer]) -> TokenTable:
    tokenizer = kind()
    return TokenTable(tokenizer, json.loads(tokenizer.to_str())["decoder"])


def pieces(kind: Callable[[], Tokenizer], ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = table(kind).make_detokenizer(skip)
    return [*(detokenizer.add_token(token) for token in ids), detokenizer.flush()]


def characters(run: bytes) -> list[str]:
    """Byte tokens of the characters in a run, and U+FFFD for each byte outside of them."""
    found = []
    while run:
        for size in range(1, 5):
            with contextlib.suppress(UnicodeDecodeError):
                run[:size].decode()
                found += [f"<0x{byte:02X}>" for byte in run[:size]]
                run = run[size:]
                break
        else:
            found.append("\ufffd")
            run = run[1:]
    return found


def whole(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """The tokenizer's own decode, given U+FFFD for bytes that belong to no character."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    tokens = [tokenizer.id_to_token(i) for i in ids if not (skip and i in special)]
    shown: list[str] = []
    run = b""
    for token in [*(token for token in tokens if token is not None), None]:
        if token is not None and BYTE_TOKEN.fullmatch(token):
            run += bytes.fromhex(token[3:5])
            continue
        shown += [*characters(run), *([] if token is None else [token])]
        run = b""
    return str(tokenizer.decoder.decode(shown))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_ids_concatenate_to_the_full_decode(
    kind: Callable[[], Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = table(kind).tokenizer
    beyond = tokenizer.get_vocab_size() + 3  # a model's vocabulary is often padded
    ids = data.draw(st.lists(st.integers(0, beyond), max_size=40))
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    if table(kind).byte_fallback:
        assert "\ufffd" in expected or expected == whole(tokenizer, ids, skip)
        expected = whole(tokenizer, ids, skip)
    assert "".join(pieces(kind, ids, skip)) == expected


@pytest.mark.parametrize("kind", BYTE_FALLBACKS, ids=lambda kind: kind.__name__)
@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(st.text("\n é漢😀\x00▁", max_size=4) | st.integers(259, 280), max_size=12),
    skip=st.booleans(),
)
def test_byte_tokens_of_whole_characters_are_the_full_decode_and_stream_with_their_last_byte(
    kind: Callable[[], Tokenizer], parts: list[str | int], skip: bool
) -> None:
    tokenizer = table(kind).tokenizer
    detokenizer = table(kind).make_detokenizer(skip)
    ids: list[int] = []
    shown = ""
    for part in parts:
        new = [part] if isinstance(part, int) else [3 + byte for byte in part.encode()]
        for token in new:
            shown += detokenizer.add_token(token)
        ids += new
        # Nothing waits for the run to end.
        assert shown == tokenizer.decode(ids, skip_special_tokens=skip)
    assert detokenizer.flush() == ""


def test_a_newline_and_an_emoji_of_byte_tokens_are_text_at_once() -> None:
    the, world = (table(byte_fallback).tokenizer.token_to_id(piece) for piece in ("▁the", "▁w"))
    emoji = [3 + byte for byte in "😀".encode()]
    assert pieces(byte_fallback, [the, 3 + 0x0A, *emoji, 3 + 0x0A, world]) == (
        ["the", "\n", "", "", "", "😀", "\n", " w", ""]
    )


def test_only_bytes_that_belong_to_no_character_become_replacement_characters() -> None:
    run = [3 + byte for byte in b"a\xe6\xbcb\xff\n"]
    assert pieces(byte_fallback, run) == ["a", "", "", "\ufffd\ufffdb", "\ufffd", "\n", ""]
    # The tokenizer by itself decodes the run as a whole.
    assert table(byte_fallback).tokenizer.decode(run) == "\ufffd" * len(run)
    cut = [3 + byte for byte in b"\xe6\xbc"]
    assert pieces(byte_fallback, cut) == ["", "", "\ufffd\ufffd"]


def test_a_stop_string_of_byte_tokens_matches_on_the_token_that_completes_it() -> None:
    detokenizer = table(byte_fallback).make_detokenizer(True)
    stops = StopMatcher(StopSearch(["\n\n"]))
    the = table(byte_fallback).tokenizer.token_to_id("▁the")
    assert [stops.add_text(detokenizer.add_token(i)) for i in (the, 13, 13)] == ["the", "", ""]
    assert stops.matched == "\n\n"


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_no_piece_of_a_valid_text_holds_half_a_character(text: str) -> None:
    for kind in (byte_level, byte_fallback):
        ids = table(kind).tokenizer.encode(text).ids
        shown = pieces(kind, ids)
        assert all(("�" in piece) <= ("�" in text) for piece in shown)
        if kind is byte_level:
            assert "".join(shown) == text


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=30))
def test_random_bytes_decode_as_a_whole(data: bytes) -> None:
    tokenizer = table(byte_level).tokenizer
    by_byte = {table(byte_level).get_bytes(i): i for i in range(400)}
    ids = [by_byte[bytes([byte])] for byte in data]
    assert "".join(pieces(byte_level, ids)) == data.decode(errors="replace")
    assert "".join(pieces(byte_level, ids)) == tokenizer.decode(ids)
    ids = [3 + byte for byte in data]
    fallback = table(byte_fallback).tokenizer
    assert "".join(pieces(byte_fallback, ids)) == whole(fallback, ids, True)
    with contextlib.suppress(UnicodeDecodeError):
        assert data.decode().removeprefix(" ") == fallback.decode(ids) == whole(fallback, ids, True)


def test_an_emoji_comes_out_with_its_last_byte_and_not_before() -> None:
    by_byte = {table(byte_level).get_bytes(i): i for i in range(400)}
    ids = [by_byte[bytes([byte])] for byte in "a😀b".encode()]
    assert pieces(byte_level, ids) == ["a", "", "", "", "😀", "b", ""]


def test_a_character_that_never_completes_is_shown_at_the_end() -> None:
    by_byte = {table(byte_level).get_bytes(i): i for i in range(400)}
    assert pieces(byte_level, [by_byte[b"\xf0"], by_byte[b"\x9f"]]) == ["", "", "�"]


def test_the_cost_per_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    real = table(byte_fallback).join_pieces

    def counting(tokens: list[str]) -> str:
        decoded.append(len(tokens))
        return real(tokens)

    monkeypatch.setattr(table(byte_fallback), "join_pieces", counting)
    ids = [261, 262, 263] * 200 + [3 + 200] * 500 + [261]
    pieces(byte_fallback, ids)
    assert sum(decoded) < 8 * len(ids)


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert NoDetokenizer().add_token(5) + NoDetokenizer().flush() == ""


def test_token_bytes_of_both_families() -> None:
    level = table(byte_level)
    assert level.get_bytes(level.tokenizer.token_to_id("Ġthe")) == b" the"
    assert (
        level.get_bytes(level.tokenizer.token_to_id("\uff5c漢\uff5c")) == "\uff5c漢\uff5c".encode()
    )
    assert level.get_bytes(10**6) == b""
    fallback = table(byte_fallback)
    assert fallback.get_bytes(3 + 0xF0) == b"\xf0"
    assert fallback.get_bytes(fallback.tokenizer.token_to_id("▁the")) == b" the"
