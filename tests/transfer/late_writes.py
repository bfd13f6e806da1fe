"""A prefill and a decode node reduced to their page tables and the transfer protocol.

A schedule drives them through random aborts, restarts, partitions and the fake backend's faults.
Every token of every room has a value of its own. A page that D reserves is filled with ``POISON``;
from then on each of its slots may hold poison or the room's own value and nothing else, and from
the commit until the room ends exactly its value.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from transfer_helpers import SEED, node_info

from pd.core.errors import TransferError
from pd.core.messages import Reservation
from pd.core.node_info import KVLayout, Plane
from pd.engine.kv_pool import KVPool
from pd.transfer.base import TransferState
from pd.transfer.fake.manager import FakeManager
from pd.transfer.fake.script import (
    DelayReservation,
    DelayWrite,
    DuplicateWrite,
    FailRoom,
    FaultScript,
    LateWrite,
    LinkDown,
    LoseWrite,
)
from pd.transfer.registry import manager_class
from pd.transfer.tcp.manager import TcpManager
from pd.util.starvation import CEILING_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import numpy.typing as npt

    from pd.transfer.base import Sender, TransferManager
    from pd.transfer.fake.script import AnyRule
    from pd.transfer.kv_buffer import IntArray

PAGES_P, PAGES_D = 10, 8
PAGE_P, PAGE_D = 2, 4
LAYERS = 2
MAX_TOKENS = 14
POISON = -1.0
# Schedules that run at a time.
_WIDTH = 8
# Beside a layer of K and V: another one of one vector for each token, cached for itself.
EXTRA_PLANES = (Plane("head", 1, 1, 1, "float32", vectors=1, ranks="first", group=1),)


class ForeignBytes(AssertionError):
    """A room's page holds what is not the room's."""


class Pages:
    """A node's pool: free pages, and rooms whose pages may still be read or written.

    ``groups``: of each row, which is a vector of a layer; heads and width are 1.
    """

    def __init__(
        self, count: int, page_size: int, rng: random.Random, extra_planes: tuple[Plane, ...]
    ) -> None:
        layers = LAYERS - sum(plane.num_layers for plane in extra_planes)
        layout = KVLayout.of_model(layers, 1, 1, "float32", page_size, extra_planes=extra_planes)
        self.use(KVPool(layout, count, "cpu"))
        self._rng = rng
        self.free = list(range(count))
        self.quarantine: list[Room] = []

    def use(self, pool: KVPool) -> None:
        self.pool = pool
        self._rows = [plane.buffer.flatten(0, 1).numpy()[..., 0, 0] for plane in pool.planes]
        self.groups = [
            plane.spec.group
            for plane, rows in zip(pool.planes, self._rows, strict=True)
            for _ in rows
        ]

    def put(self, slots: IntArray, content: Any) -> None:
        """``content``: a number, or ``[rows, tokens]``."""
        content, first = np.broadcast_to(content, (len(self.groups), len(slots))), 0
        for rows in self._rows:
            rows[:, slots] = content[first : first + len(rows)]
            first += len(rows)

    def get(self, slots: IntArray) -> npt.NDArray[np.float32]:
        """``[rows, tokens]``"""
        return np.concatenate([rows[:, slots] for rows in self._rows])

    def take(self, tokens: int) -> IntArray | None:
        count = -(-tokens // self.pool.layout.page_size)
        if count > len(self.free):
            return None
        self._rng.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        return np.array(taken, dtype=np.int32)

    def slots(self, pages: IntArray, tokens: int) -> IntArray:
        size, order = self.pool.layout.page_size, np.arange(tokens)
        return pages[order // size] * size + order % size

    def give(self, pages: IntArray) -> None:
        self.free += pages.tolist()

    def sweep(self) -> None:
        """Free what has drained."""
        for room in [r for r in self.quarantine if r.end.drained()]:
            self.quarantine.remove(room)
            self.give(room.pages)


@dataclass
class Node:
    """One side's process: its life ends with a restart, its memory does not."""

    role: str
    pages: Pages
    instance: str = ""
    manager: TransferManager | None = None
    rooms: dict[int, Room] = field(default_factory=dict)
    inbox: deque[tuple[float, str, str, int]] = field(default_factory=deque)
    peer: str = ""
    tombstones: set[int] = field(default_factory=set)
    undrained: dict[int, Sender] = field(default_factory=dict)


@dataclass
class Room:
    """One side's view of a room; its number is also its epoch. ``slots``: one for each token;
    ``cached``: what D has already, of each group of planes."""

    number: int
    pages: IntArray
    slots: IntArray
    tokens: int
    cached: tuple[int, ...]
    content: npt.NDArray[np.float32]
    end: Any = None
    sent: int = 0
    committed: bool = False
    hold_until: float = 0.0

    @property
    def start(self) -> int:
        return min(self.cached)


