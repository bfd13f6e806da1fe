"""Prefill and decode nodes of any ``--tp-size`` hand KV to each other."""

from __future__ import annotations

import contextlib
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import is_greedy, make_checkpoint
from cluster import Cluster, TokenClient, random_prompts, start_node, wait_idle
from tiny import tiny_cluster, tiny_model, tiny_node

from pd.core.config import NodeConfig
from pd.core.errors import UsageError
from pd.launch import NodeServer
from pd.transfer.registry import check_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Pages differ between the two sides, and so few that sequences are retracted on the decode nodes.
PREFILL = {"page_size": 4, "chunked_prefill_size": 48}
DECODE = {"page_size": 8, "kv_cache_tokens": 256, "reserved_decode_tokens": 2}


@pytest.fixture(
    scope="module",
    params=[
        "tcp",
        pytest.param("nixl", marks=pytest.mark.full),
        pytest.param("mooncake", marks=pytest.mark.full),
    ],
)
def nodes(request: pytest.FixtureRequest, forked_ranks: None) -> Iterator[dict[str, NodeServer]]:
    """Prefill and decode nodes of one rank and of two."""
    common: dict[str, Any] = {"transfer_backend": request.param, "kv_digest": True}

    def start(role: str, tp_size: int) -> NodeServer:
        settings = PREFILL if role == "prefill" else DECODE
        return tiny_node(role, tp_size=tp_size, **common, **settings)

    kinds = [("prefill", 1), ("prefill", 2), ("decode", 1), ("decode", 2)]
    made = {f"{role}{tp_size}": start(role, tp_size) for role, tp_size in kinds}
    yield made
    with ThreadPoolExecutor() as pool:
        list(pool.map(NodeServer.stop, made.values()))


def test_every_pair_answers_what_one_node_answers(nodes: dict[str, NodeServer], seed: int) -> None:
    """Prompts that end anywhere in a chunk and a page, most with prefixes that are cached already,
    under a digest of what was computed and of what arrived."""
    rng = random.Random(seed)
    prompts = list(random_prompts(seed, [1, 4, 33, 48, 100, 150]))
    prompts += [prompts[4][:60] + prompts[2], prompts[5][: rng.randrange(1, 150)] + prompts[0]]
    params: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "n": 2}
    with tiny_cluster(0, 0, 1) as single:
        sent = [single.client.generate(p, single.unified, **params) for p in prompts]
        expected = [request.result(60) for request in sent]
    client = TokenClient(list(nodes.values()))
    try:
        for prefill in ("prefill1", "prefill2"):
            for decode in ("decode1", "decode2"):
                pair = (nodes[prefill], nodes[decode])
                pending = [client.generate(p, pair, **params) for p in prompts]
                assert [p.result(60) for p in pending] == expected, (prefill, decode, seed)
        for server in nodes.values():
            wait_idle(server)
    finally:
        client.close()


@pytest.mark.full
@pytest.mark.skipif(
    os.environ.get("PD_TEST_DEVICE") == "cuda" and torch.cuda.device_count() < 4,
    reason="needs four GPUs",
)
def test_two_ranks_and_four(seed: int) -> None:
    """Each of P's ranks has the heads of two of D's, and the other way round."""
    model = tiny_model(num_key_value_heads=4)
    prompts = list(random_prompts(seed, [1, 33, 100, 150]))
    params: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 3}
    common: dict[str, Any] = {"load_format": "dummy", "transfer_backend": "tcp", "kv_digest": True}
    with Cluster(model, 0, 0, 1, **common) as single:
        expected = [single.client.generate(p, single.unified, **params) for p in prompts]
        answers = [request.result(60) for request in expected]
    with contextlib.ExitStack() as stack:
        nodes = {}
        for role, tp_size in [("prefill", 2), ("decode", 4), ("prefill", 4), ("decode", 2)]:
            settings = PREFILL if role == "prefill" else DECODE
            server = start_node(role, model, tp_size=tp_size, **common, **settings)
            stack.callback(server.stop)
            nodes[role, tp_size] = server
        client = stack.enter_context(contextlib.closing(TokenClient(list(nodes.values()))))
        for pair in [(2, 4), (4, 2), (4, 4)]:
            servers = nodes["prefill", pair[0]], nodes["decode", pair[1]]
            pending = [client.generate(p, servers, **params) for p in prompts]
            assert [p.result(60) for p in pending] == answers, (pair, seed)


