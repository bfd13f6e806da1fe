"""Drafts of a smaller model: what they are, and what they cost."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cluster import random_prompts, wait_until
from counters import counter
from tiny import VOCAB_SIZE, tiny_cluster, tiny_model

from pd.core.config import NodeConfig
from pd.core.errors import UsageError
from pd.launch import NodeServer
from pd.scheduling import step
from pd.speculative import draft_model
from pd.speculative.adaptation import DraftLengths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster import Cluster

PROMPTS = list(random_prompts(4, [5, 40, 90]))
DRAFTED = 4


def speculating(*, prefill: int = 0, decode: int = 0, unified: int = 0, **settings: Any) -> Cluster:
    settings = {"speculative_draft_model": tiny_model()} | settings
    return tiny_cluster(
        prefill,
        decode,
        unified,
        speculative_algorithm="draft",
        speculative_num_draft_tokens=DRAFTED,
        speculative_adaptive="off",
        **settings,
    )


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.8},
]


@pytest.mark.parametrize("params", SAMPLING, ids=["greedy", "seeded", "penalties"])
@pytest.mark.parametrize("kind", ["unified", "split"])
def test_a_model_that_drafts_for_itself_is_always_right(kind: str, params: dict[str, Any]) -> None:
    """With one's own noise, at any temperature: each step accepts the whole draft."""
    nodes = {"unified": 1} if kind == "unified" else {"prefill": 1, "decode": 1}
    with speculating(**nodes) as cluster:
        decoding = cluster.nodes[-1]
        targets = list(cluster.pair) if kind == "split" else [decoding]
        asked = [
            cluster.client.generate(prompt, targets, max_tokens=41, **params) for prompt in PROMPTS
        ]
        for pending in asked:
            assert len(pending.tokens()) == 41
        # Token 1 comes from the prompt; the others in steps of a draft and one token more.
        drafts = counter(decoding, "pd_speculative_drafts_total")
        accepted = counter(decoding, "pd_speculative_accepted_total")
        assert drafts == len(PROMPTS) * 40 / (DRAFTED + 1)
        assert accepted == drafts * DRAFTED
        assert counter(decoding, "pd_speculative_acceptance_length") == DRAFTED + 1
        cluster.wait_idle()
        steps = counter(decoding, "pd_speculative_steps_total")
        assert 0 < steps <= drafts
        draft, verify, total = (
            counter(decoding, "pd_speculative_step_seconds_total", part=part)
            for part in ("draft", "verify", "total")
        )
        assert draft > 0 and verify > 0
        assert total == pytest.approx(draft + verify)


def test_the_kv_of_a_pass_that_failed_is_computed_again() -> None:
    """The prompt's, and that of the tokens before a draft."""
    with speculating(unified=1) as cluster:
        (node,) = cluster.nodes
        drafter: Any = node.node.core.drafter
        forward, lengths, failed = drafter._runner.forward, list[int](), list[int]()

        def fail(items: Any, **others: Any) -> Any:
            lengths.append(len(items[0].token_ids))
            if len(lengths) in (1, 6):
                failed.append(lengths[-1])
                raise torch.OutOfMemoryError("no memory")
            return forward(items, **others)

        drafter._runner.forward = fail
        asked = cluster.client.generate(PROMPTS[1], [node], max_tokens=42)
        assert len(asked.tokens()) == 42
        assert failed == [len(PROMPTS[1]), 2]
        drafts = counter(node, "pd_speculative_drafts_total")
        accepted = counter(node, "pd_speculative_accepted_total")
        assert 0 < accepted == drafts * DRAFTED


def test_drafting_is_timed_by_the_devices_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step with drafts later, if the device tells."""

    class Timer:
        has_measured = True

        def __init__(self, _: Any) -> None:
            self.marks = 0

        def start_part(self) -> None:
            self.marks += 1

        stop = start_part

        def read_parts(self) -> list[float]:
            assert self.marks == 3
            return [1.0, 20.0, 300.0]

    monkeypatch.setattr(step, "DeviceTimer", Timer)
    with speculating(unified=1) as cluster:
        (node,) = cluster.nodes
        for prompt in PROMPTS:
            cluster.client.generate(prompt, [node], max_tokens=9).result()
        cluster.wait_idle()
        steps = counter(node, "pd_speculative_steps_total")
        assert steps == counter(node, "pd_speculative_drafts_total") - 1 > 0
        for part, seconds in (("draft", 301.0), ("verify", 20.0), ("total", 321.0)):
            found = counter(node, "pd_speculative_step_seconds_total", part=part)
            assert found == seconds * steps


def test_a_prompt_is_computed_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, while the prefill node computes it and sends it."""
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 16)
    (prompt,) = random_prompts(8, [200])
    with speculating(prefill=1, decode=1) as cluster:
        drafter: Any = cluster.decode[0].node.core.drafter
        with held(cluster.prefill[0]):
            pending = cluster.client.generate(prompt, list(cluster.pair), max_tokens=62)
            wait_until(lambda: done_with(drafter, [200]), 20.0)
        pending.result()
        # Token 1 is delivered by both nodes.
        lengths = [len(output.token_ids) for output in pending.outputs]
        assert lengths == [1, 1] + [DRAFTED + 1] * 12 + [1]
        cluster.wait_idle()