def value(room: int, token: int, row: int) -> float:
    return float(room * 1000 + token * 10 + row)


def expected(number: int, tokens: int, rows: int) -> npt.NDArray[np.float32]:
    """``[rows, tokens]``"""
    return np.array([[value(number, t, row) for t in range(tokens)] for row in range(rows)]).astype(
        np.float32
    )


def by_byte(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """``[rows, tokens, 4]``"""
    return np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, 4)


def random_script(rng: random.Random) -> FaultScript:
    rules: list[AnyRule] = []
    if rng.random() < 0.7:
        rules.append(LateWrite(seconds=[0.0, 0.012], probability=rng.random()))
    if rng.random() < 0.7:
        rules.append(DuplicateWrite(seconds=[0.0, 0.012], probability=rng.random()))
    if rng.random() < 0.3:
        rules.append(DelayWrite(seconds=[0.0, 0.01], probability=rng.random()))
    if rng.random() < 0.3:
        rules.append(LoseWrite(seconds=0.005, probability=0.1))
    if rng.random() < 0.2:
        rules.append(FailRoom(rooms=rng.randint(1, 6)))
    if rng.random() < 0.3:
        start = rng.uniform(0.0, 0.02)
        rules.append(LinkDown(start=start, stop=start + rng.uniform(0.005, 0.03)))
    if rng.random() < 0.3:
        rules.append(DelayReservation(seconds=[0.0, 0.01], probability=0.5))
    return FaultScript(seed=rng.randrange(1 << 30), rules=rules)


