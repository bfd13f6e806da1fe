"""Shared memory in the place of GPUs: the nvlink backend between processes on a CPU.

The pool is a file of /dev/shm that the peer maps, as it would map GPU memory: it outlives its
owner until the peer unmaps it, and who touches it after unmapping dies of it. A lane stores in a
thread of its own, as a stream would, and can be slowed down or held.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transfer_helpers import Pool

from pd.core.errors import TransferError
from pd.engine import kv_pool
from pd.engine.kv_pool import KVPool
from pd.kernels.kv_copy import copy_to_peer
from pd.transfer.host_id import host_id
from pd.transfer.nvlink import manager as nvlink
from pd.transfer.nvlink.backend import NvlinkBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.node_info import KVLayout
    from pd.transfer.kv_buffer import KVBuffer, KVPlane
    from pd.transfer.ranges import Block

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shm_pool(layout: KVLayout, slots: int) -> tuple[Pool, Path]:
    """A pool of zeros and its file, which the caller removes."""
    model = layout.model
    shape = (model.num_layers, 2, slots, model.num_heads, model.head_dim)
    size = slots * layout.token_bytes
    file, name = tempfile.mkstemp(prefix="pd-test-", dir="/dev/shm")
    os.ftruncate(file, size)
    memory = mmap.mmap(file, size)
    os.close(file)
    buffer = torch.frombuffer(memory, dtype=_DTYPES[model.dtype]).view(shape)
    return Pool(buffer, layout), Path(name)


def shm_planes(layout: KVLayout, num_pages: int) -> tuple[KVPool, Path]:
    """A node's pool of zeros and its file, which the caller removes."""
    file, name = tempfile.mkstemp(prefix="pd-test-", dir="/dev/shm")
    pool = KVPool(layout, num_pages, "cpu", shared_memory=file)
    os.close(file)
    return pool, Path(name)


@contextlib.contextmanager
def nodes_in_shared_memory() -> Iterator[list[ShmDevice]]:
    """Have the nodes of this process keep their pools in shared memory and offer nvlink. The
    devices of their managers appear in the list as they come."""
    paths: dict[int, Path] = {}
    made: list[ShmDevice] = []

    def zeros(size: int, device: torch.device) -> torch.Tensor:
        file, name = tempfile.mkstemp(prefix="pd-test-", dir="/dev/shm")
        os.ftruncate(file, size)
        memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        os.close(file)
        paths[memory.data_ptr()] = Path(name)
        return memory

    def device(pool: KVBuffer) -> ShmDevice:
        made.append(ShmDevice(pool, paths[pool.memory.data_ptr()]))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_pool, "_allocate_zeros", zeros)
        patch.setattr(NvlinkBackend, "obstacle", lambda self, device: None)
        patch.setattr(nvlink, "CudaDevice", device)
        yield made
    for path in paths.values():
        path.unlink()


class ShmMapping:
    def __init__(self, device: ShmDevice, path: Path) -> None:
        self._device = device
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        pointer = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(pointer)
        del pointer
        device.mapped += 1

    def close(self) -> None:
        self._memory.close()
        self._device.mapped -= 1


class ShmTicket:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.waited = False
        self.took = 0.0

    def is_done(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        self.waited = True
        self.event.wait()

    def measure_seconds(self) -> float:
        return self.took


class ShmLane:
    def __init__(self, device: ShmDevice) -> None:
        self._device = device
        self._queue: queue.Queue = queue.Queue()
        # It does not keep the lane alive: its end is the end of the thread.
        threading.Thread(target=self._run, args=(device, self._queue), daemon=True).start()

    def make_table(self, slots) -> torch.Tensor:
        return torch.from_numpy(slots)

    def store_block(self, table, columns, peer, peer_num_slots, block) -> ShmTicket:
        ticket = ShmTicket()
        slots, peer_slots = table[:, columns]
        plane = self._device.plane_of(block)
        layers = block.layer_start - plane.first_layer, block.layer_stop - plane.first_layer
        args = (plane.buffer, slots, peer, peer_num_slots, peer_slots, *layers)
        self._device.launched += 1
        self._queue.put((args, ticket))
        if self._device.breaks:
            raise RuntimeError(self._device.breaks)
        return ticket

    def wait_until_idle(self) -> None:
        nothing = ShmTicket()
        self._queue.put((None, nothing))
        nothing.wait()

    def __del__(self) -> None:
        self._queue.put(None)

    @staticmethod
    def _run(device: ShmDevice, stores: queue.Queue) -> None:
        while (item := stores.get()) is not None:
            args, ticket = item
            began = time.perf_counter()
            time.sleep(device.next_delay())
            device.flows.wait()
            if args is not None:
                copy_to_peer(*args)
            ticket.took = time.perf_counter() - began
            ticket.event.set()


class ShmDevice:
    """Attributes:
    delay: seconds that a store takes.
    flows: while it is not set, launched stores stand still.
    computed: while it is not set, what the forward pass has queued since it was put here is not
        complete.
    breaks: the error of stores, each of which is begun all the same.
    """

    def __init__(self, pool: KVBuffer, path: Path, uuid: str = "GPU-0") -> None:
        self._planes = pool.planes
        self._path, self._uuid = path, uuid
        self.delay = 0.0
        self.flows = threading.Event()
        self.flows.set()
        self.computed = threading.Event()
        self.computed.set()
        self.mapped = 0
        self.launched = 0
        self.refuses = self.breaks = ""
        self._closed = False
        self._calls: queue.Queue = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def plane_of(self, block: Block) -> KVPlane:
        return [plane for plane in self._planes if plane.first_layer <= block.layer_start][-1]

    def next_delay(self) -> float:
        return self.delay

    def describe_pool(self) -> dict[str, str]:
        return {
            "host_id": host_id(),
            "device": self._uuid,
            "reachable": "GPU-0,GPU-1",
            "handle": str(self._path).encode().hex(),
            "offset": "0",
        }

    def map_pool(self, handle: bytes, offset: int) -> ShmMapping:
        if self.refuses:
            raise TransferError(self.refuses)
        return ShmMapping(self, Path(handle.decode()))

    def when_computed(self, call) -> None:
        if self.computed.is_set():
            call("")
        else:
            self._calls.put((self.computed, call))

    def make_lane(self) -> ShmLane:
        return ShmLane(self)

    def close(self) -> None:
        self._closed = True
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            computed, call = item
            while not computed.wait(0.02) and not self._closed:
                pass
            call("")
