"""The colocated baseline: prompts and answers in one forward pass over one pool."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from cluster import random_prompts, wait_until
from tiny import tiny_cluster

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster import Cluster, Pending


class Steps:
    """The items of each forward pass: (tokens, whether it continues a known answer)."""

    def __init__(self, cluster: Cluster) -> None:
        self.sizes: list[list[int]] = []
        runner = cluster.unified[0].node.engine.runner
        forward = runner.forward

        def watching(items: Any, *rest: Any) -> Any:
            self.sizes.append([len(item.token_ids) for item in items])
            return forward(items, *rest)

        runner.forward = watching


def test_chunks_and_answers_are_computed_in_one_forward_pass() -> None:
    with tiny_cluster(0, 0, 1, chunked_prefill_size=17) as cluster:
        steps = Steps(cluster)
        short, long = random_prompts(0, [8, 160])
        first = cluster.client.generate(short, cluster.unified, max_tokens=300)
        wait_until(lambda: first.choices[0].tokens, 5)
        cluster.client.generate(long, cluster.unified, max_tokens=2).tokens()
        mixed = [sizes for sizes in steps.sizes if len(sizes) > 1 and max(sizes) > 1]
        assert [sizes for sizes in mixed if sizes == [1, 16]], "an answer goes on beside a chunk"
        assert all(sum(sizes) <= 17 for sizes in steps.sizes), "both share the step's budget"
        cluster.client.abort(first)
        cluster.wait_idle()


def test_a_long_prompt_does_not_stop_answers_that_run() -> None:
    with tiny_cluster(0, 0, 1, chunked_prefill_size=33) as cluster:
        short, long = random_prompts(1, [8, 900])
        first = cluster.client.generate(short, cluster.unified, max_tokens=900)
        wait_until(lambda: len(first.choices[0].tokens) > 2, 5)
        before = len(first.choices[0].tokens)
        cluster.client.generate(long, cluster.unified, max_tokens=1).tokens()
        assert len(first.choices[0].tokens) - before >= 900 // 33 - 2
        cluster.client.abort(first)
        cluster.wait_idle()


@pytest.mark.parametrize("split", [True, False])
def test_short_prompts_are_answered_before_a_long_one_that_came_first(split: bool) -> None:
    counts = (1, 1, 0) if split else (0, 0, 1)
    with tiny_cluster(*counts, chunked_prefill_size=16) as cluster:
        pair = cluster.pair if split else cluster.unified
        long, *short = random_prompts(4, [1000, 5, 16, 12])
        first = cluster.client.generate(long, pair, max_tokens=2)
        others = [cluster.client.generate(prompt, pair, max_tokens=2) for prompt in short]
        assert [len(request.tokens()) for request in (first, *others)] == [2] * 4
        began = [request.choices[0].first_at or 0.0 for request in (first, *others)]
        assert max(began[1:]) < began[0]
        cluster.wait_idle()


def test_it_answers_what_a_split_pair_answers() -> None:
    with tiny_cluster(1, 1, 1, chunked_prefill_size=32) as cluster:
        prompts = list(random_prompts(2, [1, 3, 4, 5, 31, 32, 33, 100]))
        params = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "logprobs": True, "n": 2}
        both = [
            [cluster.client.generate(prompt, nodes, **params) for prompt in prompts]
            for nodes in (cluster.unified, cluster.pair)
        ]
        for unified, split in zip(*both, strict=True):
            assert unified.result() == split.result()
            for a, b in zip(unified.choices, split.choices, strict=True):
                assert a.finish == b.finish
                for position, entry in a.logprobs.items():
                    assert entry.logprob == pytest.approx(b.logprobs[position].logprob, abs=1e-4)
        cluster.wait_idle()


def test_token_1_comes_once_and_says_what_was_cached() -> None:
    with tiny_cluster(0, 0, 1) as cluster:
        (prompt,) = random_prompts(3, [22])
        for cached in (0, 20):
            request = cluster.client.generate(prompt, cluster.unified, max_tokens=3)
            request.tokens()
            assert [output.position for output in request.outputs] == [0, 1, 2]
            assert [output.cached_tokens for output in request.outputs] == [cached, None, None]
            assert request.transferred_bytes is None


def test_prompts_leave_room_for_answers_to_grow() -> None:
    # Without that, each new prompt would throw an answer out of the pool.
    with tiny_cluster(0, 0, 1, kv_cache_tokens=160) as cluster:
        node = cluster.unified[0].node
        prompts = list(random_prompts(4, [30] * 8))
        sent = [cluster.client.generate(p, cluster.unified, max_tokens=40) for p in prompts]
        assert [len(request.tokens(30)) for request in sent] == [40] * 8
        assert node.core.metrics.retractions._value.get() == 0
        cluster.wait_idle()


@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.full), 8])
def test_many_streams_with_retraction_and_aborts_lose_nothing(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [*(rng.randrange(1, 60) for _ in range(25)), 60, 60]
    counts = [*(rng.randrange(1, 50) for _ in range(25)), 50, 50]
    prompts = list(random_prompts(seed, lengths))
    with tiny_cluster(0, 0, 1) as cluster:
        expected = [
            cluster.client.generate(prompt, cluster.unified, max_tokens=count).tokens()
            for prompt, count in zip(prompts, counts, strict=True)
        ]
    settings = {"kv_cache_tokens": 160, "reserved_decode_tokens": 2, "chunked_prefill_size": 48}
    with tiny_cluster(0, 0, 1, page_size=page_size, **settings) as cluster:
        node = cluster.unified[0].node

        def send(indices: Iterable[int]) -> dict[int, Pending]:
            return {
                i: cluster.client.generate(prompts[i], cluster.unified, max_tokens=counts[i])
                for i in indices
            }

        sent = send(range(len(prompts)))
        for index in range(0, 25, 10):
            cluster.client.abort(sent.pop(index))
        for index, request in sent.items():
            assert request.tokens(60) == expected[index]
        # Most loads retract. In an empty pool these two begin together and cannot end together.
        for index, request in send((25, 26)).items():
            assert request.tokens(60) == expected[index]
        assert node.core.metrics.retractions._value.get() > 0
        cluster.wait_idle()
        assert node.scheduler.decode._host_used == 0
