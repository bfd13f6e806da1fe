"""Drafts of an EAGLE head: they change no output, and they are what one pass over all tokens gives,
however a node computed them: in chunks, from cached pages, after drafts, on two nodes."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
import triton_device
from cluster import random_prompts
from counters import counter
from drafters import draft_only_last_siblings, note_accepted_siblings
from tiny import CONTEXT, tiny_cluster, tiny_head

from pd.core.sampling_params import SamplingParams
from pd.engine.eagle import CarriedState, EagleWriter
from pd.engine.forward_item import ForwardItem
from pd.engine.kv_pool import KVPool
from pd.engine.model_runner import ModelRunner
from pd.engine.sampling_state import SamplingState
from pd.kernels import acceptance, drafting
from pd.kernels.acceptance import accept_drafts
from pd.kernels.attention import AttentionBatch, find_attention_backend
from pd.kernels.draft_tensors import Accepted, Trees
from pd.kernels.sampling import make_gumbel_noise, mix_noise_keys
from pd.scheduling.request import Request, Sequence
from pd.speculative import eagle as eagle_drafter
from pd.speculative.draft import Draft
from pd.speculative.shape import DraftShape

if TYPE_CHECKING:
    from cluster import Cluster, Pending

    from pd.launch import NodeServer

PROMPTS = list(random_prompts(4, [5, 40, 90, 130]))
DRAFTED = 3
DEVICE = torch.device(os.environ.get("PD_TEST_DEVICE", "cpu"))
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5, "n": 2},
    "penalties": {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.8},
}


def speculating(kind: str, algorithm: str = "eagle3", **settings: Any) -> Cluster:
    counts = (1, 1, 0) if kind == "split" else (0, 0, 1)
    settings = {"speculative_adaptive": "off", "chunked_prefill_size": 48} | settings
    return tiny_cluster(
        *counts,
        speculative_algorithm="eagle",
        speculative_draft_model=tiny_head(algorithm),
        **{"speculative_num_draft_tokens": DRAFTED} | settings,
    )


def targets(cluster: Cluster) -> list[NodeServer]:
    return list(cluster.pair) if cluster.prefill else [cluster.unified[0]]


def answers(cluster: Cluster, tokens: int = 30) -> list[list[list[int]]]:
    asked: list[Pending] = [
        cluster.client.generate(prompt, targets(cluster), max_tokens=tokens, **params)
        for prompt in PROMPTS
        for params in REQUESTS.values()
    ]
    return [pending.result() for pending in asked]


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    with tiny_cluster(0, 0, 1) as cluster:
        return answers(cluster)


@dataclass
class Made:
    """A draft that a node made: the tokens before it, what was drafted, and how it was drawn."""

    ids: list[int]
    draft: Draft
    choice: SamplingState


class Notes:
    """Notes every draft. The tokens that it follows are known when its sequence has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Sequence, int, Draft, SamplingState]] = []
        draft = eagle_drafter.EagleDrafter._draft_asks

        def note(drafter: Any, asks: Any, ends: Any) -> Any:
            drafts = draft(drafter, asks, ends)
            positions = ends.positions[list(ends.index)].tolist()
            rows = zip(asks, positions, drafts, strict=True)
            for ask, position, made in rows:
                if ask.sequence.request.room:
                    self.made.append((ask.sequence, position + 1, made, ask.choice))
            return drafts

        monkeypatch.setattr(eagle_drafter.EagleDrafter, "_draft_asks", note)

    def drafts(self) -> list[Made]:
        return [
            Made(sequence.ids[:count].tolist(), draft, choice)
            for sequence, count, draft, choice in self.made
            if count <= sequence.num_tokens
        ]


