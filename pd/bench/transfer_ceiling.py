"""Ceiling of a path: the same bytes between the same kinds of memory, without a pool.

Each ceiling has two halves. P's half measures; D's half describes where to write and does its part
of each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from pd.bench.transfer_ceiling_libraries import (
    MooncakeCeilingTarget,
    MooncakeWrites,
    NixlCeilingTarget,
    NixlWrites,
)
from pd.bench.transfer_ceiling_sockets import PlainSockets, SocketsCeilingTarget

if TYPE_CHECKING:
    from pd.bench.transfer_control import Control
    from pd.bench.transfer_spec import TransferSpec
    from pd.core.node_info import NodeInfo
    from pd.engine.kv_pool import KVPool


class PathCeiling(Protocol):
    """P's half."""

    name: str

    def measure(self) -> float:
        """Move the bytes once; GB/s."""

    def close(self) -> None:
        """Give everything back; before D's half does."""


class CeilingTarget(Protocol):
    """D's half."""

    def describe(self) -> dict[str, Any]:
        """Everything that P needs to begin."""

    def step(self) -> None:
        """D's part of one measurement; over when the bytes are here."""

    def close(self) -> None:
        """Give everything back."""


def ceiling_of(
    spec: TransferSpec,
    pool: KVPool,
    control: Control,
    key: bytes | None,
    connections: int,
    peer: NodeInfo,
) -> PathCeiling:
    """P's half of a backend's ceiling; asks D, which is ``peer``, for the other one.

    Raises:
        SetupError: a library or a device is missing at either end.
    """
    if spec.backend == "nvlink":
        return PeerCopy(spec, pool, peer.transfers["nvlink"]["device"])
    described = control.call("ceiling", connections=connections)
    if spec.backend == "nixl":
        return NixlWrites(spec, pool, control, described)
    if spec.backend == "mooncake":
        return MooncakeWrites(spec, pool, control.host, described)
    return PlainSockets(spec, pool, control, key, connections, described)


def ceiling_target(
    spec: TransferSpec, pool: KVPool, control: Control, key: bytes | None, connections: int
) -> CeilingTarget:
    """D's half."""
    if spec.backend == "nixl":
        return NixlCeilingTarget(spec, pool, control.host)
    if spec.backend == "mooncake":
        return MooncakeCeilingTarget(spec, pool, control.host)
    return SocketsCeilingTarget(spec, pool, control.host, key, connections)


class PeerCopy:
    """``copy_`` from one GPU's memory to the other's, by this process alone.

    Args:
        uuid: of D's GPU, which may have another number here.
    """

    name = "peer copy"

    def __init__(self, spec: TransferSpec, pool: KVPool, uuid: str) -> None:
        uuids = [
            str(torch.cuda.get_device_properties(number).uuid)
            for number in range(torch.cuda.device_count())
        ]
        device = torch.device("cuda", uuids.index(uuid))
        self._source = pool.memory[: spec.num_bytes]
        self._target = torch.empty(spec.num_bytes, dtype=torch.uint8, device=device)

    def measure(self) -> float:
        begun = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._source.device):
            begun.record()
            self._target.copy_(self._source, non_blocking=True)
            ended.record()
            ended.synchronize()
        milliseconds: float = begun.elapsed_time(ended)
        return self._source.numel() / milliseconds / 1e6

    def close(self) -> None:
        """Memory goes with the process."""
