"""Every pair of a drafter's and a request's circumstances, in as few deployments as cover them;
with tensor parallelism, which starts processes, every three in ``make test-all``."""

from __future__ import annotations

import functools
import itertools
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster import Cluster, random_prompts, same
from counters import counter
from drafters import SEED, Oracle
from tiny import VOCAB_SIZE, tiny_cluster, tiny_head, tiny_model

from pd import assembly
from pd.speculative import costs
from pd.speculative.adaptation import StepCosts

if TYPE_CHECKING:
    from cluster import Pending

TOKENS = 20
# They share prefixes of 40 tokens, two by two.
PROMPTS = [
    [*prefix, *rest]
    for prefix, rests in zip(
        random_prompts(21, [40] * 4), [random_prompts(22 + i, [3, 17]) for i in range(4)],
        strict=True,
    )
    for rest in rests
]  # fmt: skip
FACTORS: dict[str, tuple[Any, ...]] = {
    "drafter": ("ngram", "draft", "eagle", "eagle tree", "half right"),
    "kind": ("unified", "split"),
    "page_size": (1, 16, 64),
    "overlap_schedule": ("off", "on"),
    "speculative_adaptive": ("off", "on"),
    "speculative_num_draft_tokens": (1, 5),
    "chunked_prefill_size": (16, 8192),
    "kv_cache_tokens": ("few", "many"),
    "batch": (1, 8),
    "cache": ("cold", "warm"),
    "tp_size": (1, 2),
    # The others are computed beside requests that are given up meanwhile.
    "aborts": ("none", "some"),
    # One request after the other is of these kinds, so a batch has all three.
    "first request": ("greedy", "penalties", "stop ids"),
    "second request": ("seeded", "bias", "log probabilities"),
    "third request": ("filtered", "min tokens", "choices"),
}
KINDS = ("first request", "second request", "third request")
# Steps of any size take as long, and drafting a hundredth of that.
_STEP = np.array([1e-3])
TOKENS_COST_NOTHING = StepCosts(np.array([1e9]), _STEP, _STEP, _STEP / 100, _STEP / 100)
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 0.9, "seed": 8, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "seed": 9, "repetition_penalty": 1.3, "presence_penalty": 1},
    "bias": {"logit_bias": {7: 3.0, 9: -50.0}},
    "min tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
    "stop ids": {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 16)), "seed": 3, "temperature": 1.0},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "choices": {"n": 2, "temperature": 1.0, "seed": 11},
}


def cost(row: dict[str, Any]) -> float:
    """Processor time of a row, roughly, in that of one whose nodes start no process of a rank."""
    if row["tp_size"] == 1:
        return 1.0
    return 4.0 if row["kind"] == "split" else 2.5


