"""Description of the backend ``nvlink``."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from pd.transfer.allocator import expandable_segments
from pd.transfer.backend import TransferBackend

if TYPE_CHECKING:
    from pd.transfer.nvlink.manager import NvlinkManager


class NvlinkBackend(TransferBackend):
    """Stores into the memory of another GPU of the host."""

    one_device = True

    def manager_class(self) -> type[NvlinkManager]:
        from pd.transfer.nvlink.manager import NvlinkManager

        return NvlinkManager

    def obstacle(self, device: str) -> str | None:
        if device == "cpu":
            return "the KV cache is on the CPU; use --device cuda, or tcp"
        if variable := expandable_segments():
            return f"peers cannot map memory of expandable segments; unset {variable}"
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "this machine has no NVIDIA driver (libcuda.so.1); use tcp"
        return None
