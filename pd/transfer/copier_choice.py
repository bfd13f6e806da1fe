"""Chooses the copier for the memory of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.transfer.copier import Copier, HostCopier

if TYPE_CHECKING:
    from pd.transfer.kv_buffer import KVBuffer


def copier_for(pool: KVBuffer) -> Copier:
    """Return a copier between a pool and staging buffers."""
    if pool.memory.device.type == "cpu":
        return HostCopier(pool)
    from pd.transfer.copier_cuda import CudaCopier

    return CudaCopier(pool)
