"""Drafted tokens, which stay on the device until the step that verifies them is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.engine.device_copy import to_device
from pd.engine.draft_tree import chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.engine.draft_tree import DraftTree

    IntArray = npt.NDArray[np.int32]


class DraftedTokens:
    """Tokens that were drafted together, those of one draft after those of another.

    Attributes:
        tokens: int64 ``[n]`` on the device.
        host: the same tokens, int32; None until the host has them.
    """

    def __init__(self, tokens: torch.Tensor, host: IntArray | None = None) -> None:
        """Everything that drafts ``tokens`` was queued on the current stream."""
        self.tokens = tokens
        self.host = host
        self._drafted: torch.cuda.Event | None = None
        if tokens.is_cuda and host is None:
            self._drafted = torch.cuda.Event()
            self._drafted.record(torch.cuda.current_stream(tokens.device))

    @property
    def is_complete(self) -> bool:
        """Whether the device is done with drafting them; any thread."""
        return self._drafted is None or self._drafted.query()

    def wait(self) -> None:
        """Wait until :attr:`is_complete`."""
        if self._drafted is not None:
            self._drafted.synchronize()


@dataclass(eq=False, slots=True)
class Draft:
    """Guesses of how one sequence goes on. Guesses that follow the same token differ.

    Attributes:
        batch: holds the guessed tokens.
        first: index of the first of them in ``batch``.
        stale: it is known not to go on from the sequence's last token.
    """

    batch: DraftedTokens
    first: int
    tree: DraftTree
    stale: bool = False

    @property
    def size(self) -> int:
        """Number of guesses."""
        return self.tree.size

    @property
    def tokens(self) -> IntArray:
        """The guessed tokens, int32, once the host has them."""
        assert self.batch.host is not None, "the step is not complete"
        return self.batch.host[self.first : self.first + self.size]

    def first_tokens(self, count: int) -> Draft | None:
        """The draft without the guesses after the first ``count``; None if none is left."""
        if count >= self.size:
            return self
        return Draft(self.batch, self.first, self.tree.first(count)) if count > 0 else None

    def path(self, sampled: Sequence[int]) -> list[int]:
        """The indices of the guesses that are right, each following the one before it.

        Args:
            sampled: the model's own token after the root and after each guess.
        """
        found, last = list[int](), -1
        guesses = zip(self.tree.parents.tolist(), self.tokens.tolist(), strict=True)
        for index, (parent, token) in enumerate(guesses):
            if parent == last and token == sampled[last + 1]:
                found.append(index)
                last = index
        return found


def upload_chains(chains: Sequence[IntArray], device: torch.device) -> list[Draft | None]:
    """Make drafts of chains of tokens on the host, int32; None of empty ones."""
    tokens = np.concatenate([*chains, np.empty(0, np.int32)]).astype(np.int32)
    batch = DraftedTokens(to_device(tokens, torch.int64, device), tokens)
    ends = np.cumsum([len(each) for each in chains])
    return [
        Draft(batch, int(end) - len(each), chain(len(each))) if len(each) else None
        for each, end in zip(chains, ends, strict=True)
    ]
