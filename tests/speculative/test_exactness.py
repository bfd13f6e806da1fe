"""Output with speculation equals output without, token for token, whatever is drafted."""

from __future__ import annotations

import itertools
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster import random_prompts, same, wait_until
from counters import counter
from drafters import SEED, Oracle
from tiny import VOCAB_SIZE, tiny_cluster

from pd import assembly
from pd.node import step_watch
from pd.scheduling.step import Work
from pd.speculative.ngram import NgramDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster import Cluster, Pending

    from pd.launch import NodeServer
    from pd.speculative.drafter import Drafter

TOKENS = 24
PROMPTS = list(random_prompts(3, [5, 16, 33, 64, 100]))
# With no token followed by a larger one.
FALLING = tuple(range(40, 64))
# What a request asks for, one feature each.
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 0.9, "seed": 8, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "seeded penalties": {"temperature": 0.8, "seed": 9, "frequency_penalty": 1.5},
    "bias": {"logit_bias": {7: 3.0, 9: -50.0}},
    "min tokens": {"min_tokens": 20, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
    "stop ids": {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 16)), "seed": 3, "temperature": 1.0},
    "log probabilities": {"logprobs": True, "top_logprobs": 3},
    "choices": {"n": 3, "temperature": 1.0, "seed": 11},
    "limits": {
        "allowed_token_ids": FALLING,
        "bad_sequences": tuple((a, b) for a in FALLING for b in FALLING if a < b),
        "temperature": 1.0,
        "seed": 5,
        "n": 2,
        "logprobs": True,
    },
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}


def layout(kind: str, **settings: Any) -> Cluster:
    """Nodes that draft as many tokens as they may."""
    settings = {"speculative_adaptive": "off"} | settings
    if kind == "unified":
        return tiny_cluster(0, 0, 1, **settings)
    return tiny_cluster(**settings)


def targets(cluster: Cluster) -> list[NodeServer]:
    return list(cluster.pair) if cluster.prefill else [cluster.unified[0]]


def ask(cluster: Cluster, prompt: list[int], **params: Any) -> Pending:
    return cluster.client.generate(prompt, targets(cluster), **{"max_tokens": TOKENS} | params)


def answers(cluster: Cluster, **params: Any) -> list[Pending]:
    """The requests of all prompts, together."""
    asked = [ask(cluster, prompt, **params) for prompt in PROMPTS]
    for pending in asked:
        pending.result()
    return asked


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, list[Pending]]]:
    """What each feature's requests are answered without speculation."""
    with layout("unified") as cluster:
        yield {name: answers(cluster, **params) for name, params in FEATURES.items()}


def test_no_forbidden_token_is_drawn(plain: dict[str, list[Pending]]) -> None:
    outputs = [tokens for pending in plain["limits"] for tokens in pending.result()]
    assert len({tuple(tokens) for tokens in outputs}) > len(PROMPTS)
    for tokens in outputs:
        assert len(tokens) == TOKENS
        assert set(tokens) <= set(FALLING)
        assert tokens == sorted(tokens, reverse=True)


@pytest.fixture
def drafts_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Drafter], None]:
    """Gives nodes that are started from now on another drafter."""

    def set_drafter(drafter: Drafter) -> None:
        monkeypatch.setattr(
            assembly,
            "make_drafter",
            lambda config, *_: drafter if config.role != "prefill" else None,
        )

    return set_drafter


def oracle_of(plain: dict[str, list[Pending]], spoiled: float) -> Oracle:
    oracle = Oracle(VOCAB_SIZE, spoiled)
    for requests in plain.values():
        for prompt, pending in zip(PROMPTS, requests, strict=True):
            for tokens in pending.result():
                oracle.learn([*prompt, *tokens])
    return oracle


SHARP = {("split", 16, "on")}


