"""Sliding windows: layers whose tokens see only the last keys before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class LayerWindows:
    """The window of each layer of a pool: the number of keys that a token sees, or 0 for all.

    A token sees only the last keys of those that it would see without a window. In a tree of drafts
    these are the keys of its own branch and of the text before the tree, because it sees no other
    branch.

    Attributes:
        kinds: the distinct windows.
    """

    def __init__(self, windows: Sequence[int] = ()) -> None:
        """``windows``: one for each layer; none at all if every layer sees everything."""
        self._windows = tuple(windows)
        self.kinds = tuple(sorted(set(windows))) or (0,)

    def of_layer(self, layer: int) -> int:
        """Return the window of a layer; 0 if it sees everything."""
        return self._windows[layer] if self._windows else 0


ALL_KEYS = LayerWindows()


def keep_last(visible: torch.Tensor, window: int) -> torch.Tensor:
    """Keep the last ``window`` visible keys of each row: bool ``[rows, keys]``; all if it is 0."""
    if window == 0:
        return visible
    later = visible.flip(1).cumsum(1).flip(1)
    return visible & (later <= window)
