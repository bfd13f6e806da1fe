"""Pools of several planes of different widths, over every backend."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from nvlink_shm import ShmDevice, shm_planes
from transfer_helpers import (
    SEED,
    backends,
    hand_off,
    node_info,
    reservation,
    settled,
    wait_until,
)

from pd.core.errors import TransferError
from pd.core.node_info import KVLayout, Plane
from pd.engine.kv_pool import KVPool
from pd.kernels.paging import find_token_slots
from pd.transfer import make_transfer_manager
from pd.transfer.base import TransferState
from pd.transfer.nvlink.manager import NvlinkManager
from pd.transfer.pool_shape import MissingTokens, PoolShape
from pd.transfer.ranges import Block
from pd.transfer.staged.messages import Filled
from pd.transfer.tcp.frames import decode_header, encode_header
from pd.transfer.tcp.manager import TcpManager
from pd.transfer.wire.errors import PeerDataError
from pd.util.starvation import Patience

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd.transfer.base import TransferManager
    from pd.transfer.kv_buffer import IntArray

BACKENDS = backends("tcp", "tcp-staged", "fake", "nixl", "mooncake", "nvlink", "mailbox")
# Nodes of several ranks hand KV to each other over these.
BACKENDS_OF_RANKS = backends("tcp", "nixl", "mooncake")
EXTRA_PLANES = (
    Plane("latent", 1, 1, 24, "bfloat16", vectors=1, ranks="first", group=1),
    Plane("head", 1, 4, 8, "float16", group=2),
    Plane("rows", 2, 1, 20, "float32", vectors=1, ranks="copied", group=1),
)
NUM_LAYERS, GROUPS, TOKENS = 6, 3, 200


def make_layout(page_size: int, tp_size: int = 1) -> KVLayout:
    return KVLayout.of_model(2, 2, 16, "float32", page_size, tp_size, EXTRA_PLANES)


@dataclass
class Node:
    """A node's manager and the pools of its ranks."""

    ranks: list[KVPool]
    manager: TransferManager
    layout: KVLayout

    @property
    def pool(self) -> KVPool:
        return self.ranks[0]

    def rows(self, pages: IntArray, start: int, stop: int) -> list[torch.Tensor]:
        """Read each plane's ``[layers, vectors, tokens, heads of all ranks, dim]`` as bytes, by the
        definition."""
        slots = find_token_slots(pages, np.arange(start, stop), self.pool.page_size)
        found = []
        for index, plane in enumerate(self.layout.planes):
            ranks = self.ranks[:: self.replicas(plane)]
            parts = [rank.planes[self._place(rank, index)].buffer[:, :, slots] for rank in ranks]
            found.append(torch.cat(parts, dim=3).view(torch.uint8))
        return found

    def replicas(self, plane: Plane) -> int:
        """How many neighbouring ranks have the same of a plane; all of them if it is rank 0's."""
        if plane.ranks != "divided":
            return len(self.ranks)
        return max(1, len(self.ranks) // plane.num_heads)

    def pairs(self, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The buffers of neighbouring ranks that have the same of a plane."""
        (plane,) = (plane for plane in self.layout.planes if plane.name == name)
        replicas = self.replicas(plane)
        buffers = [
            next(each.buffer for each in rank.planes if each.spec.name == name).view(torch.uint8)
            for rank in self.ranks
        ]
        pairs = enumerate(itertools.pairwise(buffers), start=1)
        return [pair for index, pair in pairs if index % replicas]

    def _place(self, rank: KVPool, index: int) -> int:
        name = self.layout.planes[index].name
        return [plane.spec.name for plane in rank.planes].index(name)

    def pages(self, rng: random.Random) -> IntArray:
        """A page table for ``TOKENS`` tokens."""
        count = -(-TOKENS // self.pool.page_size)
        return np.array(rng.sample(range(self.pool.num_pages), count), dtype=np.int32)


def make_manager(backend: str, pool: KVPool, instance: str, path: Path | None) -> TransferManager:
    if backend == "nvlink":
        assert path is not None
        device = ShmDevice(pool, path, f"GPU-{instance == 'D':d}")
        return NvlinkManager(pool, instance, device=device)
    if backend == "tcp-staged":
        return TcpManager(pool, instance, staged=True)
    if backend == "mailbox":
        from pd_mailbox.manager import MailboxManager

        return MailboxManager(
            pool, instance, "", advertise_host="", cluster_key=None, patience=Patience()
        )
    return make_transfer_manager(backend, pool, instance)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Node, Node]]]:
    """``make(backend, page size of P, of D, ranks of P, of D)``, connected; P's pool is random."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "mailbox_package"))
    made: list[Node] = []
    paths: list[Path] = []

    def start(backend: str, instance: str, page_size: int, ranks: int) -> Node:
        layout, path = make_layout(page_size, ranks), None
        num_pages = 2 * -(-TOKENS // page_size)
        if backend == "nvlink":
            pool, path = shm_planes(layout, num_pages)
            paths.append(path)
            pools = [pool]
        else:
            pools = [KVPool(layout.of_rank(rank), num_pages, "cpu") for rank in range(ranks)]
            pools[0].set_parts([pool.memory.data_ptr() for pool in pools], layout)
        for number, pool in enumerate(pools):
            generator = torch.Generator().manual_seed(SEED + number)
            if instance == "P":
                pool.memory.random_(generator=generator)
        node = Node(pools, make_manager(backend, pools[0], instance, path), layout)
        for name in ("model", "head", "rows"):
            for one, other in node.pairs(name):
                other.copy_(one)
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


def cuts(rng: random.Random, start: int, stop: int) -> list[tuple[int, int]]:
    """Parts of a range in order."""
    inside = sorted(rng.randint(start, stop) for _ in range(rng.randint(0, 3)))
    return list(zip([start, *inside], [*inside, stop], strict=True))


def transfer(
    p: Node, d: Node, rng: random.Random, cached: Sequence[int], epoch: int = 1
) -> tuple[IntArray, IntArray]:
    """Hand a prompt over, in blocks of any size that do not end where planes do."""
    pages, into = p.pages(rng), d.pages(rng)
    cached = tuple(cached)
    receiver = d.manager.receiver("P", bytes(16), epoch, into, cached, TOKENS)
    asked = msgspec.structs.replace(reservation(receiver, bytes(16), epoch, 0), cached=cached)
    sender = p.manager.sender("D", asked, pages, TOKENS)
    for start, stop in cuts(rng, min(cached), TOKENS):
        for first, last in cuts(rng, 0, NUM_LAYERS):
            sender.send(start, stop, first, last)
    hand_off(sender, receiver)
    assert sender.bytes_sent == p.layout.missing_bytes(cached, TOKENS)
    wait_until(lambda: sender.drained() and receiver.drained(), "both ends to drain")
    return pages, into


def check_arrived(
    p: Node, d: Node, pages: IntArray, into: IntArray, cached: Sequence[int], before: list[Any]
) -> None:
    """All that was missing is there, and nothing else was written."""
    for plane, sent, found in zip(
        p.layout.planes, p.rows(pages, 0, TOKENS), d.rows(into, 0, TOKENS), strict=True
    ):
        held = cached[plane.group]
        assert torch.equal(found[:, :, held:], sent[:, :, held:]), plane
        assert not found[:, :, :held].any(), plane
    d_slots = find_token_slots(into, np.arange(TOKENS), d.pool.page_size)
    for name in ("model", "head", "rows"):
        for one, other in d.pairs(name):
            assert torch.equal(one[:, :, d_slots], other[:, :, d_slots]), name
    for rank, memory in zip(d.ranks, before, strict=True):
        for plane in rank.planes:
            plane.buffer[:, :, d_slots] = 0
        assert torch.equal(rank.memory, memory)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("p_page", "d_page"), [(4, 16), (16, 1)])
def test_each_plane_arrives_from_its_group_s_cached_length_on(
    nodes, backend: str, p_page: int, d_page: int
) -> None:
    rng = random.Random(f"{SEED}/{p_page}/{d_page}")
    p, d = nodes(backend, p_page, d_page)
    some: list[tuple[int, ...]] = [(0, 0, 0), (0, 37, TOKENS), (64, 16, 0), (TOKENS,) * GROUPS]
    for epoch, cached in enumerate(some, start=1):
        before = [rank.memory.clone() for rank in d.ranks]
        pages, into = transfer(p, d, rng, cached, epoch)
        digests = (
            p.pool.compute_digest(pages, cached, TOKENS),
            d.pool.compute_digest(into, cached, TOKENS),
        )
        assert digests[0] == digests[1]
        check_arrived(p, d, pages, into, cached, before)


@pytest.mark.parametrize("backend", BACKENDS_OF_RANKS)
@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (8, 4)])
def test_planes_of_ranks_are_divided_anew_or_copied_or_those_of_rank_0(
    nodes, backend: str, p_ranks: int, d_ranks: int
) -> None:
    rng = random.Random(f"{SEED}/{p_ranks}/{d_ranks}")
    p, d = nodes(backend, 4, 16, p_ranks, d_ranks)
    for epoch, cached in enumerate([(0, 0, 0), (5, 0, 90)], start=1):
        before = [rank.memory.clone() for rank in d.ranks]
        pages, into = transfer(p, d, rng, cached, epoch)
        digests = (
            p.pool.compute_digest(pages, cached, TOKENS),
            d.pool.compute_digest(into, cached, TOKENS),
        )
        assert digests[0] == digests[1]
        check_arrived(p, d, pages, into, cached, before)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_flipped_bit_in_any_plane_changes_the_digest(nodes, ranks: int) -> None:
    """With four ranks, two have each of the model's heads."""
    rng = random.Random(SEED)
    p, d = nodes("tcp", 4, 16, 1, ranks)
    cached = (0, 10, 20)
    _, into = transfer(p, d, rng, cached)
    good = d.pool.compute_digest(into, cached, TOKENS)
    planes = [plane for rank in d.ranks for plane in rank.planes]
    # The other ranks have none of the plane of the first.
    names = ["model", "latent", "head", "rows"] + ["model", "head", "rows"] * (ranks - 1)
    assert [plane.spec.name for plane in planes] == names
    groups = {plane.name: plane.group for plane in d.layout.planes}
    for plane in planes:
        token = rng.randrange(cached[groups[plane.spec.name]], TOKENS)
        slots = find_token_slots(into, np.array([token]), d.pool.page_size)
        rows = plane.buffer.view(torch.uint8)
        layer, vector, _, head, byte = (rng.randrange(size) for size in rows.shape)
        place, bit = (layer, vector, int(slots[0]), head, byte), 1 << rng.randrange(8)
        rows[place] ^= bit
        assert d.pool.compute_digest(into, cached, TOKENS) != good, plane.spec
        rows[place] ^= bit
        assert d.pool.compute_digest(into, cached, TOKENS) == good, plane.spec


