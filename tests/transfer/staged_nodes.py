"""A prefill and a decode process with a staged backend, and what may happen to them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from transfer_helpers import wait_until
from transfer_process import PARTS, NodeProcess

from pd.transfer.base import TransferState

if TYPE_CHECKING:
    import random


class Nodes:
    """A prefill and a decode process, and what the rooms between them must leave behind."""

    def __init__(self, backend: str, env: dict[str, str] | None = None) -> None:
        self._backend, self._env = backend, env or {}
        self._lives = 0
        self.all: list[NodeProcess] = []
        self.room = 0
        self.wiped: set[int] = set()
        self.p, self.d = self.start("prefill"), self.start("decode")
        self.introduce()

    def start(self, role: str) -> NodeProcess:
        self._lives += 1
        # A room of 128 KiB goes through small buffers in many writes.
        node = NodeProcess(
            self._backend, f"{role}-{self._lives}", role, self._env, buffers=3, buffer_bytes=2048
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

    def meet_again(self) -> None:
        """The other side may use the old link for a moment, until it sees that it was given up."""
        for _ in range(5):
            room, num_bytes = self.begin()
            if self.end(self.p, room) is TransferState.DONE:
                self.d.call("commit", room, num_bytes)
                if self.end(self.d, room) is TransferState.DONE:
                    return
            self.d.call("abort", room)
            self.release(room)
        raise AssertionError("they do not find together again")

    def at_rest(self) -> None:
        self.complete(*self.begin())
        for node in (self.p, self.d):
            wait_until(lambda node=node: node.call("quarantined") == 0, "the quarantine to end")
        self.check()

    def cost_nothing_idle(self) -> None:
        """Two idle nodes that are linked take next to no processor time."""
        self.complete(*self.begin())
        time.sleep(0.5)
        before = [node.call("cpu_seconds") for node in (self.p, self.d)]
        time.sleep(2.0)
        after = [node.call("cpu_seconds") for node in (self.p, self.d)]
        for start, stop in zip(before, after, strict=True):
            assert stop - start < 0.02

    def close(self) -> None:
        for node in self.all:
            node.kill()


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
        nodes.d.stop()
        time.sleep(rng.uniform(0.0, 0.3))
        nodes.p.call("abort", room)
        nodes.d.resume()
        nodes.d.call("abort", room)
    elif what.startswith("kill"):
        role = "decode" if what == "kill D" else "prefill"
        dead, alive = (nodes.d, nodes.p) if what == "kill D" else (nodes.p, nodes.d)
        dead.kill()
        # A peer that died before the link was up is noticed by the node's heartbeat only.
        alive.call("disconnect", dead.info.instance_id)
        if alive is nodes.d:
            nodes.release(room)
        else:
            nodes.end(alive, room)
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
        nodes.meet_again()
        return
    nodes.release(room)


def play(nodes: Nodes, rng: random.Random, rounds: int) -> None:
    """Rooms of which three in four are upset; pages that were released never change."""
    for _ in range(rounds):
        room, num_bytes = nodes.begin()
        time.sleep(rng.choice([0.0, rng.uniform(0.0, 0.01)]))
        if rng.random() < 0.75:
            upset(nodes, rng, room)
        else:
            nodes.complete(room, num_bytes)
        nodes.check()
    nodes.at_rest()
