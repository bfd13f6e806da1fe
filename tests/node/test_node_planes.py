"""Nodes whose pools have planes beside the model's K and V, under a digest of all of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from cluster import TokenClient, random_prompts, wait_idle
from tiny import tiny_cluster, tiny_node

from pd.core.node_info import Plane
from pd.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.launch import NodeServer

EXTRA_PLANES = (
    Plane("latent", 1, 1, 24, "bfloat16", vectors=1, ranks="first"),
    Plane("head", 1, 4, 8, "float16", group=1),
)


@pytest.fixture(scope="module")
def nodes(forked_ranks: None) -> Iterator[dict[str, NodeServer]]:
    """Prefill and decode nodes of one rank and of two."""
    build = Engine.build

    def with_planes(config: Any, beside: Any) -> Engine:
        return build(config, beside, EXTRA_PLANES)

    common: dict[str, Any] = {"transfer_backend": "tcp", "kv_digest": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "build", with_planes)
        made = {
            f"{role}{ranks}": tiny_node(role, tp_size=ranks, page_size=page, **common)
            for role, page in (("prefill", 4), ("decode", 8))
            for ranks in (1, 2)
        }
    yield made
    for server in made.values():
        server.stop()


def test_every_pair_hands_all_planes_over(nodes: dict[str, NodeServer], seed: int) -> None:
    """Nobody computes the further planes: P's hold what a test put there."""
    rng = random.Random(seed)
    prompts = list(random_prompts(seed, [1, 33, 100, 150]))
    prompts.append(prompts[2][:64] + prompts[1])
    params: dict[str, Any] = {"max_tokens": 5, "temperature": 1.0, "seed": 3}
    with tiny_cluster(0, 0, 1) as single:
        sent = [single.client.generate(p, single.unified, **params) for p in prompts]
        expected = [request.result(60) for request in sent]
    for name in ("prefill1", "prefill2"):
        for plane in nodes[name].node.engine.pool.planes[1:]:
            plane.buffer.copy_(torch.rand(plane.buffer.shape))
    client = TokenClient(list(nodes.values()))
    try:
        for prefill in ("prefill1", "prefill2"):
            for decode in ("decode1", "decode2"):
                pair = (nodes[prefill], nodes[decode])
                rng.shuffle(order := list(range(len(prompts))))
                pending = {
                    index: client.generate(prompts[index], pair, **params) for index in order
                }
                found = [pending[index].result(60) for index in range(len(prompts))]
                assert found == expected, (prefill, decode, seed)
        for server in nodes.values():
            wait_idle(server)
    finally:
        client.close()
    for decode in ("decode1", "decode2"):
        pool = nodes[decode].node.engine.pool
        for plane in pool.planes[1:]:
            assert plane.buffer.any(), f"nothing of {plane.spec} arrived"


def test_pages_and_layouts_count_all_planes(nodes: dict[str, NodeServer]) -> None:
    one, two = nodes["decode1"].node.engine, nodes["decode2"].node.engine
    names = ["model", "latent", "head"]
    assert [plane.name for plane in one.layout.planes] == names
    assert one.layout.planes == two.layout.planes
    assert two.layout.token_bytes == one.layout.token_bytes
    extra = sum(plane.token_bytes for plane in EXTRA_PLANES)
    assert one.pool.count_page_bytes(one.layout) == 8 * (one.layout.model.token_bytes + extra)
    assert [len(plane.parts) for plane in two.pool.planes] == [2, 1, 2]


def test_retraction_saves_all_planes_of_all_ranks(nodes: dict[str, NodeServer]) -> None:
    engine = nodes["decode2"].node.engine
    pages = np.array([3, 1], dtype=np.int32)
    for plane in engine.pool.planes:
        plane.buffer[:, :, 8:32] = torch.rand(plane.buffer[:, :, 8:32].shape)
    before = engine.pool.compute_digest(pages, (0, 0), 16)
    saved = engine.save_pages(pages)
    for plane in engine.pool.planes:
        plane.buffer[:, :, 8:32] = 0
    saved.restore_pages(pages)
    assert engine.pool.compute_digest(pages, (0, 0), 16) == before
