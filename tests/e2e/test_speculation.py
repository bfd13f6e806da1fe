"""The embedded model with a drafter: the same answers, in as many steps as measured offline."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cluster import Cluster
from embedded.heldout import evaluation_set
from embedded.text import Message, render
from tokenizers import Tokenizer

from pd.embedded import EMBEDDED_MODEL
from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Iterator

DRAFT_MODEL = EMBEDDED_MODEL.parent / "embedded-draft"
MEASURED = Path(__file__).resolve().parents[2] / "docs" / "embedded-model.json"
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_algorithm": "ngram"},
    "draft": {"speculative_algorithm": "draft", "speculative_draft_model": DRAFT_MODEL},
}
LAYOUTS = {"unified": {"prefill": 0, "decode": 0, "unified": 1}, "split": {}}


def cluster_of(kind: str, **settings: Any) -> Cluster:
    return Cluster(EMBEDDED_MODEL, kv_cache_tokens=16384, **LAYOUTS[kind], **settings)


def questions() -> list[str]:
    """One of each set with short prompts."""
    names = ("arithmetic", "extraction", "faq")
    return [evaluation_set(name)[3].turns[0].question for name in names]


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 17},
    "several": {"temperature": 1.0, "seed": 18, "n": 3},
    "penalties": {"temperature": 0.7, "seed": 19, "frequency_penalty": 0.6},
    # They end inside what a step accepts.
    "stop strings": {"temperature": 0, "stop": ["e", "1"]},
    "log probabilities": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    "length": {"temperature": 0, "max_tokens": 7, "ignore_eos": True},
    "streamed": {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}},
}


def replies(cluster: Cluster) -> dict[str, list[Any]]:
    """The answers to every body and question, through a proxy."""
    roles = ("prefill", "decode", "unified")
    urls = {role: [node.url for node in getattr(cluster, role)] for role in roles}
    found: dict[str, list[Any]] = {}
    with ProxyThread(ProxyConfig(**urls, port=0)) as proxy:
        for name, body in BODIES.items():
            found[name] = []
            for question in questions():
                messages = [{"role": "user", "content": question}]
                request = {"messages": messages, "max_tokens": 40} | body
                response = httpx.post(f"{proxy.url}/v1/chat/completions", json=request, timeout=120)
                assert response.status_code == 200, response.text
                read = _streamed if body.get("stream") else _whole
                found[name].append(read(response))
    cluster.wait_idle()
    return found


def _whole(response: httpx.Response) -> Any:
    answer = response.json()
    for choice in answer["choices"]:
        for entry in (choice["logprobs"] or {}).get("content") or []:
            # What is computed for several tokens at once is rounded otherwise.
            for each in (entry, *entry["top_logprobs"]):
                each["logprob"] = pytest.approx(each["logprob"], abs=1e-4)
    return answer["choices"], answer["usage"]["completion_tokens"]


def _streamed(response: httpx.Response) -> Any:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    ends = [c["finish_reason"] for c in choices if c["finish_reason"]]
    return text, ends, chunks[-1]["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Any]]:
    with cluster_of("unified") as cluster:
        return replies(cluster)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_answers_are_the_same(plain: dict[str, list[Any]], kind: str, drafter: str) -> None:
    settings = {"speculative_adaptive": "off", "speculative_num_draft_tokens": 5}
    with cluster_of(kind, **settings, **DRAFTERS[drafter]) as cluster:
        assert replies(cluster) == plain


def sampled_prompts(name: str) -> Iterator[list[int]]:
    """The prompts of a set for which docs/embedded-model.json gives acceptance lengths."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    examples = evaluation_set(name)
    for example in random.Random(0).sample(examples, min(60, len(examples))):
        text = render([*example.before, Message("user", example.turns[-1].question)])
        yield tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    ["arithmetic", *(pytest.param(n, marks=pytest.mark.full) for n in ("faq", "recall-2k"))],
)
def test_acceptance_is_what_was_measured_offline(kind: str, name: str) -> None:
    """Within 5 %, the first step after the hand-off included."""
    settings = {"speculative_adaptive": "off", "speculative_num_draft_tokens": 4}
    with cluster_of(kind, **settings, **DRAFTERS["draft"]) as cluster:
        nodes = list(cluster.pair) if kind == "split" else [cluster.unified[0]]
        tokens = steps = 0
        for prompt in sampled_prompts(name):
            pending = cluster.client.generate(prompt, nodes, max_tokens=128, ignore_eos=False)
            output = pending.tokens()
            if len(output) > 1:
                tokens += len(output) - 1
                # Token 1 comes with the prompt, and of a split from both nodes.
                steps += len(pending.outputs) - len(nodes)
    expected = json.loads(MEASURED.read_text())["drafters"]["draft"][name]["4"]
    assert tokens / steps == pytest.approx(expected, rel=0.05)