def test_the_digest_is_of_the_tokens_from_each_group_s_length_on() -> None:
    pool = KVPool(make_layout(4), 8, "cpu")
    pool.memory.random_(generator=torch.Generator().manual_seed(SEED))
    pages = np.array([5, 0, 3], dtype=np.int32)
    whole = pool.compute_digest(pages, (0, 0, 0), 12)
    assert pool.compute_digest(pages, (0, 1, 0), 12) != whole
    assert pool.compute_digest(pages, (12, 12, 12), 12) == bytes(8)
    (slot,) = find_token_slots(pages, np.array([6]), 4)
    held = pool.compute_digest(pages, (0, 7, 0), 12)
    pool.planes[1].buffer[:, :, slot] += 1
    assert pool.compute_digest(pages, (0, 7, 0), 12) == held
    assert pool.compute_digest(pages, (0, 6, 0), 12) != whole


@pytest.mark.parametrize("backend", BACKENDS)
def test_cached_lengths_that_do_not_fit_the_groups_are_refused(nodes, backend: str) -> None:
    rng = random.Random(SEED)
    p, d = nodes(backend)
    pages, into = p.pages(rng), d.pages(rng)
    for cached, complaint in (
        ((0, 0), "tokens in 2 groups of planes; there are 3"),
        ((0, 201, 0), "201 tokens of a prompt of 200"),
    ):
        with pytest.raises(ValueError, match=complaint):
            d.manager.receiver("P", bytes(16), 1, into, cached, TOKENS)
        receiver = d.manager.receiver("P", bytes(16), 1, into, (0, 0, 0), TOKENS)
        asked = reservation(receiver, bytes(16), 1, 0)
        with pytest.raises(TransferError, match=complaint):
            p.manager.sender("D", msgspec.structs.replace(asked, cached=cached), pages, TOKENS)
        receiver.abort()


