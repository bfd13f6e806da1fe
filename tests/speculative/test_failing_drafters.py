"""Drafters that are late or out of memory: no page changes its owner too early, no request fails,
and the output stays the same."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cluster import random_prompts
from drafters import draft_only_last_siblings, note_accepted_siblings
from tiny import tiny_cluster, tiny_head, tiny_model

from pd.engine.eagle import NO_ROW, EagleWriter
from pd.scheduling.memory import Memory
from pd.speculative import eagle as eagle_drafter
from pd.speculative.draft import DraftedTokens
from pd.speculative.eagle import EagleDrafter

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Cluster

    from pd.engine.sampler import Sampler
    from pd.launch import NodeServer

PROMPTS = list(random_prompts(4, [5, 40, 90, 130]))
SEEDED = {"temperature": 1.5, "seed": 3}
TREES = {"speculative_num_draft_tokens": 7, "speculative_topk": 3, "page_size": 4}


def speculating(kind: str = "unified", **settings: Any) -> Cluster:
    counts = (1, 1, 0) if kind == "split" else (0, 0, 1)
    settings = {"speculative_adaptive": "off", "speculative_num_draft_tokens": 3} | settings
    return tiny_cluster(
        *counts,
        speculative_algorithm="eagle",
        speculative_draft_model=tiny_head(),
        **settings,
    )


def targets(cluster: Cluster) -> list[NodeServer]:
    return list(cluster.pair) if cluster.prefill else [cluster.unified[0]]


def plain_answer(prompt: list[int], **params: Any) -> list[list[int]]:
    with tiny_cluster(0, 0, 1) as cluster:
        return cluster.client.generate(prompt, targets(cluster), **params).result()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are complete when the host waits for them or has seen a step after them."""
    batches: list[DraftedTokens] = []
    done: set[int] = set()
    begin = DraftedTokens.__init__

    def made(self: DraftedTokens, tokens: torch.Tensor, host: Any = None) -> None:
        begin(self, tokens, host)
        if host is None:
            batches.append(self)

    def wait(self: DraftedTokens) -> None:
        for batch in itertools.takewhile(lambda each: each is not self, batches):
            done.add(id(batch))
        done.add(id(self))

    complete = property(lambda self: self.host is not None or id(self) in done)
    monkeypatch.setattr(DraftedTokens, "__init__", made)
    monkeypatch.setattr(DraftedTokens, "wait", wait)
    monkeypatch.setattr(DraftedTokens, "is_complete", complete)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("overlap", ["on", pytest.param("off", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["unified", "split"])
def test_two_choices_end_in_one_step_while_their_drafts_are_made(kind: str, overlap: str) -> None:
    (first, _) = plain_answer(PROMPTS[0], max_tokens=30, n=2)
    stop = next(t for i, t in enumerate(first) if i > 5 and t not in first[:i])
    with speculating(kind, overlap_schedule=overlap) as cluster:
        params = {"max_tokens": 30, "n": 2, "stop_token_ids": (stop,)}
        found = cluster.client.generate(PROMPTS[0], targets(cluster), **params).result(10)
        assert found == [first[: first.index(stop) + 1]] * 2
        cluster.wait_idle(5.0)
        assert cluster.client.generate(PROMPTS[1], targets(cluster), max_tokens=3).result(5)


@pytest.mark.usefixtures("late")
def test_choices_and_requests_are_given_up_while_their_drafts_are_made() -> None:
    with speculating("split", overlap_schedule="on") as cluster:
        for turn in range(6):
            asked = [
                cluster.client.generate(prompt, targets(cluster), max_tokens=60, n=2, **SEEDED)
                for prompt in PROMPTS
            ]
            for pending in asked[turn % 3 :: 2]:
                cluster.client.abort(pending)
        cluster.wait_idle(20)
        for server in targets(cluster):
            with server.node.core.events.lock:
                server.node.check_books()


def raising_now_and_then(call: Callable[..., Any]) -> Callable[..., Any]:
    """Every third call raises, but for the first ones, which prepare the node."""
    calls = itertools.count(1)

    def maybe(*arguments: Any) -> Any:
        number = next(calls)
        if number > 12 and number % 3 == 0:
            raise torch.OutOfMemoryError("no memory")
        return call(*arguments)

    return maybe


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("begin_step", marks=pytest.mark.full),
        pytest.param("draft_tokens", marks=pytest.mark.full),
        "_move_accepted",
        pytest.param("nowhere", marks=pytest.mark.full),
        pytest.param("accept_drafts", marks=pytest.mark.full),
    ],
)
def test_trees_of_a_drafter_that_raises(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    (expected,) = plain_answer(PROMPTS[1], max_tokens=100, **SEEDED)
    (other,) = plain_answer(PROMPTS[0], max_tokens=3)
    draft_only_last_siblings(monkeypatch, [*PROMPTS[1], *expected])
    siblings = note_accepted_siblings(monkeypatch)
    place: Any = eagle_drafter if where == "accept_drafts" else EagleDrafter
    if where == "draft_tokens":
        monkeypatch.setattr(EagleDrafter, "draft_tokens", raising_always)
    elif where != "nowhere":
        monkeypatch.setattr(place, where, raising_now_and_then(getattr(place, where)))
    with speculating(**TREES) as cluster:
        asked = cluster.client.generate(PROMPTS[1], targets(cluster), max_tokens=100, **SEEDED)
        for _ in range(10):  # others begin meanwhile
            assert cluster.client.generate(PROMPTS[0], targets(cluster), max_tokens=3).result() == [
                other
            ]
        assert asked.result(20) == [expected]
        cluster.wait_idle()
        again = cluster.client.generate(PROMPTS[1], targets(cluster), max_tokens=100, **SEEDED)
        assert again.result(20) == [expected], "what was cached is wrong"
        if where != "draft_tokens":
            assert len(siblings) > 10


def raising_always(*_: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.usefixtures("late")
def test_no_page_is_released_while_it_is_drafted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    (answer,) = plain_answer(PROMPTS[0], max_tokens=30)
    stop = next(t for i, t in enumerate(answer) if i > 5 and t not in answer[:i])
    batches: dict[Any, DraftedTokens] = {}
    draft, release, released = EagleDrafter._draft_asks, Memory.release_pages, list[bool]()

    def note_draft(self: EagleDrafter, asks: Any, ends: Any) -> Any:
        made = draft(self, asks, ends)
        batches.update((ask.sequence, each.batch) for ask, each in zip(asks, made, strict=True))
        return made

    def note_release(self: Memory, sequence: Any) -> None:
        if sequence in batches:
            released.append(batches[sequence].is_complete)
        release(self, sequence)

    monkeypatch.setattr(EagleDrafter, "_draft_asks", note_draft)
    monkeypatch.setattr(Memory, "release_pages", note_release)
    with speculating(overlap_schedule="on") as cluster:
        params = {"max_tokens": 30, "stop_token_ids": (stop,)}
        cluster.client.generate(PROMPTS[0], targets(cluster), **params).result(20)
        cluster.wait_idle()
    assert released and all(released)


class FailingSampler:
    """The node's sampler as its drafter has it: each third call raises that comes to a place."""

    def __init__(self, sampler: Sampler, where: str) -> None:
        self._sampler, self._where, self.calls = sampler, where, itertools.count(1)

    def _fail(self, place: str) -> None:
        if place == self._where and next(self.calls) % 3 == 0:
            raise torch.OutOfMemoryError("no memory")

    def prepare_draws(self, draws: Any, drafts: torch.Tensor) -> Any:
        prepared = self._sampler.prepare_draws(draws, drafts=drafts)
        self._fail("prepare")
        return prepared

    def choose_tokens(self, logits: torch.Tensor, prepared: Any) -> Any:
        self._fail("choose")
        return self._sampler.choose_tokens(logits, prepared)


def draft_model_cluster(num_tokens: int) -> Cluster:
    """A unified node whose draft model guesses so many tokens in every step."""
    settings = {"speculative_adaptive": "off", "speculative_num_draft_tokens": num_tokens}
    settings |= {"speculative_algorithm": "draft", "speculative_draft_model": tiny_model()}
    return tiny_cluster(0, 0, 1, **settings)


@pytest.mark.parametrize(
    ("penalty", "where"),
    [
        pytest.param("frequency_penalty", "prepare", marks=pytest.mark.full),
        ("repetition_penalty", "choose"),
        pytest.param("frequency_penalty", "choose", marks=pytest.mark.full),
        pytest.param("repetition_penalty", "prepare", marks=pytest.mark.full),
    ],
)
def test_penalties_after_the_sampling_of_a_draft_failed(penalty: str, where: str) -> None:
    params = {"max_tokens": 60, "temperature": 0.8, "seed": 3, penalty: 1.5}
    expected = plain_answer(PROMPTS[1], **params)
    with draft_model_cluster(1) as cluster:
        drafter: Any = cluster.unified[0].node.core.drafter
        drafter._sampler = failing = FailingSampler(drafter._sampler, where)
        assert cluster.client.generate(PROMPTS[1], targets(cluster), **params).result() == expected
        assert next(failing.calls) > 9
        assert len(failing._sampler._penalties._counts) == 4, "the choice keeps its row"


@pytest.mark.parametrize(
    "penalty", ["frequency_penalty", pytest.param("repetition_penalty", marks=pytest.mark.full)]
)
def test_penalties_after_a_pass_of_a_draft_model_failed(penalty: str) -> None:
    params = {"max_tokens": 40, "temperature": 0.8, "seed": 3, penalty: 1.5}
    expected = plain_answer(PROMPTS[1], **params)
    with draft_model_cluster(3) as cluster:
        drafter: Any = cluster.unified[0].node.core.drafter
        forward, calls = drafter._runner.forward, itertools.count(1)

        def fail(*arguments: Any, previous_tokens: Any = None) -> Any:
            if previous_tokens is not None and next(calls) in (1, 5):
                raise torch.OutOfMemoryError("no memory")
            return forward(*arguments, previous_tokens=previous_tokens)

        drafter._runner.forward = fail
        assert cluster.client.generate(PROMPTS[1], targets(cluster), **params).result() == expected
        assert next(calls) > 5


def test_sequences_without_a_row_are_not_drafted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain_answer(PROMPTS[1], max_tokens=24)
    rows, draft = list[int](), EagleDrafter._draft_asks

    def note(self: EagleDrafter, asks: Any, ends: Any) -> Any:
        rows.extend(ask.state.row for ask in asks if ask.sequence.request.room)
        return draft(self, asks, ends)

    monkeypatch.setattr(EagleDrafter, "_draft_asks", note)
    with speculating() as cluster:
        writer: Any = cluster.unified[0].node.engine.runner.eagle
        free, writer._free = list(writer._free), type(writer._free)()
        asked = cluster.client.generate(PROMPTS[1], targets(cluster), max_tokens=24)
        assert asked.result(20) == expected
        assert rows == []
        writer._free.extend(free)
        asked = cluster.client.generate(PROMPTS[1], targets(cluster), max_tokens=24)
        assert asked.result(20) == expected
        assert rows and NO_ROW not in rows


@pytest.mark.parametrize("kind", ["unified", "split"])
def test_sequences_without_a_row_get_one_that_comes_free(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    expected = plain_answer(PROMPTS[1], max_tokens=60)
    begin, works = EagleDrafter.begin_step, list[Any]()
    with speculating(kind) as cluster:
        drafter: Any = targets(cluster)[-1].node.core.drafter
        writer = drafter._writer
        free, writer._free = list(writer._free), type(writer._free)()

        def note(self: EagleDrafter, works_of_step: Any) -> None:
            begin(self, works_of_step)
            if self is drafter:
                works.extend(works_of_step)
                if len(works) == 12:
                    writer._free.extend(free)

        monkeypatch.setattr(EagleDrafter, "begin_step", note)
        asked = cluster.client.generate(PROMPTS[1], targets(cluster), max_tokens=60)
        assert asked.result(20) == expected
        cluster.wait_idle()
        drafted = [work.draft is not None for work in works]
        assert not any(drafted[:12])
        assert any(drafted[12:])


def test_the_last_row_is_given_once() -> None:
    """Also where another thread takes it between a look and the taking."""

    class Emptied(list[int]):
        def __len__(self) -> int:
            return 1

        def popleft(self) -> int:
            raise IndexError("pop from an empty deque")

    writer: Any = object.__new__(EagleWriter)
    writer._free = Emptied()
    assert writer.take_row().row == NO_ROW
