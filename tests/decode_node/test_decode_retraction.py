"""When the pool is full, sequences leave it and come back, and nobody can tell from the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from cluster import random_prompts, wait_until
from hand_off_helpers import Gate, queues
from tiny import TOKEN_BYTES, tiny_cluster

from pd.core.errors import NodeFailedError, PDError

if TYPE_CHECKING:
    from cluster import Cluster

POOL = {"kv_cache_tokens": 120, "reserved_decode_tokens": 1}


def expected_tokens(prompts: list[list[int]], max_tokens: int, **settings: Any) -> list[list[int]]:
    """What a node with plenty of memory answers, one prompt at a time."""
    with tiny_cluster(0, 0, 1, **settings) as plenty:
        nodes = plenty.unified
        return [
            plenty.client.generate(prompt, nodes, max_tokens=max_tokens).tokens()
            for prompt in prompts
        ]


SAMPLE = {("split", 4), ("unified", 16)}


def scattered_pages(cluster: Cluster, node: int = -1) -> list[int]:
    """Counts pages that come back from host memory from now on."""
    pool = cluster.nodes[node].node.engine.pool
    scatter, counts = pool.scatter_pages, []

    def counting(pages: Any, host: Any) -> None:
        counts.append(len(pages))
        scatter(pages, host)

    pool.scatter_pages = counting
    return counts


def retractions(cluster: Cluster) -> float:
    return cluster.nodes[-1].node.core.metrics.retractions._value.get()


@pytest.mark.parametrize(
    ("roles", "page_size"),
    [
        pytest.param(
            roles,
            page_size,
            id=f"{name}-{page_size}",
            marks=() if (name, page_size) in SAMPLE else pytest.mark.full,
        )
        for name, roles in (("split", (1, 1, 0)), ("unified", (0, 0, 1)))
        for page_size in (1, 4, 16)
    ],
)
def test_kv_of_retracted_sequences_comes_back_from_host_memory(
    roles: tuple[int, int, int], page_size: int
) -> None:
    prompts = list(random_prompts(1, [20, 21, 22, 23]))
    expected = expected_tokens(prompts, 60)
    with tiny_cluster(*roles, page_size=page_size, **POOL) as cluster:
        returned = scattered_pages(cluster)
        sent = [cluster.client.generate(p, cluster.nodes, max_tokens=60) for p in prompts]
        assert [request.tokens(30) for request in sent] == expected
        assert retractions(cluster) > 0
        assert sum(returned) > 0
        cluster.wait_idle()
        assert cluster.nodes[-1].node.scheduler.decode._host_used == 0


@pytest.mark.parametrize("limit", [0, 30 * TOKEN_BYTES])
def test_kv_beyond_the_host_memory_cap_is_computed_again(limit: int) -> None:
    prompts = list(random_prompts(2, [20, 21, 22, 23]))
    expected = expected_tokens(prompts, 60)
    with tiny_cluster(**POOL, retraction_host_memory=limit) as cluster:
        decode = cluster.decode[0].node.scheduler.decode
        used = []
        retract = decode._retract_sequence

        def watching(sequence: Any) -> None:
            retract(sequence)
            used.append(decode._host_used)

        decode._retract_sequence = watching
        sent = [cluster.client.generate(p, cluster.pair, max_tokens=60) for p in prompts]
        assert [request.tokens(30) for request in sent] == expected
        assert used and max(used) <= limit
        cluster.wait_idle()


@pytest.mark.parametrize("what", ["save", "restore"])
def test_kv_for_whose_copy_there_is_no_memory_is_computed_again(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = list(random_prompts(5, [20, 21, 22, 23]))
    expected = expected_tokens(prompts, 60)
    with tiny_cluster(**POOL) as cluster:
        node = cluster.decode[0].node
        scatter = node.engine.pool.scatter_pages

        def no_memory(pages: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        def half_restored(pages: Any, copies: Any) -> None:
            some = pages[: len(pages) // 2 + 1]
            scatter(some, [torch.full_like(copy[:, :, : len(some)], 7.0) for copy in copies])
            no_memory(pages)

        if what == "save":
            monkeypatch.setattr(node.engine.pool, "gather_pages", no_memory)
        else:
            monkeypatch.setattr(node.engine.pool, "scatter_pages", half_restored)
        sent = [cluster.client.generate(p, cluster.pair, max_tokens=60) for p in prompts]
        assert [request.tokens(30) for request in sent] == expected
        assert retractions(cluster) > 0
        assert f"cannot {what} the KV of a retracted sequence: RuntimeError" in caplog.text
        cluster.wait_idle()
        assert node.ready
        assert node.scheduler.decode._host_used == 0


def test_ranks_that_are_gone_while_kv_is_saved_end_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(pages: Any) -> Any:
        raise NodeFailedError("rank 1 is gone")

    with tiny_cluster(**POOL) as cluster:
        node = cluster.decode[0].node
        monkeypatch.setattr(node.engine.pool, "gather_pages", gone)
        prompts = random_prompts(6, [20, 21, 22, 23])
        sent = [cluster.client.generate(p, cluster.pair, max_tokens=60) for p in prompts]
        for request in sent:
            with pytest.raises(PDError, match="rank 1 is gone"):
                request.tokens(30)
        assert node.step_loop.broken


def test_a_committed_sequence_runs_when_the_retracted_one_lacks_its_pages() -> None:
    # The first grows until only the pages of the second, which waits for its place in the batch,
    # could help it. If the second waited for the first to resume, both would wait for ever.
    first, second = random_prompts(3, [40, 60])
    expected = [expected_tokens([p], n)[0] for p, n in ((first, 60), (second, 20))]
    with tiny_cluster(**POOL, decode_settings={"max_running_requests": 1}) as cluster:
        gate = Gate(cluster.decode[0])
        sent = [cluster.client.generate(first, cluster.pair, max_tokens=60)]
        wait_until(lambda: queues(cluster.decode[0])["running"] == 1, 5)
        sent.append(cluster.client.generate(second, cluster.pair, max_tokens=20))
        wait_until(lambda: queues(cluster.decode[0])["waiting"] == 1, 5)
        gate.open()
        assert [request.tokens(10) for request in sent] == expected
        assert retractions(cluster) > 0
        cluster.wait_idle()


def test_retracted_sequences_resume_before_anything_new_gets_memory() -> None:
    long, *short = random_prompts(4, [30, 30, 8, 8, 8, 8])
    with tiny_cluster(**POOL) as cluster:
        node = cluster.decode[0].node
        reserved: list[int] = []
        receiver = node.transfers[-1].receiver

        def watching(*args: Any) -> Any:
            reserved.append(len(node.scheduler.decode.retracted))
            return receiver(*args)

        node.transfers[-1].receiver = watching
        sent = [cluster.client.generate(long, cluster.pair, max_tokens=80)]
        sent += [cluster.client.generate(p, cluster.pair, max_tokens=40) for p in short]
        for request in sent:
            request.tokens(30)
        assert retractions(cluster) > 0
        assert len(reserved) == len(sent)
        assert not any(reserved), "a request was given memory that a retracted sequence waits for"
        cluster.wait_idle()
