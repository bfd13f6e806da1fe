"""The optimum of :mod:`pd.bench.programs.optimum` is the best of all orders."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from pd.bench.programs.optimum import CacheRequest, replay_best_order, replay_sent_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PAGE_SIZES = (1, 2, 3)


def draw_tokens(rng: random.Random, least: int, most: int) -> tuple[int, ...]:
    """Draw tokens of which many are equal, so that prompts share beginnings."""
    return tuple(rng.choices((1, 2), k=rng.randint(least, most)))


def draw_request(rng: random.Random, tokens: tuple[int, ...]) -> CacheRequest:
    """Make a request with this prompt. A third of them want log probabilities from early on."""
    reusable = len(tokens) - 1 if rng.random() < 0.7 else rng.randrange(len(tokens))
    answers = tuple(draw_tokens(rng, 0, 4) for _ in range(rng.randrange(3)))
    return CacheRequest(tokens, reusable, answers)


def count_hits(requests: Iterable[CacheRequest], page_size: int, *, answers_stay: bool) -> int:
    """Count the hits of an order by comparing each prompt with all texts before it."""
    texts: list[tuple[int, ...]] = []
    hits = 0
    for request in requests:
        lengths = range(0, request.reusable + 1, page_size)
        hits += max(
            length
            for length in lengths
            if length == 0 or any(text[:length] == request.token_ids[:length] for text in texts)
        )
        texts.append(request.token_ids)
        if answers_stay:
            texts += [request.token_ids + answer for answer in request.answers]
    return hits


def is_causal(order: Sequence[CacheRequest], causes: dict[int, int]) -> bool:
    places = {id(request): place for place, request in enumerate(order)}
    return all(places[cause] < places[effect] for effect, cause in causes.items())


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("answers_stay", [False, True])
def test_no_order_of_requests_has_more_hits(page_size: int, answers_stay: bool, seed: int) -> None:
    rng = random.Random(seed)
    gains = 0
    for _ in range(60):
        requests = [draw_request(rng, draw_tokens(rng, 1, 9)) for _ in range(rng.randint(1, 5))]
        every = [
            count_hits(order, page_size, answers_stay=answers_stay)
            for order in itertools.permutations(requests)
        ]
        replay = replay_best_order(requests, page_size, answers_stay=answers_stay)
        assert replay.hit_tokens == max(every), requests
        assert replay.prompt_tokens == sum(len(request.token_ids) for request in requests)
        gains += max(every) > min(every)
    assert gains, "the order never mattered"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_orders_in_which_answers_come_before_their_use_reach_the_optimum(
    page_size: int, seed: int
) -> None:
    """Chains of prompts, each of which continues an answer to the one before it."""
    rng = random.Random(seed)
    for _ in range(60):
        requests: list[CacheRequest] = []
        causes: dict[int, int] = {}
        for length in (3, 2):
            tokens, cause = draw_tokens(rng, 1, 4), None
            for _ in range(length):
                answer = draw_tokens(rng, 1, 4)
                requests.append(CacheRequest(tokens, len(tokens) - 1, (answer,)))
                if cause is not None:
                    causes[id(requests[-1])] = cause
                cause = id(requests[-1])
                tokens = tokens + answer + draw_tokens(rng, 1, 3)
        best = max(
            count_hits(order, page_size, answers_stay=True)
            for order in itertools.permutations(requests)
            if is_causal(order, causes)
        )
        assert replay_best_order(requests, page_size, answers_stay=True).hit_tokens == best


def test_a_chat_hits_its_own_answers_only_where_they_stay() -> None:
    first = CacheRequest((1, 2, 3), 2, ((4, 5),))
    second = CacheRequest((1, 2, 3, 4, 5, 6, 7), 6, ())
    requests = [second, first]
    unified = replay_best_order(requests, 1, answers_stay=True)
    split = replay_best_order(requests, 1, answers_stay=False)
    assert (unified.hit_tokens, unified.distinct_tokens) == (5, 7)
    assert (split.hit_tokens, split.distinct_tokens) == (3, 7)
    pages = replay_best_order(requests, 2, answers_stay=True)
    assert (pages.hit_tokens, pages.distinct_tokens) == (4, 6)


def count_evicting_hits(
    requests: Sequence[CacheRequest], page_size: int, num_pages: int, *, answers_stay: bool
) -> int:
    """Find the most hits of requests in this order by trying everything that can be evicted."""

    def list_pages(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [tokens[:end] for end in range(page_size, len(tokens) + 1, page_size)]

    # The hits so far, by the pages in the pool.
    pools: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
    for request in requests:
        needed = set(list_pages(request.token_ids))
        for answer in request.answers if answers_stay else ():
            needed.update(list_pages(request.token_ids + answer))
        later: dict[frozenset[tuple[int, ...]], int] = {}
        for pool, hits in pools.items():
            path = list_pages(request.token_ids[: request.reusable])
            new = len(list(itertools.takewhile(pool.__contains__, path)))
            others = pool - needed
            for count in range(min(len(others), num_pages - len(needed)) + 1):
                for kept in itertools.combinations(sorted(others), count):
                    state = frozenset(needed | set(kept))
                    later[state] = max(later.get(state, 0), hits + new)
        pools = later
    return max(pools.values()) * page_size


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("answers_stay", [False, True])
def test_no_eviction_gives_requests_in_their_order_more_hits(
    page_size: int, answers_stay: bool, seed: int
) -> None:
    rng = random.Random(seed)
    losses = 0
    for _ in range(100):
        requests = []
        for _ in range(rng.randint(4, 8)):
            tokens = draw_tokens(rng, 1, 4 * page_size)
            answers = (draw_tokens(rng, 0, 2 * page_size),)
            requests.append(CacheRequest(tokens, rng.randrange(len(tokens)), answers))
        longest = max(
            len(request.token_ids) + answers_stay * len(request.answers[0]) for request in requests
        )
        num_pages = max(1, longest // page_size) + rng.randint(0, 1)
        replay = replay_sent_order(requests, page_size, num_pages, answers_stay=answers_stay)
        assert replay == count_evicting_hits(
            requests, page_size, num_pages, answers_stay=answers_stay
        ), requests
        unlimited = replay_sent_order(requests, page_size, 1000, answers_stay=answers_stay)
        assert unlimited == count_hits(requests, page_size, answers_stay=answers_stay)
        losses += replay < unlimited
    assert losses, "the pool never was too small"
