"""What a decode node's staged manager does with a peer that breaks the rules."""

from __future__ import annotations

import socket
import struct

import msgspec
import numpy as np
import pytest
from held_mover import HeldTarget
from staged_pair import BUFFERS, CELL, TOKENS
from transfer_helpers import (
    settled,
    wait_until,
)

from pd.transfer.base import TransferState
from pd.transfer.ranges import Block
from pd.transfer.staged.messages import (
    VERSION,
    BuffersReady,
    Filled,
    FilledBuffers,
    Freed,
    Open,
    Refused,
    decoder,
)
from pd.transfer.wire.greeting import greet_peer


class RawP:
    """P by hand, over a socket."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=10.0)
        greet_peer(self.sock, "held", "P", "D", None)
        self.send(Open(VERSION, BUFFERS, 16 * CELL, False, ""))
        self.answer = self.receive()
        assert isinstance(self.answer, BuffersReady | Refused)

    def send(self, message) -> None:
        body = msgspec.msgpack.encode(message)
        self.sock.sendall(struct.pack("<I", len(body)) + body)

    def receive(self):
        head = self.sock.recv(4, socket.MSG_WAITALL)
        if not head:
            return None
        body = self.sock.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL)
        return decoder.decode(body)

    def filled(self, buffer: int, epoch: int, block: Block, room: bytes = bytes(16)) -> None:
        ends = (block.token_start, block.token_stop, block.layer_start, block.layer_stop)
        self.send(FilledBuffers([Filled(buffer, room, epoch, *ends)]))


@pytest.fixture
def raw(pair):
    nodes = pair()
    raw = RawP(nodes.d._hub.port)
    assert isinstance(raw.answer, BuffersReady)
    yield nodes, raw
    raw.sock.close()


def test_repeated_and_unknown_blocks_are_discarded_and_acknowledged(raw) -> None:
    nodes, p = raw
    into = np.arange(4, dtype=np.int32)
    receiver = nodes.d.receiver("P", bytes(16), 1, into, (0,), TOKENS)
    p.filled(0, 1, Block(0, 16, 0, 1))
    assert p.receive() == Freed([0])
    assert receiver.bytes_received == 16 * CELL
    # A repeat, in whole or in part; a room that is not; an epoch that is not.
    nodes.target.buffer.fill_(7.0)
    for buffer, epoch, block, room in [
        (0, 1, Block(0, 16, 0, 1), bytes(16)),
        (1, 1, Block(15, 17, 0, 1), bytes(16)),
        (2, 1, Block(16, 32, 0, 1), b"x" * 16),
        (3, 2, Block(16, 32, 0, 1), bytes(16)),
    ]:
        p.filled(buffer, epoch, block, room)
        assert p.receive() == Freed([buffer])
    assert bool((nodes.target.buffer == 7.0).all())
    assert receiver.bytes_received == 16 * CELL
    assert nodes.d.counters.discarded_frames == 4
    assert nodes.d.counters.duplicate_frames == 2
    assert receiver.poll() is TransferState.ACTIVE


@pytest.mark.parametrize(
    ("buffer", "block", "reason"),
    [
        (BUFFERS, Block(0, 1, 0, 1), f"buffer {BUFFERS} is not P's to fill"),
        (0, Block(0, 17, 0, 1), "17 tokens of 1 layers do not fit in a buffer"),
        (0, Block(0, 1, 2, 4), "are no block of 3 layers"),
        (0, Block(4, 4, 0, 1), "are no block of 3 layers"),
        (0, Block(60, 65, 0, 1), "tokens [60, 65) are outside the reserved [0, 64)"),
    ],
)
def test_a_block_that_cannot_be_ends_the_link(raw, caplog, buffer, block, reason) -> None:
    nodes, p = raw
    receiver = nodes.d.receiver("P", bytes(16), 1, np.arange(4, dtype=np.int32), (0,), TOKENS)
    nodes.target.buffer.fill_(7.0)
    p.filled(buffer, 1, block)
    assert settled(receiver) is TransferState.FAILED
    assert reason in str(receiver.error)
    assert "gave up the held channel of P (127.0.0.1:" in caplog.text
    assert bool((nodes.target.buffer == 7.0).all())
    # Its buffers stay until it is gone.
    while p.receive() is not None:
        pass
    assert nodes.d.quarantined_buffers == BUFFERS
    p.sock.close()
    wait_until(lambda: nodes.d.quarantined_buffers == 0, "the proof")


def test_a_buffer_cannot_be_filled_again_before_it_was_freed(raw) -> None:
    nodes, p = raw
    receiver = nodes.d.receiver("P", bytes(16), 1, np.arange(4, dtype=np.int32), (0,), TOKENS)
    one = Filled(0, bytes(16), 1, 0, 16, 0, 1)
    p.send(FilledBuffers([one, one]))
    assert settled(receiver) is TransferState.FAILED
    assert "buffer 0 is not P's to fill" in str(receiver.error)
    p.sock.close()
    wait_until(lambda: nodes.d.quarantined_buffers == 0, "the proof")


def test_a_peer_whose_lost_links_may_still_write_gets_no_more_buffers(pair) -> None:
    nodes = pair()
    peers = [RawP(nodes.d._hub.port) for _ in range(5)]
    assert [type(p.answer) for p in peers] == 4 * [BuffersReady] + [Refused]
    assert peers[-1].answer.reason == "the buffers of 4 lost links of P are still in quarantine"
    for p in peers:
        p.sock.close()
    wait_until(lambda: not nodes.d._incoming._links, "the proof")
    again = RawP(nodes.d._hub.port)
    assert isinstance(again.answer, BuffersReady)
    again.sock.close()


def test_buffers_that_cannot_be_freed_are_bounded(pair, monkeypatch) -> None:
    def fail(target: HeldTarget) -> None:
        raise RuntimeError("the library is broken")

    nodes = pair()
    monkeypatch.setattr(HeldTarget, "close", fail)
    answers = []
    for number in range(12):
        p = RawP(nodes.d._hub.port)
        answers.append(type(p.answer))
        p.sock.close()
        kept = min(number + 1, 8)
        wait_until(lambda kept=kept: nodes.d.quarantined_buffers == kept * BUFFERS, "its end")
        wait_until(lambda kept=kept: len(nodes.d._incoming._links) == kept, "the refused one's end")
    assert answers == 8 * [BuffersReady] + 4 * [Refused]
