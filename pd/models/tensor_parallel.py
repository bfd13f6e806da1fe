"""How the ranks of a tensor-parallel model share weights and put results together.

As in Megatron-LM (Shoeybi et al., 2019): a rank has some of the heads and some of the MLP's
columns, and the rows of the projections behind them, so that a layer needs two sums over the ranks
and nothing else is exchanged inside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class TensorParallel:
    """One rank among others. This class is a rank alone; :mod:`pd.engine.tensor_parallel` has
    those that are several processes.

    All ranks must call the same methods in the same order with tensors of the same shape. On a GPU
    calls are queued on the current stream and can be captured in a CUDA graph.
    """

    rank = 0
    size = 1

    def part(self, length: int) -> slice:
        """This rank's part of a dimension of ``length``, a multiple of ``size``."""
        each = length // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, in its dtype and the same on every rank. ``x`` is
        contiguous, and may be what is returned."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, n]`` of every rank, side by side: ``[rows, size * n]``."""
        return x

    def meet(self, device: torch.device) -> None:
        """What is queued behind this runs when all ranks are here."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Make ``x`` what it is on rank 0."""


SINGLE = TensorParallel()


class Place(NamedTuple):
    """Where a tensor of the checkpoint goes.

    Attributes:
        memory: what it is read into.
        split: dimension along which ranks divide it, each having an equal part in their order; None
            if every rank has all of it.
    """

    memory: torch.Tensor
    split: int | None = None

    def whole_shape(self, tp: TensorParallel) -> list[int]:
        """Of the tensor in the checkpoint."""
        shape = list(self.memory.shape)
        if self.split is not None:
            shape[self.split] *= tp.size
        return shape

    def index(self, tp: TensorParallel) -> tuple[slice, ...]:
        """This rank's part of the tensor in the checkpoint."""
        whole = self.whole_shape(tp)
        return tuple(
            tp.part(size) if dim == self.split else slice(0, size) for dim, size in enumerate(whole)
        )