def test_sequences_run_without_drafts_until_their_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 16)
    monkeypatch.setattr(draft_model.ModelDrafter, "expect_sequence", lambda *_: None)
    (prompt,) = random_prompts(8, [200])
    with speculating(unified=1) as cluster:
        pending = cluster.client.generate(prompt, [cluster.unified[0]], max_tokens=60)
        pending.result()
        # One token a step until 200 of its tokens, and those that came meanwhile, were computed.
        lengths = [len(output.token_ids) for output in pending.outputs]
        assert set(lengths[1:13]) == {1}
        assert DRAFTED + 1 in lengths[13:]


def done_with(drafter: Any, num_tokens: list[int]) -> bool:
    found = [memory.num_tokens for memory in list(drafter._memories.values())]
    return sorted(found) == sorted(num_tokens)


@contextlib.contextmanager
def held(server: NodeServer) -> Iterator[None]:
    """Computes nothing."""
    loop = server.node.step_loop
    launch, gate = loop._launch_step, threading.Event()

    def wait(*args: Any) -> Any:
        gate.wait(30.0)
        return launch(*args)

    loop._launch_step = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        gate.set()


def test_pages_of_ended_sequences_are_free_again() -> None:
    with speculating(unified=1, kv_cache_tokens=600, reserved_decode_tokens=1) as cluster:
        (server,) = cluster.unified
        for turn in range(4):
            asked = [
                cluster.client.generate(prompt, [server], max_tokens=50, seed=turn, n=2)
                for prompt in PROMPTS
            ]
            cluster.client.abort(asked[turn % 3])
            for number, pending in enumerate(asked):
                if number != turn % 3:
                    pending.result()
        cluster.wait_idle()
        drafter: Any = server.node.core.drafter
        free = partial(drafter._allocator.count_pages, draft_model.PageState.FREE)
        wait_until(lambda: drafter._memories == {} and free() == 600 // 4, 10.0)


def test_ended_sequences_leave_nothing_on_a_node_that_is_busy_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Because drafting never pays, and one answer is so long that no step is without works."""
    monkeypatch.setattr(DraftLengths, "choose_lengths", lambda _, __, limits: [0] * len(limits))
    with speculating(prefill=1, decode=1) as cluster:
        node, pair = cluster.decode[0].node, list(cluster.pair)
        drafter: Any = node.core.drafter
        free = partial(drafter._allocator.count_pages, draft_model.PageState.FREE)
        pages = free()
        with held(cluster.prefill[0]):
            prompts = [len(prompt) for prompt in PROMPTS]
            asked = [cluster.client.generate(prompt, pair, max_tokens=8) for prompt in PROMPTS]
            long = cluster.client.generate(PROMPTS[0], pair, max_tokens=1000)
            wait_until(partial(done_with, drafter, [*prompts, prompts[0]]), 20.0)
        asked += [cluster.client.generate(prompt, pair, max_tokens=2) for prompt in 4 * PROMPTS]
        for pending in asked:
            pending.result()

        def only_the_long_one_is_left() -> bool:
            with node.core.events.lock:
                assert node.scheduler.decode is not None
                is_running = len(node.scheduler.decode.running) == 1
            left = len(drafter._memories), len(drafter._expected), drafter._changes.qsize()
            return is_running and left == (1, 0, 0) and free() == pages - -(-prompts[0] // 4)

        wait_until(only_the_long_one_is_left, 20.0)
        cluster.client.abort(long)


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    other = tiny_model(vocab_size=VOCAB_SIZE + 8)
    config = NodeConfig(
        role="unified",
        model=tiny_model(),
        load_format="dummy",
        device="cpu",
        speculative_algorithm="draft",
        speculative_draft_model=other,
    )
    with pytest.raises(UsageError, match=r"has 264 tokens in its vocabulary, the model has 256"):
        NodeServer(config).start()


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_algorithm": "draft"},
        {"speculative_draft_model": "x"},
        {"speculative_algorithm": "ngram", "speculative_draft_model": "x"},
    ],
)
def test_draft_and_its_model_need_each_other(settings: Any) -> None:
    with pytest.raises(UsageError, match="need each other"):
        NodeConfig(role="unified", model=tiny_model(), **settings)
