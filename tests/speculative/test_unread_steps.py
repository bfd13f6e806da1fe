"""Steps that are launched before the host has read what the step before them accepted: where their
tokens stand, which noise they draw with and what penalties count, only the device knows."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster import random_prompts
from drafters import SEED, plant_right_guesses
from tiny import tiny_cluster, tiny_head

from pd.kernels.acceptance import accept_drafts
from pd.scheduling.decode import DecodeScheduler
from pd.scheduling.step import LaunchedStep, Work
from pd.speculative import eagle as eagle_drafter
from pd.speculative.adaptation import DraftLengths
from pd.speculative.eagle import EagleDrafter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from cluster import Cluster, Pending

    from pd.kernels.draft_tensors import Accepted, Trees
    from pd.launch import NodeServer

EVERY_OTHER = tuple(range(0, 256, 2))
REQUESTS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5, "n": 2},
    {"temperature": 0.8, "seed": 6, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 7, "min_tokens": 9, "stop_token_ids": EVERY_OTHER},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": tuple(range(0, 256, 16))},
    {"logprobs": True, "top_logprobs": 2, "presence_penalty": 0.7},
    {"logit_bias": {7: 3.0, 9: -50.0}, "min_tokens": 20, "stop_token_ids": EVERY_OTHER},
    # Its drafts are shorter than those of the others.
    {"frequency_penalty": 0.5, "max_tokens": 4},
]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"speculative_num_draft_tokens": 3},
    "tree": {"speculative_num_draft_tokens": 7, "speculative_topk": 3},
}


def speculating(shape: str, kind: str = "unified", **settings: Any) -> Cluster:
    counts = (1, 1, 0) if kind == "split" else (0, 0, 1)
    given = {"speculative_adaptive": "off", "overlap_schedule": "on", "chunked_prefill_size": 48}
    return tiny_cluster(
        *counts,
        speculative_algorithm="eagle",
        speculative_draft_model=tiny_head("eagle3"),
        **given | SHAPES[shape] | settings,
    )


def targets(cluster: Cluster) -> list[NodeServer]:
    return list(cluster.pair) if cluster.prefill else [cluster.unified[0]]


def ask_all(cluster: Cluster, prompts: list[list[int]], rng: random.Random) -> list[Pending]:
    """Ask with each kind of request at random moments; beside some, others that are given up."""
    asked = []
    for prompt, params in zip(prompts, REQUESTS * len(prompts), strict=False):
        tokens = {"max_tokens": 30} | params
        if rng.random() < 0.3:
            given_up = cluster.client.generate(prompt, targets(cluster), **tokens)
            time.sleep(rng.random() / 50)
            cluster.client.abort(given_up)
        asked.append(cluster.client.generate(prompt, targets(cluster), **tokens))
        if rng.random() < 0.3:
            time.sleep(rng.random() / 10)
    return asked


@pytest.fixture(autouse=True)
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is done with steps of a tiny model before the next one is planned, which then has
    nothing unread."""
    monkeypatch.setattr(LaunchedStep, "is_over", False)


@pytest.fixture
def no_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A drafter that fails changes no output, and would not be seen."""
    yield
    assert [each.getMessage() for each in caplog.records if each.name == "pd.scheduling.step"] == []


class Settled:
    """Notes works that were launched unread: the guesses before them, and how many were right."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[int, int]] = []
        settle = Work.settle_unread

        def note(work: Work, accepted: int) -> None:
            if work.num_unread:
                self.found.append((accepted, work.num_unread))
            settle(work, accepted)

        monkeypatch.setattr(Work, "settle_unread", note)


PROMPTS = list(random_prompts(33, [5, 40, 90, 130, 17, 64, 3, 55, 70, 31, 12, 48, 99, 8]))


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    with tiny_cluster(0, 0, 1) as cluster:
        asked = ask_all(cluster, PROMPTS, random.Random(0))
        return [pending.result() for pending in asked]


