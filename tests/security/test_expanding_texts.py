"""Texts that a tokenizer's normalizer makes many times as long."""

from __future__ import annotations

import json
import random
import time
import unicodedata
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import edge_helpers  # noqa: F401  # makes the proxy's helpers known
import pytest
from proxy_cluster import Cluster
from proxy_tokenizers import byte_level
from tokenizers import normalizers

from pd.proxy.text import normalized_lengths
from pd.proxy.text.normalized_lengths import MAX_CHARACTERS, NormalizedLengths

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# 18 characters by compatibility forms.
LONGEST = "\ufdfa"
KINDS: list[Any] = [
    normalizers.NFKC(),
    normalizers.NFKD(),
    normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.NFKC()]),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, str(tmp_path))


def tokenizer(normalizer: Any) -> Any:
    made = byte_level()
    made.normalizer = normalizer
    return made


@pytest.mark.one_process("changes a constant of a running proxy")
@pytest.mark.parametrize("normalizer", KINDS, ids=str)
def test_a_text_that_normalizing_makes_too_long_is_not_tokenized(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, normalizer: Any
) -> None:
    """With the real limit a body of 8 MiB would become some 50 million characters."""
    monkeypatch.setattr(normalized_lengths, "MAX_CHARACTERS", 10_000)
    tokenizer(normalizer).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    )
    cluster.pair(context_length=100_000, pages={"total": 50_000})
    client = cluster.client(tokenizer=str(tmp_path))
    text = "a" + LONGEST * 1000
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"prompt": ["a", text]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/generate", {"text": text}),
        ("/generate", {"text": "a", "choices": [text, "b"]}),
    ]
    for path, body in asked:
        response = client.post(path, json=body)
        assert response.status_code == 400, (path, response.text[:200])
        message = response.json()["error"]["message"]
        assert "characters, of which the model's tokenizer makes 1800" in message
    for fine in (LONGEST * 500, "a" * 20_000, "\u6f22" * 12_000):
        assert client.post("/tokenize", json={"prompt": fine}).status_code == 200


@pytest.mark.parametrize("normalizer", KINDS, ids=str)
def test_lengths_are_those_of_the_normalizer(
    monkeypatch: pytest.MonkeyPatch, normalizer: Any
) -> None:
    monkeypatch.setattr(normalized_lengths, "MAX_CHARACTERS", 0)
    seed = time.time_ns()
    print("seed", seed)
    chosen = random.Random(seed)
    codes = [code for code in range(0x20, 0x2FA1E) if not 0xD800 <= code < 0xE000]
    longer = [c for c in codes if len(unicodedata.normalize("NFKC", chr(c))) > 4]
    lengths = NormalizedLengths.from_tokenizer(tokenizer(normalizer))
    assert lengths is not None
    for _ in range(50):
        text = "".join(map(chr, chosen.choices(longer, k=50) + chosen.choices(codes, k=10)))
        counted = lengths.find_excess(text)
        real = len(normalizer.normalize_str(text))
        # Marks may join letters, and syllables of Hangul, three letters each, count as one.
        assert counted is not None
        assert real - 25 <= counted <= real + 20


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFD()], ids=str)
def test_nothing_is_counted_where_texts_become_hardly_longer(normalizer: Any) -> None:
    assert NormalizedLengths.from_tokenizer(tokenizer(normalizer)) is None


def test_the_largest_body_is_counted_quickly() -> None:
    lengths = NormalizedLengths.from_tokenizer(tokenizer(normalizers.NFKC()))
    assert lengths is not None
    count = MAX_CHARACTERS // 3
    began = time.process_time()
    assert lengths.find_excess(LONGEST * count) == 18 * count
    # Tokenizing it takes a hundred times as long.
    assert time.process_time() - began < 5
