"""The part of a step that belongs to one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.engine.device_copy import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.engine.draft_tree import DraftTree

    IntArray = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]


@dataclass
class ForwardItem:
    """One sequence's part of a step.

    Attributes:
        token_ids: new tokens to compute, int32, at least one. ``-1 - row`` stands for a token that
            only the device knows (see :meth:`pd.engine.model_runner.ModelRunner.forward`).
        start: number of tokens with KV in the pool, and so the position of ``token_ids[0]``.
        pages: page table, int32 ``[n]``, covering at least ``start + len(token_ids)`` tokens, or
            ``[tables, n]`` if the pool has several (:attr:`pd.core.node_info.KVLayout.windows`).
        num_logits: how many of the last new tokens need logits; 0 for a chunk before the last one
            of a prompt.
        tree: shape of the drafted tokens, the last of ``token_ids``; None without a draft.
        reread: whether the first token is in the pool already and is computed again only for its
            hidden state. Its new K and V go to the pool's extra page.
        carried: row of :attr:`pd.engine.eagle.EagleWriter.carried` with the state of the token
            before the first one.
        unread: number of guesses of the previous step that may have been accepted. Only the device
            knows how many were, so ``start`` assumes none and ``pages`` cover all.
        work: index of the work with these guesses in the previous step.
    """

    token_ids: IntArray
    start: int
    pages: IntArray
    num_logits: int = 1
    tree: DraftTree | None = None
    reread: bool = False
    carried: int = 0
    unread: int = 0
    work: int = -1

    @property
    def has_branches(self) -> bool:
        """Whether some new token does not follow the one before it."""
        return self.tree is not None and not self.tree.is_chain

    def make_attention_mask(self) -> BoolArray | None:
        """Make the attention mask among the new tokens, in the form of
        :class:`pd.kernels.attention.AttentionBatch`; None if it is causal."""
        if self.tree is None or self.tree.is_chain:
            return None
        root = len(self.token_ids) - self.tree.size - 1
        seen = np.tri(len(self.token_ids), dtype=np.bool_)
        seen[root:, root:] = self.tree.attention_mask
        return seen


def find_token_positions(
    items: Sequence[ForwardItem], starts: Int64Array, lengths: Int64Array
) -> Int64Array:
    """Return the position of each token of a step in its sequence, int64 ``[tokens]``."""
    ends = np.cumsum(lengths)
    positions: Int64Array = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
    for item, end in zip(items, ends.tolist(), strict=True):
        if item.tree is not None and not item.tree.is_chain:
            root = end - item.tree.size - 1
            positions[root + 1 : end] = positions[root] + item.tree.depths
    return positions


def find_reread_rows(items: Sequence[ForwardItem], device: torch.device) -> torch.Tensor | None:
    """Return the tokens of a step that are computed again, int64 on the device; None without
    any."""
    if not any(item.reread for item in items):
        return None
    ends = np.cumsum([len(item.token_ids) for item in items])
    rows = [
        int(end) - len(item.token_ids) for item, end in zip(items, ends, strict=True) if item.reread
    ]
    return to_device(rows, torch.int64, device)
