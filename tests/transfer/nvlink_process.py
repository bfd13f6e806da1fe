"""A node's nvlink side in a process of its own, with shared memory for its GPU."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nvlink_shm import ShmDevice, shm_pool
from transfer_process import LAYERS, PAGE, SLOTS, NodeProcess, _Node

from pd.core.errors import PDError
from pd.core.node_info import KVLayout
from pd.transfer.nvlink.manager import NvlinkManager

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "pd.transfer.nvlink.manager"])


class ShmNodeProcess(NodeProcess):
    """As :class:`NodeProcess`; what may be called is in :class:`_ShmNode`."""

    def __init__(self, instance: str, role: str) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, instance, role), daemon=True)
        self._process.start()
        theirs.close()
        self.info = self.call("info")
        self._path = Path(bytes.fromhex(self.info.transfers["nvlink"]["handle"]).decode())

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        super().kill()
        self._path.unlink(missing_ok=True)

    def mapped_by(self, other: ShmNodeProcess) -> bool:
        """Whether another process maps this one's pool, as the kernel sees it."""
        maps = Path(f"/proc/{other.pid}/maps").read_text()
        return str(self._path) in maps


class _ShmNode(_Node):
    def __init__(self, instance: str, role: str) -> None:
        torch.set_num_threads(1)
        layout = KVLayout.of_model(LAYERS, 2, 4, "float32", PAGE)
        self.pool, path = shm_pool(layout, SLOTS)
        if role == "prefill":
            generator = torch.Generator().manual_seed(0)
            self.pool.buffer.copy_(torch.rand(self.pool.buffer.shape, generator=generator))
        self.device = ShmDevice(self.pool, path)
        self.manager = NvlinkManager(self.pool, instance, device=self.device)
        self.instance, self.role = instance, role
        self.ends: dict[int, Any] = {}

    def hold(self) -> None:
        """Stores that are launched stand still."""
        self.device.flows.clear()

    def release(self) -> None:
        self.device.flows.set()

    def slow_down(self, seconds: float) -> None:
        self.device.delay = seconds

    def launched(self) -> int:
        return self.device.launched

    def abort(self, room: int) -> None:
        self.ends[room].abort()

    def on_peer_drained(self, room: int) -> None:
        self.ends[room].on_peer_drained()


def _serve(pipe: Connection, instance: str, role: str) -> None:
    node = _ShmNode(instance, role)
    while True:
        method, args = pipe.recv()
        try:
            pipe.send(getattr(node, method)(*args))
        except (PDError, ValueError) as error:
            pipe.send(error)