def test_a_commit_without_a_plane_fails_the_receiver(nodes) -> None:
    rng = random.Random(SEED)
    p, d = nodes("tcp")
    receiver = d.manager.receiver("P", bytes(16), 1, d.pages(rng), (0, 0, 0), TOKENS)
    asked = reservation(receiver, bytes(16), 1, 0)
    asked = msgspec.structs.replace(asked, cached=(0, 0, 0))
    sender = p.manager.sender("D", asked, p.pages(rng), TOKENS)
    sender.send(0, TOKENS, 0, NUM_LAYERS - 1)
    sender.finish()
    assert settled(sender) is TransferState.DONE
    receiver.commit(sender.bytes_sent)
    whole, layer = p.layout.token_bytes, p.layout.planes[-1].token_bytes // 2
    assert str(receiver.error) == (
        f"P committed {TOKENS * (whole - layer)} KV bytes; {TOKENS * whole} were reserved"
    )


SHAPE = PoolShape.from_pool(KVPool(make_layout(4), 8, "cpu"))


def test_blocks_end_where_planes_do() -> None:
    tokens = MissingTokens((8, 0, 20), 20)
    assert SHAPE.make_blocks(tokens, 4, 20, 0, 4) == [Block(8, 20, 0, 2), Block(4, 20, 2, 3)]
    assert SHAPE.make_blocks(tokens, 0, 6, 1, 3) == [Block(0, 6, 2, 3)]
    assert [SHAPE.num_bytes(block) for block in SHAPE.make_blocks(tokens, 0, 20, 1, 3)] == [
        12 * 2 * 2 * 16 * 4,
        20 * 24 * 2,
    ]
    assert SHAPE.missing_bytes(tokens) == 12 * 2 * 2 * 2 * 16 * 4 + 20 * (24 * 2 + 2 * 20 * 4)


