"""How many tokens are drafted."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster import TokenClient, random_prompts
from counters import counter
from drafters import Oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCAB_SIZE, tiny_node

from pd import assembly
from pd.engine.draft_tree import make_chain
from pd.speculative.adaptation import MOST_REST_STEPS, REST_STEPS, DraftLengths, StepCosts

if TYPE_CHECKING:
    from pd.launch import NodeServer

SIZES = np.array([1.0, 4.0, 16.0, 64.0])


def costs(
    plain: list[float], verify: list[float], draft: float = 0.0, deeper: float | None = None
) -> StepCosts:
    more = draft if deeper is None else deeper
    return StepCosts(SIZES, np.array(plain), np.array(verify), np.full(4, draft), np.full(4, more))


# Steps as of a GPU, whose time hardly depends on the tokens, and as of a CPU.
FLAT = costs([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.05])
LINEAR = costs([1.0, 4.0, 16.0, 64.0], [1.0, 4.0, 16.0, 64.0])


def keys(count: int) -> list[Any]:
    return [object() for _ in range(count)]


def test_where_more_tokens_cost_nothing_all_are_drafted() -> None:
    assert DraftLengths(FLAT).choose_lengths(keys(3), [4, 2, 1]) == [4, 2, 1]


def test_where_each_token_costs_as_much_as_a_step_none_is_drafted_and_the_drafter_rests() -> None:
    """Each time for longer: a step before which it is asked cannot be launched ahead."""
    lengths = DraftLengths(LINEAR)
    some, rest = keys(2), REST_STEPS
    while rest <= MOST_REST_STEPS:
        assert lengths.choose_lengths(some, [4, 4]) == [0, 0]
        for _ in range(rest):
            assert lengths.is_resting
            assert lengths.choose_lengths([], []) == []
        assert not lengths.is_resting
        rest *= 2
    assert lengths.choose_lengths(some, [4, 4]) == [0, 0]
    for _ in range(MOST_REST_STEPS):
        lengths.choose_lengths([], [])
    assert not lengths.is_resting


def test_a_draft_that_pays_makes_the_next_rest_short_again() -> None:
    lengths = DraftLengths(costs([1.0, 1.0, 1.2, 3.0], [1.0, 1.0, 1.2, 3.0], draft=0.4))
    rests = []
    for kept in ([], range(4)) * 2:
        (only,) = keys(1)
        for _ in range(400):
            (length,) = lengths.choose_lengths([only], [4])
            if length:
                lengths.observe_draft(only, make_chain(length), kept[:length])
            elif not lengths.is_resting:
                rests.append(0)
            elif rests:
                rests[-1] += 1
    assert REST_STEPS in rests[rests.index(MOST_REST_STEPS) :], rests


def test_sequences_are_drafted_for_as_their_drafts_were_accepted() -> None:
    lengths = DraftLengths(costs([1.0, 1.0, 1.2, 3.0], [1.0, 1.0, 1.2, 3.0]))
    good, bad = keys(2)
    for _ in range(30):
        lengths.choose_lengths([good, bad], [8, 8])
        lengths.observe_draft(good, make_chain(8), range(8))
        lengths.observe_draft(bad, make_chain(8), [])
    most, least = lengths.choose_lengths([good, bad], [8, 8])
    assert most == 8
    assert least <= 1


def test_of_a_new_sequence_is_believed_what_was_seen_of_others() -> None:
    """Short answers end before much is seen of them."""
    table = costs([1.0, 1.0, 1.5, 6.0], [1.0, 1.2, 1.5, 6.0], 0.4, 0.25)
    (at_first,) = DraftLengths(table).choose_lengths(keys(1), [8])
    assert 1 < at_first < 8
    for accepted in (range(8), []):
        lengths = DraftLengths(table)
        for old in keys(10):
            for _ in range(3):
                (length,) = lengths.choose_lengths([old], [8])
                if length:
                    lengths.observe_draft(old, make_chain(length), accepted[:length])
            lengths.forget_sequence(old)
        while lengths.is_resting:
            lengths.choose_lengths([], [])
        (chosen,) = lengths.choose_lengths(keys(1), [8])
        assert chosen == 8 if accepted else chosen < at_first


def test_a_sequence_is_tried_again() -> None:
    lengths = DraftLengths(costs([1.0, 1.0, 1.5, 6.0], [1.0, 1.0, 1.5, 6.0], draft=0.4))
    (bad,) = keys(1)
    chosen = []
    for _ in range(1000):
        (length,) = lengths.choose_lengths([bad], [4])
        chosen.append(length)
        if length:
            lengths.observe_draft(bad, make_chain(length), [])
    tries = [step for step, length in enumerate(chosen) if length]
    assert 2 < len(tries) < 200
    assert tries[-1] > 700


def test_a_drafter_that_finds_nothing_is_hardly_asked() -> None:
    """Its steps cannot be launched ahead, which makes them slower."""
    lengths = DraftLengths(costs([1.0, 1.0, 1.5, 6.0], [1.0, 1.2, 1.5, 6.0], draft=0.1))
    some, asked = keys(4), 0
    for _ in range(2000):
        chosen = lengths.choose_lengths(some, [4] * 4)
        asked += any(chosen)
        for each, length in zip(some, chosen, strict=True):
            if length:
                lengths.observe_no_draft(each)
    assert 2 < asked < 400


@pytest.mark.parametrize(("slower", "drafts"), [(1.0, True), (2.5, False)])
def test_the_time_of_steps_in_the_running_node_decides(slower: float, drafts: bool) -> None:
    """With overlap a plain step takes less than it did alone."""
    table = costs([1.0, 1.0, 1.5, 6.0], [1.0, 1.1, 1.5, 6.0], draft=0.1)
    lengths, (only,) = DraftLengths(table), keys(1)
    counts = {True: 0, False: 0}
    for step in range(1000):
        (length,) = lengths.choose_lengths([only], [4])
        if length:  # half of the guesses are right
            lengths.observe_draft(only, make_chain(length), range(min(length, step % 2)))
            lengths.observe_time(slower * (1.1 + 0.1 * length), 1, [length])
        else:
            lengths.observe_time(1.0, 1, None)
        counts[bool(length)] += 1
    assert (counts[True] > 800) is drafts, counts
    assert counts[True] > 2, "it is tried again"
    assert drafts or counts[False] > 800, counts


def test_what_pays_for_many_sequences_is_found_not_to_pay_for_one() -> None:
    """A step with drafts waits for the host, which takes as long for one sequence as for many."""
    table = costs([1.0, 1.0, 5.0, 5.0], [1.0, 1.1, 5.0, 5.0], draft=0.1)
    lengths = DraftLengths(table)
    drafted = []
    for size, steps in ((16, 300), (1, 100), (16, 100)):
        some, count = keys(size), 0
        for step in range(steps):
            chosen = lengths.choose_lengths(some, [4] * size)
            for each, length in zip(some, chosen, strict=True):
                if length:  # half of the guesses are right
                    lengths.observe_draft(each, make_chain(length), range(min(length, step % 2)))
            plain = float(table.interpolate_costs(table.plain, size))
            seconds = plain if not any(chosen) else plain + 0.1 + 0.1 * max(chosen) + 1.0
            lengths.observe_time(seconds, size, [length for length in chosen if length] or None)
            count += any(chosen)
        drafted.append(count)
    many, one, again = drafted
    assert many > 250, drafted
    assert 2 < one < 40, drafted
    assert again > 50, drafted


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.05, 0.95), st.integers(0, 3)), min_size=1, max_size=3),
    st.lists(st.floats(0.1, 3.0), min_size=8, max_size=8),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_the_choice_is_the_best_of_all(
    asked: list[tuple[float, int]], seconds: list[float], draft: float, deeper: float
) -> None:
    plain, verify = np.cumsum(seconds[:4]), np.cumsum(seconds[4:]) + 0.01
    table = costs(plain.tolist(), verify.tolist(), draft, deeper)
    shares, limits = np.array([a[0] for a in asked]), np.array([a[1] for a in asked])
    batch = len(asked)

    def rate(chosen: tuple[int, ...]) -> float:
        if not any(chosen):
            return float(batch / table.interpolate_costs(table.plain, batch))
        tokens = batch + sum(
            share**place
            for share, length in zip(shares, chosen, strict=True)
            for place in range(1, length + 1)
        )
        cost = table.interpolate_costs(table.verify, float(batch + sum(chosen)))
        return float(tokens / (cost + draft + (max(chosen) - 1) * deeper))

    best = max(rate(each) for each in itertools.product(*(range(n + 1) for n in limits)))
    mine = rate(
        tuple(DraftLengths(table)._find_best_lengths(shares, limits, np.ones(batch)).tolist())
    )
    assert mine == pytest.approx(best, rel=1e-9)


def served(server: NodeServer, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    """Answers to prompts, of which two are asked at a time."""
    client = TokenClient([server])
    answers: list[list[int]] = []
    try:
        for first in range(0, len(prompts), 2):
            two = prompts[first : first + 2]
            asked = [client.generate(prompt, [server], **params) for prompt in two]
            answers += [pending.tokens() for pending in asked]
        return answers
    finally:
        client.close()


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_on_a_node(monkeypatch: pytest.MonkeyPatch, overlap: str) -> None:
    """Right drafts are made; after wrong ones the drafter rests; the output is the same."""
    prompts = list(random_prompts(6, [20, 30]))
    plain = tiny_node("unified")
    try:
        expected = served(plain, prompts, max_tokens=150)
    finally:
        plain.stop()
    for spoiled, low, high in ((0.0, 100, 400), (1.0, 1, 60)):
        # One that has no draft a few times is not asked again in an answer of this length.
        oracle = Oracle(VOCAB_SIZE, spoiled, shortest=1)
        for prompt, tokens in zip(prompts, expected, strict=True):
            oracle.learn([*prompt, *tokens])
        table = costs([1.0, 1.0, 1.1, 3.0], [1.0, 1.0, 1.1, 3.0], draft=0.3)
        monkeypatch.setattr(assembly, "make_drafter", lambda *_, oracle=oracle: oracle)
        monkeypatch.setattr(assembly, "make_draft_lengths", lambda *_, t=table: DraftLengths(t))
        server = tiny_node("unified", overlap_schedule=overlap)
        try:
            assert served(server, prompts, max_tokens=150) == expected
            assert low <= oracle.drafted <= high
            assert counter(server, "pd_speculative_drafted_total") == oracle.drafted
        finally:
            server.stop()


def test_costs_are_measured_at_the_start() -> None:
    server = tiny_node("unified", speculative_algorithm="ngram", max_running_requests=16)
    try:
        table = server.node.core.draft_lengths._costs
        assert table is not None
        assert table.sizes.tolist() == [1, 2, 4, 8, 16, 32, 64]
        for column in (table.plain, table.verify, table.draft):
            assert (column > 0).all()
    finally:
        server.stop()
