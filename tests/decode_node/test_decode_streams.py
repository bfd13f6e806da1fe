"""What a decode node streams: choices, ends, reuse on the next turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster import random_prompts, wait_until
from tiny import TOKEN_BYTES, tiny_cluster

from pd.core.messages import Finish
from pd.core.sampling_params import choice_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster import Cluster, Pending

EOS = 255


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with tiny_cluster(1, 1, 1) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    shared.wait_idle()
    for server in shared.nodes:
        server.node.flush_cache()


@pytest.fixture(params=["split", "unified"])
def nodes(request: pytest.FixtureRequest, cluster: Cluster) -> Any:
    return cluster.pair if request.param == "split" else cluster.unified


def greedy(cluster: Cluster, nodes: Any, prompt: list[int], **params: Any) -> list[int]:
    return cluster.client.generate(prompt, nodes, **params).tokens()


def wanders(cluster: Cluster, count: int = 12) -> tuple[list[int], list[int]]:
    """A prompt, and its greedy continuation in which token 5 and later ones are new."""
    for prompt in random_prompts(11, [12] * 50):
        tokens = greedy(cluster, cluster.unified, prompt, max_tokens=count)
        if len(set(tokens[:8])) == 8:
            return prompt, tokens
    raise AssertionError("every continuation repeats itself")


# ---- how an answer ends


@pytest.mark.parametrize("position", [0, 1, 5])
def test_a_stop_id_ends_the_answer_and_is_named(
    cluster: Cluster, nodes: Any, position: int
) -> None:
    prompt, tokens = wanders(cluster)
    stop = tokens[position]
    request = cluster.client.generate(prompt, nodes, max_tokens=12, stop_token_ids=(stop,))
    assert request.tokens() == tokens[: position + 1]
    assert request.choices[0].finish == Finish("stop", stop)


def test_max_tokens_end_the_answer(cluster: Cluster, nodes: Any) -> None:
    prompt, tokens = wanders(cluster)
    for count in (1, 2, 5):
        request = cluster.client.generate(prompt, nodes, max_tokens=count)
        assert request.tokens() == tokens[:count]
        assert request.choices[0].finish == Finish("length")


def test_the_models_end_counts_unless_it_is_to_be_ignored(cluster: Cluster, nodes: Any) -> None:
    prompt, _ = wanders(cluster)
    certain = {"logit_bias": {EOS: 100.0}, "max_tokens": 4}
    request = cluster.client.generate(prompt, nodes, ignore_eos=False, **certain)
    assert request.tokens() == [EOS]
    assert request.choices[0].finish == Finish("stop", EOS)
    request = cluster.client.generate(prompt, nodes, ignore_eos=True, **certain)
    assert request.tokens() == [EOS] * 4


@pytest.mark.parametrize("min_tokens", [1, 2, 6])
def test_min_tokens_hold_the_end_back(cluster: Cluster, nodes: Any, min_tokens: int) -> None:
    prompt, _ = wanders(cluster)
    request = cluster.client.generate(
        prompt, nodes, max_tokens=12, min_tokens=min_tokens, ignore_eos=False,
        logit_bias={EOS: 100.0},
    )  # fmt: skip
    tokens = request.tokens()
    assert len(tokens) == min_tokens + 1
    assert EOS not in tokens[:-1] and tokens[-1] == EOS


# ---- choices


def choices_of(cluster: Cluster, nodes: Any, prompt: list[int], **params: Any) -> Pending:
    params = {"n": 3, "max_tokens": 10, "temperature": 1.0, "seed": 5} | params
    request = cluster.client.generate(prompt, nodes, **params)
    request.result()
    return request


@pytest.mark.parametrize("length", [8, 11])
def test_each_choice_is_what_its_own_seed_gives_alone(
    cluster: Cluster, nodes: Any, length: int
) -> None:
    (prompt,) = random_prompts(12, [length])
    together = choices_of(cluster, nodes, prompt).result()
    alone = [
        choices_of(cluster, nodes, prompt, n=1, seed=choice_seed(5, index)).tokens()
        for index in range(3)
    ]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) > 1


def test_choices_share_the_prompt_and_its_transfer(cluster: Cluster) -> None:
    (prompt,) = random_prompts(13, [43])
    decode = cluster.decode[0].node
    before = decode.core.metrics.transferred_bytes._value.get()
    pages: list[int] = []
    process = decode.scheduler.process_step

    def watching(works: Any) -> None:
        pages.append(decode.core.memory.count_pages()["locked"])
        process(works)

    decode.scheduler.process_step = watching
    request = choices_of(cluster, cluster.pair, prompt, n=8, max_tokens=4)
    decode.scheduler.process_step = process
    assert request.transferred_bytes == 43 * TOKEN_BYTES
    assert decode.core.metrics.transferred_bytes._value.get() - before == 43 * TOKEN_BYTES
    # 10 whole pages of the prompt are shared; each choice has one or two of its own.
    assert 8 < max(pages) <= 10 + 8 * 2


def test_a_choice_that_the_proxy_ends_stops_and_the_others_go_on(
    cluster: Cluster, nodes: Any
) -> None:
    (prompt,) = random_prompts(14, [20])
    full = choices_of(cluster, nodes, prompt, max_tokens=200).result()
    request = cluster.client.generate(prompt, nodes, n=3, max_tokens=200, temperature=1.0, seed=5)
    wait_until(lambda: all(len(choice.tokens) > 3 for choice in request.choices), 10)
    cluster.client.abort(request, index=1)
    wait_until(lambda: all(request.choices[i].finish for i in (0, 2)), 20)
    for index in (0, 2):
        stream = request.choices[index].tokens
        assert [stream[i] for i in range(len(stream))] == full[index]
    cluster.wait_idle()
    assert request.choices[1].finish is None
    assert len(request.choices[1].tokens) < 200
    assert request.error is None


@pytest.mark.parametrize("n", [1, 3])
def test_when_the_proxy_ended_every_choice_nothing_is_left_and_the_answer_is_cached(
    cluster: Cluster, nodes: Any, n: int
) -> None:
    (prompt,) = random_prompts(15, [20])
    request = cluster.client.generate(prompt, nodes, n=n, max_tokens=900)
    wait_until(lambda: all(len(choice.tokens) >= 21 for choice in request.choices), 10)
    for index in range(n):
        cluster.client.abort(request, index=index)
    cluster.wait_idle()
    assert request.error is None
    node = nodes[-1].node
    conversation = np.array([*prompt, *list(request.choices[0].tokens.values())[:20]], np.int32)
    assert node.core.memory.radix.count_cached(conversation) == 40
    assert node.core.metrics.failed.labels("aborted")._value.get() == 0


# ---- the next turn


def test_the_next_turn_transfers_only_what_the_decode_node_lacks(cluster: Cluster) -> None:
    (prompt,) = random_prompts(16, [50])
    first = cluster.client.generate(prompt, cluster.pair, max_tokens=24)
    answer = first.tokens()
    assert (first.cached_tokens, first.transferred_bytes) == (0, 50 * TOKEN_BYTES)
    # The last token's KV was never computed; whole pages are kept: 50 + 23 tokens, 18 pages of 4.
    turn = [*prompt, *answer, 1, 2, 3]
    second = cluster.client.generate(turn, cluster.pair, max_tokens=4)
    second.tokens()
    assert second.cached_tokens == 48, "the prefill node has the first prompt's whole pages"
    assert second.transferred_bytes == (77 - 72) * TOKEN_BYTES
    again = cluster.client.generate(turn, cluster.pair, max_tokens=4)
    assert again.tokens() == second.tokens()
    assert (again.cached_tokens, again.transferred_bytes) == (76, 1 * TOKEN_BYTES)


def test_a_prompt_of_whole_pages_that_d_has_needs_no_byte(cluster: Cluster) -> None:
    (prompt,) = random_prompts(17, [40])
    first = cluster.client.generate(prompt, cluster.pair, max_tokens=6)
    second_tokens = cluster.client.generate(prompt, cluster.pair, max_tokens=6)
    first.tokens(), second_tokens.tokens()
    third = cluster.client.generate(prompt, cluster.pair, max_tokens=6)
    assert third.tokens() == first.tokens()
    assert (third.cached_tokens, third.transferred_bytes) == (36, 0)


def test_tenants_share_nothing(cluster: Cluster) -> None:
    (prompt,) = random_prompts(18, [30])
    for namespace in ("a", "b"):
        request = cluster.client.generate(prompt, cluster.pair, namespace=namespace)
        request.tokens()
        assert (request.cached_tokens, request.transferred_bytes) == (0, 30 * TOKEN_BYTES)
