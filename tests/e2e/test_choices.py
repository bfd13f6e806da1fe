"""``choices`` of ``/generate`` over HTTP and real nodes: scores equal transformers', and the prompt
is computed once."""

from __future__ import annotations

import contextlib
import math
import random
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from checkpoints import reference_logprobs
from cluster import Cluster
from tiny import CONTEXT, VOCAB_SIZE, tiny_cluster
from tokenizers import Tokenizer

from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pd.launch import NodeServer

PAGE = 4
METHODS = ("token_length_normalized", "greedy_token", "unconditional_likelihood")
PROMPT = "the thing that I mean is in "
OPTIONS = ["the house", "an inn", "the garden behind the inn", "then", "漢字", "x"]


class System:
    """A cluster behind a proxy."""

    def __init__(self, cluster: Cluster, proxy: ProxyThread) -> None:
        self.cluster = cluster
        self.http = httpx.Client(base_url=proxy.url, timeout=60)

    def choose(self, **body: Any) -> Any:
        response = self.http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()


@contextlib.contextmanager
def behind_proxy(cluster: Cluster, **options: Any) -> Iterator[System]:
    with cluster:
        roles = {
            role: [node.url for node in getattr(cluster, role)]
            for role in ("prefill", "decode", "unified")
        }
        with ProxyThread(ProxyConfig(port=0, **roles, **options)) as proxy:
            yield System(cluster, proxy)
            cluster.wait_idle()


DEPLOYMENTS = {
    "split": {},
    "unified": {"prefill": 0, "decode": 0, "unified": 1},
    "small-chunks": {"chunked_prefill_size": 8},
    "ranks": {"prefill_settings": {"tp_size": 2}},
}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def system(model: Path, request: pytest.FixtureRequest) -> Iterator[System]:
    with behind_proxy(Cluster(model, page_size=PAGE, **DEPLOYMENTS[request.param])) as system:
        yield system


def expected_logprobs(model: Path, before: list[int], option: list[int]) -> list[float]:
    """transformers' log probabilities of the option's tokens."""
    table = reference_logprobs(model, before + option)[len(before) - 1 :]
    return [float(row[token]) for row, token in zip(table, option, strict=False)]


def expected_score(model: Path, method: str, before: list[int], option: list[int]) -> float:
    conditional = expected_logprobs(model, before, option)
    if method == "greedy_token":
        return conditional[0]
    total = sum(conditional)
    if method == "unconditional_likelihood":
        total -= sum(expected_logprobs(model, option[:1], option[1:]))
    return total / len(option)


