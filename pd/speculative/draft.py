"""Drafted tokens. They stay on the device until their verification step is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.engine.device_copy import to_device
from pd.engine.draft_tree import make_chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.engine.draft_tree import DraftTree

    IntArray = npt.NDArray[np.int32]


class DraftedTokens:
    """Tokens drafted together, one draft after the other.

    Attributes:
        tokens: int64 ``[n]`` on the device.
        host: the same tokens, int32; None until the host has them.
    """

    def __init__(self, tokens: torch.Tensor, host: IntArray | None = None) -> None:
        """Take tokens whose drafting is queued on the current stream."""
        self.tokens = tokens
        self.host = host
        self._drafted: torch.cuda.Event | None = None
        if tokens.is_cuda and host is None:
            self._drafted = torch.cuda.Event()
            self._drafted.record(torch.cuda.current_stream(tokens.device))

    @property
    def is_complete(self) -> bool:
        """Whether the device has drafted them. Any thread may ask."""
        return self._drafted is None or self._drafted.query()

    def wait(self) -> None:
        """Wait until :attr:`is_complete`."""
        if self._drafted is not None:
            self._drafted.synchronize()


@dataclass(eq=False, slots=True)
class Draft:
    """Guesses of the next tokens of one sequence. Guesses after the same token differ.

    Attributes:
        batch: holds the guessed tokens.
        first: index of the first guess in ``batch``.
        is_stale: whether it does not continue from the sequence's last token.
    """

    batch: DraftedTokens
    first: int
    tree: DraftTree
    is_stale: bool = False

    @property
    def size(self) -> int:
        """Number of guesses."""
        return self.tree.size

    @property
    def tokens(self) -> IntArray:
        """The guessed tokens, int32, once the host has them."""
        assert self.batch.host is not None, "the step is not complete"
        return self.batch.host[self.first : self.first + self.size]

    def take_first(self, count: int) -> Draft | None:
        """Return the draft with only its first ``count`` guesses, or None if none is left."""
        if count >= self.size:
            return self
        return Draft(self.batch, self.first, self.tree.take_first(count)) if count > 0 else None

    def find_accepted(self, sampled: Sequence[int]) -> list[int]:
        """Find the indices of the right guesses, each following the one before it.

        Args:
            sampled: the model's own token after the root and after each guess.
        """
        accepted, last = list[int](), -1
        guesses = zip(self.tree.parents.tolist(), self.tokens.tolist(), strict=True)
        for index, (parent, token) in enumerate(guesses):
            if parent == last and token == sampled[last + 1]:
                accepted.append(index)
                last = index
        return accepted


def upload_chains(chains: Sequence[IntArray], device: torch.device) -> list[Draft | None]:
    """Make drafts from int32 chains of tokens on the host, and None from empty ones."""
    tokens = np.concatenate([*chains, np.empty(0, np.int32)]).astype(np.int32)
    batch = DraftedTokens(to_device(tokens, torch.int64, device), tokens)
    ends = np.cumsum([len(each) for each in chains])
    return [
        Draft(batch, int(end) - len(each), make_chain(len(each))) if len(each) else None
        for each, end in zip(chains, ends, strict=True)
    ]
