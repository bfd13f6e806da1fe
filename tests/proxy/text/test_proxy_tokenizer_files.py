"""Tokenizers are read from ``tokenizer.json``, or from a sentencepiece model by transformers."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import sentencepiece
from fake_node import EOS
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_tokenizers import CORPUS, byte_level
from tokenizers import Tokenizer

from pd.core.errors import UsageError
from pd.proxy.text.chat_template import load_templates, read_config
from pd.proxy.text.detokenizer import TokenTable
from pd.proxy.text.tokenizer import TextModels
from pd.proxy.text.tokenizer_files import load_tokenizer

if TYPE_CHECKING:
    from proxy_cluster import Cluster

BOS_ID = 1


@pytest.fixture(scope="module")
def only_sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as Llama 2 came, without ``tokenizer.json``."""
    directory = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (directory / "config.json").write_text('{"model_type": "llama"}')
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def converted(only_sentencepiece: Path) -> Tokenizer:
    """Read by a process that, as the proxy, must not come to hold torch."""
    program = (
        "import sys; from pathlib import Path;"
        "from pd.proxy.text.tokenizer_files import load_tokenizer;"
        "print(load_tokenizer(Path(sys.argv[1])).to_str());"
        "assert not {'torch', 'transformers', 'sentencepiece'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(only_sentencepiece)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Tokenizer.from_str(done.stdout)


@settings(max_examples=30, deadline=None)
@given(text=st.text("helo wrd\n,é漢😀", max_size=30))
def test_a_sentencepiece_model_alone_gives_its_own_tokens_and_streams_them(
    only_sentencepiece: Path, converted: Tokenizer, text: str
) -> None:
    text = text.lstrip(" ")  # of which transformers keeps one less
    model = sentencepiece.SentencePieceProcessor(str(only_sentencepiece / "tokenizer.model"))
    ids = converted.encode(text).ids
    assert ids == [BOS_ID, *model.encode(text)]
    assert converted.decode(ids) == text
    table = TokenTable(converted, json.loads(converted.to_str())["decoder"])
    detokenizer = table.make_detokenizer(True)
    assert "".join(detokenizer.add_token(token) for token in ids) + detokenizer.flush() == text


@pytest.mark.full
def test_the_proxy_serves_text_with_it(cluster: Cluster, only_sentencepiece: Path) -> None:
    cluster.pair(lambda prompt, index: [*prompt[1:], EOS], model_path=str(only_sentencepiece))
    client = cluster.client(text=False, wait_ready=60.0)
    body = {"prompt": "hello\nworld", "max_tokens": 100, "add_special_tokens": True}
    response = client.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["text"] == "hello\nworld", response.text


def test_without_the_extra_the_remedy_is_named(
    only_sentencepiece: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sentencepiece.py").write_text("raise ImportError(name='sentencepiece')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(UsageError) as raised:
        load_tokenizer(only_sentencepiece)
    assert "it needs sentencepiece; pip install 'pd-serve[hf]'" in raised.value.message
    assert "\n" not in raised.value.message


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no directory .* on this host"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot read the tokenizer in"):
        load_tokenizer(tmp_path)


@pytest.mark.full
def test_a_broken_sentencepiece_model_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0e\x00 nothing of the kind")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="transformers cannot read it: ") as raised:
        load_tokenizer(tmp_path)
    assert "\n" not in raised.value.message


@pytest.mark.one_process("reads the log of this process")
def test_the_proxy_warns_at_its_start_that_it_has_no_tokenizer(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.pair(model_path=str(tmp_path / "elsewhere"))
    with caplog.at_level(logging.WARNING, "pd.proxy.text.tokenizer"):
        proxy = cluster.proxy(text=False)
    (warning,) = (r.getMessage() for r in caplog.records if r.name == "pd.proxy.text.tokenizer")
    assert f"there is no directory {tmp_path / 'elsewhere'} on this host" in warning
    assert "without --tokenizer DIR this proxy serves token ids only" in warning
    refused = httpx.post(f"{proxy.url}/generate", json={"text": "hello"})
    assert refused.status_code == 400
    given = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
    assert httpx.post(f"{proxy.url}/generate", json=given).status_code == 200
    assert len(caplog.records) == 1, "one line, however many requests"


def test_the_tokenizer_is_loaded_before_the_first_request(cluster: Cluster, tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    cluster.pair(model_path=str(tmp_path))
    proxy = cluster.proxy(text=False)
    (tmp_path / "tokenizer.json").unlink()
    answer = httpx.post(f"{proxy.url}/tokenize", json={"prompt": "hello"})
    assert answer.json()["count"] > 0, answer.text


# ---- files that cannot be read, and loads that fail


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not UTF-8"),
        ("additional_chat_templates/rag.jinja", b"\xff", "rag.jinja is not UTF-8"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is not UTF-8"),
        ("tokenizer_config.json", b"{", "cannot read .*tokenizer_config.json"),
        ("tokenizer_config.json", b"[" * 100_000, "cannot read .*tokenizer_config.json"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config.json must be an object, not \[\]"),
    ],
)
def test_templates_that_cannot_be_read_name_their_file(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=says):
        load_templates(tmp_path, read_config(tmp_path))


def test_a_template_without_the_right_to_read_it_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user of this test may be root, who may read all."""

    def refuse(path: Path, **_: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "chat_template.jinja").write_text("")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UsageError, match=r"cannot read .*chat_template\.jinja: Permission denied$"):
        load_templates(tmp_path, read_config(tmp_path))


def test_a_nodes_template_that_is_no_text_costs_only_chat(cluster: Cluster, tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    cluster.pair(model_path=str(tmp_path))
    client = cluster.client(text=False)
    assert client.post("/generate", json={"text": "hello"}).json()["text"]
    body = {"messages": [{"role": "user", "content": "hello"}]}
    assert client.post("/v1/chat/completions", json=body).status_code == 400


def test_a_directory_that_could_not_be_read_is_tried_again(tmp_path: Path) -> None:
    async def ask_twice() -> Any:
        models = TextModels(str(tmp_path))
        with pytest.raises(UsageError, match="has no tokenizer"):
            await models.load(None)
        byte_level().save(str(tmp_path / "tokenizer.json"))
        return await models.load(None)

    assert len(asyncio.run(ask_twice()).encode("hello", add_special_tokens=False))


def test_a_nodes_directory_without_a_tokenizer_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be mounted late."""
    monkeypatch.setattr("pd.proxy.text.tokenizer.RETRY_SECONDS", 0.05)

    async def ask() -> Any:
        models = TextModels(None)
        assert await models.load(str(tmp_path)) is None
        byte_level().save(str(tmp_path / "tokenizer.json"))
        assert await models.load(str(tmp_path)) is None, "not at once"
        await asyncio.sleep(0.2)
        return await models.load(str(tmp_path))

    assert asyncio.run(ask()) is not None


@pytest.mark.one_process("looks at the state of one process")
def test_a_load_that_fails_in_another_way_holds_up_neither_the_start_nor_later_requests(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [RuntimeError("as scripted")]

    def load(directory: Path) -> Tokenizer:
        if failures:
            raise failures.pop()
        return load_tokenizer(directory)

    monkeypatch.setattr("pd.proxy.text.tokenizer.load_tokenizer", load)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    cluster.pair(model_path=str(tmp_path))
    proxy = cluster.proxy(text=False)
    served: Any = proxy.proxy
    assert (served._became_ready.is_set(), failures) == (True, [])
    answer = httpx.post(f"{proxy.url}/tokenize", json={"prompt": "hello"})
    assert answer.json()["count"] > 0, answer.text
