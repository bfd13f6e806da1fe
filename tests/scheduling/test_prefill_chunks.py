"""Chunks share a token budget; a prefix that several requests need is computed once."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
from cluster import random_prompts, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_bench import PrefillBench
from requests_for_tests import make_request
from tiny import tiny_cluster

from pd.core.errors import AbortedError
from pd.scheduling.prefill import MAX_LOGPROB_CHUNK
from pd.scheduling.request import RequestState
from pd.scheduling.waiting_queue import count_common_prefix, count_reusable

if TYPE_CHECKING:
    from cluster import Cluster

    from pd.scheduling.step import Work


def ranges(works: list[Work]) -> list[tuple[int, int, int]]:
    """First token of each prompt (which names it here), start and stop."""
    return [(int(w.sequence.request.prompt[0]), w.start, w.stop) for w in works]


# ---- budget


def test_several_requests_share_the_budget_of_a_step() -> None:
    bench = PrefillBench(budget=10)
    for number, length in enumerate((6, 7, 12), 1):
        bench.add([number] * length)
    assert ranges(bench.step()) == [(1, 0, 6), (2, 0, 4)]
    assert ranges(bench.step()) == [(2, 4, 7), (3, 0, 7)]
    assert ranges(bench.step()) == [(3, 7, 12)]
    assert bench.step() == []


def test_only_the_chunk_that_ends_the_prompt_samples() -> None:
    bench = PrefillBench(budget=4)
    bench.add([1] * 9, params={"n": 3})
    assert [len(bench.step()[0].samples) for _ in range(3)] == [0, 0, 3]


def test_no_more_requests_run_than_may() -> None:
    bench = PrefillBench(budget=100, max_running=2)
    for number in range(3):
        bench.add([number] * 8)
    assert len(bench.step()) == 2
    assert len(bench.step()) == 1


def test_a_prompt_is_admitted_only_with_pages_for_all_of_it() -> None:
    bench = PrefillBench(pages=8, budget=4, page_size=4)
    bench.add([1] * 20)
    second = bench.add([2] * 16)
    assert ranges(bench.step()) == [(1, 0, 4)]
    assert bench.memory.num_available == 3
    for _ in range(4):
        assert len(bench.step()) == 1
    assert second not in bench.admitted
    assert ranges(bench.step()) == [(2, 0, 4)]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=12), st.integers(1, 40), st.integers(0, 1 << 20))
def test_every_token_is_computed_once_within_the_budget(
    lengths: list[int], budget: int, seed: int
) -> None:
    rng = random.Random(seed)
    bench = PrefillBench(rng.choice(("fcfs", "lpm")), budget=budget)
    for number, length in enumerate(lengths):
        bench.add([number] * length)
    done: dict[int, int] = {}
    for _ in range(sum(lengths) + 1):
        works = bench.step()
        assert sum(work.stop - work.start for work in works) <= budget
        for name, start, stop in ranges(works):
            assert start == done.get(name, 0)
            done[name] = stop
    assert done == dict(enumerate(lengths))


# ---- steps in which a prompt ends


def test_a_prompt_that_ends_waits_for_few_tokens_of_others() -> None:
    bench = PrefillBench(pages=8192)
    bench.add([1] * 9_450)
    bench.add([2] * 9_000)
    assert ranges(bench.step()) == [(1, 0, 8192)], "no prompt ends"
    assert ranges(bench.step()) == [(1, 8192, 9450), (2, 0, 2048 - 1258)]
    assert ranges(bench.step()) == [(2, 790, 8982)]


def test_a_prompt_that_ends_in_the_step_before_makes_none_behind_it_short() -> None:
    """As with overlapping steps: the next is planned before that one is accounted for."""
    bench = PrefillBench(pages=8192)
    bench.add([1] * 600)
    bench.add([2] * 12_000)
    first = bench.scheduler.plan_step(8192, 16)
    assert ranges(first) == [(1, 0, 600), (2, 0, 2048 - 600)]
    assert ranges(bench.scheduler.plan_step(8192, 16)) == [(2, 1448, 1448 + 8192)]


def test_a_short_prompt_waits_for_few_tokens_of_a_long_one() -> None:
    bench = PrefillBench(pages=8192)
    bench.add([1] * 20_000)
    bench.step()
    bench.add([2] * 300)
    assert ranges(bench.step()) == [(2, 0, 300), (1, 8192, 8192 + 1748)]
    bench.add([3] * 3_000)
    assert ranges(bench.step()) == [(3, 0, 3000), (1, 9940, 9940 + 1024)], "all get on"


def test_where_many_tokens_wait_steps_are_longer() -> None:
    bench = PrefillBench(pages=16_384)
    for number in range(5):
        bench.add([number] * 8_000)
    bench.add([5] * 600)
    lengths = []
    while works := bench.step():
        lengths.append(sum(work.stop - work.start for work in works))
    assert lengths[0] == 8_000, "the first ends, and enough is computed"
    assert max(lengths) == 8_000
    many = PrefillBench(pages=16_384)
    for number in range(20):
        many.add([number] * 1_000)
    assert sum(work.stop - work.start for work in many.step()) == 8192


# ---- short prompts beside long ones


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one() -> None:
    bench = PrefillBench(budget=100, pages=2048)
    bench.add([1] * 3000)
    assert ranges(bench.step()) == [(1, 0, 100)]
    bench.add([2] * 30)
    bench.add([3] * 90)
    assert ranges(bench.step()) == [(2, 0, 30), (3, 0, 20), (1, 100, 150)]
    assert ranges(bench.step()) == [(3, 20, 70), (1, 150, 200)]
    assert ranges(bench.step()) == [(3, 70, 90), (1, 200, 280)]
    assert ranges(bench.step()) == [(1, 280, 380)]


def test_a_short_prompt_that_comes_with_a_long_one_runs_in_its_first_step() -> None:
    bench = PrefillBench(budget=100, pages=2048)
    bench.add([1] * 3000)
    bench.add([2] * 30)
    assert ranges(bench.step()) == [(2, 0, 30), (1, 0, 70)]


def test_what_is_cached_of_a_long_prompt_does_not_make_it_long() -> None:
    bench = PrefillBench(budget=100, pages=2048)
    bench.cache([2] * 400)
    bench.add([1] * 3000)
    bench.step()
    bench.add([2] * 420)
    assert ranges(bench.step()) == [(2, 400, 420), (1, 100, 180)]


def test_long_prompts_run_one_after_the_other_and_hold_no_pages_before() -> None:
    bench = PrefillBench(budget=100, pages=2048)
    first, second = bench.add([1] * 250), bench.add([2] * 250)
    assert ranges(bench.step()) == [(1, 0, 100)]
    bench.add([3] * 10)
    assert ranges(bench.step()) == [(3, 0, 10), (1, 100, 190)]
    assert bench.admitted[0] is first and second not in bench.admitted
    assert ranges(bench.step()) == [(1, 190, 250), (2, 0, 40)]


def test_a_far_shorter_long_prompt_goes_beside_a_longer_one() -> None:
    """And before it, but for the half that the oldest keeps; those of a length wait."""
    bench = PrefillBench(budget=100, pages=4096)
    bench.add([1] * 2000)
    assert ranges(bench.step()) == [(1, 0, 100)]
    bench.add([2] * 960)
    bench.add([3] * 300)
    bench.add([4] * 300)
    # 1,900 tokens of the first are left: half of it is more than 300, and less than 960.
    assert ranges(bench.step()) == [(3, 0, 50), (1, 100, 150)]
    for start in range(50, 250, 50):
        assert ranges(bench.step()) == [(3, start, start + 50), (1, 100 + start, 150 + start)]
    assert ranges(bench.step()) == [(3, 250, 300), (1, 350, 400)]
    assert ranges(bench.step()) == [(4, 0, 50), (1, 400, 450)]


def test_few_long_prompts_hold_pages_at_a_time() -> None:
    bench = PrefillBench(budget=100, pages=1 << 14)
    for number in range(12):
        bench.add([number + 1] * (2000 - 150 * number))
    most = 0
    while bench.scheduler.running or len(bench.scheduler.waiting):
        bench.step()
        most = max(most, len(bench.scheduler.running))
    # 2,000, fewer than 1,000, fewer than 500 and so on, down to 350.
    assert 2 <= most <= 4


def test_a_long_prompt_that_was_overtaken_too_often_is_admitted_beside_another() -> None:
    bench = PrefillBench(budget=100, pages=2048, max_overtakes=2)
    bench.add([1] * 1000)
    second = bench.add([2] * 1000)
    bench.step()
    for number in (3, 4, 5):
        bench.add([number] * 10)
    assert ranges(bench.step()) == [(3, 0, 10), (4, 0, 10), (1, 100, 180)]
    assert ranges(bench.step()) == [(5, 0, 10), (1, 180, 270)]
    assert bench.admitted[-2] is second


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 40), st.data())
def test_every_prompt_gets_on_and_a_short_one_waits_for_short_ones_only(
    budget: int, data: st.DataObject
) -> None:
    bench = PrefillBench(budget=budget, pages=2048, max_overtakes=1 << 20)
    share = budget // 2
    arrivals = data.draw(
        st.lists(st.lists(st.integers(1, 4 * budget), max_size=3), min_size=1, max_size=12)
    )
    bench.add([1] * (20 * budget))  # a long one is there all the time
    names = itertools.count(2)
    # Step of arrival, and tokens of short prompts that were there then, its own among them.
    short: dict[int, tuple[int, int]] = {}
    first_token: dict[int, int] = {}
    backlog = 0
    for step in range(250):
        for length in arrivals[step] if step < len(arrivals) else ():
            name = next(names)
            bench.add([name] * length)
            if length <= budget:
                backlog += length
                short[name] = (step, backlog)
        oldest = next(iter(bench.scheduler.running), None)
        before = oldest.sequence.num_computed if oldest is not None else 0
        works = bench.step()
        given_out = sum(work.stop - work.start for work in works)
        assert given_out <= budget
        if bench.scheduler.running or len(bench.scheduler.waiting):
            assert given_out == budget, "a step is full while anything is left"
        if oldest is not None:
            got = sum(w.stop - w.start for w in works if w.sequence.request is oldest)
            assert got >= min(len(oldest.prompt) - before, budget - share)
        for work in works:
            prompt = work.sequence.request.prompt
            backlog -= work.stop - work.start if len(prompt) <= budget else 0
            if work.stop == len(prompt):
                first_token[int(prompt[0])] = step
    assert len(first_token) == next(names) - 1, "everybody ended"
    for name, (arrived, older) in short.items():
        # The last chunk of a long prompt goes before short ones that came after it.
        ended = [n for n, at in first_token.items() if arrived <= at <= first_token[name]]
        tails = budget * sum(n not in short for n in ended)
        assert first_token[name] - arrived < -(-(older + tails) // share)


# ---- shared prefixes

SHARED = list(range(500, 532))


def test_a_wave_computes_its_shared_prefix_once() -> None:
    bench = PrefillBench(budget=16)
    wave = [bench.add([*SHARED, number]) for number in range(6)]
    assert bench.run() == wave
    assert bench.computed_tokens == len(SHARED) + len(wave)
    assert [request.progress.cached_tokens for request in wave] == [0, *[len(SHARED)] * 5]


def test_those_who_share_nothing_do_not_wait_for_a_leader() -> None:
    bench = PrefillBench(budget=16)
    bench.add([*SHARED, 1])
    bench.add([*SHARED, 2])
    bench.add([3] * 4)
    assert ranges(bench.step()) == [(3, 0, 4), (500, 0, 12)]
    assert ranges(bench.step()) == [(500, 12, 28)]
    assert ranges(bench.step()) == [(500, 28, 33)]
    assert ranges(bench.step()) == [(500, 32, 33)]


def test_another_tenant_follows_nobody() -> None:
    bench = PrefillBench(budget=100)
    bench.add([*SHARED, 1])
    bench.add([*SHARED, 1], namespace="tenant")
    assert len(bench.step()) == 2


def test_when_the_leader_is_aborted_a_follower_takes_over() -> None:
    bench = PrefillBench(budget=16)
    leader, *followers = [bench.add([*SHARED, number]) for number in range(4)]
    bench.step()
    assert bench.scheduler.running == [leader]
    leader.state, leader.error = RequestState.ABORTED, AbortedError("test")
    bench.scheduler.remove_request(leader)
    bench.memory.release_pages(leader.sequence)
    bench.run()
    assert bench.admitted == [leader, *followers]
    assert bench.computed_tokens == len(SHARED) + len(followers), "the leader's part was lost"


def test_who_wants_log_probabilities_of_the_prompt_does_not_wait_for_what_it_cannot_use() -> None:
    bench = PrefillBench(budget=100)
    bench.add([*SHARED, 1])
    bench.add([*SHARED, 2], params={"prompt_logprobs_start": 0})
    assert len(bench.step()) == 2


@pytest.mark.parametrize(
    ("start", "reusable"), [(None, 32), (0, 0), (1, 0), (9, 8), (10, 9), (33, 32), (99, 32)]
)
def test_prompt_logprobs_limit_what_may_come_from_the_cache(
    start: int | None, reusable: int
) -> None:
    bench = PrefillBench()
    bench.cache([*SHARED, 1, 2, 3, 4])
    request = bench.add([*SHARED, 1], params={"prompt_logprobs_start": start})
    assert count_reusable(request) == reusable
    bench.step()
    assert request.progress.cached_tokens == reusable // 4 * 4


def test_chunks_with_prompt_logprobs_are_bounded() -> None:
    bench = PrefillBench(budget=8192, pages=1024)
    bench.add(range(1000), params={"prompt_logprobs_start": 0})
    assert ranges(bench.step()) == [(0, 0, MAX_LOGPROB_CHUNK)]
    assert ranges(bench.step()) == [(0, MAX_LOGPROB_CHUNK, 1000)]


def test_many_prompts_with_log_probabilities_have_few_rows_of_logits_in_a_step() -> None:
    bench = PrefillBench(budget=8192, pages=16_384)
    requests = [
        bench.add(range(number, number + 1000), params={"prompt_logprobs_start": 0})
        for number in range(20)
    ]
    bench.add([7] * 100)
    rows = []
    while works := bench.step():
        rows.append(sum(work.num_logits for work in works if work.logprobs_from is not None))
        assert len(rows) > 1 or any(work.logprobs_from is None for work in works), "waits for none"
    assert max(rows) == MAX_LOGPROB_CHUNK
    assert all(request in bench.computed for request in requests)


def test_tokens_before_the_first_log_probability_do_not_make_chunks_short() -> None:
    bench = PrefillBench(budget=8192, pages=2048)
    bench.add(range(4000), params={"prompt_logprobs_start": 3001})
    first, second = bench.step() + bench.step()
    assert (first.start, first.stop) == (0, 3000 + MAX_LOGPROB_CHUNK)
    assert (second.start, second.stop) == (first.stop, 4000)
    assert [work.num_logits for work in (first, second)] == [MAX_LOGPROB_CHUNK, 4000 - first.stop]


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1), ([2], [1], 0), ([1], [1], 1)],
)
def test_common_prefix(a: list[int], b: list[int], length: int) -> None:
    left, right = (make_request(x or [0]).prompt[: len(x)] for x in (a, b))
    assert count_common_prefix(left, right) == length


# ---- on a real node


class CountedTokens:
    """Tokens that a node's forward passes compute."""

    def __init__(self, cluster: Cluster) -> None:
        self.count = 0
        runner = cluster.nodes[0].node.engine.runner
        forward = runner.forward

        def counting(items: Any, *rest: Any) -> Any:
            self.count += sum(len(item.token_ids) for item in items)
            return forward(items, *rest)

        runner.forward = counting


