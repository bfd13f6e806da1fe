"""Whole nodes over nvlink, with shared memory for GPUs: same tokens, pages at the baseline."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from cluster import random_prompts
from nvlink_shm import nodes_in_shared_memory
from tiny import tiny_cluster, tiny_node
from transfer_helpers import SEED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvlink_shm import ShmDevice


@pytest.fixture
def devices() -> Iterator[list[ShmDevice]]:
    with nodes_in_shared_memory() as made:
        yield made


def test_nodes_over_nvlink_give_the_tokens_of_a_unified_node(devices: list[ShmDevice]) -> None:
    print(f"seed {SEED}")
    prompts = list(random_prompts(SEED, [1, 7, 40, 200, 333, 900] * 3))
    settings = {"decode_settings": {"page_size": 16}, "unified": 1}
    with tiny_cluster(transfer_backend="nvlink", chunked_prefill_size=64, **settings) as cluster:
        expected = [cluster.client.generate(p, cluster.unified).tokens() for p in prompts]
        asked = [cluster.client.generate(p, cluster.pair) for p in prompts]
        assert [request.tokens() for request in asked] == expected
        cluster.wait_idle()
    assert devices[0].launched >= len(prompts)
    assert devices[0].mapped == 0, "mappings end with the node"


@pytest.mark.full
def test_aborts_during_slow_stores_return_every_page(devices: list[ShmDevice]) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    prompts = list(random_prompts(SEED, [rng.randint(100, 700) for _ in range(30)]))
    with tiny_cluster(unified=1, transfer_backend="nvlink", kv_digest=True) as cluster:
        expected = [cluster.client.generate(p, cluster.unified).tokens() for p in prompts]
        devices[0].delay = 0.02
        kept = []
        for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            request = cluster.client.generate(prompt, cluster.pair)
            time.sleep(rng.uniform(0.0, 0.04))
            if number % 2:
                cluster.client.abort(request)
            else:
                kept.append((request, tokens))
        for request, tokens in kept:
            assert request.tokens() == tokens
        cluster.wait_idle()


def test_a_new_decode_node_takes_over_and_the_old_pool_is_unmapped(
    devices: list[ShmDevice],
) -> None:
    (prompt,) = random_prompts(SEED, [300])
    with tiny_cluster(transfer_backend="nvlink") as cluster:
        expected = cluster.client.generate(prompt, cluster.pair).tokens()
        cluster.decode[0].stop()
        again = tiny_node("decode", transfer_backend="nvlink")
        try:
            cluster.decode[0] = again
            assert cluster.client.generate(prompt, cluster.pair).tokens() == expected
            cluster.wait_idle()
            assert devices[0].mapped == 1
        finally:
            again.stop()
            del cluster.decode[0]
