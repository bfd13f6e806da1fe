"""Sequences in randomly placed pages, and what attention over them must be."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.kernels.attention import AttentionBatch, LatentShape
from pd.kernels.attention.torch_backend import TorchAttention
from pd.kernels.attention.torch_draft import TorchDraft
from pd.kernels.attention.windows import LayerWindows
from pd.kernels.kv_store import UNSCALED, KVScales, store_kv

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.kernels.attention import AttentionBackend, DraftAttention

LAYERS = 2


@dataclass
class Pool:
    """The least that attention needs of a pool."""

    page_size: int
    num_pages: int
    buffer: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    def get_scales(self, layer: int) -> KVScales:
        return UNSCALED

    def get_keys(self, layer: int) -> torch.Tensor:
        return self.buffer[layer, 0]

    def get_values(self, layer: int) -> torch.Tensor:
        return self.buffer[layer, -1]


class Case:
    """Sequences with random history, and one step's new tokens. Pages are at random places, or one
    after the other."""

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
        trees: Sequence[np.ndarray | None] | None = None,
        latent: LatentShape | None = None,
        windows: Sequence[int] = (),
        sinks: bool = False,
    ) -> None:
        """Place the sequences in pages.

        Args:
            shapes: (tokens in the pool, new tokens) of each sequence.
            trees: as in :class:`AttentionBatch`.
            latent: of rows with one vector; ``k`` and ``v`` are then the same.
            windows: number of keys that tokens see in each layer; 0 for all.
            sinks: whether heads have sinks.
        """
        random = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        self.shapes, self.group, self.page_size = shapes, group, page_size
        self.head_dim, self.trees, self.latent = head_dim, trees, latent
        self.windows = tuple(windows)
        self.value_dim = head_dim if latent is None else latent.value_dim
        self.scale = head_dim**-0.5 if latent is None else latent.scale
        sizes = [-(-(start + length) // page_size) for start, length in shapes]
        num_pages = sum(sizes) + 3
        order = random.permutation(num_pages).astype(np.int32)
        if adjacent:
            order.sort()
        self.pages = np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])
        slots = (num_pages + 1) * page_size
        buffer = torch.randn(
            (LAYERS, 2 - bool(latent), slots, kv_heads, head_dim),
            generator=generator,
            dtype=torch.float32,
        )
        self.pool = Pool(page_size, num_pages, buffer.to(device, dtype))
        tokens = sum(length for _, length in shapes)
        widths = (kv_heads * group, kv_heads, kv_heads)
        self.q, self.k, self.v = (
            torch.randn(tokens, width, head_dim, generator=generator).to(device, dtype)
            for width in widths
        )
        if latent is not None:
            self.v = self.k
        self.sinks = None
        if sinks:
            self.sinks = torch.randn(kv_heads * group, generator=generator).to(device) + 1

    @property
    def batch(self) -> AttentionBatch:
        starts, lengths = np.array(self.shapes, dtype=np.int64).T
        return AttentionBatch(starts, lengths, self.pages, self.trees)

    def slots(self, sequence: int, stop: int) -> torch.Tensor:
        positions = np.arange(stop)
        pages = self.pages[sequence][positions // self.page_size].astype(np.int64)
        return torch.from_numpy(pages * self.page_size + positions % self.page_size)

    def expected(self, layer: int) -> torch.Tensor:
        """Compute attention by its definition, one token and head at a time, in float64. The pool
        must be written."""
        out = torch.empty(*self.q.shape[:2], self.value_dim, dtype=torch.float64)
        row = 0
        for sequence, (start, length) in enumerate(self.shapes):
            tree = None if self.trees is None else self.trees[sequence]
            for token in range(length):
                slots = self.slots(sequence, start + token + 1)
                if tree is not None:
                    seen = np.concatenate([np.ones(start, bool), tree[token, : token + 1]])
                    slots = slots[torch.from_numpy(seen)]
                out[row] = self.expected_row(self.q[row], layer, slots)
                row += 1
        return out

    def expected_row(self, q: torch.Tensor, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Attend with one token's ``q``, ``[heads, head_dim]``, to the keys in ``slots``, or the
        last ones in the layer's window."""
        window = self.windows[layer] if self.windows else 0
        slots = slots[-window:] if window else slots
        out = torch.empty(len(q), self.value_dim, dtype=torch.float64)
        keys = self.pool.get_keys(layer)[slots].double().cpu()
        values = self.pool.get_values(layer)[slots].double().cpu()
        q = q.double().cpu()
        for head in range(len(q)):
            shared = head // self.group
            scores = keys[:, shared] @ q[head] * self.scale
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks[head : head + 1].double().cpu()))
            weights = scores.softmax(0)[: len(slots)]
            out[head] = weights @ values[:, shared, : self.value_dim]
        return out

    def attend(self, backend: AttentionBackend, layer: int = 1) -> torch.Tensor:
        """Run a whole step of a backend over this pool. Memory that it forgets to write is NaN."""
        backend.plan(self.batch)
        store_kv(
            self.pool.get_keys(layer), self.pool.get_values(layer), backend.slots, self.k, self.v
        )
        with poisoned_memory():
            return backend.attend(layer, self.q, self.k, self.v[..., : self.value_dim], self.sinks)

    def pool_copy(self) -> Pool:
        """Copy the pool to float32 on the CPU."""
        return Pool(self.page_size, self.pool.num_pages, self.pool.buffer.float().cpu().clone())

    def reference(self, layer: int = 1) -> torch.Tensor:
        """Compute with the torch backend in float32 on the CPU, for cases too large for
        :meth:`expected`."""
        pool = self.pool_copy()
        q, k, v = (x.float().cpu() for x in (self.q, self.k, self.v))
        backend = TorchAttention(pool, self.q.shape[1], self.latent, self.windows)
        backend.plan(self.batch)
        store_kv(pool.get_keys(layer), pool.get_values(layer), backend.slots, k, v)
        sinks = None if self.sinks is None else self.sinks.cpu()
        return backend.attend(layer, q, k, v[..., : self.value_dim], sinks)

    def spoil(self, value: float = float("nan")) -> None:
        """Fill every slot that no sequence has."""
        free = torch.ones(self.pool.buffer.shape[2], dtype=torch.bool)
        for i, (start, length) in enumerate(self.shapes):
            free[self.slots(i, start + length)] = False
        self.pool.buffer[:, :, free.to(self.pool.buffer.device)] = value


