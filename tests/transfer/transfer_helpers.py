"""Pools, managers and small rooms for the tests of the transfer backends."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pd.core.messages import Reservation
from pd.core.node_info import KVLayout, NodeInfo
from pd.engine.kv_pool import KVPool, PoolPlane
from pd.transfer.base import TransferState

if TYPE_CHECKING:
    import random
    import selectors
    from collections.abc import Callable, Sequence

    from pd.transfer.base import Receiver, Sender, TransferManager
    from pd.transfer.kv_buffer import IntArray

SEED = int(os.environ.get("PD_TEST_SEED", "0"))
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_LIBRARIES = {"nixl": "nixl", "mooncake": "mooncake"}


def is_installed(name: str) -> bool:
    return name not in _LIBRARIES or importlib.util.find_spec(_LIBRARIES[name]) is not None


def backends(*names: str, full: Sequence[str] = ()) -> list[Any]:
    """Parameters of a test, those of ``full`` in ``make test-all`` only. Those without their
    library are skipped with a reason, but not in CI, which has to have it."""
    return [
        pytest.param(
            name,
            marks=[
                pytest.mark.skipif(
                    not is_installed(name) and not os.environ.get("CI"),
                    reason=f"the library {name} is not installed",
                ),
                *([pytest.mark.full] if name in full else []),
            ],
        )
        for name in names
    ]


@dataclass
class Pool:
    """What a node's KV pool offers to transfers, with one plane."""

    buffer: torch.Tensor
    layout: KVLayout

    @property
    def memory(self) -> torch.Tensor:
        return self.buffer.view(-1).view(torch.uint8)

    @property
    def planes(self) -> list[PoolPlane]:
        return [PoolPlane(self.layout.model, 0, self.buffer, (self.buffer.data_ptr(),))]

    def tokens(self, pages: IntArray, start: int, stop: int) -> torch.Tensor:
        """``[layers, 2, tokens, heads, dim]`` of a sequence's tokens, by the definition."""
        size = self.layout.page_size
        slots = [int(pages[t // size]) * size + t % size for t in range(start, stop)]
        return self.buffer[:, :, slots]


def make_pool(
    slots: int,
    page_size: int,
    *,
    layers: int = 3,
    heads: int = 2,
    dim: int = 4,
    dtype: str = "float32",
    fill: float | None = None,
    seed: int = 0,
) -> Pool:
    shape = (layers, 2, slots, heads, dim)
    if fill is None:
        generator = torch.Generator().manual_seed(seed)
        buffer = torch.rand(shape, generator=generator).to(_DTYPES[dtype])
    else:
        buffer = torch.full(shape, fill, dtype=_DTYPES[dtype])
    return Pool(buffer, KVLayout.of_model(layers, heads, dim, dtype, page_size))


def node_info(instance: str, role: str, manager: TransferManager, pool: Pool | KVPool) -> NodeInfo:
    return NodeInfo(
        instance_id=instance,
        role=role,  # type: ignore[arg-type]
        model_id="m",
        kv=pool.layout,
        endpoint=f"tcp://{instance}",
        bootstrap="",
        transfers=manager.addresses(),
    )


def introduce(
    prefill: TransferManager, p: str, decode: TransferManager, d: str, pool: Pool
) -> None:
    """What the handshake does on both sides."""
    prefill.connect(node_info(d, "decode", decode, pool))
    decode.connect(node_info(p, "prefill", prefill, pool))


def reservation(receiver: Receiver, room: bytes, epoch: int, start: int) -> Reservation:
    return Reservation(
        to="P",
        sender="D",
        room=room,
        epoch=epoch,
        cached=(start,),
        destination=receiver.destination,
    )


def random_pages(rng: random.Random, pool: Pool, tokens: int) -> IntArray:
    size = pool.layout.page_size
    total = pool.buffer.shape[2] // size
    return np.array(rng.sample(range(total), -(-tokens // size)), dtype=np.int32)


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 20.0) -> None:
    """Poll; the time-out only ends a test that hangs."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for: {what}"
        time.sleep(0.001)


def watch_limit(selector: selectors.BaseSelector, concerns: Callable[[Any], bool]) -> None:
    """Have a selector refuse once what is registered with data that this concerns, as under
    ``fs.epoll.max_user_watches``."""
    register = selector.register

    def refuse_once(file: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if not concerns(data):
            return register(file, events, data)
        selector.register = register  # type: ignore[method-assign]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    selector.register = refuse_once  # type: ignore[method-assign]


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait: on a busy machine its threads run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")

    def stopped() -> bool:
        stats = [(thread / "stat").read_text() for thread in threads.iterdir()]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    wait_until(stopped, f"process {pid} to stop")


def settled(end: Sender | Receiver) -> TransferState:
    """Wait until it is DONE or FAILED."""
    wait_until(lambda: end.poll() is not TransferState.ACTIVE, "the transfer to end")
    return end.poll()


def hand_off(sender: Sender, receiver: Receiver) -> None:
    """The end of a good transfer."""
    sender.finish()
    assert settled(sender) is TransferState.DONE, sender.error
    receiver.commit(sender.bytes_sent)
    assert settled(receiver) is TransferState.DONE, receiver.error
