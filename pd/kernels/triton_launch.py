"""What the Triton kernels of a layer share: they overlap with their neighbours.

On GPUs from Hopper on, kernels are launched with programmatic dependent launch (CUDA programming
guide, "Programmatic Dependent Launch"): a kernel's programs start once all programs of the one
before it have called :func:`start_next` or ended, and run up to :func:`wait_for_previous`, which
returns when that one has completed and its results can be read. So launching, and asking for
weights, costs no time of its own.

Every kernel launched this way must wait before it reads or writes anything that another kernel
writes or reads: its successor takes its end as the end of all kernels before it.
"""

# Triton is not installed everywhere, and its language has no types.
# mypy: ignore-errors

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def start_next(PDL: tl.constexpr):
    """The next kernel's programs may take what room this one leaves on the GPU."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until all kernels launched before have completed."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def zero_after_previous(PDL: tl.constexpr):
    """:func:`wait_for_previous`, and then 0, which the compiler does not know to be that: an
    address to which it is added cannot be read ahead of the wait."""
    if PDL:
        return tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return 0


@functools.cache
def launch_options(device: torch.device, overlaps: bool = True) -> dict[str, Any]:
    """Arguments of every launch of a kernel that uses the functions above."""
    if overlaps and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def on_device(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current device; this makes it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
