"""A node's transfer side in a process of its own, which a test can kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transfer_helpers import make_pool, node_info, reservation, stop_process

from pd.core.errors import PDError
from pd.transfer import make_transfer_manager
from pd.transfer.registry import manager_class

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Children fork from a server that imported torch once and has no threads.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "pd.transfer.tcp.manager", "pd.transfer.fake.manager"])

SLOTS, PAGE, LAYERS, PARTS = 4096, 4, 4, 8


class NodeProcess:
    """Calls the methods of :class:`_Node` in another process, one at a time."""

    def __init__(
        self, backend: str, instance: str, role: str, env: dict[str, str] | None = None, **kw: Any
    ) -> None:
        """``kw``: of the manager."""
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(
            target=_serve, args=(theirs, backend, instance, role, env or {}, kw), daemon=True
        )
        self._process.start()
        theirs.close()
        self.info = self.call("info")

    def call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        assert self._pipe.poll(30.0), f"no answer to {method}"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        assert self._process.pid is not None
        stop_process(self._process.pid)

    def resume(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)


class _Node:
    """Rooms are numbered; room n uses all pages in order, and P's pool is random by seed 0."""

    def __init__(self, backend: str, instance: str, role: str, kw: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.pool = make_pool(SLOTS, PAGE, layers=LAYERS, fill=None if role == "prefill" else -1.0)
        if kw:
            self.manager = manager_class(backend)(self.pool, instance, **kw)
        else:
            self.manager = make_transfer_manager(backend, self.pool, instance)
        self.instance, self.role = instance, role
        self.ends: dict[int, Any] = {}

    def info(self) -> Any:
        return node_info(self.instance, self.role, self.manager, self.pool)

    def connect(self, peer: Any) -> None:
        self.manager.connect(peer)

    def disconnect(self, instance: str) -> None:
        self.manager.disconnect(instance)

    def receive(self, peer: str, room: int) -> Any:
        end = self.manager.receiver(peer, room.to_bytes(16), room, _pages(), (0,), SLOTS)
        self.ends[room] = end
        return reservation(end, room.to_bytes(16), room, 0)

    def receive_part(self, peer: str, room: int) -> Any:
        """Room n uses one of the parts of the pool."""
        part, tokens = _part(room)
        end = self.manager.receiver(peer, room.to_bytes(16), room, part, (0,), tokens)
        self.ends[room] = end
        return reservation(end, room.to_bytes(16), room, 0)

    def send_part(self, peer: str, asked: Any) -> int:
        part, tokens = _part(asked.epoch)
        end = self.ends[asked.epoch] = self.manager.sender(peer, asked, part, tokens)
        for layer in range(LAYERS):
            end.send(0, tokens, layer, layer + 1)
        end.finish()
        return end.bytes_sent

    def abort(self, room: int) -> None:
        self.ends[room].abort()

    def wipe(self, room: int) -> None:
        """The room's pages belong to somebody else now."""
        self.pool.buffer[:, :, _slots(room)] = 7.0

    def wiped(self, room: int) -> bool:
        return bool((self.pool.buffer[:, :, _slots(room)] == 7.0).all())

    def values(self, room: int) -> Any:
        return self.pool.buffer[:, :, _slots(room)].numpy().copy()

    def quarantined(self) -> int:
        return getattr(self.manager, "quarantined_buffers", 0)

    def owed(self) -> int:
        """Buffers of a staged backend that decode nodes have not given back after use."""
        return self.manager._outgoing.num_held

    def cpu_seconds(self) -> float:
        return time.process_time()

    def send(self, peer: str, asked: Any, layer_start: int, layer_stop: int) -> None:
        if asked.epoch not in self.ends:
            self.ends[asked.epoch] = self.manager.sender(peer, asked, _pages(), SLOTS)
        self.ends[asked.epoch].send(0, SLOTS, layer_start, layer_stop)

    def finish(self, room: int) -> int:
        self.ends[room].finish()
        return self.ends[room].bytes_sent

    def commit(self, room: int, num_bytes: int) -> None:
        self.ends[room].commit(num_bytes)

    def state(self, room: int) -> Any:
        end = self.ends[room]
        return end.poll(), str(end.error), end.drained()

    def received(self, room: int) -> int:
        return self.ends[room].bytes_received

    def checksum(self) -> float:
        return float(self.pool.buffer.double().sum())


def _pages() -> Any:
    return np.arange(SLOTS // PAGE, dtype=np.int32)


def _part(room: int) -> Any:
    """Page table and tokens."""
    pages = SLOTS // PAGE // PARTS
    first = room % PARTS * pages
    return np.arange(first, first + pages, dtype=np.int32)[::-1].copy(), pages * PAGE


def _slots(room: int) -> slice:
    size = SLOTS // PARTS
    return slice(room % PARTS * size, (room % PARTS + 1) * size)


def _serve(
    pipe: Connection,
    backend: str,
    instance: str,
    role: str,
    env: dict[str, str],
    kw: dict[str, Any],
) -> None:
    os.environ.update(env)
    node = _Node(backend, instance, role, kw)
    while True:
        method, args = pipe.recv()
        try:
            pipe.send(getattr(node, method)(*args))
        except (PDError, ValueError) as error:
            pipe.send(error)
