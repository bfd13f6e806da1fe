"""Theorem 3.1 of Zheng et al. (SGLang, 2024): one request after the other, in the order of a walk
through the tree of all prompts, reach the best hit rate of any order, even if the cache holds no
more than the longest of them."""

from __future__ import annotations

import itertools
import random

import pytest
from prefill_bench import PrefillBench

OPTIMAL = ("lpm", "dfs-weight")


def draw_prompts(chance: random.Random, count: int) -> list[tuple[int, ...]]:
    """Prompts that branch from each other at random places; some continue others or equal them."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(count):
        trunk = chance.choice(prompts) if prompts and chance.random() < 0.8 else ()
        kept = trunk[: chance.randint(0, len(trunk))]
        tail = tuple(chance.randint(1, 3) for _ in range(chance.randint(0, 9)))
        prompts.append((*kept, *tail) or (1,))
    return prompts


def count_computed(prompts: list[tuple[int, ...]]) -> int:
    """Count the tokens that an unlimited cache computes in this order. The last token of a prompt
    is always computed."""
    known: set[tuple[int, ...]] = set()
    computed = 0
    for prompt in prompts:
        beginnings = [prompt[:length] for length in range(1, len(prompt) + 1)]
        computed += max(1, sum(beginning not in known for beginning in beginnings))
        known.update(beginnings)
    return computed


def count_least(prompts: list[tuple[int, ...]]) -> int:
    """Count the tokens that the best order computes. A prompt that another one begins with goes
    first, because afterwards its last token would be computed a second time."""
    return count_computed(sorted(prompts, key=len))


def run_in_policy(policy: str, prompts: list[tuple[int, ...]], pages: int) -> int:
    bench = PrefillBench(policy, max_overtakes=1 << 20, pages=pages, page_size=1, max_running=1)
    for prompt in prompts:
        bench.add(prompt)
    bench.run()
    return bench.computed_tokens


def test_the_shortest_first_is_the_best_of_all_orders(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(20):
        prompts = draw_prompts(chance, chance.randint(1, 6))
        best = min(count_computed(list(order)) for order in itertools.permutations(prompts))
        assert count_least(prompts) == best, prompts


@pytest.mark.parametrize("policy", OPTIMAL)
def test_a_cache_as_large_as_the_longest_prompt_is_enough(policy: str, seed: int) -> None:
    """Where prompts are part of others, each may cost one token: the last one, which we compute
    again."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(30):
        prompts = draw_prompts(chance, chance.randint(1, 40))
        longest = max(len(prompt) for prompt in prompts)
        parts = sum(
            any(other[: len(prompt)] == prompt and (i != j) for j, other in enumerate(prompts))
            for i, prompt in enumerate(prompts)
        )
        least = count_least(prompts)
        computed = run_in_policy(policy, prompts, longest)
        assert least <= computed <= least + parts, (policy, prompts)


def test_orders_that_ignore_the_tree_compute_more() -> None:
    """Two documents, asked about in turn, and a cache for one of them."""
    prompts = [(*[document] * 30, question) for question in range(5, 15) for document in (1, 2)]
    least = count_least(prompts)
    assert least == 2 * 30 + 20
    for policy in OPTIMAL:
        assert run_in_policy(policy, prompts, 31) == least
    for policy in ("fcfs", "random"):
        assert run_in_policy(policy, prompts, 31) > 2 * least