CROSSING = [Block(0, 4, 1, 3), Block(0, 4, 2, 4), Block(0, 4, 5, 7), Block(0, 4, 6, 7)]


@pytest.mark.parametrize("block", CROSSING)
def test_a_block_of_two_planes_is_refused(block: Block) -> None:
    complaint = r"6 layers, in planes of \[0, 2\), \[2, 3\), \[3, 4\), \[4, 6\)"
    header = encode_header(bytes(16), 1, block, 4)
    with pytest.raises(PeerDataError, match=complaint):
        decode_header(header, SHAPE)
    ends = (block.token_start, block.token_stop, block.layer_start, block.layer_stop)
    with pytest.raises(PeerDataError, match=complaint):
        Filled(0, bytes(16), 1, *ends).check_fits(SHAPE, 1 << 20)


def test_a_block_is_as_large_as_its_plane_says() -> None:
    block = Block(0, 4, 2, 3)
    header = encode_header(bytes(16), 1, block, 4 * 48)
    assert decode_header(header, SHAPE).block == block
    with pytest.raises(PeerDataError, match=r"payload of 512 bytes, but .* have 192"):
        decode_header(encode_header(bytes(16), 1, block, 512), SHAPE)
    Filled(0, bytes(16), 1, 0, 4, 2, 3).check_fits(SHAPE, 192)
    with pytest.raises(PeerDataError, match="do not fit"):
        Filled(0, bytes(16), 1, 0, 4, 2, 3).check_fits(SHAPE, 191)


def test_nvlink_refuses_a_peer_with_other_planes(nodes) -> None:
    p, d = nodes("nvlink")
    info = node_info("E", "decode", d.manager, d)
    other = msgspec.structs.replace(info.kv, planes=info.kv.planes[:2])
    with pytest.raises(TransferError, match=r"plane 'head' differs: .* here, 'none' at E"):
        p.manager.connect(msgspec.structs.replace(info, kv=other))