class OnePass:
    """Drafts after one forward pass over all tokens of a sequence, in a pool of its own."""

    def __init__(self, server: NodeServer) -> None:
        engine = server.node.engine
        self._runner: Any = engine.runner
        self._layout = engine.pool.layout
        drafter: Any = server.node.core.drafter
        self.shape: DraftShape = drafter._shape

    @torch.inference_mode()
    def draft(self, made: Made) -> list[int]:
        """The tokens of a draft after one pass over those before it."""
        pool, writer, ids, pages = self._computed(made.ids)
        kind = find_attention_backend("torch", DEVICE, torch.float32, 16)
        drafter = eagle_drafter.EagleDrafter(
            writer, kind(writer.kv, 2), self.shape, pool.move_tokens, max_context=1024
        )
        count, size = len(ids), made.draft.size
        sequence = Sequence(
            Request("", b"", b"", ids, SamplingParams(max_tokens=1)), 0, ids, count, pages=pages
        )
        asks = [eagle_drafter._Ask(sequence, CarriedState(2), made.choice, size, count + size)]
        ends = eagle_drafter._Ends(*numbers(made.ids[-1:], [count - 1]), [0])
        (draft,) = drafter._draft_asks(asks, ends)
        assert draft is not None
        return draft.batch.tokens.tolist()[:size]

    @torch.inference_mode()
    def likeliest(self, made: Made, path: list[int]) -> list[int]:
        """The tokens that a head draws after a path of guesses, the likeliest first."""
        _, writer, ids, pages = self._computed(made.ids)
        kind = find_attention_backend("torch", DEVICE, torch.float32, 16)
        attention = kind(writer.kv, 2)
        head, state = writer.head, writer.carried[2:3]
        for place, token in enumerate([int(ids[-1]), *path], len(ids) - 1):
            attention.plan(AttentionBatch(np.array([place]), np.array([1]), [pages]))
            given, where = numbers([token], [place])
            logits, state = head(given, state, where, attention)
        names = head.target_ids
        params, best = made.choice.params, logits.float()
        if not params.greedy:
            position = made.choice.find_position(len(path))
            (noise_at,) = numbers([[made.choice.seed, position]])
            keys = mix_noise_keys(noise_at)
            best = best / params.temperature + make_gumbel_noise(keys, best.shape[1], names)
        order = best[0].argsort(descending=True)
        return (order if names is None else names[order]).tolist()

    def _computed(self, ids: list[int]) -> tuple[KVPool, EagleWriter, Any, Any]:
        """All but the last token, computed by the model in one pass."""
        pool = KVPool(msgspec.structs.replace(self._layout, page_size=16), 40, DEVICE)
        writer = EagleWriter.build_for_pool(
            self._runner.eagle.head, self._runner.model, pool, _Config()
        )
        kind = find_attention_backend("torch", DEVICE, torch.float32, 8)
        runner = ModelRunner.build(self._runner.model, pool, kind, prompts=False, eagle=writer)
        pages, known = np.arange(40, dtype=np.int32), np.array(ids, np.int32)
        runner.forward([ForwardItem(known[:-1], 0, pages)])
        writer.keep_states(*numbers([2], [len(ids) - 2], [-1]))
        return pool, writer, known, pages


def numbers(*columns: list[Any]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.int64, device=DEVICE) for column in columns]


class _Config:
    max_running_requests = 4


CELLS = list(
    itertools.product(("eagle", "eagle3"), ("unified", "split"), (1, 16, 64), ("off", "on"))
)
# Every two of an algorithm, a deployment and overlap stand together somewhere; test_pairs.py has
# every two of all of these.
SHARP = {("eagle", "unified", 1, "off")}


@pytest.mark.parametrize(
    ("algorithm", "kind", "page_size", "overlap"),
    [cell if cell in SHARP else pytest.param(*cell, marks=pytest.mark.full) for cell in CELLS],
)
def test_the_output_is_the_same(
    plain: list[list[list[int]]], algorithm: str, kind: str, page_size: int, overlap: str
) -> None:
    with speculating(kind, algorithm, page_size=page_size, overlap_schedule=overlap) as cluster:
        for _ in range(2):  # then from cached pages
            assert answers(cluster) == plain
        cluster.wait_idle()
        drafted = counter(targets(cluster)[-1], "pd_speculative_drafted_total")
        drafts = counter(targets(cluster)[-1], "pd_speculative_drafts_total")
        assert drafted > 2.5 * drafts > 0


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        ("eagle", "split"),
        pytest.param("eagle3", "unified", marks=pytest.mark.full),
        pytest.param("eagle", "unified", marks=pytest.mark.full),
        pytest.param("eagle3", "split", marks=pytest.mark.full),
    ],
)
def test_drafts_are_those_of_one_pass(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, kind: str
) -> None:
    """From prompts in chunks and from cached pages, after right and wrong drafts, and right behind
    a hand-off."""
    notes = Notes(monkeypatch)
    with speculating(kind, algorithm, page_size=4) as cluster:
        for _ in range(2):
            answers(cluster, tokens=12)
        cluster.wait_idle()
        made = notes.drafts()
        assert len(made) > 150
        # Every draft that stands first behind a prompt, and some of the others.
        prompts = {len(prompt) for prompt in PROMPTS}
        first = [each for each in made if len(each.ids) - 1 in prompts]
        assert len(first) >= 2 * len(PROMPTS)
        check_drafts(targets(cluster)[-1], [*first, *made[::7]])


