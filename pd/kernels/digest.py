"""A digest of KV that does not depend on page size or sharding.

Each (layer, K or V, token, head) vector is hashed together with its coordinates, and layer numbers
run through all planes of the pool. The digest is the sum of the hashes modulo 2**64. A sum has no
order, so we can hash parts of a prompt where they lie, in pages of any size and on any number of
ranks, and then add them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64Array = npt.NDArray[np.int64]

# Bytes of KV to hash at once. This needs about three times as much memory. On a CPU that should fit
# its cache. On a GPU it should be large enough to outweigh the kernel launches.
_PIECE_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}
_GOLDEN = 0x9E3779B97F4A7C15


def hash_tokens(
    buffer: torch.Tensor,
    slots: Int64Array,
    token_start: int,
    *,
    first_head: int = 0,
    first_layer: int = 0,
) -> Int64Array:
    """Compute the digest of each token's vectors in all layers of a plane. On a GPU this uses the
    current stream and waits for it.

    Args:
        buffer: plane ``[num_layers, 1 or 2, num_slots, num_heads, head_dim]``.
        slots: int64 ``[n]``, slots of the tokens.
        token_start: position of the first token in its sequence.
        first_head: index of the buffer's first head among all ranks' heads.
        first_layer: number of the buffer's first layer among those of all planes.

    Returns:
        int64 ``[n]``. Sums (which wrap around) are digests of ranges.
    """
    words = _view_words(buffer)
    layers, kinds, num_slots, heads, width = words.shape
    device = buffer.device
    rows = words.view(layers, kinds, num_slots, heads * width)
    piece = max(1, _PIECE_BYTES[device.type] // (kinds * heads * width * words.element_size()))
    index = torch.from_numpy(np.ascontiguousarray(slots, dtype=np.int64)).to(device)
    weights = _mix_bits(torch.arange(1, width + 1, device=device)) | 1
    head_index = torch.arange(first_head, first_head + heads, device=device).view(1, 1, -1)
    kind = torch.arange(kinds, device=device).view(-1, 1, 1)
    total = torch.zeros(len(slots), dtype=torch.int64, device=device)
    for start in range(0, len(slots), piece):
        part = slice(start, min(start + piece, len(slots)))
        tokens = torch.arange(part.start, part.stop, device=device).view(1, -1, 1) + token_start
        places = ((tokens * 65536 + head_index) * 2 + kind) * 4096 + first_layer
        for layer in range(layers):
            found = rows[layer].index_select(1, index[part]).view(kinds, -1, heads, width)
            vectors = _reduce_vectors(found, weights)
            total[part] += _mix_bits(vectors ^ _mix_bits(places + layer)).sum(dim=(0, 2))
    return total.cpu().numpy()


def _view_words(buffer: torch.Tensor) -> torch.Tensor:
    """View the pool as integers, as wide as a vector's size allows, because fewer words are
    faster."""
    row = buffer.shape[-1] * buffer.element_size()
    if row % 8 == 0:
        return buffer.view(torch.int64)
    return buffer.view(torch.int16 if row % 2 == 0 else torch.int8)


def _reduce_vectors(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Reduce each vector to one number, int64 ``[kinds, tokens, heads]``. May overwrite
    ``words``."""
    words = words.to(torch.int64)
    # NOTE: the bits of a product depend only on lower bits of its factors. Without this line, the
    # top bit of each word would count only modulo 2.
    words ^= words >> 32
    words *= weights
    # NOTE: weights are odd, so a change of one word always changes the sum.
    return words.sum(dim=-1)


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood, 2014) in place, on int64, which wraps
    like uint64."""
    x += _to_signed(_GOLDEN)
    x ^= _shift_right(x, 30)
    x *= _to_signed(0xBF58476D1CE4E5B9)
    x ^= _shift_right(x, 27)
    x *= _to_signed(0x94D049BB133111EB)
    x ^= _shift_right(x, 31)
    return x


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right logically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def sum_digests(digests: Int64Array) -> bytes:
    """Return the digest of a range, 8 bytes: the sum of its tokens' digests."""
    total: np.uint64 = np.asarray(digests).view(np.uint64).sum(dtype=np.uint64)
    return total.tobytes()
