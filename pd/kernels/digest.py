"""A digest of KV that does not depend on page size or sharding.

Each (layer, K or V, token, head) vector is hashed with its coordinates; the digest is the sum of
the hashes modulo 2**64. A sum has no order, so the parts of a prompt can be hashed wherever they
are, in pages of any size, by any number of ranks, and added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64Array = npt.NDArray[np.int64]

# Tokens that are hashed at once; 64-bit words of them are held in memory.
_CHUNK_TOKENS = 512
_GOLDEN = 0x9E3779B97F4A7C15


def token_digests(
    buffer: torch.Tensor, slots: Int64Array, token_start: int, *, first_head: int = 0
) -> Int64Array:
    """Digest of each token's K and V in all layers.

    Args:
        buffer: pool ``[num_layers, 2, num_slots, num_kv_heads, head_dim]`` of a 2- or 4-byte dtype.
        slots: int64 ``[n]``, where the tokens lie.
        token_start: position of the first of them in its sequence.
        first_head: index of the buffer's first head among all ranks' heads.

    Returns:
        int64 ``[n]``; sums (which wrap around) are digests of ranges.
    """
    digests = [
        _chunk(buffer, slots[start : start + _CHUNK_TOKENS], token_start + start, first_head)
        for start in range(0, len(slots), _CHUNK_TOKENS)
    ]
    return np.concatenate([*digests, np.empty(0, dtype=np.int64)])


def _chunk(
    buffer: torch.Tensor, slots: Int64Array, token_start: int, first_head: int
) -> Int64Array:
    device = buffer.device
    layers, _, _, heads, dim = buffer.shape
    index = torch.from_numpy(slots).to(device)
    tokens = torch.arange(token_start, token_start + len(slots), device=device).view(1, -1, 1)
    head_index = torch.arange(first_head, first_head + heads, device=device).view(1, 1, -1)
    kinds = torch.arange(2, device=device).view(2, 1, 1)
    width = dim * buffer.element_size() // 2
    weights = _mix(torch.arange(1, width + 1, device=device)) | 1
    total = torch.zeros(len(slots), dtype=torch.int64, device=device)
    for layer in range(layers):
        words = buffer[layer].index_select(1, index).view(torch.int16).to(torch.int64)
        # NOTE: odd weights, so that a change of one word always changes the sum.
        vectors = (words * weights).sum(dim=-1)
        place = ((tokens * 65536 + head_index) * 2 + kinds) * 4096 + layer
        total += _mix(vectors ^ _mix(place)).sum(dim=(0, 2))
    return total.cpu().numpy()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Finalizer of splitmix64 (Steele, Lea, Flood, 2014) on int64, which wraps like uint64."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def digest_bytes(digests: Int64Array) -> bytes:
    """Digest of a range, 8 bytes: the sum of its tokens' digests."""
    return np.asarray(digests).view(np.uint64).sum(dtype=np.uint64).tobytes()
