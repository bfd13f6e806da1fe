"""NIXL between processes that are killed, stopped and cut off in the middle of writes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from transfer_helpers import SEED, is_installed, wait_until
from transfer_process import PARTS, NodeProcess

from pd.core.errors import TransferError
from pd.transfer.base import TransferState

pytestmark = pytest.mark.skipif(
    not is_installed("nixl") and not os.environ.get("CI"), reason="the library nixl is missing"
)

TLS = [pytest.param({}, id="any"), pytest.param({"UCX_TLS": "tcp"}, id="tcp")]


class Nodes:
    """A prefill and a decode process, and what the rooms between them must leave behind."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._lives = 0
        self.all: list[NodeProcess] = []
        self.room = 0
        self.wiped: set[int] = set()
        self.p, self.d = self.start("prefill"), self.start("decode")
        self.introduce()

    def start(self, role: str) -> NodeProcess:
        self._lives += 1
        # A room of 128 KiB goes through small slots in many writes.
        node = NodeProcess(
            "nixl", f"{role}-{self._lives}", role, self._env, slots=3, slot_bytes=2048
        )
        self.all.append(node)
        return node

    def introduce(self) -> None:
        self.p.call("connect", self.d.info)
        self.d.call("connect", self.p.info)

    def begin(self) -> tuple[int, int]:
        """A room whose data is on the way; returns its number and its bytes."""
        self.room += 1
        self.wiped.discard(self.room % PARTS)
        asked = self.d.call("receive_part", self.p.info.instance_id, self.room)
        return self.room, self.p.call("send_part", self.d.info.instance_id, asked)

    def end(self, node: NodeProcess, room: int) -> TransferState:
        wait_until(lambda: node.call("state", room)[0] is not TransferState.ACTIVE, "the end")
        state, _, _ = node.call("state", room)
        wait_until(lambda: node.call("state", room)[2], "the drain")
        return state

    def release(self, room: int) -> None:
        """D's pages go to somebody else once D says that they may."""
        self.end(self.d, room)
        self.d.call("wipe", room)
        self.wiped.add(room % PARTS)

    def check(self) -> None:
        for part in self.wiped:
            assert self.d.call("wiped", part), f"pages of part {part} changed after their release"

    def complete(self, room: int, num_bytes: int) -> None:
        assert self.end(self.p, room) is TransferState.DONE
        self.d.call("commit", room, num_bytes)
        assert self.end(self.d, room) is TransferState.DONE
        assert np.array_equal(self.d.call("values", room), self.p.call("values", room))

    def at_rest(self) -> None:
        self.complete(*self.begin())
        for node in (self.p, self.d):
            wait_until(lambda node=node: node.call("quarantined") == 0, "the quarantine to end")
        self.check()

    def close(self) -> None:
        for node in self.all:
            node.kill()


@pytest.fixture(params=TLS)
def nodes(request):
    made = Nodes(request.param)
    yield made
    made.close()


def upset(nodes: Nodes, rng: random.Random, room: int) -> None:
    """Something happens while the room is on its way; afterwards both sides know each other."""
    what = rng.choice(["abort P", "abort D", "stop D", "kill D", "kill P", "part D", "part P"])
    if what == "abort P":
        nodes.p.call("abort", room)
        nodes.d.call("abort", room)
    elif what == "abort D":
        nodes.d.call("abort", room)
        nodes.release(room)
        nodes.p.call("abort", room)
    elif what == "stop D":
        nodes.d.signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.0, 0.3))
        nodes.p.call("abort", room)
        nodes.d.signal(signal.SIGCONT)
        nodes.d.call("abort", room)
    elif what.startswith("kill"):
        role = "decode" if what == "kill D" else "prefill"
        dead, alive = (nodes.d, nodes.p) if what == "kill D" else (nodes.p, nodes.d)
        dead.kill()
        if alive is nodes.d:
            nodes.release(room)
        else:
            nodes.end(alive, room)
        alive.call("disconnect", dead.info.instance_id)
        again = nodes.start(role)
        if role == "decode":
            nodes.d, nodes.wiped = again, set()
        else:
            nodes.p = again
        nodes.introduce()
        return
    else:
        one, other = (nodes.d, nodes.p) if what == "part D" else (nodes.p, nodes.d)
        one.call("disconnect", other.info.instance_id)
        nodes.end(one, room)
        nodes.d.call("abort", room)
        nodes.p.call("abort", room)
        nodes.introduce()
    nodes.release(room)


