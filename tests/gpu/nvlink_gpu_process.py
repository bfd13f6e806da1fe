"""A node's nvlink side in a process of its own, with its pool on a GPU."""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transfer.transfer_helpers import node_info, reservation

from pd.core.errors import PDError
from pd.core.node_info import KVLayout
from pd.engine.kv_pool import KVPool
from pd.transfer.nvlink.manager import NvlinkManager

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# KV of Llama-3.1-8B; 2 GiB.
LAYERS, HEADS, DIM, SLOTS = 32, 8, 128, 16384

_context = multiprocessing.get_context("spawn")


class GpuNodeProcess:
    """Calls the methods of :class:`_GpuNode` in another process, one at a time. The process starts
    by itself; who wants to use it waits."""

    def __init__(self, instance: str, role: str, device: str, page_size: int = 16) -> None:
        self._pipe, theirs = _context.Pipe()
        arguments = (theirs, instance, role, device, page_size)
        self._process = _context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._info: Any = None

    @property
    def info(self) -> Any:
        if self._info is None:
            self._info = self._answer(120.0, "start")
        return self._info

    def call(self, method: str, *args: Any) -> Any:
        assert self.info
        self._pipe.send((method, args))
        return self._answer(60.0, method)

    def _answer(self, seconds: float, what: str) -> Any:
        assert self._pipe.poll(seconds), f"no answer to {what}"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def alive(self) -> bool:
        return self._process.is_alive()


class _GpuNode:
    """Room n's pages are drawn by seed n, in runs of one page, of 64 or all together: by the kernel
    or by a copy engine."""

    def __init__(self, instance: str, role: str, device: str, page_size: int) -> None:
        torch.cuda.set_device(device)
        self._layout = KVLayout.of_model(LAYERS, HEADS, DIM, "bfloat16", page_size)
        self._pool = KVPool(self._layout, SLOTS // page_size - 1, device)
        self._device = torch.device(device)
        self.manager = NvlinkManager(self._pool, instance)
        self._instance, self._role = instance, role
        self._ends: dict[int, Any] = {}
        if role == "prefill":
            self.fill(0)

    def info(self) -> Any:
        return node_info(self._instance, self._role, self.manager, self._pool)  # type: ignore[arg-type]

    def connect(self, peer: Any) -> None:
        self.manager.connect(peer)

    def disconnect(self, instance: str) -> None:
        self.manager.disconnect(instance)

    def fill(self, seed: int, delay_cycles: int = 0) -> None:
        """Queue random content, behind a kernel that takes its time; does not wait."""
        generator = torch.Generator(self._device).manual_seed(seed)
        if delay_cycles:
            torch.cuda._sleep(delay_cycles)
        self._pool.memory.view(torch.int16).random_(generator=generator)

    def _pages(self, room: int, tokens: int) -> Any:
        rng = np.random.default_rng((room, self._layout.page_size))
        count, pages = -(-tokens // self._layout.page_size), self._pool.num_pages
        if room % 3 == 0:
            return np.arange(count, dtype=np.int32) + rng.integers(pages - count, dtype=np.int32)
        run = (1, 64)[room % 3 - 1]
        firsts = rng.permutation(pages // run).astype(np.int32) * run
        return (firsts[:, None] + np.arange(run, dtype=np.int32)).ravel()[:count]

    def receive(self, peer: str, room: int, start: int, stop: int) -> Any:
        pages = self._pages(room, stop)
        self._ends[room] = self.manager.receiver(
            peer, room.to_bytes(16), room, pages, (start,), stop
        )
        return reservation(self._ends[room], room.to_bytes(16), room, start)

    def send(self, peer: str, asked: Any, tokens: int, layers: list[tuple[int, int]]) -> float:
        """Send groups of layers; the seconds for which the calls held up the caller."""
        if asked.epoch not in self._ends:
            pages = self._pages(asked.epoch, tokens)
            self._ends[asked.epoch] = self.manager.sender(peer, asked, pages, tokens)
        began = time.monotonic()
        for first, stop in layers:
            self._ends[asked.epoch].send(asked.cached[0], tokens, first, stop)
        return time.monotonic() - began

    def fill_and_send(self, peer: str, asked: Any, tokens: int, seed: int, cycles: int) -> None:
        """As a forward pass does: the KV is not there yet when it is sent."""
        self.fill(seed, cycles)
        self.send(peer, asked, tokens, [(layer, layer + 4) for layer in range(0, LAYERS, 4)])

    def finish(self, room: int) -> int:
        self._ends[room].finish()
        return self._ends[room].bytes_sent

    def commit(self, room: int, num_bytes: int) -> None:
        self._ends[room].commit(num_bytes)

    def abort(self, room: int) -> None:
        self._ends[room].abort()

    def state(self, room: int) -> Any:
        end = self._ends[room]
        return end.poll(), str(end.error), end.drained()

    def digest(self, room: int, start: int, stop: int) -> bytes:
        return self._pool.compute_digest(self._pages(room, stop), (start,), stop)

    def free_memory(self, device: str) -> int:
        return torch.cuda.mem_get_info(device)[0]


def _serve(pipe: Connection, instance: str, role: str, device: str, page_size: int) -> None:
    try:
        node = _GpuNode(instance, role, device, page_size)
        pipe.send(node.info())
    except PDError as error:
        pipe.send(error)
        return
    while True:
        method, args = pipe.recv()
        try:
            pipe.send(getattr(node, method)(*args))
        except (PDError, ValueError, RuntimeError) as error:
            pipe.send(error)
