"""Choosing an attention backend by name."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from pd.core.errors import UsageError
from pd.kernels.attention.torch_backend import TorchAttention

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.kernels.attention.base import AttentionBackend, PagedKV


def _torch() -> type[AttentionBackend]:
    return TorchAttention


def _triton() -> type[AttentionBackend]:
    from pd.kernels.attention.triton_backend import TritonAttention

    return TritonAttention


def _flashinfer() -> type[AttentionBackend]:
    from pd.kernels.attention.flashinfer_backend import FlashInferAttention

    return FlashInferAttention


def _fastest() -> type[AttentionBackend]:
    from pd.kernels.attention.fastest import FastestAttention

    return FastestAttention


# The best first. The optional ones import their libraries only when they are chosen.
_BACKENDS: dict[str, Callable[[], type[AttentionBackend]]] = {
    "flashinfer": _flashinfer,
    "triton": _triton,
    "torch": _torch,
}


def find_attention_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> type[AttentionBackend]:
    """The class called ``name``; ``auto`` picks the best that is available and fits.

    Raises UsageError, naming what would work, for a backend that is missing or does not fit.
    """
    obstacles = {known: _obstacle(known, device, dtype, head_dim) for known in _BACKENDS}
    usable = [known for known, obstacle in obstacles.items() if not obstacle]
    if name == "auto":
        both = {"flashinfer", "triton"}.issubset(usable)
        return _fastest() if both else _BACKENDS[usable[0]]()
    obstacle = obstacles.get(name, "there is no such backend")
    if obstacle:
        raise UsageError(
            f"attention backend {name!r} is not available here ({obstacle}); "
            f"use one of: {', '.join(['auto', *usable])}"
        )
    return _BACKENDS[name]()


def make_attention_backend(name: str, pool: PagedKV, num_heads: int) -> AttentionBackend:
    """The backend called ``name``, over ``pool``; see :func:`find_attention_backend`."""
    sample = pool.key(0)
    backend = find_attention_backend(name, sample.device, sample.dtype, sample.shape[-1])
    return backend(pool, num_heads)


def _obstacle(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why a backend cannot be used; empty if it can."""
    if name == "torch":
        return ""
    if device.type != "cuda":
        return f"it needs a GPU, and the device is {device.type}"
    if importlib.util.find_spec(name) is None:
        return f"the Python package {name} is not installed"
    if name == "flashinfer":
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it has no {str(dtype).removeprefix('torch.')}"
        if head_dim not in (64, 128, 256):
            return f"it has no head size {head_dim}"
    return ""
