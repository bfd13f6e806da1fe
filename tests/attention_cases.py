"""Sequences in randomly placed pages, and what attention over them must be."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.kernels.attention import AttentionBatch
from pd.kernels.attention.torch_backend import TorchAttention
from pd.kernels.kv_store import store_kv

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.kernels.attention import AttentionBackend

LAYERS = 2


@dataclass
class Pool:
    """The least that attention needs of a pool."""

    page_size: int
    num_pages: int
    buffer: torch.Tensor

    def key(self, layer: int) -> torch.Tensor:
        return self.buffer[layer, 0]

    def value(self, layer: int) -> torch.Tensor:
        return self.buffer[layer, 1]


class Case:
    """Sequences with random history, and one step's new tokens. Pages are placed at random, or one
    behind the other."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        page_size: int,
        kv_heads: int = 2,
        group: int = 2,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        head_dim: int = 16,
        device: str = "cpu",
        *,
        adjacent: bool = False,
    ) -> None:
        """``shapes``: (tokens in the pool, new tokens) of each sequence."""
        random = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        self.shapes, self.group, self.page_size = shapes, group, page_size
        self.head_dim = head_dim
        sizes = [-(-(start + length) // page_size) for start, length in shapes]
        num_pages = sum(sizes) + 3
        order = random.permutation(num_pages).astype(np.int32)
        if adjacent:
            order.sort()
        self.pages = np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])
        slots = (num_pages + 1) * page_size
        buffer = torch.randn(
            (LAYERS, 2, slots, kv_heads, head_dim), generator=generator, dtype=torch.float32
        )
        self.pool = Pool(page_size, num_pages, buffer.to(device, dtype))
        tokens = sum(length for _, length in shapes)
        widths = (kv_heads * group, kv_heads, kv_heads)
        self.q, self.k, self.v = (
            torch.randn(tokens, width, head_dim, generator=generator).to(device, dtype)
            for width in widths
        )

    @property
    def batch(self) -> AttentionBatch:
        starts, lengths = np.array(self.shapes, dtype=np.int64).T
        return AttentionBatch(starts, lengths, self.pages)

    def slots(self, sequence: int, stop: int) -> torch.Tensor:
        positions = np.arange(stop)
        pages = self.pages[sequence][positions // self.page_size].astype(np.int64)
        return torch.from_numpy(pages * self.page_size + positions % self.page_size)

    def expected(self, layer: int) -> torch.Tensor:
        """By definition, one token and head at a time, in float64; the pool must be written."""
        out = torch.empty(self.q.shape, dtype=torch.float64)
        row = 0
        for sequence, (start, length) in enumerate(self.shapes):
            for position in range(start, start + length):
                slots = self.slots(sequence, position + 1)
                keys = self.pool.key(layer)[slots].double()
                values = self.pool.value(layer)[slots].double()
                for head in range(self.q.shape[1]):
                    shared = head // self.group
                    scores = keys[:, shared] @ self.q[row, head].double() / self.head_dim**0.5
                    out[row, head] = scores.softmax(0) @ values[:, shared]
                row += 1
        return out

    def attend(self, backend: AttentionBackend, layer: int = 1) -> torch.Tensor:
        """The whole step of a backend over this pool; memory it forgets to write is NaN."""
        backend.plan(self.batch)
        store_kv(self.pool.key(layer), self.pool.value(layer), backend.slots, self.k, self.v)
        with poisoned_memory():
            return backend.attend(layer, self.q, self.k, self.v)

    def reference(self, layer: int = 1) -> torch.Tensor:
        """The result of the torch backend in float32 on the CPU, for cases too large for
        :meth:`expected`."""
        pool = Pool(self.page_size, self.pool.num_pages, self.pool.buffer.float().cpu().clone())
        q, k, v = (x.float().cpu() for x in (self.q, self.k, self.v))
        backend = TorchAttention(pool, self.q.shape[1])
        backend.plan(self.batch)
        store_kv(pool.key(layer), pool.value(layer), backend.slots, k, v)
        return backend.attend(layer, q, k, v)

    def spoil(self, value: float = float("nan")) -> None:
        """Fill every slot that no sequence has."""
        free = torch.ones(self.pool.buffer.shape[2], dtype=torch.bool)
        for i, (start, length) in enumerate(self.shapes):
            free[self.slots(i, start + length)] = False
        self.pool.buffer[:, :, free.to(self.pool.buffer.device)] = value


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Torch fills what it allocates with NaN meanwhile."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
