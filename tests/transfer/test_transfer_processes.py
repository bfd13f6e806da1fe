"""Peers that are killed, stopped and started again: the survivor lives and serves the next one."""

from __future__ import annotations

import pytest
from transfer_helpers import backends, wait_until
from transfer_process import LAYERS, NodeProcess

from pd.transfer.base import TransferState


@pytest.fixture(params=backends("tcp", "fake", "nixl", "mooncake"))
def backend(request) -> str:
    return request.param


@pytest.fixture
def start(backend):
    nodes = []

    def make(instance: str, role: str) -> NodeProcess:
        nodes.append(NodeProcess(backend, instance, role))
        return nodes[-1]

    yield make
    for node in nodes:
        node.kill()


def introduce(p: NodeProcess, d: NodeProcess) -> None:
    p.call("connect", d.info)
    d.call("connect", p.info)


def ended(node: NodeProcess, room: int) -> tuple[TransferState, str]:
    wait_until(lambda: node.call("state", room)[0] is not TransferState.ACTIVE, "the end")
    state, error, _ = node.call("state", room)
    return state, error


def drained(node: NodeProcess, room: int) -> None:
    wait_until(lambda: node.call("state", room)[2], "the drain")


def transfer_works(p: NodeProcess, d: NodeProcess, room: int) -> None:
    asked = d.call("receive", p.info.instance_id, room)
    p.call("send", d.info.instance_id, asked, 0, LAYERS)
    num_bytes = p.call("finish", room)
    assert ended(p, room)[0] is TransferState.DONE
    d.call("commit", room, num_bytes)
    assert ended(d, room)[0] is TransferState.DONE
    assert d.call("checksum") == p.call("checksum")


def test_a_killed_prefill_node_fails_its_rooms_only(start, backend) -> None:
    d, p, other = start("D", "decode"), start("P", "prefill"), start("Q", "prefill")
    introduce(p, d)
    introduce(other, d)
    asked = d.call("receive", "P", 1)
    kept = d.call("receive", "Q", 2)
    p.call("send", "D", asked, 0, 2)
    other.call("send", "D", kept, 0, 2)
    if backend != "fake":
        wait_until(lambda: d.call("received", 1) > 0, "the first bytes")
    p.kill()
    # One-sided writes tell D nothing; there the node's heartbeat finds out and disconnects.
    if backend == "fake":
        d.call("disconnect", "P")
    state, error = ended(d, 1)
    assert state is TransferState.FAILED
    assert "P" in error
    drained(d, 1)
    other.call("send", "D", kept, 2, LAYERS)
    d.call("commit", 2, other.call("finish", 2))
    assert ended(d, 2)[0] is TransferState.DONE
    again = start("P-again", "prefill")
    introduce(again, d)
    transfer_works(again, d, 3)


def test_a_killed_decode_node_fails_its_rooms_only(start) -> None:
    p, d, other = start("P", "prefill"), start("D", "decode"), start("E", "decode")
    introduce(p, d)
    introduce(p, other)
    asked = d.call("receive", "P", 1)
    p.call("send", "D", asked, 0, 2)
    d.kill()
    p.call("send", "D", asked, 2, LAYERS)
    state, error = ended(p, 1)
    assert state is TransferState.FAILED
    assert "D" in error
    drained(p, 1)
    transfer_works(p, other, 2)
    p.call("disconnect", "D")
    again = start("D-again", "decode")
    introduce(p, again)
    transfer_works(p, again, 3)


def test_a_stopped_decode_node_blocks_nobody(start) -> None:
    p, d, other = start("P", "prefill"), start("D", "decode"), start("E", "decode")
    introduce(p, d)
    introduce(p, other)
    transfer_works(p, d, 1)
    asked = d.call("receive", "P", 2)
    d.stop()
    for _ in range(4):
        p.call("send", "D", asked, 0, LAYERS)
    transfer_works(p, other, 3)
    p.call("disconnect", "D")
    assert ended(p, 2)[0] is TransferState.FAILED
    drained(p, 2)
    d.resume()
    transfer_works(p, other, 4)