@pytest.mark.parametrize(
    ("kind", "page_size", "overlap"),
    [
        cell if cell in SHARP else pytest.param(*cell, marks=pytest.mark.full)
        for cell in itertools.product(("unified", "split"), (1, 16, 64), ("off", "on"))
    ],
)
def test_every_feature_gives_the_same(
    plain: dict[str, list[Pending]],
    drafts_with: Callable[[Drafter], None],
    kind: str,
    page_size: int,
    overlap: str,
) -> None:
    oracle = oracle_of(plain, 0.2)
    drafts_with(oracle)
    with layout(kind, page_size=page_size, overlap_schedule=overlap) as cluster:
        for name, params in FEATURES.items():
            for ours, theirs in zip(answers(cluster, **params), plain[name], strict=True):
                same(ours, theirs, f"PD_TEST_SEED={SEED}")
        cluster.wait_idle()
        decoding = targets(cluster)[-1]
        accepted = counter(decoding, "pd_speculative_accepted_total")
        assert counter(decoding, "pd_speculative_drafted_total") == oracle.drafted
        assert 0.2 * oracle.drafted < accepted < 0.95 * oracle.drafted


@pytest.mark.parametrize("kind", ["unified", pytest.param("split", marks=pytest.mark.full)])
def test_ngrams_give_the_same(plain: dict[str, list[Pending]], kind: str) -> None:
    with layout(kind, speculative_algorithm="ngram") as cluster:
        for name, params in FEATURES.items():
            for ours, theirs in zip(answers(cluster, **params), plain[name], strict=True):
                same(ours, theirs, f"PD_TEST_SEED={SEED}")
        # An answer that repeats its prompt is foretold.
        looping = [5, 6, 7, 8] * 8
        bias = {token: 30.0 for token in (5, 6)}
        pending = ask(cluster, looping, logit_bias=bias, max_tokens=64)
        pending.result()
        cluster.wait_idle()
        assert len(pending.outputs) < 64, "several tokens came at once"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["unified", "split"])
def test_ngrams_of_other_requests_give_the_same(plain: dict[str, list[Pending]], kind: str) -> None:
    """A second client asks what a first one asked: its drafts come from the first one's answers."""
    accepted: dict[str, list[float]] = {}
    for cache in ("off", "on"):
        settings = {"speculative_algorithm": "ngram", "speculative_ngram_cache": cache}
        with layout(kind, **settings) as cluster:
            accepted[cache] = []
            for _ in range(2):
                before = counter(targets(cluster)[-1], "pd_speculative_accepted_total")
                for name, params in FEATURES.items():
                    for ours, theirs in zip(answers(cluster, **params), plain[name], strict=True):
                        same(ours, theirs, f"PD_TEST_SEED={SEED}")
                cluster.wait_idle()
                after = counter(targets(cluster)[-1], "pd_speculative_accepted_total")
                accepted[cache].append(after - before)
    assert accepted["on"][0] >= accepted["off"][0]
    answered = sum(
        len(tokens) for each in plain.values() for one in each for tokens in one.result()
    )
    assert accepted["on"][1] > accepted["off"][1] + answered / 3


def test_what_another_namespace_was_answered_is_not_drafted(
    plain: dict[str, list[Pending]],
) -> None:
    def accepted(namespace: str) -> float:
        node = targets(cluster)[-1]
        before = counter(node, "pd_speculative_accepted_total")
        for prompt, reference in zip(PROMPTS, plain["greedy"], strict=True):
            pending = cluster.client.generate(
                prompt, targets(cluster), namespace=namespace, max_tokens=TOKENS
            )
            assert pending.result() == reference.result()
        cluster.wait_idle()
        return counter(node, "pd_speculative_accepted_total") - before

    settings = {"speculative_algorithm": "ngram", "speculative_ngram_cache": "on"}
    with layout("split", **settings) as cluster:
        first, again = accepted("a"), accepted("a")
        other = accepted("b")
        assert other == first < again
        targets(cluster)[-1].node.flush_cache()
        assert accepted("a") == first