def test_pages_never_change_after_their_release(nodes) -> None:
    seed = f"{SEED}/nixl"
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(seed)
    for _ in range(12):
        room, num_bytes = nodes.begin()
        time.sleep(rng.choice([0.0, rng.uniform(0.0, 0.01)]))
        if rng.random() < 0.75:
            upset(nodes, rng, room)
        else:
            nodes.complete(room, num_bytes)
        nodes.check()
    nodes.at_rest()


@pytest.mark.full
def test_pages_never_change_after_their_release_in_many_rounds(nodes) -> None:
    rng = random.Random(f"{SEED}/nixl/many")
    print(f"PD_TEST_SEED={SEED}")
    for _ in range(150):
        room, num_bytes = nodes.begin()
        time.sleep(rng.choice([0.0, rng.uniform(0.0, 0.01)]))
        if rng.random() < 0.75:
            upset(nodes, rng, room)
        else:
            nodes.complete(room, num_bytes)
        nodes.check()
    nodes.at_rest()


def test_a_killed_peer_is_noticed_at_once(nodes) -> None:
    nodes.complete(*nodes.begin())
    room, _ = nodes.begin()
    nodes.d.kill()
    begun = time.monotonic()
    # What was sent before the kill may be complete, which is for the node's heartbeat to find out.
    nodes.end(nodes.p, room)
    assert time.monotonic() - begun < 2.0
    room, later = room + 1, nodes.d.info.instance_id
    with pytest.raises(TransferError, match=r"is gone|was lost|not connected") as caught:
        wait_for_refusal(nodes, later, room)
    assert later in str(caught.value)


def wait_for_refusal(nodes: Nodes, peer: str, room: int) -> None:
    """A room for a dead peer fails with a clear error."""
    from pd.core.messages import Reservation

    asked = Reservation(to="P", sender="D", room=room.to_bytes(16), epoch=room, cached_prefix_len=0)
    nodes.p.call("send_part", peer, asked)
    wait_until(lambda: nodes.p.call("state", room)[0] is TransferState.FAILED, "the failure")
    raise TransferError(nodes.p.call("state", room)[1])


def test_idle_nodes_cost_nothing(nodes) -> None:
    nodes.complete(*nodes.begin())
    time.sleep(0.5)
    before = [node.call("cpu_seconds") for node in (nodes.p, nodes.d)]
    time.sleep(2.0)
    after = [node.call("cpu_seconds") for node in (nodes.p, nodes.d)]
    for start, stop in zip(before, after, strict=True):
        assert stop - start < 0.02


SILENT = """
import sys; sys.path[:0] = {path!r}
import logging; logging.basicConfig(level=logging.INFO)
from transfer_helpers import make_pool, introduce, reservation, hand_off
import numpy as np
from pd.transfer.nixl import NixlManager
a, b = make_pool(64, 4), make_pool(64, 4)
p, d = NixlManager(a, "P"), NixlManager(b, "D")
introduce(p, "P", d, "D", a)
pages = np.arange(16, dtype=np.int32)
r = d.receiver("P", bytes(16), 1, pages, 0, 64)
s = p.sender("D", reservation(r, bytes(16), 1, 0), pages, 64)
s.send(0, 64, 0, 3)
hand_off(s, r)
p.close(); d.close()
"""


def test_the_library_neither_speaks_nor_crashes_at_the_end() -> None:
    code = SILENT.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "NIXL" not in done.stderr
    assert "UCX" not in done.stderr
