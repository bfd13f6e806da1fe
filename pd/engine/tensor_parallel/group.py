"""Sums and exchanges between the devices of the ranks: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import contextlib
import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
)

from pd.core.errors import SetupError
from pd.models.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from pathlib import Path

# Ranks may load their weights at very different speeds. A rank that ends is noticed otherwise.
_TIMEOUT = timedelta(minutes=30)
_MEETING = timedelta(minutes=1)
_ABORT_SECONDS = 5.0


class ProcessGroup(TensorParallel):
    """Ranks that are processes of this host.

    They meet in a file, so that nothing listens for strangers, and their connections are on
    loopback. Blocks until all have come.

    Args:
        rendezvous: a file that does not exist yet, the same for all; to be kept until the end.
        device: this rank's.
    """

    def __init__(self, rank: int, size: int, rendezvous: Path | str, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._device = device
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = "lo"
        store = dist.FileStore(str(rendezvous), size)
        store.set_timeout(_MEETING)
        # NOTE: not torch's default group, so that a process may be part of several.
        if device.type == "cuda":
            if not dist.is_nccl_available():
                raise SetupError("--tp-size needs a build of torch with NCCL")
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            self._group.eager_connect_single_device(device)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, _TIMEOUT)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            options = AllreduceOptions()
            options.asyncOp = False
            self._group.allreduce([x], options).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        gathered = x.new_empty(self.size * rows, columns)
        if rows:
            options = AllgatherOptions()
            options.asyncOp = False
            self._group._allgather_base(gathered, x.contiguous(), options).wait()
        return gathered.view(self.size, rows, columns).transpose(0, 1).flatten(1)

    def broadcast(self, x: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        self._group.broadcast([x], options).wait()

    def abort(self) -> None:
        """End what waits for other ranks, with whatever result. Returns within seconds."""
        if self._device.type == "cuda":
            thread = threading.Thread(target=self._abort, name="abort", daemon=True)
            thread.start()
            thread.join(_ABORT_SECONDS)

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):  # it may have noticed by itself
            self._group.abort()
