"""The outcome of a step with drafts, on the device, before the host has read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch

    from pd.engine.device_copy import HostCopy


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """The outcome of each work of a step; int64 tensors on the device.

    Attributes:
        counts: ``[works]``, number of accepted guesses.
        ends: ``[works]``, the model's own token after the last accepted guess.
        tokens: ``[works, n]``, all output tokens, then -1; None if no work has penalties.
        counts_on_host: a copy of ``counts``.
    """

    counts: torch.Tensor
    ends: torch.Tensor
    tokens: torch.Tensor | None
    counts_on_host: HostCopy

    def counts_of(self, works: torch.Tensor) -> torch.Tensor:
        """Return the counts of some works, int64 like ``works``. For -1, which stands for no work,
        the count is 0."""
        return functional.pad(self.counts, (0, 1))[works]
