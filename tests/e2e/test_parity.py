"""Tokens equal transformers', whatever the architecture, page size, chunking and deployment."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from backends import FAKE, MOONCAKE, NIXL, TCP, Backend, over
from checkpoints import ARCHITECTURES, reference_generate, reference_logprobs
from cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cluster import Pending

PAGE_SIZES = (1, 16, 64)
CHUNKS = (16, 4096)
OUTPUT_TOKENS = 16
# The one that ``make test`` runs over every backend: small chunks, many pages.
OVER_ALL = ("qwen3", 16, 16)
MATRIX = list(itertools.product(ARCHITECTURES, PAGE_SIZES, CHUNKS))


# Every page size with every chunk size, and the architectures that differ most. All of them, on two
# ranks, are in tests/engine/test_tensor_parallel.py.
SAMPLE = {
    ("qwen3", 16, 16),
    ("llama3", 16, 4096),
    ("qwen2", 1, 4096),
    ("mixtral", 64, 4096),
    ("deepseek_v3", 64, 16),
    ("gpt_oss", 1, 16),
}
assert set(MATRIX) >= SAMPLE


def twenty_prompts(seed: int) -> list[list[int]]:
    """1 to 700 tokens; some share a prefix, some are repeated."""
    rng = np.random.default_rng(seed)
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 700]
    prompts = [rng.integers(0, 256, n).tolist() for n in lengths]
    prompts += [rng.integers(0, 256, int(n)).tolist() for n in rng.integers(3, 400, 4)]
    for shared in (10, 100, 500):
        prompts.append(prompts[8][:shared] + rng.integers(0, 256, 30).tolist())
    prompts.append(prompts[8][:650])
    prompts += [list(prompts[8]), list(prompts[3]), list(prompts[0])]
    return prompts


@pytest.fixture(scope="module")
def references(checkpoint: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """Greedy continuations of the twenty prompts by transformers, computed once."""
    known: dict[str, list[list[int]]] = {}

    def continuations(architecture: str) -> list[list[int]]:
        if architecture not in known:
            known[architecture] = reference_generate(
                checkpoint(architecture), twenty_prompts(0), OUTPUT_TOKENS
            )
        return known[architecture]

    return continuations


@pytest.mark.parametrize(
    ("architecture", "page_size", "chunk"),
    [pytest.param(*c, marks=() if c in SAMPLE else pytest.mark.full) for c in MATRIX],
)
def test_split_tokens_equal_transformers(
    checkpoint: Callable[[str], Path],
    references: Callable[[str], list[list[int]]],
    architecture: str,
    page_size: int,
    chunk: int,
) -> None:
    outputs = split_tokens(checkpoint(architecture), TCP, page_size, chunk)
    assert outputs == references(architecture)


@over((FAKE, NIXL, MOONCAKE), sample=[NIXL])
@pytest.mark.parametrize(
    ("architecture", "page_size", "chunk"),
    [pytest.param(*c, marks=() if c == OVER_ALL else pytest.mark.full) for c in MATRIX],
)
def test_tokens_equal_transformers_over_every_backend(
    checkpoint: Callable[[str], Path],
    references: Callable[[str], list[list[int]]],
    backend: Backend,
    architecture: str,
    page_size: int,
    chunk: int,
) -> None:
    outputs = split_tokens(checkpoint(architecture), backend, page_size, chunk)
    assert outputs == references(architecture)


def split_tokens(model: Path, backend: Backend, page_size: int, chunk: int) -> list[list[int]]:
    """Tokens of the twenty prompts, all at once on one pair."""
    settings = {"page_size": page_size, "chunked_prefill_size": chunk}
    with Cluster(model, transfer_backend=backend.flag, **settings) as cluster:
        pending = [
            cluster.client.generate(prompt, cluster.pair, max_tokens=OUTPUT_TOKENS)
            for prompt in twenty_prompts(0)
        ]
        outputs = [request.tokens() for request in pending]
        cluster.wait_idle()
    return outputs


def run_everywhere(
    model: Path, prompts: list[list[int]], **params: object
) -> dict[str, list[Pending]]:
    """The same requests unified, 1P1D and 2P2D, all at once in each deployment."""
    results = {}
    with Cluster(model, prefill=2, decode=2, unified=1, chunked_prefill_size=100) as cluster:
        pairs = list(itertools.product(cluster.prefill, cluster.decode))
        for name, choose in (
            ("unified", lambda i: cluster.unified),
            ("1P1D", lambda i: cluster.pair),
            ("2P2D", lambda i: pairs[i % 4]),
        ):
            pending = [
                cluster.client.generate(prompt, choose(index), **params)
                for index, prompt in enumerate(prompts)
            ]
            for request in pending:
                request.result()
            results[name] = pending
        cluster.wait_idle()
    return results


def test_unified_1p1d_and_2p2d_agree(
    checkpoint: Callable[[str], Path], references: Callable[[str], list[list[int]]]
) -> None:
    results = run_everywhere(checkpoint("qwen3"), twenty_prompts(0), max_tokens=OUTPUT_TOKENS)
    for name, pending in results.items():
        assert [request.tokens() for request in pending] == references("qwen3"), name


def test_log_probabilities_agree_with_transformers_everywhere(
    checkpoint: Callable[[str], Path],
) -> None:
    model = checkpoint("llama3")
    prompts = [p for p in twenty_prompts(1) if 2 <= len(p) <= 200]
    results = run_everywhere(
        model, prompts, max_tokens=12, logprobs=True, top_logprobs=3, prompt_logprobs_start=0
    )
    for name, pending in results.items():
        for prompt, request in zip(prompts, pending, strict=True):
            check_logprobs(model, prompt, request, name)


def check_logprobs(model: Path, prompt: list[int], request: Pending, name: str) -> None:
    output = request.tokens()
    expected = reference_logprobs(model, prompt + output).numpy()
    stream = request.choices[0]
    for position, token in enumerate(output):
        row = expected[len(prompt) + position - 1]
        found = stream.logprobs[position]
        assert found.token_id == token
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-4), name
        assert found.top_logprobs == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-4)
    assert request.prompt_logprobs is not None
    assert [entry.token_id for entry in request.prompt_logprobs] == prompt
    assert request.prompt_logprobs[0].logprob is None
    for position, entry in enumerate(request.prompt_logprobs[1:], start=1):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4), name


def test_a_seeded_request_gives_the_same_tokens_everywhere_and_in_a_batch_of_32(
    checkpoint: Callable[[str], Path], seed: int
) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(256) for _ in range(50)]
    params = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 1234, "max_tokens": 32}
    results = run_everywhere(checkpoint("qwen3"), [prompt], **params)
    alone = {name: pending[0].tokens() for name, pending in results.items()}
    crowd = [[rng.randrange(256) for _ in range(rng.randrange(1, 120))] for _ in range(31)]
    batch = run_everywhere(checkpoint("qwen3"), [prompt, *crowd], **params)
    together = {name: pending[0].tokens() for name, pending in batch.items()}
    expected = alone["unified"]
    assert all(tokens == expected for tokens in [*alone.values(), *together.values()])


def test_choices_share_one_transfer_and_the_first_is_the_request_without_n(
    checkpoint: Callable[[str], Path], seed: int
) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(256) for _ in range(75)]
    params = {"temperature": 1.0, "seed": 7, "max_tokens": 20}
    with Cluster(checkpoint("qwen3"), unified=1) as cluster:
        single = cluster.client.generate(prompt, cluster.unified, **params).tokens()
        alone = cluster.client.generate(prompt, cluster.unified, n=4, **params).result()
        request = cluster.client.generate(prompt, cluster.pair, n=4, **params)
        split = request.result()
        cluster.wait_idle()
        token_bytes = cluster.decode[0].node.engine.layout.token_bytes
    assert split == alone
    assert split[0] == single
    assert len({tuple(choice) for choice in split}) == 4
    assert request.transferred_bytes == len(prompt) * token_bytes