def test_a_real_wave_computes_its_prefix_once_and_says_so() -> None:
    (shared,) = random_prompts(3, [200])
    with tiny_cluster(chunked_prefill_size=32) as cluster:
        counted = CountedTokens(cluster)
        wave = [
            cluster.client.generate([*shared, number], cluster.pair, max_tokens=4)
            for number in range(8)
        ]
        for request in wave:
            request.tokens()
        assert counted.count == 200 + len(wave)
        assert sorted(request.cached_tokens for request in wave) == [0, *[200] * 7]
        cluster.wait_idle()


def test_a_real_follower_takes_over_from_an_aborted_leader() -> None:
    (shared,) = random_prompts(4, [800])
    with tiny_cluster(chunked_prefill_size=8) as cluster:
        leader = cluster.client.generate([*shared, 1], cluster.pair, max_tokens=4)
        running = cluster.prefill[0].node.scheduler.prefill.running
        wait_until(lambda: running, 5)
        followers = [
            cluster.client.generate([*shared, number], cluster.pair, max_tokens=4)
            for number in (2, 3)
        ]
        cluster.client.abort(leader)
        first, second = (request.tokens() for request in followers)
        assert not leader.choices[0].tokens, "the leader was too fast for this test"
        again = [
            cluster.client.generate([*shared, number], cluster.pair, max_tokens=4)
            for number in (2, 3)
        ]
        assert [request.tokens() for request in again] == [first, second]
        cluster.wait_idle()


def test_prompt_logprobs_are_complete_whatever_is_cached() -> None:
    (prompt,) = random_prompts(5, [50])
    with tiny_cluster(chunked_prefill_size=16) as cluster:
        found: list[Any] = []
        requests: list[Any] = []
        for start in (0, 0, 20, 45):
            request = cluster.client.generate(
                prompt, cluster.pair, max_tokens=2, prompt_logprobs_start=start, top_logprobs=2
            )
            request.tokens()
            requests.append(request)
            found.append(request.prompt_logprobs)
            assert [entry.token_id for entry in found[-1]] == prompt[start:]
        assert [request.cached_tokens for request in requests] == [0, 0, 16, 44]
        for start, entries in ((0, found[1]), (20, found[2]), (45, found[3])):
            for entry, first in zip(entries, found[0][start:], strict=True):
                assert entry.logprob == pytest.approx(first.logprob, abs=1e-4)
        assert found[0][0].logprob is None