def known(plain: list[Any]) -> dict[tuple[int, ...], Any]:
    """The answers by prompt."""
    return {tuple(prompt): choices for prompt, choices in zip(PROMPTS, plain, strict=True)}


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize(
    ("shape", "kind", "page_size"),
    [
        ("tree", "split", 1),
        pytest.param("chain", "unified", 16, marks=pytest.mark.full),
        pytest.param("chain", "split", 1, marks=pytest.mark.full),
        pytest.param("tree", "unified", 4, marks=pytest.mark.full),
        pytest.param("chain", "unified", 64, marks=pytest.mark.full),
        pytest.param("tree", "split", 64, marks=pytest.mark.full),
    ],
)
def test_the_output_is_that_without_drafts(
    monkeypatch: pytest.MonkeyPatch, plain: list[Any], shape: str, kind: str, page_size: int
) -> None:
    print(f"seed {SEED}")
    settled, rng = Settled(monkeypatch), random.Random(SEED)
    plant_right_guesses(monkeypatch, known(plain))
    with speculating(shape, kind, page_size=page_size) as cluster:
        for _ in range(3):  # then from cached pages
            asked = ask_all(cluster, PROMPTS, rng)
            assert [pending.result() for pending in asked] == plain
        cluster.wait_idle()
    assert len(settled.found) > 5
    accepted = {right for right, _ in settled.found}
    assert len(accepted) >= 3, "none, some and many guesses were right"


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("shape", ["tree", pytest.param("chain", marks=pytest.mark.full)])
def test_drafts_are_of_any_length(
    monkeypatch: pytest.MonkeyPatch, plain: list[Any], shape: str
) -> None:
    """Some works have none, beside others, and behind some that had one."""
    print(f"seed {SEED}")
    settled, rng = Settled(monkeypatch), random.Random(SEED)
    plant_right_guesses(monkeypatch, known(plain))

    def choose(_: DraftLengths, sequences: Sequence[Any], limits: Sequence[int]) -> list[int]:
        return [rng.choice((0, limit, rng.randint(0, limit))) for limit in limits]

    monkeypatch.setattr(DraftLengths, "choose_lengths", choose)
    with speculating(shape, page_size=4) as cluster:
        asked = ask_all(cluster, PROMPTS, random.Random(SEED))
        assert [pending.result() for pending in asked] == plain
        cluster.wait_idle()
    assert settled.found


def test_a_drafter_that_fails_beside_unread_guesses(
    monkeypatch: pytest.MonkeyPatch, plain: list[Any]
) -> None:
    print(f"seed {SEED}")
    begin, item, rng = EagleDrafter.begin_step, Work.make_item, random.Random(SEED)
    settled, reread = Settled(monkeypatch), list[Work]()

    def fail(drafter: EagleDrafter, works: Sequence[Any]) -> None:
        begin(drafter, works)
        if any(work.sequence.request.room for work in works) and rng.random() < 0.2:
            raise MemoryError("no room")

    def note(work: Work, *args: int) -> Any:
        if work.num_unread and work.reread:
            reread.append(work)
        return item(work, *args)

    monkeypatch.setattr(EagleDrafter, "begin_step", fail)
    monkeypatch.setattr(Work, "make_item", note)
    with speculating("chain") as cluster:
        asked = ask_all(cluster, PROMPTS, random.Random(SEED))
        assert [pending.result() for pending in asked] == plain
        cluster.wait_idle()
    assert settled.found
    assert reread == []


@pytest.mark.usefixtures("no_warnings")
def test_sequences_that_lack_memory_come_back(
    monkeypatch: pytest.MonkeyPatch, plain: list[Any]
) -> None:
    print(f"seed {SEED}")
    settled, rng = Settled(monkeypatch), random.Random(SEED)
    small = {"kv_cache_tokens": 320, "reserved_decode_tokens": 1, "page_size": 1}
    with speculating("chain", **small) as cluster:
        asked = ask_all(cluster, PROMPTS, rng)
        assert [pending.result() for pending in asked] == plain
        cluster.wait_idle()
        memory = cluster.unified[0].node.scheduler.decode
        assert isinstance(memory, DecodeScheduler)
        assert memory.running == []
    assert settled.found


def test_works_with_drafts_are_not_read_before_the_next_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single sequence without a minimum length overlaps in nearly every step."""
    settled = Settled(monkeypatch)
    drafted = []
    observe = DecodeScheduler._take_tokens

    def note(scheduler: DecodeScheduler, sequence: Any, work: Work) -> None:
        if work.draft is not None:
            drafted.append(work)
        observe(scheduler, sequence, work)

    monkeypatch.setattr(DecodeScheduler, "_take_tokens", note)
    with speculating("chain") as cluster:
        cluster.client.generate(PROMPTS[1], targets(cluster), max_tokens=100).result()
    assert len(settled.found) >= len(drafted) - 4 > 20


def one_more(sampled: torch.Tensor, trees: Trees, width: int) -> Accepted:
    """Accept on the device one guess more than the host, if there is one."""
    found = accept_drafts(sampled, trees, width)
    more = (found.last + 1 < trees.counts).long()
    last = found.last + more
    return found._replace(
        last=last, counts=found.counts + more, tokens=sampled[trees.rows + last + 1]
    )


def test_a_device_that_accepts_otherwise_than_the_host_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plain: list[Any]
) -> None:
    """The comparisons above can fail."""
    monkeypatch.setattr(eagle_drafter, "accept_drafts", one_more)
    plant_right_guesses(monkeypatch, known(plain))
    with speculating("chain") as cluster:
        asked = ask_all(cluster, PROMPTS, random.Random(SEED))
        assert [pending.result() for pending in asked] != plain
