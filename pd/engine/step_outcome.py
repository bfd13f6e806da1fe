"""What came out of a step with drafts, on the device, before the host has read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """StepOutcome of the works of a step; int64 tensors on the device.

    Attributes:
        counts: ``[works]``, the number of guesses that were accepted.
        ends: ``[works]``, the model's own token after the last accepted one.
        tokens: ``[works, n]``, all tokens that came out, then -1; None if no work has penalties.
    """

    counts: torch.Tensor
    ends: torch.Tensor
    tokens: torch.Tensor | None

    def counts_of(self, works: torch.Tensor) -> torch.Tensor:
        """The counts of some works, int64 as ``works``, in which -1 stands for none: 0."""
        return functional.pad(self.counts, (0, 1))[works]