def transfer_prompts(
    model: Path, prefill: int, decode: int, seed: int, *, ep_size: int = 1
) -> float:
    """Answer prompts with two nodes of these many ranks. Return the bytes sent for each token.

    ``ep_size``: of the decode node.
    """
    prompts = list(random_prompts(seed, [33, 1, 150]))
    prompts.append(prompts[2][:60] + prompts[1])
    with contextlib.ExitStack() as stack:
        pair = (
            start_node("prefill", model, tp_size=prefill, kv_digest=True, **PREFILL),
            start_node(
                "decode", model, tp_size=decode, ep_size=ep_size, kv_digest=True, page_size=8
            ),
        )
        for server in pair:
            stack.callback(server.stop)
        client = stack.enter_context(contextlib.closing(TokenClient(list(pair))))
        pending = [client.generate(p, pair, max_tokens=12) for p in prompts]
        for prompt, request in zip(prompts, pending, strict=True):
            assert is_greedy(model, prompt, request.tokens()), seed
    return pending[0].transferred_bytes / len(prompts[0])


@pytest.mark.parametrize(
    ("kv_heads", "prefill", "decode"),
    [
        (1, 2, 1),
        *(pytest.param(*c, marks=pytest.mark.full) for c in [(1, 1, 2), (2, 4, 2), (2, 2, 4)]),
    ],
)
def test_ranks_that_share_heads(
    forked_ranks: None, tmp_path: Path, kv_heads: int, prefill: int, decode: int, seed: int
) -> None:
    """Heads that several ranks have travel once, and are written to each of them."""
    model = make_checkpoint("gpt_oss", tmp_path, num_key_value_heads=kv_heads)
    # A row of 3 layers has K and V of 32 float32 for each head.
    assert transfer_prompts(model, prefill, decode, seed) == 3 * 2 * kv_heads * 32 * 4


@pytest.mark.parametrize(
    ("prefill", "decode", "ep_size"),
    [
        (2, 2, 1),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(1, 2, 2), (2, 1, 1)]),
    ],
)
def test_latents_of_all_ranks_travel_once(
    checkpoint: Callable[[str], Path],
    forked_ranks: None,
    prefill: int,
    decode: int,
    ep_size: int,
    seed: int,
) -> None:
    """Each rank has all latents, and the receiving end writes them into every rank's pool. The
    decode node's ranks may have different experts, because that changes no KV."""
    model = checkpoint("deepseek_v2")
    # A row of 3 layers has 32 + 8 float32.
    assert transfer_prompts(model, prefill, decode, seed, ep_size=ep_size) == 3 * 40 * 4


def test_the_whole_model_is_what_peers_are_told(nodes: dict[str, NodeServer]) -> None:
    one, two = nodes["decode1"].node.engine, nodes["decode2"].node.engine
    assert (one.layout.tp_size, two.layout.tp_size) == (1, 2)
    part, (plane,) = two.pool.layout.model, two.pool.planes
    assert one.layout.model == two.layout.model
    assert one.layout.model.num_heads == 2 * part.num_heads
    assert plane.buffer.shape[3] * len(plane.parts) == two.layout.model.num_heads


@pytest.mark.parametrize("backend", ["nvlink", "fake"])
def test_backends_that_reach_into_one_pool_are_refused(backend: str) -> None:
    config = NodeConfig(role="prefill", model=tiny_model(), tp_size=2, transfer_backend=backend)
    with pytest.raises(UsageError, match=f"{backend} moves the KV of one device; .* tcp"):
        check_backend(config.transfer_backend, None, "cuda", config.tp_size)