@pytest.mark.parametrize("kind", ["split", pytest.param("unified", marks=pytest.mark.full)])
def test_drafts_behind_pages_of_another_prompt_are_those_of_one_pass(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What a page holds of its last token depends on none behind it: the cached page is from a
    prompt that goes on otherwise. Prompts are so short that a draft is wrong if one slot is."""
    pages, rests = list(random_prompts(14, [4] * 8)), random_prompts(15, [3] * 16)
    prompts = [[*page, *rest] for page, rest in zip(pages + pages, rests, strict=True)]
    notes = Notes(monkeypatch)
    with speculating(kind, page_size=4) as cluster:
        for cached, some in ((0, prompts[:8]), (4, prompts[8:])):
            notes.made.clear()
            for prompt in some:
                pending = cluster.client.generate(prompt, targets(cluster), max_tokens=9)
                pending.result()
                assert pending.cached_tokens == cached
        cluster.wait_idle()
        made = notes.drafts()
        assert len(made) > 30
        check_drafts(targets(cluster)[-1], made)


@pytest.mark.parametrize(
    ("page_size", "ranks", "of_prefill", "ranks_of_prefill"),
    [
        (4, 1, 16, 2),
        pytest.param(16, 1, 4, 1, marks=pytest.mark.full),
        pytest.param(64, 1, 1, 2, marks=pytest.mark.full),
        pytest.param(1, 2, 64, 1, marks=pytest.mark.full),
    ],
)
@pytest.mark.usefixtures("forked_ranks")
def test_a_pair_may_differ_in_pages_and_ranks(
    monkeypatch: pytest.MonkeyPatch,
    plain: list[list[list[int]]],
    page_size: int,
    ranks: int,
    of_prefill: int,
    ranks_of_prefill: int,
) -> None:
    """The head's KV is on rank 0 of each end, and divided among pages as the model's is."""
    notes = Notes(monkeypatch)
    prefill = {"page_size": of_prefill, "tp_size": ranks_of_prefill}
    settings = {"page_size": page_size, "tp_size": ranks, "prefill_settings": prefill}
    with speculating("split", **settings) as cluster:
        for _ in range(2):  # then from cached pages of either end
            assert answers(cluster) == plain
        cluster.wait_idle()
        prompts = {len(prompt) for prompt in PROMPTS}
        made = notes.drafts()
        first = [each for each in made if len(each.ids) - 1 in prompts]
        assert len(first) >= 2 * len(PROMPTS)
        # One rank does not have the model that a pass needs.
        if ranks == 1:
            check_drafts(targets(cluster)[-1], [*first, *made[::11]])


@pytest.mark.full
@pytest.mark.skipif(triton_device.ON_GPU, reason="the other tests run compiled kernels on a GPU")
def test_drafts_of_a_gpus_kernels_are_those_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a GPU, interpreted. Steps are planned ahead, so some drafts are made behind a
    step, and others before one."""
    triton_device.skip_unless_interpreter_works()
    notes = Notes(monkeypatch)
    for module in (acceptance, drafting):
        monkeypatch.setattr(module, "uses_triton", lambda _: True)
    with speculating("unified", page_size=4, overlap_schedule="on") as cluster:
        for _ in range(2):
            answers(cluster, tokens=6)
        cluster.wait_idle()
        monkeypatch.undo()
        made = notes.drafts()
        assert len(made) > 60
        check_drafts(targets(cluster)[-1], made)


def check_drafts(server: NodeServer, made: list[Made]) -> None:
    """Compare drafts that a node made with those of one pass."""
    again = OnePass(server)
    for each in made:
        tokens = each.draft.batch.tokens[each.draft.first :][: each.draft.size]
        assert again.draft(each) == tokens.tolist(), f"after {len(each.ids)} tokens"


def test_acceptance_on_the_device_that_differs_from_the_hosts_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plain: list[list[list[int]]]
) -> None:
    """The comparison above can fail: here the device accepts one token more than the host. That
    changes drafts, and nothing else where every step begins with what the host has read."""

    def one_more(sampled: torch.Tensor, trees: Trees, width: int) -> Accepted:
        found = accept_drafts(sampled, trees, width)
        more = (found.last + 1 < trees.counts).long()
        last = found.last + more
        tokens = sampled[trees.rows + last + 1]
        return Accepted(last, found.counts + more, tokens, found.positions + more, found.path)

    monkeypatch.setattr(eagle_drafter, "accept_drafts", one_more)
    notes = Notes(monkeypatch)
    with speculating("unified", overlap_schedule="off") as cluster:
        assert answers(cluster) == plain
        cluster.wait_idle()
        with pytest.raises(AssertionError, match=r"after \d+ tokens"):
            check_drafts(cluster.unified[0], notes.drafts()[::7])


