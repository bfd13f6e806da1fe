"""Choosing an attention backend by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import UsageError
from pd.kernels.attention.torch_backend import TorchAttention

if TYPE_CHECKING:
    import torch

    from pd.kernels.attention.base import AttentionBackend, PagedKV

_BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchAttention}


def find_attention_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> type[AttentionBackend]:
    """The class called ``name``; ``auto`` picks the best that is available and fits.

    Raises UsageError, naming what would work, for a backend that is missing or does not fit.
    """
    backend = _BACKENDS.get("torch" if name == "auto" else name)
    if backend is None:
        available = ", ".join(["auto", *_BACKENDS])
        raise UsageError(
            f"attention backend {name!r} is not available here; use one of: {available}"
        )
    return backend


def make_attention_backend(name: str, pool: PagedKV, num_heads: int) -> AttentionBackend:
    """The backend called ``name``, over ``pool``; see :func:`find_attention_backend`."""
    sample = pool.key(0)
    backend = find_attention_backend(name, sample.device, sample.dtype, sample.shape[-1])
    return backend(pool, num_heads)
