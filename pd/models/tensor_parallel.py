"""Tensor parallelism: ranks share a model's weights and combine their results.

We divide a model as Megatron-LM does (Shoeybi et al., 2019). A rank has some of the heads and some
of the MLP's columns, and the matching rows of the projections after them. So a layer needs two sums
over the ranks and no other exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class TensorParallel:
    """One rank among others. This class is the only rank of its model. Subclasses in
    :mod:`pd.engine.tensor_parallel` exchange data with ranks in other processes.

    All ranks must call the same methods in the same order with tensors of the same shape. On a GPU,
    calls are queued on the current stream and can be captured in a CUDA graph.
    """

    rank = 0
    size = 1

    def slice_part(self, length: int, replicas: int = 1, groups: int = 1) -> slice:
        """Return this rank's part of a dimension of ``length``, a multiple of the number of
        different parts. ``replicas`` neighbouring ranks have the same part, and each of ``groups``
        groups of neighbouring ranks divides the dimension anew."""
        ranks = self.size // groups
        each = length * replicas // ranks
        first = self.rank % ranks // replicas * each
        return slice(first, first + each)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' ``x``, in its dtype and the same on every rank. ``x`` is
        contiguous. The result may lie in its memory."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Put every rank's ``[rows, n]`` side by side: ``[rows, size * n]``."""
        return x

    def barrier(self, device: torch.device) -> None:
        """Delay work queued after this call until all ranks have reached it."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite ``x`` with rank 0's ``x``."""


SINGLE = TensorParallel()


class Fp8Destination(NamedTuple):
    """The memory for the scales of a tensor in fp8.

    Attributes:
        scales: float32 ``[ceil(outputs / rows), groups]``, of this rank's part.
        rows: outputs that share a scale.
        input_scale: float32 ``[1]``, the largest scale of the inputs so far; None if the checkpoint
            has none.
        make_plain: allocates memory in the model's dtype instead, also for tensors fused with this
            one. All destinations have to be listed again afterwards.
    """

    scales: torch.Tensor
    rows: int
    input_scale: torch.Tensor | None
    make_plain: Callable[[], None]


class WeightDestination(NamedTuple):
    """The memory to read a tensor of the checkpoint into.

    Attributes:
        memory: this rank's part of the tensor.
        split: dimension along which the ranks divide the tensor into equal parts, in their order;
            None if every rank has all of it.
        fp8: memory for its scales if it is in fp8.
        replicas: number of neighbouring ranks that have the same part.
        groups: number of groups of neighbouring ranks. The ranks of each group divide the tensor,
            or the group's part of it.
        is_stack: whether the groups divide dimension 0 of the tensor.
    """

    memory: torch.Tensor
    split: int | None = None
    fp8: Fp8Destination | None = None
    replicas: int = 1
    groups: int = 1
    is_stack: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of the tensor."""
        return self.split is None and not self.is_stack

    def whole_shape(self, tp: TensorParallel) -> list[int]:
        """Return the shape of the tensor in the checkpoint."""
        shape = list(self.memory.shape)
        if self.split is not None:
            shape[self.split] *= tp.size // self.groups // self.replicas
        if self.is_stack:
            shape[0] *= self.groups
        return shape

    def slice_part(self, tp: TensorParallel) -> tuple[slice, ...]:
        """Return the index of this rank's part in the tensor of the checkpoint."""
        parts = [slice(0, size) for size in self.whole_shape(tp)]
        if self.split is not None:
            whole = parts[self.split].stop
            parts[self.split] = tp.slice_part(whole, self.replicas, self.groups)
        if self.is_stack:
            parts[0] = tp.slice_part(parts[0].stop, replicas=tp.size // self.groups)
        return tuple(parts)