@pytest.mark.parametrize(
    "host_memory",
    [1 << 29, pytest.param(0, marks=pytest.mark.full)],
    ids=["kept", "computed again"],
)
@pytest.mark.parametrize("kind", [pytest.param("unified", marks=pytest.mark.full), "split"])
def test_sequences_that_come_back_are_drafted_for_as_before(
    monkeypatch: pytest.MonkeyPatch, kind: str, host_memory: int
) -> None:
    """Host memory keeps the head's KV beside the model's."""
    notes, returned = Notes(monkeypatch), list[int]()
    prompts = list(random_prompts(1, [20, 21, 22, 23]))
    settings = {"kv_cache_tokens": 120, "reserved_decode_tokens": 1}
    with speculating(kind, **settings, retraction_host_memory=host_memory) as cluster:
        server = targets(cluster)[-1]
        decode: Any = server.node.scheduler.decode
        pool: Any = server.node.engine.pool
        retract, scatter = decode._retract_sequence, pool.scatter_pages
        retracted: dict[Sequence, int] = {}

        def note_retraction(sequence: Sequence) -> None:
            retracted.setdefault(sequence, len(notes.made))
            retract(sequence)

        def note_return(pages: Any, host: Any) -> None:
            returned.append(len(pages))
            scatter(pages, host)

        decode._retract_sequence, pool.scatter_pages = note_retraction, note_return
        sent = [
            cluster.client.generate(prompt, targets(cluster), max_tokens=60) for prompt in prompts
        ]
        for pending in sent:
            pending.result(60)
        cluster.wait_idle()
        made = [
            Made(sequence.ids[:count].tolist(), draft, choice)
            for place, (sequence, count, draft, choice) in enumerate(notes.made)
            if count <= sequence.num_tokens and place >= retracted.get(sequence, 1 << 30)
        ]
        assert retracted
        assert len(made) > 10
        assert (sum(returned) > 0) == (host_memory > 0)
        check_drafts(server, made)


@pytest.mark.full
def test_too_little_memory_and_aborts_change_nothing(plain: list[list[list[int]]]) -> None:
    with speculating("split", kv_cache_tokens=400, reserved_decode_tokens=1) as cluster:
        for turn in range(10):
            asked = [
                cluster.client.generate(prompt, targets(cluster), max_tokens=30, **params)
                for prompt in PROMPTS
                for params in REQUESTS.values()
            ]
            given_up = asked[turn % 5 :: 5]
            for pending in given_up:
                cluster.client.abort(pending)
            for pending, expected in zip(asked, plain, strict=True):
                if pending not in given_up:
                    assert pending.result() == expected
            cluster.wait_idle(30.0)
            # Whether memory runs out depends on when requests arrive.
            if turn > 1 and counter(targets(cluster)[-1], "pd_retractions_total"):
                break
        else:
            pytest.fail("no sequence had to leave the pool")