class Schedule:
    """One random life of a pair. ``careless``: the side that breaks the rule that is tested;
    ``extra_planes``: of the pools, beside the model's, with a group of their own.

    :meth:`steps` raises ForeignBytes when a room sees another's bytes.
    """

    def __init__(
        self,
        backend: str,
        seed: str,
        *,
        careless: str = "",
        rooms: int = 8,
        extra_planes: tuple[Plane, ...] = (),
    ) -> None:
        self._backend, self._careless, self._left = backend, careless, rooms
        self._rng = random.Random(seed)
        self._script = random_script(self._rng)
        self._abort_rate = self._rng.choice([0.0, 0.02, 0.05, 0.1])
        self._upset_rate = self._rng.choice([0.0, 0.0, 0.01, 0.03])
        self._p = Node("prefill", Pages(PAGES_P, PAGE_P, self._rng, extra_planes))
        self._d = Node("decode", Pages(PAGES_D, PAGE_D, self._rng, extra_planes))
        self._lives = self._last_room = 0
        self._upset_at: list[tuple[float, str]] = []
        self.committed = self.aborted = self.restarts = 0

    def steps(self) -> Generator[None]:
        """Run; the caller may do other things at each yield."""
        try:
            for node in (self._p, self._d):
                self._start(node)
            self._introduce()
            # Twice what a library may take to give a write up.
            deadline = time.monotonic() + 2 * CEILING_SECONDS
            while self._left or self._busy():
                assert time.monotonic() < deadline, self._stuck()
                self._step()
                yield
            assert len(self._p.pages.free) == PAGES_P, self._stuck()
            assert len(self._d.pages.free) == PAGES_D, self._stuck()
        finally:
            for node in (self._p, self._d):
                if node.manager is not None:
                    node.manager.close()

    def _busy(self) -> bool:
        return any(n.rooms or n.pages.quarantine or n.undrained for n in (self._p, self._d))

    def _stuck(self) -> str:
        return f"does not come to rest: {self._p} {self._d} {self._script}"

    def _step(self) -> None:
        rng = self._rng
        if self._left and rng.random() < 0.3:
            self._begin_room()
        if rng.random() < self._upset_rate:
            self._upset()
        self._notice_upsets()
        for node in (self._p, self._d):
            self._deliver(node)
        for room in list(self._p.rooms.values()):
            self._advance_sender(room)
        for room in list(self._d.rooms.values()):
            self._advance_receiver(room)
        self._send_drained()
        for node in (self._p, self._d):
            node.pages.sweep()

    # ---- life of the nodes

    def _start(self, node: Node) -> None:
        self._lives += 1
        node.instance = f"{node.role}-{self._lives}"
        pool, instance = node.pages.pool, node.instance
        if self._backend == "fake":
            node.manager = FakeManager(pool, instance, script=self._script)
        elif self._backend == "tcp":
            node.manager = TcpManager(pool, instance)
        else:
            # Rooms need several slots, and wait for them.
            node.manager = manager_class(self._backend)(pool, instance, buffers=2, buffer_bytes=64)

    def _introduce(self) -> None:
        """The handshake."""
        p, d = self._p, self._d
        assert p.manager is not None
        assert d.manager is not None
        p.peer, d.peer = d.instance, p.instance
        p.manager.connect(node_info(d.instance, "decode", d.manager, d.pages.pool))
        d.manager.connect(node_info(p.instance, "prefill", p.manager, p.pages.pool))

    def _upset(self) -> None:
        what = self._rng.choice(["restart P", "restart D", "partition P", "partition D"])
        self.restarts += 1
        if what.startswith("restart"):
            node, other = (self._p, self._d) if what == "restart P" else (self._d, self._p)
            assert node.manager is not None
            node.manager.close()
            for room in node.rooms.values():
                node.pages.give(room.pages)
            for room in node.pages.quarantine:
                node.pages.give(room.pages)
            node.rooms, node.pages.quarantine, node.undrained = {}, [], {}
            node.tombstones, node.peer = set(), ""
            node.inbox.clear()
            self._start(node)
        else:
            # One side takes the other for dead although it lives.
            other = self._p if what == "partition P" else self._d
        self._upset_at.append((time.monotonic() + self._rng.uniform(0.0, 0.008), other.role))

    def _notice_upsets(self) -> None:
        """The survivor's heartbeat gives the peer up; then they shake hands again."""
        due = [role for at, role in self._upset_at if at <= time.monotonic()]
        self._upset_at = [(at, role) for at, role in self._upset_at if at > time.monotonic()]
        for role in due:
            node = self._p if role == "prefill" else self._d
            assert node.manager is not None
            if node.peer:
                node.manager.disconnect(node.peer)
            # The other side learns by the new handshake that its rooms are gone. What D committed
            # lives on.
            other = self._d if node is self._p else self._p
            for side, tell in ((node, False), (other, True)):
                for room in list(side.rooms.values()):
                    if side is self._p or not room.committed:
                        self._give_up(side, room, tell=tell)
        if due and not self._upset_at:
            self._introduce()

    # ---- messages

    def _tell(self, to: Node, kind: str, room: int) -> None:
        """In order, after a moment; for the peer as it is known now."""
        sender = self._d if to is self._p else self._p
        delay = self._rng.uniform(0.0, 0.002)
        if kind == "reserve":
            assert sender.manager is not None
            # Held back without blocking anything, so later messages overtake it.
            delay += sender.manager.reservation_delay()
        to.inbox.append((time.monotonic() + delay, sender.peer, kind, room))

    def _deliver(self, node: Node) -> None:
        now = time.monotonic()
        waiting = []
        while node.inbox:
            at, instance, kind, number = node.inbox.popleft()
            if at > now:
                waiting.append((at, instance, kind, number))
            elif instance == node.instance and node.peer:
                self._handle(node, kind, number)
        node.inbox.extend(waiting)

    def _handle(self, node: Node, kind: str, number: int) -> None:
        room = node.rooms.get(number)
        if kind == "reserve":
            self._reserved(number, room)
        elif kind == "abort":
            node.tombstones.add(number)
            if room is not None:
                self._give_up(node, room, tell=node is self._d)
            elif node is self._p and number not in node.undrained:
                self._tell(self._d, "drained", number)
        elif kind == "drained":
            for old in [r for r in node.pages.quarantine if r.number == number]:
                old.end.on_peer_drained()
        elif kind == "commit" and room is not None:
            layout = self._d.pages.pool.layout
            room.end.commit(layout.missing_bytes(room.cached, room.tokens))
        elif kind == "ack" and room is not None:
            self._p.pages.give(room.pages)
            del self._p.rooms[number]

    # ---- D

    def _begin_room(self) -> None:
        """The proxy tells both sides; D reserves and P computes its first chunk."""
        p, d, rng = self._p, self._d, self._rng
        if not p.peer or not d.peer or self._upset_at:
            return
        tokens = rng.randint(1, MAX_TOKENS)
        cached = tuple(
            rng.randint(0, tokens) if rng.random() < 0.3 else 0
            for _ in range(d.pages.pool.layout.num_groups)
        )
        into = d.pages.take(tokens)
        pages = p.pages.take(tokens) if into is not None else None
        if into is None or pages is None:
            if into is not None:
                d.pages.give(into)
            return
        self._left -= 1
        self._last_room += 1
        number = self._last_room
        assert d.manager is not None
        content = expected(number, tokens, len(p.pages.groups))
        d.pages.put(d.pages.slots(into, tokens), POISON)
        receiver = d.manager.receiver(d.peer, number.to_bytes(16), number, into, cached, tokens)
        d.rooms[number] = Room(
            number, into, d.pages.slots(into, tokens), tokens, cached, content, receiver
        )
        slots = p.pages.slots(pages, tokens)
        p.rooms[number] = Room(number, pages, slots, tokens, cached, content)
        p.pages.put(slots, content)
        self._tell(p, "reserve", number)

    def _check(self, room: Room) -> None:
        found = self._d.pages.get(room.slots)
        # Byte by byte: a value that is just being written may be there in part.
        seen, own = by_byte(found), by_byte(room.content)
        poison = by_byte(np.full_like(room.content, POISON))
        good = seen == own
        if not room.committed:
            good |= seen == poison
        # What D has in its own cache was not sent.
        for row, group in enumerate(self._d.pages.groups):
            held = slice(room.cached[group])
            good[row, held] = seen[row, held] == poison[row, held]
        if not good.all():
            raise ForeignBytes(f"{room} holds {found}")

    def _advance_receiver(self, room: Room) -> None:
        self._check(room)
        state = room.end.poll()
        if state is TransferState.FAILED:
            self._give_up(self._d, room, tell=True)
        elif state is TransferState.DONE and not room.committed:
            room.committed = True
            self.committed += 1
            self._check(room)
            room.hold_until = time.monotonic() + self._rng.uniform(0.0, 0.01)
            self._tell(self._p, "ack", room.number)
        elif room.committed and time.monotonic() > room.hold_until:
            self._d.pages.give(room.pages)
            del self._d.rooms[room.number]
        elif not room.committed and self._rng.random() < self._abort_rate:
            self._give_up(self._d, room, tell=True)

    # ---- P

    def _reserved(self, number: int, room: Room | None) -> None:
        p = self._p
        receiver_room = self._d.rooms.get(number)
        if room is None or number in p.tombstones or receiver_room is None:
            self._tell(self._d, "drained", number)
            return
        assert p.manager is not None
        asked = Reservation(
            to=p.instance,
            sender=self._d.instance,
            room=number.to_bytes(16),
            epoch=number,
            cached=room.cached,
            destination=receiver_room.end.destination,
        )
        try:
            room.end = p.manager.sender(p.peer, asked, room.pages, room.tokens)
        except TransferError:
            self._give_up(p, room, tell=True)

    def _advance_sender(self, room: Room) -> None:
        if self._rng.random() < self._abort_rate / 2:
            self._give_up(self._p, room, tell=True)
            return
        sender = room.end
        if sender is None:
            return
        state = sender.poll()
        if state is TransferState.FAILED:
            self._give_up(self._p, room, tell=True)
        elif state is TransferState.DONE:
            if not room.committed or self._rng.random() < 0.1:
                room.committed = True
                self._tell(self._d, "commit", room.number)
        elif room.sent < LAYERS and self._rng.random() < 0.5:
            middle = self._rng.randint(room.start, room.tokens)
            sender.send(room.start, middle, room.sent, room.sent + 1)
            sender.send(middle, room.tokens, room.sent, room.sent + 1)
            room.sent += 1
            if room.sent == LAYERS:
                sender.finish()

    # ---- ends

    def _give_up(self, node: Node, room: Room, *, tell: bool) -> None:
        """The one release path of both sides."""
        self.aborted += 1
        del node.rooms[room.number]
        node.tombstones.add(room.number)
        other = self._p if node is self._d else self._d
        if room.end is None:
            node.pages.give(room.pages)
        else:
            room.end.abort()
            if node.role != self._careless:
                node.pages.quarantine.append(room)
            else:
                node.pages.give(room.pages)
            if node is self._p and node.peer:
                node.undrained[room.number] = room.end
        if tell:
            self._tell(other, "abort", room.number)

    def _send_drained(self) -> None:
        for number, sender in list(self._p.undrained.items()):
            if sender.drained():
                del self._p.undrained[number]
                self._tell(self._d, "drained", number)


AnySchedule = TypeVar("AnySchedule", bound=Schedule)


def run_schedules(
    name: str, count: int, make: Callable[[str], AnySchedule], *, series: str = ""
) -> list[AnySchedule]:
    """Run schedules, a few at a time since they mostly wait.

    Args:
        make: makes a schedule from its seed.
    """
    print(f"PD_TEST_SEED={SEED}: {count} schedules of {name}")
    done: list[AnySchedule] = []
    running: list[tuple[str, Generator[None]]] = []
    left = iter(f"{SEED}/{series}{name}/{number}" for number in range(count))
    while True:
        for seed in islice(left, _WIDTH - len(running)):
            done.append(make(seed))
            running.append((seed, done[-1].steps()))
        if not running:
            return done
        for entry in list(running):
            seed, steps = entry
            try:
                next(steps)
            except StopIteration:
                running.remove(entry)
            except AssertionError as error:
                for _, others in running:
                    others.close()
                error.add_note(f"in schedule {seed}")
                raise
        time.sleep(0.0002)
