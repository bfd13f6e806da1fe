"""The table of attention backends, and the choice among them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, NamedTuple

import torch

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.kernels.attention.base import AttentionBackend, LatentShape, PagedKV


class ListedBackend(NamedTuple):
    """One line of the table.

    Attributes:
        location: ``module:class`` of the :class:`pd.kernels.attention.base.AttentionBackend`. It is
            imported when the backend is chosen.
        library: Python package that it needs, along with a GPU; empty for a backend that works
            everywhere.
        dtypes, head_dims: the supported ones; empty if all are.
        has_latents: whether it attends to rows of latents, too.
        has_windows: whether it has sliding windows and sinks.
        has_fp8: whether it reads keys and values in fp8.
    """

    location: str
    library: str = ""
    dtypes: tuple[torch.dtype, ...] = ()
    head_dims: tuple[int, ...] = ()
    has_latents: bool = False
    has_windows: bool = False
    has_fp8: bool = False


# The best comes first. ``pd.core.config.ATTENTION_BACKENDS`` has the same names for the command
# line.
BACKENDS: dict[str, ListedBackend] = {
    "flashinfer": ListedBackend(
        "pd.kernels.attention.flashinfer_backend:FlashInferAttention",
        library="flashinfer",
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(64, 128, 256),
    ),
    "triton": ListedBackend(
        "pd.kernels.attention.triton_backend:TritonAttention",
        library="triton",
        has_latents=True,
        has_windows=True,
        has_fp8=True,
    ),
    "torch": ListedBackend(
        "pd.kernels.attention.torch_backend:TorchAttention",
        has_latents=True,
        has_windows=True,
        has_fp8=True,
    ),
}
# Chosen by ``auto`` if FlashInfer and Triton are both usable.
_FASTEST = ListedBackend("pd.kernels.attention.fastest:FastestAttention")


def find_attention_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    latent: bool = False,
    windows: bool = False,
    fp8: bool = False,
) -> type[AttentionBackend]:
    """Return the class called ``name``; ``auto`` picks the best that is available and fits.

    Args:
        dtype: of queries.
        latent: whether the pool has rows of latents.
        windows: whether layers have sliding windows or sinks.
        fp8: whether keys and values are in fp8.

    Raises:
        UsageError: the backend is missing or does not fit; the message names alternatives.
    """
    obstacles = {
        known: _find_obstacle(listed, device, dtype, head_dim, latent, windows, fp8)
        for known, listed in BACKENDS.items()
    }
    usable = [known for known, obstacle in obstacles.items() if not obstacle]
    if name == "auto":
        both = {"flashinfer", "triton"}.issubset(usable)
        return _load_backend(_FASTEST if both else BACKENDS[usable[0]])
    obstacle = obstacles.get(name, "there is no such backend")
    if obstacle:
        raise UsageError(
            f"attention backend {name!r} is not available here ({obstacle}); "
            f"use one of: {', '.join(['auto', *usable])}"
        )
    return _load_backend(BACKENDS[name])


def make_attention_backend(
    name: str,
    pool: PagedKV,
    num_heads: int,
    latent: LatentShape | None = None,
    windows: Sequence[int] = (),
) -> AttentionBackend:
    """Make the backend called ``name`` over ``pool``; see :func:`find_attention_backend`."""
    sample = pool.get_keys(0)
    backend = find_attention_backend(
        name,
        sample.device,
        pool.dtype,
        sample.shape[-1],
        latent=latent is not None,
        windows=bool(windows),
        fp8=sample.dtype != pool.dtype,
    )
    return backend(pool, num_heads, latent, windows)


def _load_backend(listed: ListedBackend) -> type[AttentionBackend]:
    module, _, name = listed.location.partition(":")
    found: type[AttentionBackend] = getattr(importlib.import_module(module), name)
    return found


def _find_obstacle(
    listed: ListedBackend,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    latent: bool,
    windows: bool,
    fp8: bool,
) -> str:
    """Return why a backend cannot be used; an empty string if it can."""
    if latent and not listed.has_latents:
        return "it has no latent attention (MLA)"
    if windows and not listed.has_windows:
        return "it has no sliding windows or attention sinks"
    if fp8 and not listed.has_fp8:
        return "it has no KV cache in fp8"
    if not listed.library:
        return ""
    if device.type != "cuda":
        return f"it needs a GPU, and the device is {device.type}"
    if importlib.util.find_spec(listed.library) is None:
        return f"the Python package {listed.library} is not installed"
    if listed.dtypes and dtype not in listed.dtypes:
        return f"it has no {str(dtype).removeprefix('torch.')}"
    if listed.head_dims and head_dim not in listed.head_dims:
        return f"it has no head size {head_dim}"
    return ""
