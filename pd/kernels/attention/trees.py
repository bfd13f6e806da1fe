"""Trees of new tokens as bit masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.kernels.attention.base import BoolArray, Int64Array

# Maximum number of tokens of a tree: the bits of a mask.
MAX_TREE = 64


def pack_trees(lengths: Int64Array, trees: Sequence[BoolArray | None] | None) -> Int64Array:
    """Pack the visibility of every new token among its sequence's new tokens.

    Args:
        lengths: number of new tokens of each sequence, int64 ``[sequences]``.
        trees: as in :class:`pd.kernels.attention.base.AttentionBatch`.

    Returns:
        int64 ``[tokens]``: bit i stands for new token i of the token's sequence. Masks of chains of
        more than :data:`MAX_TREE` tokens are meaningless.
    """
    firsts = np.cumsum(lengths) - lengths
    index = (np.arange(lengths.sum()) - np.repeat(firsts, lengths)).astype(np.uint64)
    chains: Int64Array = (np.uint64(2) << index).view(np.int64) - 1
    if trees is None:
        return chains
    bits = np.zeros((len(chains), MAX_TREE), np.bool_)
    is_tree = np.zeros(len(chains), np.bool_)
    for first, length, tree in zip(firsts.tolist(), lengths.tolist(), trees, strict=True):
        if tree is not None:
            assert tree.shape == (length, length), f"a tree of {length} tokens is {tree.shape}"
            assert length <= MAX_TREE, f"a tree of {length} tokens, and {MAX_TREE} are the most"
            bits[first : first + length, :length] = tree
            is_tree[first : first + length] = True
    packed = np.packbits(bits, axis=1, bitorder="little").view("<i8")[:, 0]
    masks = np.where(is_tree, packed, chains)
    own = (np.uint64(1) << index).view(np.int64)
    assert ((masks & own) == own).all(), "a token does not see itself"
    assert not (masks & ~chains).any(), "a token sees one after it"
    return masks


def find_trees(lengths: Int64Array, trees: Sequence[BoolArray | None] | None) -> BoolArray:
    """Find the sequences with trees: bool ``[sequences]``. A single token is a chain."""
    if trees is None:
        return np.zeros(len(lengths), np.bool_)
    given = np.fromiter((tree is not None for tree in trees), np.bool_, len(lengths))
    return given & (lengths > 1)
