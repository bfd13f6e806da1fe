"""In which order waiting requests run, and that nobody starves."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prefill_bench import PrefillBench
from requests_for_tests import make_request

from pd.core.errors import UsageError
from pd.radix import RadixCache
from pd.scheduling.policy import POLICIES
from pd.scheduling.waiting_queue import WINDOW, WaitingQueue

DOCUMENT, STORY = list(range(1000, 1016)), list(range(2000, 2016))


def order(bench: PrefillBench, requests: dict[str, Any]) -> list[str]:
    names = {id(request): name for name, request in requests.items()}
    return [names[id(request)] for request in bench.run()]


def test_fcfs_takes_the_oldest() -> None:
    bench = PrefillBench("fcfs", max_running=1)
    bench.cache(DOCUMENT)
    requests = {
        "a": bench.add([1] * 8, priority=-1),
        "b": bench.add([*DOCUMENT, 2], priority=9),
        "c": bench.add([3] * 8, params={"max_tokens": 99}),
    }
    assert order(bench, requests) == ["a", "b", "c"]


def test_lpm_takes_the_longest_cached_prefix_and_then_the_oldest() -> None:
    bench = PrefillBench("lpm", max_running=1)
    bench.cache(DOCUMENT)
    bench.cache(STORY[:8])
    requests = {
        "none": bench.add([1] * 8),
        "short": bench.add([*STORY, 2]),
        "none too": bench.add([3] * 8),
        "long": bench.add([*DOCUMENT, 4]),
        "another tenant's": bench.add([*DOCUMENT, 5], namespace="tenant"),
    }
    expected = ["long", "short", "none", "none too", "another tenant's"]
    assert order(bench, requests) == expected


def test_lof_takes_the_longest_output() -> None:
    bench = PrefillBench("lof", max_running=1)
    requests = {
        str(limit): bench.add([limit] * 4, params={"max_tokens": limit}) for limit in (5, 90, 1, 30)
    }
    assert order(bench, requests) == ["90", "30", "5", "1"]


def test_priority_takes_the_most_urgent_and_then_the_oldest() -> None:
    bench = PrefillBench("priority", max_running=1)
    requests = {
        f"{number}: {priority}": bench.add([number] * 4, priority=priority)
        for number, priority in enumerate((0, 5, -3, 5, 1))
    }
    assert order(bench, requests) == ["1: 5", "3: 5", "4: 1", "0: 0", "2: -3"]


def test_dfs_weight_ends_the_branch_used_last_and_goes_on_where_most_wait() -> None:
    bench = PrefillBench()
    trunk, left, right = DOCUMENT[:8], DOCUMENT, [*DOCUMENT[:8], *STORY[8:]]
    for tokens in (left, [7] * 8, right, [8] * 8, left):
        bench.cache(tokens)
    prompts = {
        "nothing cached": [1] * 8,
        "left": [*left, 1],
        "trunk": [*trunk, 2],
        "right 1": [*right, 3],
        "seven": [*[7] * 8, 4],
        "right 2": [*right, 5],
        "half of right": [*right[:12], 6],
        "eight 1": [*[8] * 8, 7],
        "eight 2": [*[8] * 8, 8],
    }
    waiting = [make_request(prompt, rid=name) for name, prompt in prompts.items()]
    found = [request.rid for request in POLICIES["dfs-weight"](waiting, bench.memory.radix)]
    in_order = ["left", "right 1", "right 2", "half of right", "trunk"]
    assert found == [*in_order, "eight 1", "eight 2", "seven", "nothing cached"]


def test_random_is_an_order_of_its_own_that_stays() -> None:
    waiting = [make_request([number], rid=str(number)) for number in range(20)]
    radix = RadixCache(4)
    chosen = POLICIES["random"](waiting, radix)
    assert chosen == POLICIES["random"](waiting[::-1], radix)
    assert chosen not in (waiting, waiting[::-1]) and set(chosen) == set(waiting)


def test_without_a_prefix_cache_a_prompt_waits_for_no_other_and_is_computed_whole() -> None:
    bench = PrefillBench(radix_cache="off")
    for last in (1, 2, 3):
        bench.add([*DOCUMENT, last])
    bench.step()
    assert bench.computed_tokens == 3 * (len(DOCUMENT) + 1)
    assert not bench.memory.radix.list_pages().size


@pytest.mark.parametrize("policy", POLICIES)
def test_looking_at_the_order_leaves_no_trace_in_the_tree(policy: str) -> None:
    bench = PrefillBench(policy)
    bench.cache(DOCUMENT)
    radix = bench.memory.radix
    before = [(n.key, n.hits, n.last_used) for n in radix.iter_nodes()], radix.lookup_tokens
    waiting = [make_request([*DOCUMENT[:n], 1]) for n in (4, 6, 16)]
    POLICIES[policy](waiting, radix)
    assert (
        [(n.key, n.hits, n.last_used) for n in radix.iter_nodes()],
        radix.lookup_tokens,
    ) == before


def test_an_unknown_policy_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"--schedule-policy must be one of lpm.*not best"):
        WaitingQueue("best", RadixCache(4), 64)


# ---- nobody starves


def steps_until_lonely_runs(max_overtakes: int, steps: int = 60) -> int | None:
    """A request that shares nothing, among an endless stream of those that share a prefix."""
    bench = PrefillBench("lpm", max_overtakes=max_overtakes, max_running=1)
    bench.cache(DOCUMENT)
    lonely = bench.add([1] * 8)
    for number in range(steps):
        bench.add([*DOCUMENT, 100 + number])
        bench.step()
        if lonely in bench.admitted:
            assert bench.admitted.index(lonely) == lonely.progress.num_overtakes
            return number
    return None


def test_greedy_prefix_first_starves_without_a_bound_and_does_not_with_it() -> None:
    assert steps_until_lonely_runs(max_overtakes=1 << 30) is None
    assert steps_until_lonely_runs(max_overtakes=5) == 5


def test_one_step_that_admits_many_keeps_the_bound() -> None:
    bench = PrefillBench("lpm", max_overtakes=3)
    bench.cache(DOCUMENT)
    lonely = bench.add([1] * 8)
    for number in range(10):
        bench.add([*DOCUMENT, 100 + number])
    bench.step()
    assert bench.admitted.index(lonely) == 3


def test_no_overtakes_at_all_is_fcfs() -> None:
    bench = PrefillBench("priority", max_overtakes=0)
    sent = [bench.add([number] * 4, priority=number) for number in range(6)]
    assert bench.run() == sent


def test_who_is_overdue_gets_the_memory_that_comes_free() -> None:
    # Small requests always fit; the big one fits only when they let it.
    bench = PrefillBench(
        max_overtakes=4, pages=10, will_leave=lambda request: True, budget=4, page_size=4
    )
    bench.add([900] * 8)
    bench.step()
    big = bench.add(range(10, 50))
    for number in range(60):
        bench.add([1000 + number] * 8)
        bench.step()
        if big in bench.admitted:
            return
    raise AssertionError(f"overtaken {big.progress.num_overtakes} times")


@settings(max_examples=25, deadline=None)
@example(seed=38967, policy="dfs-weight", max_overtakes=1, tight=True)
@given(
    seed=st.integers(0, 1 << 30),
    policy=st.sampled_from(sorted(POLICIES)),
    max_overtakes=st.integers(0, 6),
    tight=st.booleans(),
)
def test_nobody_is_overtaken_more_often_than_the_bound(
    seed: int, policy: str, max_overtakes: int, tight: bool
) -> None:
    rng = random.Random(seed)
    bench = PrefillBench(
        policy,
        max_overtakes=max_overtakes,
        pages=12 if tight else 4096,
        budget=rng.choice((5, 40)),
        max_running=rng.choice((1, 3, 100)),
        will_leave=rng.choice((None, lambda request: True)),
    )
    documents = [[1000 * d + i for i in range(16)] for d in range(1, 4)]
    for document in documents:
        bench.cache(document)
    fresh = itertools.count(100_000)  # nothing is shared that is not cached: nobody follows
    arrived, overtaken = [], {}
    for _ in range(60):
        for _ in range(rng.choice((0, 0, 1, 2))):
            prefix = rng.choice([[], *documents]) if not tight else []
            tail = [next(fresh)] * rng.randrange(1, 40 - len(prefix))
            request = bench.add(
                [*prefix, *tail],
                priority=rng.randrange(3),
                params={"max_tokens": rng.randrange(1, 50)},
            )
            arrived.append(request)
            overtaken[request] = 0
        before = len(bench.admitted)
        bench.step()
        for position, request in enumerate(bench.admitted[before:], before):
            for older in arrived[: arrived.index(request)]:
                if older not in bench.admitted[:position]:
                    overtaken[older] += 1
    assert max(overtaken.values(), default=0) <= max_overtakes
    bench.run()


# ---- long queues


def test_requests_with_memory_at_their_decode_node_run_though_many_older_ones_cannot() -> None:
    # P's memory is full of prompts that wait for D, and D's of rooms that P has yet to compute.
    reserved = []
    bench = PrefillBench(pages=8, keep=True, will_leave=lambda request: request in reserved)
    bench.sending.park_prompts = lambda pages: [
        bench.memory.release_pages(bench.computed.pop().sequence) for _ in range(2)
    ]
    for number in range(WINDOW + 10):
        bench.add([number] * 16)
    bench.step()
    assert len(bench.computed) == 2
    behind = bench.add([9999] * 16)
    bench.step()
    assert behind not in bench.admitted
    reserved.append(behind)
    bench.step()
    assert behind in bench.admitted


def test_a_cached_prefix_is_no_memory_for_the_rest_of_its_prompt() -> None:
    # Two of eight pages are cached, the others belong to a computed prompt that waits for D.
    reserved = []
    bench = PrefillBench(pages=8, keep=True, will_leave=lambda request: request in reserved)
    bench.sending.park_prompts = lambda pages: bench.memory.release_pages(
        bench.computed.pop().sequence
    )
    document = list(range(8))
    bench.cache(document)
    bench.add([99] * 24)
    bench.step()
    assert len(bench.computed) == 1
    behind = bench.add([*document, *[98] * 8])
    reserved.append(behind)
    bench.step()
    assert behind in bench.admitted


def test_who_was_admitted_before_comes_first_again() -> None:
    queue = WaitingQueue("fcfs", RadixCache(4), 64)
    first, second, again = (make_request([i] * 4) for i in range(3))
    queue.add_request(first)
    queue.add_request(second)
    queue.put_back(again)
    assert list(queue) == [again, first, second]
    assert list(queue.iter_candidates()) == [again, first, second]