@pytest.mark.parametrize(
    ("kind", "overlap"),
    [
        pytest.param("unified", "on", marks=pytest.mark.full),
        ("split", "off"),
        pytest.param("unified", "off", marks=pytest.mark.full),
        pytest.param("split", "on", marks=pytest.mark.full),
    ],
)
def test_no_token_is_computed_twice_for_its_state(
    monkeypatch: pytest.MonkeyPatch, kind: str, overlap: str
) -> None:
    """But for tokens before those that an earlier request left in the cache."""
    reread = []
    begin = eagle_drafter.EagleDrafter.begin_step

    def note(drafter: Any, works: Any) -> None:
        begin(drafter, works)
        reread.extend(work.sequence.request.rid for work in works if work.reread)

    monkeypatch.setattr(eagle_drafter.EagleDrafter, "begin_step", note)
    (prompt,) = random_prompts(9, [100])
    with speculating(kind, overlap_schedule=overlap, page_size=16) as cluster:
        for drafted in (DRAFTED, 0):
            scheduler = targets(cluster)[-1].node.scheduler.decode
            assert scheduler is not None
            scheduler.draft_tokens = drafted
            cluster.client.generate([drafted, *prompt], targets(cluster), max_tokens=40).result()
        cluster.wait_idle()
        assert reread == []
        cluster.client.generate([DRAFTED, *prompt], targets(cluster), max_tokens=40).result()
        assert len(reread) == 1


TREES = {"speculative_num_draft_tokens": 7, "speculative_topk": 3}
assert not DraftShape.build_best(7, 3).tree.is_chain


TREE_CELLS = list(itertools.product(("unified", "split"), (1, 16, 64), ("off", "on")))


# With every other circumstance, too: test_pairs.py.
@pytest.mark.full
@pytest.mark.parametrize(("kind", "page_size", "overlap"), TREE_CELLS)
def test_trees_change_no_output(
    monkeypatch: pytest.MonkeyPatch,
    plain: list[list[list[int]]],
    kind: str,
    page_size: int,
    overlap: str,
) -> None:
    siblings = note_accepted_siblings(monkeypatch)
    settings = {"page_size": page_size, "overlap_schedule": overlap, **TREES}
    with speculating(kind, **settings) as cluster:
        for _ in range(2):  # then from cached pages
            assert answers(cluster) == plain
        cluster.wait_idle()
        accepted = counter(targets(cluster)[-1], "pd_speculative_accepted_total")
        assert accepted > len(siblings) > 0


@pytest.mark.parametrize("kind", [pytest.param("unified", marks=pytest.mark.full), "split"])
def test_trees_are_those_of_one_pass(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """So the KV of accepted guesses is where it belongs, however deep in a tree they were: in the
    model's planes, on which the states depend, and in the head's."""
    notes, siblings = Notes(monkeypatch), note_accepted_siblings(monkeypatch)
    with speculating(kind, page_size=4, **TREES) as cluster:
        answers(cluster, tokens=24)
        cluster.wait_idle()
        made = notes.drafts()
        assert len(made) > 100
        assert siblings
        check_drafts(targets(cluster)[-1], made[::3])


def leave_in_place(*_: Any) -> None:
    """Move no KV."""


def accept_another_branch(sampled: torch.Tensor, trees: Trees, width: int) -> Accepted:
    """Accept on the device, but name another guess for one that is not the likeliest."""
    found = accept_drafts(sampled, trees, width)
    return found._replace(path=torch.where(found.path > 0, found.path - 1, found.path))


def take_another_branch(draft: Draft, sampled: list[int]) -> list[int]:
    """Accept on the host, but take the likeliest guess for the one that is right."""
    return [0] if draft_path(draft, sampled) else []


draft_path = Draft.find_accepted
TREE_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "KV is not moved": (eagle_drafter.EagleDrafter, "_move_accepted", leave_in_place),
    "KV of another branch": (eagle_drafter, "accept_drafts", accept_another_branch),
    "tokens of another branch": (Draft, "find_accepted", take_another_branch),
}


