"""Sums and exchanges between the devices of the ranks: NCCL between GPUs, gloo between CPUs, and
peer memory for small sums between GPUs."""

from __future__ import annotations

import contextlib
import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    FileStore,
    Work,
)

from pd.core.errors import SetupError
from pd.engine.tensor_parallel import peer_memory
from pd.models.tensor_parallel import TensorParallel
from pd.util.exit import STUCK_PREFIX

if TYPE_CHECKING:
    from pathlib import Path

# A long timeout, because ranks may load their weights at very different speeds. We notice the end
# of a rank by other means.
_TIMEOUT = timedelta(minutes=30)
_JOIN_TIMEOUT = timedelta(minutes=1)
_ABORT_SECONDS = 5.0


class ProcessGroup(TensorParallel):
    """Ranks that are processes of this host.

    They find each other through a file, so no port is open to others, and connect over loopback.
    The constructor blocks until all ranks have connected.

    Args:
        rendezvous: a file that does not exist yet, the same for all ranks. Keep it until the end.
        device: this rank's device. A GPU becomes the current one of the calling thread.
    """

    def __init__(self, rank: int, size: int, rendezvous: Path | str, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._device = device
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = "lo"
        store = FileStore(str(rendezvous), size)
        store.set_timeout(_JOIN_TIMEOUT)
        self._peers: peer_memory.PeerMemory | None = None
        # NOTE: not torch's default group, because a process may belong to several groups.
        if device.type == "cuda":
            if not dist.is_nccl_available():
                raise SetupError("--tp-size needs a build of torch with NCCL")
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            # torch's annotations lack the collectives of backends.
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, _TIMEOUT)
        # The first exchange makes the connections. We do it now, while no rank has other work.
        self.broadcast(torch.zeros(1, device=device))
        if device.type == "cuda":
            self._peers = peer_memory.connect_peers(self, device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._peers is not None and self._peers.can_sum(x):
            return self._peers.all_reduce(x)
        if x.numel():
            self._sum_in_place(x)
        return x

    def _sum_in_place(self, x: torch.Tensor) -> None:
        options = AllreduceOptions()
        options.asyncOp = False
        _wait_for_work(self._group.allreduce([x], options))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        gathered = x.new_empty(self.size * rows, columns)
        if rows:
            options = AllgatherOptions()
            options.asyncOp = False
            _wait_for_work(self._group._allgather_base(gathered, x.contiguous(), options))
        return gathered.view(self.size, rows, columns).transpose(0, 1).flatten(1)

    def barrier(self, device: torch.device) -> None:
        self._sum_in_place(torch.zeros(1, device=device))

    def broadcast(self, x: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        _wait_for_work(self._group.broadcast([x], options))

    def abort(self) -> None:
        """End all work that waits for other ranks. Its results are undefined. Returns within
        seconds."""
        if self._device.type == "cuda":
            thread = threading.Thread(
                target=self._abort_group,
                name=STUCK_PREFIX + "abort of a process group",
                daemon=True,
            )
            thread.start()
            thread.join(_ABORT_SECONDS)

    def _abort_group(self) -> None:
        if self._peers is not None:
            self._peers.stop()
        with contextlib.suppress(RuntimeError):  # the group may have aborted by itself
            self._group.abort()
        if self._peers is not None:
            torch.cuda.synchronize(self._device)
            self._peers.close()


def _wait_for_work(work: Work | None) -> None:
    """Wait for results of gloo. Those of NCCL are ordered by the current stream."""
    if work is not None:
        work.wait()
