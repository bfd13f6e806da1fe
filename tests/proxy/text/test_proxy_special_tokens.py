"""What a client wrote stays text; what the template wrote stays control tokens."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_tokenizers import byte_fallback, byte_level, metaspace, word_piece

from pd.proxy.text.special_tokens import SpecialTokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy_cluster import Cluster
    from tokenizers import Tokenizer

BOS, EOS = 0, 1  # of the byte-level tokenizer
START, END = "<|im_start|>", "<|im_end|>"


def with_chat_tokens(kind: Callable[[], Tokenizer]) -> Tokenizer:
    tokenizer = kind()
    tokenizer.add_special_tokens([START, END])
    return tokenizer


def level() -> Tokenizer:
    return with_chat_tokens(byte_level)


def fallback() -> Tokenizer:
    return with_chat_tokens(byte_fallback)


def unigram() -> Tokenizer:
    return with_chat_tokens(metaspace)


def pieces() -> Tokenizer:
    return with_chat_tokens(word_piece)


KINDS = [level, fallback, unigram, pieces]


@cache
def tokenizer_of(kind: Callable[[], Tokenizer]) -> Tokenizer:
    return kind()


@cache
def special_of(kind: Callable[[], Tokenizer]) -> SpecialTokens:
    return SpecialTokens(tokenizer_of(kind))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def rendered(contents: list[str]) -> str:
    """As a ChatML template does."""
    return "".join(f"{START}user\n{content}{END}\n" for content in contents)


def encode_chat(kind: Callable[[], Tokenizer], contents: list[str]) -> list[int]:
    special, hidden = special_of(kind), []
    prompt = rendered(special.hide_value(contents, hidden))
    return encode(special.tokenizer, special.reveal_text(prompt, hidden))


ordinary = st.text("helo wrd,é漢😀\n<|>/s[]", max_size=12)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=100, deadline=None)
@given(contents=st.lists(ordinary, min_size=1, max_size=3))
def test_without_special_tokens_of_clients_nothing_changes(
    kind: Callable[[], Tokenizer], contents: list[str]
) -> None:
    special = {t.content for t in tokenizer_of(kind).get_added_tokens_decoder().values()}
    if any(token in content for token in special for content in contents):
        return
    assert encode_chat(kind, contents) == encode(tokenizer_of(kind), rendered(contents))
    assert encode(special_of(kind).tokenizer, contents[0]) == (
        encode(tokenizer_of(kind), contents[0])
    )


hostile = st.lists(
    st.sampled_from([START, END, "<s>", "</s>", "<|im_", "end|>", "<|im_start|", "|>", "<", "hi"]),
    max_size=5,
).map("".join)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=150, deadline=None)
@given(contents=st.lists(hostile, min_size=1, max_size=3))
def test_control_tokens_are_the_template_s_alone(
    kind: Callable[[], Tokenizer], contents: list[str]
) -> None:
    tokenizer = tokenizer_of(kind)
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    control = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    ids = encode_chat(kind, contents)
    assert [i for i in ids if i in control] == [start, end] * len(contents)
    for content in contents:
        assert control.isdisjoint(encode(special_of(kind).tokenizer, content))
    if kind is level:  # which loses nothing
        assert tokenizer.decode(ids, skip_special_tokens=False) == rendered(contents)


def test_text_around_a_special_token_is_encoded_in_one_piece() -> None:
    """As transformers' split_special_tokens does, not cut at the special token."""
    special = special_of(level)
    whole = level()
    whole.encode_special_tokens = True
    text = f"the {END}quick </s>fox"
    assert encode(special.tokenizer, text) == encode(whole, text)


def test_whatever_strings_a_message_has_are_hidden_but_the_role() -> None:
    special, hidden = special_of(level), []
    message: dict[str, Any] = {
        "role": "assistant",
        "content": END,
        "name": f"a{START}b",
        "tool_calls": [{"function": {"name": "f", "arguments": {f"{END}k": ["</s>", 1, None]}}}],
    }
    (shown,) = special.hide_messages([message], hidden)
    assert hidden == [END, START, f"{END}", "</s>"]
    assert "<" not in str(shown)
    assert shown["role"] == "assistant"
    assert special.reveal_text(str(shown), hidden) == str(message)


def test_a_client_cannot_guess_the_names() -> None:
    first, second = SpecialTokens(level()), SpecialTokens(level())
    names = set(first.tokenizer.get_vocab()) - set(level().get_vocab())
    assert len(names) == 4
    assert names.isdisjoint(second.tokenizer.get_vocab())


@pytest.mark.parametrize("split", [False, True], ids=["as they are", "split"])
@pytest.mark.parametrize(
    ("path", "body", "control"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a</s>b"}]}, [BOS]),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "assistant", "content": [{"type": "text", "text": "</s>"}]}],
                "chat_template_kwargs": {"tone": "</s>"},
                "continue_final_message": True,
            },
            [BOS],
        ),
        ("/v1/completions", {"prompt": "a</s>b"}, []),
        ("/v1/completions", {"prompt": [5, EOS, 6]}, [EOS]),
        ("/generate", {"text": "</s>"}, []),
    ],
    ids=["chat", "parts, variables", "completions", "token ids", "generate"],
)
def test_special_tokens_of_clients_are_split_only_if_the_proxy_is_told_to(
    cluster: Cluster, split: bool, path: str, body: dict[str, Any], control: list[int]
) -> None:
    prefill = cluster.node("unified")
    response = cluster.client(split_special_tokens=split).post(path, json=body)
    assert response.status_code == 200, response.text
    ids = np.frombuffer(prefill.wait_generate().token_ids, "<i4").tolist()
    found = [i for i in ids if i in (BOS, EOS)]
    assert found == control if split else EOS in found
    shown = byte_level().decode(ids, skip_special_tokens=False)
    text = str(body.get("prompt") or body.get("text") or "</s>")
    assert text in shown or body.get("prompt") == [5, EOS, 6]


@pytest.mark.parametrize("split", [False, True])
def test_tokenize_shows_what_requests_get(cluster: Cluster, split: bool) -> None:
    cluster.node("unified")
    client = cluster.client(split_special_tokens=split)
    message = {"messages": [{"role": "user", "content": "</s>"}]}
    for body, template in (({"prompt": "</s>"}, []), (message, [BOS])):
        ids = client.post("/tokenize", json=body).json()["tokens"]
        assert [i for i in ids if i in (BOS, EOS)] == template + [EOS] * (not split)


@pytest.mark.parametrize("depth", [10, 900])
def test_values_nested_deeply_are_no_fault(cluster: Cluster, depth: int) -> None:
    """Whether the template can take the deep one depends on the version of Python."""
    cluster.node("unified")
    nested: Any = "</s>"
    for _ in range(depth):
        nested = [nested]
    client = cluster.client(split_special_tokens=True)
    message = {"role": "user", "content": "a", "name": nested}
    response = client.post("/v1/chat/completions", json={"messages": [message]})
    assert response.status_code in ((200,) if depth == 10 else (200, 400)), response.text
