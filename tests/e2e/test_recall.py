"""The embedded model notices a wrong page: it recalls needles from long prompts, or it does not."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from backends import IN_PROCESS, NIXL, TCP, Backend
from cluster import Cluster
from embedded.heldout import Example, is_right, recall_examples
from embedded.text import Message, render
from tokenizers import Tokenizer

from pd.embedded import EMBEDDED_MODEL
from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from pathlib import Path


LENGTH = 1000
# Of the model's own bar (98 % up to 2,000 tokens); damaged pages cost far more.
SHARE = 0.95


def ask(url: str, example: Example, **extra: Any) -> httpx.Response:
    """The whole conversation; its last answer is judged."""
    messages = [message._asdict() for message in messages_of(example)]
    body = {"messages": messages, "temperature": 0, "max_tokens": 32, **extra}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)


def messages_of(example: Example) -> list[Message]:
    return [*example.before, Message("user", example.turns[-1].question)]


def answer_in(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def serve(cluster: Cluster) -> ProxyThread:
    roles = ("prefill", "decode", "unified")
    urls = {role: [n.url for n in getattr(cluster, role)] for role in roles}
    # Failover would answer in spite of a damaged page that is noticed.
    return ProxyThread(ProxyConfig(**urls, port=0, failover="off"))


def settings(**more: Any) -> dict[str, Any]:
    return {"kv_cache_tokens": 32768, "chunked_prefill_size": 512, **more}


def answers_of(examples: list[Example], **more: Any) -> list[str]:
    """All asked at the same time, of one deployment behind a proxy."""
    with Cluster(EMBEDDED_MODEL, **settings(**more)) as cluster:
        with serve(cluster) as proxy, ThreadPoolExecutor(len(examples)) as pool:
            texts = list(pool.map(lambda e: answer_in(ask(proxy.url, e)), examples))
        cluster.wait_idle()
    return texts


@functools.cache
def unified_answers(prompts: int) -> list[str]:
    return answers_of(recall_examples(LENGTH, prompts), prefill=0, decode=0, unified=1)


@pytest.mark.parametrize(
    ("prompts", "backend"),
    [
        pytest.param(3, TCP, id="3-tcp"),
        pytest.param(3, NIXL, id="3-nixl", marks=pytest.mark.full),
        pytest.param(60, TCP, id="60-tcp", marks=pytest.mark.full),
        *(
            pytest.param(25, backend, id=f"25-{backend}", marks=pytest.mark.full)
            for backend in IN_PROCESS
            if backend is not TCP
        ),
    ],
    indirect=["backend"],
)
@pytest.mark.timeout(600)
def test_recall_survives_the_split(backend: Backend, prompts: int) -> None:
    examples = recall_examples(LENGTH, prompts)
    texts = answers_of(examples, transfer_backend=backend.flag)
    asked = [example.turns[-1] for example in examples]
    differing = [
        (turn, split, unified)
        for turn, split, unified in zip(asked, texts, unified_answers(prompts), strict=True)
        if split != unified
    ]
    assert not differing, "the split answers otherwise than a unified node"
    right = sum(is_right(e, text) for e, text in zip(examples, texts, strict=True))
    assert right >= SHARE * prompts, list(zip(asked, texts, strict=True))


# ---- one flipped byte

# Layer 4 carries a recalled digit from its place among the lines to the answer, in V of its head 0.
# Values there are small, and the byte of sign and exponent makes one of them large: the answer gets
# another digit. In which dimensions it has was found by trying all; with new weights, try again.
DIGIT, LAYER, DIMENSION = 1, 4, 18
HIGHEST_BYTE = 4 * DIMENSION + 3
(NEEDLE,) = recall_examples(400, 1)


def token_of_digit() -> int:
    """Place in the prompt of the token of one digit of the needle's value."""
    prompt = render(messages_of(NEEDLE))
    value = NEEDLE.turns[-1].answer.removesuffix(".").split()[-1]
    assert prompt.count(value) == 1
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    token = tokenizer.encode(prompt, add_special_tokens=False).char_to_token(
        prompt.index(value) + DIGIT
    )
    assert token is not None
    return int(token)


@pytest.fixture
def flip(tmp_path: Path) -> Path:
    """A script whose rule damages the needle in the first room; the byte is one that matters."""
    script = tmp_path / "script.yaml"
    place = f"token: {token_of_digit()}, layer: {LAYER}, part: v, byte: {HIGHEST_BYTE}"
    script.write_text(f"rules: [{{do: corrupt, {place}, rooms: 1}}]\n")
    return script


def test_a_byte_flipped_in_the_needles_page_changes_the_answer(flip: Path) -> None:
    damage = settings(transfer_backend="fake", fake_script=flip)
    with Cluster(EMBEDDED_MODEL, **damage) as cluster, serve(cluster) as proxy:
        damaged = answer_in(ask(proxy.url, NEEDLE))
        # Another salt, so that nothing damaged is used again.
        intact = answer_in(ask(proxy.url, NEEDLE, cache_salt="another"))
        cluster.wait_idle()
    assert is_right(NEEDLE, intact)
    assert not is_right(NEEDLE, damaged)
    # It reads as well as the right one: only a model that recalls can tell.
    assert sum(a != b for a, b in zip(damaged, intact, strict=True)) == 1


def test_with_the_digest_the_request_fails_instead(flip: Path) -> None:
    damage = settings(transfer_backend="fake", fake_script=flip, kv_digest=True)
    with Cluster(EMBEDDED_MODEL, **damage) as cluster, serve(cluster) as proxy:
        damaged = ask(proxy.url, NEEDLE)
        again = answer_in(ask(proxy.url, NEEDLE))
        cluster.wait_idle()
    assert damaged.status_code == 502
    assert "damaged on its way" in damaged.json()["error"]["message"]
    assert is_right(NEEDLE, again)
