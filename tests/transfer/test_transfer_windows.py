"""Pools whose layers with a sliding window have a page table of their own, over every backend."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
from nvlink_shm import shm_planes
from test_transfer_planes import BACKENDS, BACKENDS_OF_RANKS, TOKENS, Node, cuts, make_manager
from transfer_helpers import SEED, hand_off, node_info, reservation

from pd.core.node_info import KVLayout, Plane
from pd.engine.kv_pool import KVPool
from pd.engine.page_allocator import NO_PAGE
from pd.kernels.paging import find_token_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.transfer.kv_buffer import IntArray

PLANES = (
    Plane("windows", 2, 2, 16, "float32", group=1, window=30),
    Plane("head", 1, 4, 8, "float16", ranks="first"),
)


def make_layout(page_size: int, tp_size: int = 1) -> KVLayout:
    return KVLayout.of_model(2, 2, 16, "float32", page_size, tp_size, PLANES)


def draw_tables(node: Node, rng: random.Random, first: int) -> IntArray:
    """Draw page tables without a page before token ``first`` in the window."""
    size = node.pool.page_size
    count = -(-TOKENS // size)
    pages = rng.sample(range(node.pool.num_pages), 2 * count)
    tables = np.array(pages, np.int32).reshape(2, count)
    tables[1, : first // size] = NO_PAGE
    return tables


def read_tokens(node: Node, tables: IntArray, index: int, start: int) -> torch.Tensor:
    """Read a plane's ``[layers, vectors, tokens, heads of all ranks, dim]`` as bytes."""
    spec = node.layout.planes[index]
    tokens = np.arange(start, TOKENS)
    slots = find_token_slots(tables[int(spec.window > 0)], tokens, node.pool.page_size)
    ranks = node.ranks if spec.ranks == "divided" else node.ranks[:1]
    parts = [rank.planes[index].buffer[:, :, slots] for rank in ranks]
    return torch.cat(parts, dim=3).view(torch.uint8)


def erase_tokens(node: Node, tables: IntArray, index: int, start: int) -> None:
    """Write zeros over a plane's tokens."""
    table = tables[int(node.layout.planes[index].window > 0)]
    slots = find_token_slots(table, np.arange(start, TOKENS), node.pool.page_size)
    for rank in node.ranks:
        if index < len(rank.planes):
            rank.planes[index].buffer[:, :, slots] = 0


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Node, Node]]]:
    """``make(backend, page size of P, of D, ranks of P, of D)``, connected; P's pool is random."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "mailbox_package"))
    made: list[Node] = []
    paths: list[Path] = []

    def start(backend: str, instance: str, page_size: int, ranks: int) -> Node:
        layout, path = make_layout(page_size, ranks), None
        num_pages = 3 * -(-TOKENS // page_size)
        if backend == "nvlink":
            pool, path = shm_planes(layout, num_pages)
            paths.append(path)
            pools = [pool]
        else:
            pools = [KVPool(layout.of_rank(rank), num_pages, "cpu") for rank in range(ranks)]
            pools[0].set_parts([pool.memory.data_ptr() for pool in pools], layout)
        for number, pool in enumerate(pools):
            if instance == "P":
                pool.memory.random_(generator=torch.Generator().manual_seed(SEED + number))
        node = Node(pools, make_manager(backend, pools[0], instance, path), layout)
        made.append(node)
        return node

    def make(
        backend: str, p_page: int = 4, d_page: int = 16, p_ranks: int = 1, d_ranks: int = 1
    ) -> tuple[Node, Node]:
        p, d = start(backend, "P", p_page, p_ranks), start(backend, "D", d_page, d_ranks)
        p.manager.connect(node_info("D", "decode", d.manager, d))
        d.manager.connect(node_info("P", "prefill", p.manager, p))
        return p, d

    yield make
    for node in made:
        node.manager.close()
    for path in paths:
        path.unlink()


def check_hand_off(p: Node, d: Node, rng: random.Random, cached: tuple[int, int]) -> None:
    """Hand a prompt over, and check every byte of D's pool."""
    # P may have given up more of the window than D has pages for.
    pages, into = draw_tables(p, rng, cached[1]), draw_tables(d, rng, cached[1])
    receiver = d.manager.receiver("P", bytes(16), 1, into, cached, TOKENS)
    asked = msgspec.structs.replace(reservation(receiver, bytes(16), 1, 0), cached=cached)
    sender = p.manager.sender("D", asked, pages, TOKENS)
    for start, stop in cuts(rng, min(cached), TOKENS):
        for first, last in cuts(rng, 0, p.layout.num_layers):
            sender.send(start, stop, first, last)
    hand_off(sender, receiver)
    assert sender.bytes_sent == p.layout.missing_bytes(cached, TOKENS)
    if len(p.ranks) == len(d.ranks) == 1:
        digests = {
            node.pool.compute_digest(tables, cached, TOKENS)
            for node, tables in ((p, pages), (d, into))
        }
        assert len(digests) == 1
    for index, plane in enumerate(p.layout.planes):
        start = cached[plane.group]
        sent = read_tokens(p, pages, index, start)
        assert torch.equal(read_tokens(d, into, index, start), sent)
        assert sent.any()
    for index, plane in enumerate(p.layout.planes):
        erase_tokens(d, into, index, cached[plane.group])
    assert not any(rank.memory.any() for rank in d.ranks), "something else was written"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cached", [(0, 170), (64, 160), (190, 190)])
def test_only_tokens_in_the_window_of_the_next_one_travel(
    backend: str, cached: tuple[int, int], nodes: Callable[..., tuple[Node, Node]], seed: int
) -> None:
    p, d = nodes(backend)
    check_hand_off(p, d, random.Random(seed), cached)


@pytest.mark.parametrize("backend", BACKENDS_OF_RANKS)
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_nodes_with_several_ranks(
    backend: str, ranks: tuple[int, int], nodes: Callable[..., tuple[Node, Node]], seed: int
) -> None:
    p, d = nodes(backend, 16, 4, *ranks)
    check_hand_off(p, d, random.Random(seed), (0, 160))


@pytest.mark.parametrize("backend", BACKENDS)
def test_page_tables_that_do_not_fit_the_planes_are_refused(
    backend: str, nodes: Callable[..., tuple[Node, Node]], seed: int
) -> None:
    p, d = nodes(backend)
    into = draw_tables(d, random.Random(seed), 170)
    for tables, cached in ((into[0], (0, 170)), (into, (0, 100))):
        with pytest.raises(ValueError, match=r"page tables of shape|pages -1 to"):
            d.manager.receiver("P", bytes(16), 1, tables, cached, TOKENS)
    receiver = d.manager.receiver("P", bytes(16), 1, into, (0, 170), TOKENS)
    asked = msgspec.structs.replace(reservation(receiver, bytes(16), 1, 0), cached=(0, 100))
    pages = draw_tables(p, random.Random(seed), 170)
    with pytest.raises(ValueError, match="pages -1 to"):
        p.manager.sender("D", asked, pages, TOKENS)
