"""Many streams on pools so small that eviction and retraction happen."""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from backends import IN_PROCESS, TCP, Backend
from checkpoints import is_greedy, reference_generate
from cluster import Cluster

from pd.core.errors import PDError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OUTPUT_TOKENS = 64


def mixed_prompts(rng: random.Random, count: int, documents: int = 12) -> list[list[int]]:
    """Questions about shared documents, and some about nothing shared."""
    shared = [
        [rng.randrange(256) for _ in range(rng.choice((20, 60, 150, 300)))]
        for _ in range(documents)
    ]
    prompts = []
    for _ in range(count):
        question = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
        prompts.append(question if rng.random() < 0.2 else rng.choice(shared) + question)
    return prompts


@pytest.mark.parametrize(
    ("streams", "backend"),
    [
        pytest.param(25, TCP, id="25-tcp"),
        *(
            pytest.param(200 if b is TCP else 50, b, id=str(b), marks=pytest.mark.full)
            for b in IN_PROCESS
        ),
    ],
    indirect=["backend"],
)
@pytest.mark.timeout(400)
def test_many_streams_on_small_pools_split(
    checkpoint: Callable[[str], Path], seed: int, backend: Backend, streams: int
) -> None:
    check_streams(checkpoint("qwen3"), seed, backend.flag, streams)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_many_streams_on_small_pools_unified(checkpoint: Callable[[str], Path], seed: int) -> None:
    check_streams(checkpoint("qwen3"), seed, None, 200)


@functools.lru_cache(maxsize=2)
def drawn(
    model: Path, seed: int, streams: int
) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Prompts, how many tokens are asked for, and transformers' answers, the same for all
    backends."""
    rng = random.Random(seed)
    prompts = mixed_prompts(rng, streams)
    lengths = [rng.randrange(1, OUTPUT_TOKENS) for _ in prompts]
    asked = zip(prompts, lengths, strict=True)
    return prompts, lengths, [reference_generate(model, [p], n)[0] for p, n in asked]


def check_streams(model: Path, seed: int, backend: str | None, streams: int) -> None:
    """``backend``: None for a unified node."""
    rng = random.Random(seed)
    prompts, lengths, expected = drawn(model, seed, streams)
    settings: dict[str, Any] = {
        "kv_cache_tokens": 1200,
        "page_size": 8,
        "chunked_prefill_size": 128,
    }
    settings |= {"transfer_backend": backend or "tcp"}
    unified = int(backend is None)
    with Cluster(
        model,
        prefill=1 - unified,
        decode=1 - unified,
        unified=unified,
        **settings,
        decode_settings={
            "kv_cache_tokens": 440,
            "reserved_decode_tokens": 1,
            "retraction_host_memory": 1 << 20,
        },
    ) as cluster:
        nodes = cluster.unified or list(cluster.pair)
        pending = [
            cluster.client.generate(prompt, nodes, max_tokens=length)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        cancelled = range(0, streams, 10)

        def cancel() -> None:
            for index in cancelled:
                time.sleep(rng.random() / 5)
                cluster.client.abort(pending[index])

        canceller = threading.Thread(target=cancel)
        canceller.start()
        wrong = []
        for index, request in enumerate(pending):
            if index in cancelled:
                continue
            try:
                tokens = request.tokens(300)
            except PDError as error:
                wrong.append((index, error))
                continue
            if len(tokens) != lengths[index] or not (
                tokens == expected[index] or is_greedy(model, prompts[index], tokens)
            ):
                wrong.append((index, tokens))
        canceller.join()
        metrics = nodes[-1].node.core.metrics
        radix = nodes[0].node.core.memory.radix
        # Elastic nodes share the streams, so that neither pool need be short.
        retracts = backend is not None and os.environ.get("PD_TEST_ELASTIC", "off") == "off"
        # What was drawn may have fitted. Two of these do not fit into the decode pool together.
        for _ in range(10):
            if radix.evicted_pages and (metrics.retractions._value.get() or not retracts):
                break
            pair = [[rng.randrange(256) for _ in range(200)] for _ in range(2)]
            growing = [cluster.client.generate(prompt, nodes, max_tokens=120) for prompt in pair]
            for prompt, request in zip(pair, growing, strict=True):
                assert is_greedy(model, prompt, request.tokens(300))
        cluster.wait_idle(30)
        evicted, retracted = radix.evicted_pages, metrics.retractions._value.get()
    assert not wrong
    assert evicted > 0, "the pool was large enough for everything"
    assert retracted > 0 or not retracts, "the decode pool was never short"