def test_label_scores_equal_transformers(system: System, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    items, labels = OPTIONS[:3], [5, 9, 17]
    body = {"query": PROMPT, "items": items, "label_token_ids": labels}
    answer = system.http.post("/v1/score", json=body).json()
    shares = system.http.post("/v1/score", json=body | {"apply_softmax": True}).json()["scores"]
    for item, scores, share in zip(items, answer["scores"], shares, strict=True):
        row = reference_logprobs(model, tokenizer.encode(PROMPT + item).ids)[-1]
        expected = [math.exp(float(row[label])) for label in labels]
        assert scores == pytest.approx(expected, rel=1e-3)
        assert share == pytest.approx([each / sum(expected) for each in expected], rel=1e-3)
    ids: Any = {"query": [5, 6], "items": [[7], [8]], "item_first": True, "label_token_ids": [5]}
    (first, _) = system.http.post("/v1/score", json=ids).json()["scores"]
    row = reference_logprobs(model, [7, 5, 6])[-1]
    assert first == pytest.approx([math.exp(float(row[5]))], rel=1e-3)
    for wrong in ({"items": [[7]]}, {"label_token_ids": []}, {"stream": True}, {"items": []}):
        assert system.http.post("/v1/score", json=body | wrong).status_code == 400
    text = {"text": PROMPT, "return_logprob": True, "token_ids_logprob": labels}
    meta = system.choose(**text, sampling_params={"max_new_tokens": 1, "temperature": 0})
    named = meta["meta_info"]["output_token_ids_logprobs"][0]
    row = reference_logprobs(model, tokenizer.encode(PROMPT).ids)[-1]
    assert [entry[1] for entry in named] == labels
    assert [entry[0] for entry in named] == pytest.approx(
        [float(row[label]) for label in labels], abs=1e-3
    )


SAMPLE = pytest.mark.sample(cells=lambda parameters: parameters["system"] in ("split", "unified"))


@SAMPLE
@pytest.mark.parametrize("method", METHODS)
def test_scores_equal_transformers(system: System, model: Path, method: str) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    answer = system.choose(text=PROMPT, choices=OPTIONS, choices_method=method)
    meta = answer["meta_info"]
    prompt = tokenizer.encode(PROMPT).ids
    assert meta["prompt_tokens"] == len(prompt)
    scores = []
    for option, scored in zip(OPTIONS, meta["choices"], strict=True):
        own = [entry[1] for entry in scored["token_logprobs"]]
        whole = tokenizer.encode(PROMPT + option).ids
        before = whole[: len(whole) - len(own)]
        assert before + own == whole
        assert before == prompt[: len(before)]
        expected = expected_logprobs(model, before, own)
        assert [x[0] for x in scored["token_logprobs"]] == pytest.approx(expected, abs=1e-4)
        scores.append(expected_score(model, method, before, own))
    assert [s["score"] for s in meta["choices"]] == pytest.approx(scores, abs=1e-4)
    assert answer["text"] in OPTIONS
    chosen = OPTIONS.index(answer["text"])
    if method != "greedy_token" or scores.count(max(scores)) == 1:
        assert scores[chosen] == pytest.approx(max(scores), abs=1e-4)


@SAMPLE
def test_the_greedy_option_is_the_one_that_greedy_generation_writes(
    system: System, model: Path
) -> None:
    prompt = [*range(100, 140)]
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = system.http.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
    written = answer.json()["output_ids"]
    # Each of the others leaves what is written at another token.
    others = [[*written[:at], (written[at] + 1) % 256, 7, 8][:4] for at in range(4)]
    for place in range(5):
        choices = [*others[:place], written, *others[place:]]
        chosen = system.choose(input_ids=prompt, choices=choices, choices_method="greedy_token")
        assert chosen["output_ids"] == written
    system.cluster.wait_idle()


# ---- what is computed


class Steps:
    """Tokens of each sequence in each forward pass of a node."""

    def __init__(self, node: NodeServer) -> None:
        self.sizes: list[list[int]] = []
        runner = node.node.engine.runner
        forward = runner.forward

        def recording(items: Any, *rest: Any) -> Any:
            self.sizes.append([len(item.token_ids) for item in items])
            return forward(items, *rest)

        runner.forward = recording


def tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def distinct_options(rng: random.Random, count: int) -> list[list[int]]:
    """Options that share nothing with each other."""
    return [[first, *tokens(rng, rng.randrange(4))] for first in rng.sample(range(250), count)]


@pytest.mark.parametrize("unified", [False, True])
def test_the_prompt_is_computed_once_and_the_options_in_one_batch(unified: bool) -> None:
    rng = random.Random(3)
    roles = {"prefill": 0, "decode": 0, "unified": 1} if unified else {}
    with behind_proxy(tiny_cluster(**roles)) as system:
        steps = Steps(system.cluster.nodes[0])
        # The last page is not whole without the last token, whose logits give the first score.
        prompt, choices = tokens(rng, 401), distinct_options(rng, 20)
        meta = system.choose(input_ids=prompt, choices=choices)["meta_info"]
        first, *others = map(len, choices)
        assert steps.sizes == [[401 + first], [1 + length for length in others]]
        assert meta["cached_tokens"] == 0
        meta = system.choose(input_ids=prompt, choices=choices)["meta_info"]
        assert sorted(*steps.sizes[2:]) == sorted(1 + length for length in (first, *others))
        assert meta["cached_tokens"] == 400


def test_a_long_prompt_is_computed_in_whole_chunks() -> None:
    rng = random.Random(4)
    with behind_proxy(tiny_cluster(chunked_prefill_size=300)) as system:
        steps = Steps(system.cluster.prefill[0])
        prompt = tokens(rng, CONTEXT - 60)
        system.choose(input_ids=prompt, choices=[[1, 2], [3]])
        assert steps.sizes == [[300], [300], [300], [len(prompt) + 2 - 900], [PAGE + 1]]


@pytest.mark.parametrize(
    "policy",
    [
        "round_robin",
        *(pytest.param(p, marks=pytest.mark.full) for p in ("random", "cache_aware")),
    ],
)
def test_one_of_several_nodes_computes_everything(policy: str) -> None:
    rng = random.Random(5)
    with behind_proxy(tiny_cluster(prefill=3), policy=policy) as system:
        all_steps = [Steps(node) for node in system.cluster.prefill]
        prompt, choices = tokens(rng, 101), distinct_options(rng, 12)
        system.choose(input_ids=prompt, choices=choices)
        (steps,) = [steps for steps in all_steps if steps.sizes]
        assert sum(map(sum, steps.sizes)) == 100 + sum(1 + len(choice) for choice in choices)


def test_unequal_options_are_scored_alike_alone_and_together() -> None:
    """Options that share pages with each other, that are prefixes of others, and that repeat."""
    rng = random.Random(6)
    with behind_proxy(tiny_cluster()) as system:
        prompt, stem = tokens(rng, 30), tokens(rng, 3 * PAGE)
        choices = [stem, stem[:5], [*stem, 9, 8, 7], [*stem[:6], 1], [4], stem, tokens(rng, 40)]
        for method in METHODS:
            together = system.choose(input_ids=prompt, choices=choices, choices_method=method)
            for choice, scored in zip(choices, together["meta_info"]["choices"], strict=True):
                alone = system.choose(
                    input_ids=prompt, choices=[choice], choices_method=method, cache_salt="alone"
                )
                (expected,) = alone["meta_info"]["choices"]
                assert scored["score"] == pytest.approx(expected["score"], abs=1e-5)
                assert [e[1] for e in scored["token_logprobs"]] == choice


def test_many_options_wait_for_memory_and_leave_nothing() -> None:
    rng = random.Random(7)
    with behind_proxy(tiny_cluster(kv_cache_tokens=160)) as system:
        prompt = tokens(rng, 61)
        choices = [[number, *tokens(rng, 30)] for number in range(100)]
        answer = system.choose(input_ids=prompt, choices=choices)
        scores = [scored["score"] for scored in answer["meta_info"]["choices"]]
        assert answer["output_ids"] == choices[scores.index(max(scores))]


def test_an_abort_in_the_middle_leaves_nothing() -> None:
    rng = random.Random(8)
    with behind_proxy(tiny_cluster(chunked_prefill_size=4)) as system:
        prompt, choices = tokens(rng, 900), distinct_options(rng, 50)
        steps = Steps(system.cluster.prefill[0])
        body = {"input_ids": prompt, "choices": choices, "timeout": 0.05}
        response = system.http.post("/generate", json=body)
        assert response.status_code == 408
        system.cluster.wait_idle()
        assert sum(map(sum, steps.sizes)) < len(prompt), "the node was too fast for this test"
