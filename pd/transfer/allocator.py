"""Settings of PyTorch's CUDA allocator that matter to transfers."""

from __future__ import annotations

import os

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expandable_segments() -> str:
    """Return the environment variable that turns expandable segments on; empty if none does.

    Other processes cannot map memory of such segments by CUDA IPC.
    """
    for variable in _VARIABLES:
        settings = os.environ.get(variable, "").lower().replace(" ", "")
        if "expandable_segments:true" in settings:
            return variable
    return ""