def rows(strength: int, **fixed: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Rows in which every choice of ``strength`` values of different factors occurs together; of
    some factors only ``fixed`` values."""
    factors = FACTORS | fixed
    rng, names = random.Random(5), list(factors)
    missing = {
        tuple(zip(some, values, strict=True))
        for some in itertools.combinations(names, strength)
        for values in itertools.product(*(factors[name] for name in some))
    }
    found = []
    while missing:
        best: tuple[float, dict[str, Any]] = (-1.0, {})
        uncovered = sorted(missing, key=repr)
        for _ in range(40):
            row = dict(rng.choice(uncovered))
            for name in rng.sample(names, len(names)):
                row.setdefault(name, rng.choice(factors[name]))
            covered = sum(all(row[n] == v for n, v in each) for each in missing)
            best = max(best, (covered / cost(row), row), key=lambda each: each[0])
        found.append(best[1])
        missing = {e for e in missing if not all(best[1][n] == v for n, v in e)}
    return found


def asked(cluster: Cluster, names: list[str], batch: int, *, aborts: bool = False) -> list[Pending]:
    """Ask all prompts, or if ``batch`` is 1 three of them, one after the other, with requests of
    these kinds in turn; with ``aborts`` each twice, of which the first is given up."""
    nodes = list(cluster.pair) if cluster.prefill else [cluster.unified[0]]
    requests, rng = [], random.Random(SEED)
    for prompt, name in zip(PROMPTS[:: stride(batch)], itertools.cycle(names), strict=False):
        params = {"max_tokens": TOKENS, **REQUESTS[name]}
        if aborts:
            given_up = cluster.client.generate(prompt, nodes, **params)
            time.sleep(rng.choice((0.0, 0.01, 0.05)))
            cluster.client.abort(given_up)
        requests.append(cluster.client.generate(prompt, nodes, **params))
        if batch == 1:
            requests[-1].result()
    for request in requests:
        request.result()
    return requests


def stride(batch: int) -> int:
    return 1 if batch > 1 else 3


@functools.cache
def expected() -> dict[str, list[Pending]]:
    """The answers to all prompts without speculation, by the kind of request."""
    with tiny_cluster(0, 0, 1, kv_cache_tokens=8192) as cluster:
        return {name: asked(cluster, [name], len(PROMPTS)) for name in REQUESTS}


def expected_in_turn(names: list[str], step: int) -> list[Pending]:
    """The answers to every ``step``-th prompt, which are asked with these kinds in turn."""
    kinds = itertools.cycle(names)
    return [expected()[next(kinds)][place] for place in range(0, len(PROMPTS), step)]


def flags(drafter: str) -> dict[str, Any]:
    """Settings of nodes with a drafter, but for one that is half right."""
    settings: dict[str, Any] = {"speculative_algorithm": drafter.split()[0]}
    if drafter == "draft":
        settings["speculative_draft_model"] = tiny_model(num_hidden_layers=1)
    elif drafter.startswith("eagle"):
        settings["speculative_draft_model"] = tiny_head()
        settings["speculative_topk"] = 3 if drafter == "eagle tree" else 1
    return settings


def check(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings, names = dict(row), [row[kind] for kind in KINDS]
    drafter, kind, batch, cache, aborts = (
        settings.pop(key) for key in ("drafter", "kind", "batch", "cache", "aborts")
    )
    for kind_of_request in KINDS:
        del settings[kind_of_request]
    # The longest request needs 90 tokens, and a page of 64 for each of two choices. With smaller
    # pages so few are there that sequences are retracted.
    few = 448 if row["page_size"] == 64 else 192
    settings["kv_cache_tokens"] = {"few": few, "many": 8192}[settings["kv_cache_tokens"]]
    answers = expected_in_turn(names, stride(batch))
    # By its own measurements a node would hardly ever draft: on a CPU every token costs.
    monkeypatch.setattr(costs, "measure_costs", lambda *_: TOKENS_COST_NOTHING)
    if drafter == "half right":
        oracle = Oracle(VOCAB_SIZE, 0.5)
        for prompt, answer in zip(PROMPTS[:: stride(batch)], answers, strict=True):
            for output in answer.result():
                oracle.learn([*prompt, *output])
        monkeypatch.setattr(
            assembly,
            "make_drafter",
            lambda config, *_: oracle if config.role != "prefill" else None,
        )
    else:
        settings |= flags(drafter)
    counts = (1, 1, 0) if kind == "split" else (0, 0, 1)
    with tiny_cluster(*counts, reserved_decode_tokens=4, **settings) as cluster:
        for _ in range(2 if cache == "warm" else 1):
            found = asked(cluster, names, batch, aborts=aborts == "some")
            for ours, theirs in zip(found, answers, strict=True):
                same(ours, theirs, row)
        cluster.wait_idle(30.0)
        # Prompts of random tokens seldom have an n-gram twice.
        if drafter != "ngram":
            assert counter(cluster.nodes[-1], "pd_speculative_drafted_total") > 0, row


PAIRS = rows(2, tp_size=(1,))
# And one with two ranks at both ends; these with everything else are among the triples.
RANKS = {"kind": "split", "tp_size": 2}
PAIRS.append(PAIRS[0] | RANKS)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_pairs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(PAIRS[number], monkeypatch)


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        ("split", "eagle tree"),
        *(
            pytest.param(kind, drafter, marks=pytest.mark.full)
            for kind, drafter in itertools.product(
                ("unified", "split"), ("ngram", "draft", "eagle", "eagle tree")
            )
            if (kind, drafter) != ("split", "eagle tree")
        ),
    ],
)
def test_sequences_leave_a_pool_of_pages_of_64(kind: str, drafter: str) -> None:
    """Their answers end in the fourth page. In the table above they end in the second one, and as
    many pages are kept free as sequences run."""
    names, tokens = ("greedy", "seeded", "penalties", "min tokens"), 150
    prompts = list(random_prompts(24, [50] * 6))

    def answers(cluster: Cluster) -> list[list[list[int]]]:
        nodes = list(cluster.pair) if cluster.prefill else [cluster.unified[0]]
        requests = [
            cluster.client.generate(prompt, nodes, **REQUESTS[name] | {"max_tokens": tokens})
            for prompt, name in zip(prompts, itertools.cycle(names), strict=False)
        ]
        return [request.result() for request in requests]

    with tiny_cluster(0, 0, 1) as cluster:
        plain = answers(cluster)
    settings = {"page_size": 64, "kv_cache_tokens": 512, "reserved_decode_tokens": 1}
    settings |= {"speculative_adaptive": "off", **flags(drafter)}
    with tiny_cluster(*((1, 1, 0) if kind == "split" else (0, 0, 1)), **settings) as cluster:
        assert answers(cluster) == plain
        cluster.wait_idle(30.0)
        decoding = cluster.nodes[-1]
        assert counter(decoding, "pd_retractions_total") > 0
        assert counter(decoding, "pd_speculative_drafted_total") > 0


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["draft", "eagle tree"])
@pytest.mark.usefixtures("forked_ranks")
def test_batches_on_two_ranks(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends, with the longest drafts in every step."""
    drafts = {"speculative_adaptive": "off", "speculative_num_draft_tokens": 5}
    row = next(row for row in PAIRS if row["drafter"] == drafter)
    check(row | RANKS | drafts | {"batch": 8}, monkeypatch)


@functools.cache
def triples() -> list[dict[str, Any]]:
    return rows(3)


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
@pytest.mark.usefixtures("forked_ranks")
def test_triples(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for row in triples()[part::8]:
        with monkeypatch.context() as patch:
            check(row, patch)
