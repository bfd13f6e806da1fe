"""Stretches of memory cross a socket whole, in order, and touch nothing else."""

from __future__ import annotations

import errno
import random
import socket

import numpy as np
import pytest
import torch
from transfer_helpers import SEED, make_pool, random_pages

from pd.transfer import pool_memory as memory
from pd.transfer.pool_memory import InPlace, PoolMemory, Stretches, wrap_buffer
from pd.transfer.ranges import Block
from pd.transfer.tcp.host_buffers import Gathers, Scatters, StagingBuffers, Tables


def stretches_of(buffer: np.ndarray, lengths: list[int]) -> Stretches:
    """Stretches with a gap of one byte after each."""
    starts = np.cumsum([0, *(n + 1 for n in lengths[:-1])])
    return Stretches(buffer.ctypes.data + starts, np.array(lengths), buffer)


def spaced(rng: random.Random, lengths: list[int], gap: bytes) -> np.ndarray:
    return np.frombuffer(
        bytearray(b"".join(rng.randbytes(n) + gap for n in lengths)), dtype=np.uint8
    )


@pytest.mark.parametrize("call_bytes", [1, 7, 1000, 512 << 10])
@pytest.mark.parametrize("trial", range(5))
def test_every_byte_arrives_at_its_place_whatever_one_call_moves(
    call_bytes, trial, monkeypatch
) -> None:
    monkeypatch.setattr(memory, "CALL_BYTES", call_bytes)
    rng = random.Random(f"{SEED}/{call_bytes}/{trial}")
    total = 5_000 if call_bytes < 1000 else 1_000_000
    sent = [rng.randint(1, total // rng.choice([3, 50, 3000])) for _ in range(1500)]
    while sum(sent) > total:
        sent.pop()
    received = [sum(sent)]
    for _ in range(rng.randint(0, 20)):
        if received[0] > 1:
            part = rng.randint(1, received[0] - 1)
            received[0] -= part
            received.append(part)
    source, target = spaced(rng, sent, b"s"), spaced(rng, received, b"t")
    out, into = stretches_of(source, sent), stretches_of(target, received)
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        while into.done < into.total:
            for move in (
                lambda: out.done < out.total and out.send_to(near),
                lambda: into.receive_from(far),
            ):
                try:
                    move()
                except BlockingIOError:
                    continue
    assert content(source, sent) == content(target, received)
    assert out.done == out.total


def content(buffer: np.ndarray, lengths: list[int]) -> bytes:
    data, found, place = buffer.tobytes(), b"", 0
    for length in lengths:
        found += data[place : place + length]
        assert data[place + length : place + length + 1] in (b"s", b"t")
        place += length + 1
    return found


def test_errors_of_the_socket_are_raised() -> None:
    near, far = socket.socketpair()
    far.close()
    with near, pytest.raises(BrokenPipeError) as raised:
        stretches_of(np.zeros(10, dtype=np.uint8), [5]).send_to(near)
    assert raised.value.errno == errno.EPIPE


def test_a_pool_must_be_one_contiguous_tensor() -> None:
    pool = make_pool(16, 4)
    pool.buffer = pool.buffer.transpose(0, 1)
    with pytest.raises(ValueError, match="one contiguous 5-D tensor"):
        PoolMemory(pool)


@pytest.mark.parametrize("staged", [False, True])
def test_blocks_travel_in_the_same_order_in_place_and_staged(staged) -> None:
    rng = random.Random(SEED)
    pool, target = make_pool(64, 4), make_pool(64, 2, fill=-1.0)
    pages, into = random_pages(rng, pool, 30), random_pages(rng, target, 30)
    block = Block(3, 29, 1, 3)
    out = staged_block(pool, pages, block) if staged else in_place_block(pool, pages, block)
    buffer = torch.empty(out.total - 4, dtype=torch.uint8)
    landing = (
        InPlace(PoolMemory(target), into).locate_block(block) if staged else wrap_buffer(buffer)
    )
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        while out.done < out.total:
            out.send_to(near)
        assert far.recv(4, socket.MSG_WAITALL) == b"head"
        while landing.done < landing.total:
            landing.receive_from(far)
    if not staged:
        unpack(target, into, block, buffer)
    assert torch.equal(target.tokens(into, 3, 29)[1:], pool.tokens(pages, 3, 29)[1:])
    assert bool((target.buffer[0] == -1.0).all())


def test_layers_of_the_same_tokens_lie_at_the_same_offsets(monkeypatch) -> None:
    """Places are computed once for each range of tokens, as many as are worth remembering."""
    rng = random.Random(SEED)
    pool = make_pool(64, 4)
    pages = random_pages(rng, pool, 30)
    for planned in (0, 1 << 16):
        monkeypatch.setattr(memory, "_PLANNED_STRETCHES", planned)
        room = InPlace(PoolMemory(pool), pages)
        for layer, start, stop in [(0, 0, 30), (2, 0, 30), (1, 5, 21), (0, 5, 21), (2, 0, 30)]:
            out = room.locate_block(Block(start, stop, layer, layer + 1))
            near, far = socket.socketpair()
            with near, far:
                while out.done < out.total:
                    out.send_to(near)
                data = far.recv(out.total, socket.MSG_WAITALL)
            expected = pool.tokens(pages, start, stop)[layer]
            assert data == expected.contiguous().numpy().tobytes()


def in_place_block(pool, pages, block: Block) -> Stretches:
    return InPlace(PoolMemory(pool), pages, 4).locate_block(block, b"head")


def staged_block(pool, pages, block: Block) -> Stretches:
    host, ticket = Gathers(pool).begin_gather(Tables(pages, block.token_stop), block)
    ticket.wait()
    return wrap_buffer(host, b"head")


def unpack(pool, pages, block: Block, data: torch.Tensor) -> None:
    scatters = Scatters(pool)
    buffer = scatters.make_buffers(lambda: None).take_buffer()
    assert buffer is not None
    buffer[: len(data)] = data
    reasons: list[str] = []
    scatters.begin_scatter(Tables(pages, block.token_stop), block, buffer, reasons.append)
    scatters.close()
    assert reasons == [""]


def test_who_finds_no_free_buffer_is_called_when_there_is_one() -> None:
    called: list[str] = []
    buffers = StagingBuffers(torch.empty(2, 8, dtype=torch.uint8), lambda: called.append("back"))
    first, second = buffers.take_buffer(), buffers.take_buffer()
    assert first is not None
    assert second is not None
    assert buffers.take_buffer() is None
    assert called == []
    buffers.give_back(first)
    assert called == ["back"]
    assert buffers.take_buffer() is first
    buffers.give_back(second)
    assert called == ["back"]


def test_a_copy_that_fails_is_reported_with_its_reason(caplog) -> None:
    pool = make_pool(16, 4)
    scatters = Scatters(pool)
    reasons: list[str] = []
    beyond = Tables(np.array([1000], dtype=np.int32), 4)
    slot = scatters.make_buffers(lambda: None).take_buffer()
    assert slot is not None
    scatters.begin_scatter(beyond, Block(0, 4, 0, 1), slot, reasons.append)
    scatters.close()
    assert len(reasons) == 1
    assert "out of bounds" in reasons[0]
    assert "cannot write to the pool" in caplog.text
