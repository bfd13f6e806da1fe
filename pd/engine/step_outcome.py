"""What came out of a step with drafts, on the device, before the host has read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch

    from pd.engine.device_copy import HostCopy


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """What came out of each work of a step; int64 tensors on the device.

    Attributes:
        counts: ``[works]``, the number of guesses that were accepted.
        ends: ``[works]``, the model's own token after the last accepted one.
        tokens: ``[works, n]``, all tokens that came out, then -1; None if no work has penalties.
        counts_on_host: a copy of ``counts``.
    """

    counts: torch.Tensor
    ends: torch.Tensor
    tokens: torch.Tensor | None
    counts_on_host: HostCopy

    def counts_of(self, works: torch.Tensor) -> torch.Tensor:
        """The counts of some works, int64 as ``works``, in which -1 stands for none: 0."""
        return functional.pad(self.counts, (0, 1))[works]