@pytest.mark.parametrize(
    "fault",
    [
        None,
        *(
            fault if fault == "KV is not moved" else pytest.param(fault, marks=pytest.mark.full)
            for fault in TREE_FAULTS
        ),
    ],
)
def test_a_fault_planted_in_trees_is_noticed(
    monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """The comparisons above can fail where the guess that is right is not the likeliest."""
    (prompt,) = random_prompts(4, [40])
    params = {"max_tokens": 60, "temperature": 1.5, "seed": 3}
    with tiny_cluster(0, 0, 1) as cluster:
        (expected,) = cluster.client.generate(prompt, targets(cluster), **params).result()
    draft_only_last_siblings(monkeypatch, [*prompt, *expected])
    if fault is not None:
        monkeypatch.setattr(*TREE_FAULTS[fault])
    with speculating("unified", page_size=4, **TREES) as cluster:
        (found,) = cluster.client.generate(prompt, targets(cluster), **params).result()
        cluster.wait_idle()
        assert counter(cluster.unified[0], "pd_speculative_accepted_total") > 0
    assert (found == expected) == (fault is None)


def test_guesses_of_a_tree_are_the_likeliest_after_each_path() -> None:
    """By the definition: each path is computed as a chain of its own."""
    with speculating("unified", **TREES) as cluster:
        again = OnePass(targets(cluster)[-1])
        (prompt,) = random_prompts(5, [50])
        for params in (
            SamplingParams(max_tokens=9, temperature=0.0),
            SamplingParams(max_tokens=9, temperature=1.0, seed=4),
        ):
            choice = SamplingState(params, np.array(prompt[:-3], np.int32), (), 256)
            for _ in range(3):
                choice.observe_token(1)
            tree, size = again.shape.tree, again.shape.tree.size
            made = Made(prompt, Draft(None, 0, tree), choice)  # type: ignore[arg-type]
            drafted = again.draft(made)
            for guess in range(size):
                *before, own = tree.paths[guess]
                found = again.likeliest(made, [drafted[index] for index in before])
                assert drafted[own] == found[again.shape.ranks[guess]]


SHARP_FAULTS = {("split", "draft_tokens")}


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        cell if cell in SHARP_FAULTS else pytest.param(*cell, marks=pytest.mark.full)
        for cell in itertools.product(
            ("unified", "split"), ("begin_step", "draft_tokens", "follow_step", "_copy_states")
        )
    ],
)
def test_a_drafter_that_raises_now_and_then_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, plain: list[list[list[int]]], kind: str, method: str
) -> None:
    """And drafts again afterwards."""
    works, calls = getattr(eagle_drafter.EagleDrafter, method), itertools.count()

    def raise_sometimes(drafter: Any, *arguments: Any) -> Any:
        if next(calls) % 3 == 1:
            raise MemoryError("no room")
        return works(drafter, *arguments)

    monkeypatch.setattr(eagle_drafter.EagleDrafter, method, raise_sometimes)
    with speculating(kind, page_size=16) as cluster:
        for _ in range(2):
            assert answers(cluster) == plain
        cluster.wait_idle()
        assert counter(targets(cluster)[-1], "pd_speculative_drafted_total") > 0


@pytest.mark.parametrize(
    ("raising", "method", "every"),
    [
        pytest.param(eagle_drafter.EagleDrafter, "begin_step", 10, marks=pytest.mark.full),
        (EagleWriter, "upload_state", 61),
    ],
    ids=["before all works", "between works"],
)
def test_drafts_after_a_failed_preparation_are_those_of_one_pass(
    monkeypatch: pytest.MonkeyPatch, raising: Any, method: str, every: int
) -> None:
    """So the head's KV of the steps that were not prepared is right."""
    notes, works, calls = Notes(monkeypatch), getattr(raising, method), itertools.count()

    def raise_sometimes(*arguments: Any) -> Any:
        if next(calls) % every == 1:
            raise MemoryError("no room")
        return works(*arguments)

    monkeypatch.setattr(raising, method, raise_sometimes)
    with speculating("unified", page_size=4) as cluster:
        for _ in range(2):
            answers(cluster, tokens=12)
        cluster.wait_idle()
        made = notes.drafts()
        assert len(made) > 30
        check_drafts(targets(cluster)[-1], made[::3])


def test_nothing_is_drafted_beyond_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that fills the context has no page for more."""
    beyond = []
    draft = eagle_drafter.EagleDrafter._draft_asks

    def note(drafter: Any, asks: Any, ends: Any) -> Any:
        requests = [(ask, ask.sequence.request) for ask in asks if ask.sequence.request.room]
        beyond.extend(ask.most - len(r.prompt) - r.params.max_tokens for ask, r in requests)
        return draft(drafter, asks, ends)

    monkeypatch.setattr(eagle_drafter.EagleDrafter, "_draft_asks", note)
    (prompt,) = random_prompts(6, [CONTEXT - 20])
    with tiny_cluster(0, 0, 1) as cluster:
        expected = cluster.client.generate(prompt, [cluster.unified[0]], max_tokens=20).result()
    with speculating("unified", page_size=1) as cluster:
        asked = cluster.client.generate(prompt, targets(cluster), max_tokens=20)
        assert asked.result() == expected
        cluster.wait_idle()
    assert beyond and max(beyond) <= 0
