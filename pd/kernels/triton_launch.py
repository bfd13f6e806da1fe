"""Launches Triton kernels cheaply for the host, and lets the kernels of a layer overlap.

On GPUs from Hopper on, we use programmatic dependent launch (CUDA programming guide, "Programmatic
Dependent Launch"). A kernel's programs start once all programs of the previous kernel have called
:func:`start_next` or ended. They run up to :func:`wait_for_previous`, which returns when the
previous kernel has completed and its results can be read. So launching a kernel and requesting its
weights costs no extra time.

Every kernel launched this way must wait before it touches anything that another kernel writes or
reads, because its successor takes its end as the end of all earlier kernels.
"""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pd.util.compiling import COMPILING

if TYPE_CHECKING:
    from collections.abc import Callable


class Pointer(Protocol):
    """An argument that stands for memory of the device, like a tensor."""

    @property
    def dtype(self) -> torch.dtype: ...

    def data_ptr(self) -> int: ...


Argument: TypeAlias = Pointer | TensorDescriptor | int | float | None


class CompiledKernel(Protocol):
    """A kernel that Triton compiled for one kind of arguments."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


class TritonKernel(Protocol):
    """A function decorated with ``triton.jit``."""

    fn: Callable[..., object]
    arg_names: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CompiledKernel]: ...


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel's programs use the room that this one leaves on the GPU."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all kernels launched before have completed."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def zero_after_previous(PDL: tl.constexpr):
    """Do :func:`wait_for_previous` and return 0, as a value that is not a constant for the
    compiler. If you add it to an address, the compiler cannot read from there before the wait."""
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


def launch_kernel(
    kernel: TritonKernel,
    grid: tuple[int, ...],
    device: torch.device,
    *args: Argument,
    overlaps: bool = True,
    **settings: object,
) -> None:
    """Queue a kernel on the current stream of a device, or interpret it on the CPU.

    At each launch, Triton looks for the kernel that it compiled for such arguments. This takes the
    host longer than the launch itself, so we do it once for each kind of arguments.

    Args:
        args: the kernel's arguments up to the first ``tl.constexpr``: tensors or other pointers,
            descriptors of tensors, numbers, and None for a tensor that is missing.
        overlaps: False if no later kernel may begin before this one ends. Ignored for kernels
            without the argument ``PDL``, which is set here.
        settings: all other arguments by name, and Triton's own, such as ``num_warps``.
    """
    names = kernel.arg_names[len(args) :]
    if "PDL" in names:
        settings |= _choose_overlap(device, overlaps)
    if device.type != "cuda":
        kernel[grid](*args, **settings)
        return
    key = (kernel.fn, device.index, *map(_describe_argument, args), *settings.items())
    with torch.cuda.device(device):
        compiled = _COMPILED.get(key)
        if compiled is None:
            with COMPILING:
                _COMPILED[key] = kernel[grid](*args, **settings)
            return
        values = [x if isinstance(x, _AS_THEY_ARE) else x.data_ptr() for x in args]
        compiled[(*grid, 1, 1)[:3]](*values, *(settings[name] for name in names))


_COMPILED: dict[tuple[object, ...], CompiledKernel] = {}
_AS_THEY_ARE = (int, float, TensorDescriptor, type(None))


def _describe_argument(x: Argument) -> object:
    """Return the properties of an argument for which Triton may compile another kernel."""
    if isinstance(x, int):
        return type(x), x == 1, x % 16 == 0, -(1 << 31) <= x < 1 << 31, x < 1 << 63
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, *x.block_shape
    if x is None:
        return None
    return float if isinstance(x, float) else (x.dtype, x.data_ptr() % 16 == 0)


@functools.cache
def _choose_overlap(device: torch.device, overlaps: bool) -> dict[str, bool]:
    if overlaps and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