def random_tree(length: int, random: np.random.Generator) -> np.ndarray:
    """Make a tree as :class:`AttentionBatch` has it, each token under one before it, or a root."""
    tree = np.eye(length, dtype=np.bool_)
    for token in range(1, length):
        parent = int(random.integers(-1, token))
        if parent >= 0:
            tree[token] |= tree[parent]
    return tree


class DraftStep:
    """Rows of one draft step over the sequences of a case, which see keys at random."""

    def __init__(
        self,
        case: Case,
        sequences: Sequence[int],
        random: np.random.Generator,
        first_key: int = 0,
    ) -> None:
        """Place the rows of these sequences.

        Args:
            sequences: sequence of each row; its tokens are at different places.
            first_key: rows see no key before it.
        """
        self.case, self.sequences, self.first_key = case, list(sequences), first_key
        self.limits = np.array([sum(case.shapes[i]) for i in sequences], np.int64)
        self.pages = [case.pages[i] for i in sequences]
        self.places, self.bases, self.masks = (np.zeros(len(sequences), np.int64) for _ in range(3))
        for row, limit in enumerate(self.limits):
            taken = {
                int(self.places[other])
                for other in range(row)
                if sequences[other] == sequences[row]
            }
            free = [place for place in range(limit) if place not in taken]
            place = int(random.choice(free[-64:]))
            base = max(0, place - int(random.integers(0, 64)))
            bits = random.integers(0, 2, 64).astype(bool)
            bits[place - base] = True
            bits[limit - base :] = False
            self.places[row], self.bases[row] = place, base
            self.masks[row] = np.packbits(bits, bitorder="little").view("<i8")[0]
        heads, kv_heads = case.q.shape[1], case.k.shape[1]
        self.q, self.k, self.v = (
            torch.from_numpy(random.standard_normal((len(sequences), width, case.head_dim))).to(
                case.q.device, case.q.dtype
            )
            for width in (heads, kv_heads, kv_heads)
        )
        if case.latent is not None:
            self.v = self.k

    def visible(self, row: int) -> np.ndarray:
        """Return the positions that a row sees in a layer without a window, ascending."""
        base, mask = int(self.bases[row]), int(self.masks[row])
        masked = (base + bit for bit in range(64) if mask >> bit & 1)
        keys = [key for key in (*range(base), *masked) if key >= self.first_key]
        return np.array(keys, np.int64)

    def seen_slots(self, row: int) -> torch.Tensor:
        table = self.case.slots(self.sequences[row], int(self.limits[row]))
        return table[torch.from_numpy(self.visible(row))]

    def spoil(self) -> None:
        """Fill every slot that no row sees with NaN."""
        hidden = torch.ones(self.case.pool.buffer.shape[2], dtype=torch.bool)
        for row in range(len(self.sequences)):
            hidden[self.seen_slots(row)] = False
        self.case.pool.buffer[:, :, hidden.to(self.case.pool.buffer.device)] = float("nan")

    def fill(self, graph: DraftAttention) -> None:
        """Write to the device where rows are and what they see. Padding gets arbitrary numbers."""
        for tensor, values in (
            (graph.places, self.places),
            (graph.bases, self.bases),
            (graph.masks, self.masks),
        ):
            tensor[: len(values)] = torch.from_numpy(values)
            tensor[len(values) :] = 7

    def attend(self, graph: DraftAttention, layer: int = 1) -> torch.Tensor:
        """Run a planned step over the graph's pool; memory it forgets to write is NaN."""
        self.fill(graph)
        graph.locate_slots()
        padding, pool = len(graph.places) - len(self.sequences), graph.pool
        keys = pool.get_keys(layer)
        q, k, v = (
            torch.cat((x, torch.ones(padding, *x.shape[1:]).to(x))).to(keys)
            for x in (self.q, self.k, self.v)
        )
        store_kv(keys, pool.get_values(layer), graph.slots, k, v)
        with poisoned_memory():
            sinks = None if self.case.sinks is None else self.case.sinks.to(q.device)
            return graph.attend(layer, q, k, v[..., : self.case.value_dim], sinks)

    def reference(self) -> torch.Tensor:
        """Compute with the torch backend in float32 on the CPU."""
        case = self.case
        windows = LayerWindows(case.windows)
        rows, first_key = len(self.sequences), self.first_key
        graph = TorchDraft(case.pool_copy(), rows, case.latent, windows, first_key)
        graph.plan(self.limits, self.pages)
        return self.attend(graph)

    def expected(self, layer: int = 1) -> torch.Tensor:
        """Compute attention by its definition. The pool must be written."""
        rows = range(len(self.sequences))
        return torch.stack(
            [self.case.expected_row(self.q[i].cpu(), layer, self.seen_slots(i)) for i in rows]
        )


def make_step_without_first_keys(case: Case) -> DraftStep:
    """Make rows that do not see their sequences' first keys, which are NaN. The last row would see
    no other key."""
    sequences = [index for index in range(len(case.shapes)) for _ in range(2)]
    step = DraftStep(case, sequences, np.random.default_rng(3), first_key=1)
    step.places[-1], step.bases[-1], step.masks[-1] = 1, 1, 0
    step.spoil()
    return step


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make torch fill its allocations with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