@pytest.mark.full  # with every other circumstance: test_pairs.py
@pytest.mark.parametrize("kind", ["unified", "split"])
def test_too_little_memory_and_aborts_change_nothing(
    plain: dict[str, list[Pending]], drafts_with: Callable[[Drafter], None], kind: str
) -> None:
    rng = random.Random(SEED)
    drafts_with(oracle_of(plain, 0.5))
    # Pages for a third of what the requests grow to.
    with layout(kind, kv_cache_tokens=400, reserved_decode_tokens=1) as cluster:
        for _ in range(3):
            asked = [
                (ask(cluster, prompt, **FEATURES[name]), reference)
                for name in ("greedy", "seeded", "penalties", "choices")
                for prompt, reference in zip(PROMPTS, plain[name], strict=True)
            ]
            rng.shuffle(asked)
            given_up = asked[: len(asked) // 4]
            for pending, _ in given_up:
                cluster.client.abort(pending)
            for pending, reference in asked[len(given_up) :]:
                same(pending, reference, f"PD_TEST_SEED={SEED}")
        cluster.wait_idle(30.0)
        assert counter(targets(cluster)[-1], "pd_retractions_total") > 0


def test_a_drafter_that_raises_ends_no_request(
    plain: dict[str, list[Pending]], drafts_with: Callable[[Drafter], None]
) -> None:
    class Broken(Oracle):
        def draft_tokens(self, *_: Any) -> Any:
            raise MemoryError("no page left")

        def catch_up(self) -> bool:
            raise MemoryError("no page left")

    drafts_with(Broken(VOCAB_SIZE, 0.0))
    with layout("split") as cluster:
        for ours, theirs in zip(answers(cluster), plain["greedy"], strict=True):
            same(ours, theirs, f"PD_TEST_SEED={SEED}")
        cluster.wait_idle()


def test_a_drafter_that_does_not_return_from_its_preparation_is_noticed(
    drafts_with: Callable[[Drafter], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first preparation, as long as it may be, tells how long the others take."""
    hangs, released = threading.Event(), threading.Event()

    class Hanging(Oracle):
        def catch_up(self) -> bool:
            if hangs.is_set():
                released.wait(20)
            time.sleep(0.01)
            return not hangs.is_set()

    monkeypatch.setattr(step_watch, "MIN_SECONDS", 0.5)
    drafts_with(Hanging(VOCAB_SIZE, 0.0))
    with layout("unified") as cluster:
        loop = cluster.unified[0].node.step_loop
        time.sleep(1.0)
        assert not loop.stuck
        hangs.set()
        try:
            wait_until(lambda: loop.stuck, 20)
        finally:
            released.set()
        wait_until(lambda: not loop.stuck, 20)


def test_a_planted_fault_is_noticed(
    plain: dict[str, list[Pending]],
    drafts_with: Callable[[Drafter], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparisons above can fail: here one more token is accepted than the model sampled."""
    drafts_with(oracle_of(plain, 0.5))
    true = Work.accepted.fget
    assert true is not None
    monkeypatch.setattr(
        Work,
        "accepted",
        property(lambda work: list(range(min(len(true(work)) + 1, work.num_drafted)))),
    )
    with layout("unified") as cluster:
        ours = [pending.result() for pending in answers(cluster)]
    assert ours != [pending.result() for pending in plain["greedy"]]


def test_nothing_that_was_not_accepted_is_cached(
    plain: dict[str, list[Pending]], drafts_with: Callable[[Drafter], None]
) -> None:
    drafts_with(oracle_of(plain, 0.5))
    with layout("unified", page_size=1) as cluster:
        answers(cluster)
        cluster.wait_idle()
        again = []
        for prompt, reference in zip(PROMPTS, plain["greedy"], strict=True):
            turn = [*prompt, *reference.tokens(), 1, 2, 3]
            again.append((turn, ask(cluster, turn)))
        # All but the last token of each answer was computed and is cached.
        for turn, pending in again:
            pending.result()
            assert pending.cached_tokens == len(turn) - 4
        cluster.wait_idle()
    with layout("unified", page_size=1) as cluster:
        for turn, pending in again:
            assert ask(cluster, turn).tokens() == pending.tokens()


def test_the_node_has_the_drafter_that_was_asked_for() -> None:
    with layout("split", speculative_algorithm="ngram") as cluster:
        prefill, decode = cluster.pair
        assert prefill.node.core.drafter is None
        assert isinstance(decode.node.core.drafter, NgramDrafter)
        assert decode.node.server_info()["speculative_algorithm"] == "ngram"
