"""Layers with a window whose sequences have a second page table, without the pages before the
window."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from attention_cases import Case, poisoned_memory, random_tree

from pd.engine.page_allocator import NO_PAGE
from pd.kernels.attention import AttentionBatch
from pd.kernels.attention.base import UnreadStarts
from pd.kernels.attention.tables import TablePart, TablesAttention
from pd.kernels.attention.torch_backend import TorchAttention
from pd.kernels.kv_store import store_kv

if TYPE_CHECKING:
    from pd.kernels.attention import PlannedAttention
    from pd.kernels.kv_store import KVScales

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = "cuda:0" if ON_GPU else "cpu"

# Tokens in the pool, new tokens, and whether these form a tree.
STEPS = [
    [(6, 1, False), (300, 1, False), (0, 1, False), (64, 1, False)],
    [(0, 50, False), (90, 40, False), (17, 1, False), (33, 2, False)],
    [(29, 1, False), (40, 9, True), (0, 12, True), (130, 30, False), (200, 5, True)],
]


class Tables:
    """The same step over a layer without a window and one with it. The latter has pages of its own.
    Those before its windows are given up, and their slots are NaN."""

    def __init__(
        self, step: list[tuple[int, int, bool]], window: int, page_size: int, kind: Any
    ) -> None:
        random = np.random.default_rng(window)
        trees = [random_tree(n, random) if is_tree else None for _, n, is_tree in step]
        shapes = [(start, n) for start, n, _ in step]
        self.cases = [
            Case(shapes, page_size, seed=seed, device=DEVICE, trees=trees, windows=windows)
            for seed, windows in enumerate(((0, 0), (0, window)))
        ]
        whole, cut = self.cases
        cut.q, cut.k, cut.v = whole.q, whole.k, whole.v
        self.pages = []
        for i, (start, _) in enumerate(shapes):
            first = max(0, start - window + 1) // page_size
            gone = cut.slots(i, first * page_size).to(DEVICE)
            cut.pool.buffer[:, :, gone] = float("nan")
            kept = cut.pages[i].copy()
            kept[:first] = NO_PAGE
            self.pages.append(np.stack((whole.pages[i], kept)))
        for case in self.cases:
            case.spoil()
        parts = [
            TablePart(0, 0, kind(whole.pool, whole.q.shape[1])),
            TablePart(1, window, kind(cut.pool, cut.q.shape[1], windows=(0, window))),
        ]
        # The layers of the model are the second ones of both pools.
        self.backend = TablesAttention(_Layers(self.cases), parts, [(0, 1), (1, 1)])

    @property
    def batch(self) -> AttentionBatch:
        batch = self.cases[0].batch
        return AttentionBatch(batch.starts, batch.lengths, self.pages, batch.trees)

    def check(self, planned: PlannedAttention, rows: int | None = None) -> None:
        """Attend in both layers, and compare with the definition. The rest of ``rows`` is
        padding."""
        for layer, case in enumerate(self.cases):
            padding = 0 if rows is None else rows - len(case.q)
            q, k, v = (
                torch.cat((x, torch.zeros(padding, *x.shape[1:], device=DEVICE)))
                for x in (case.q, case.k, case.v)
            )
            keys, values = planned.pool.get_keys(layer), planned.pool.get_values(layer)
            store_kv(keys, values, planned.get_slots(layer), k, v)
            with poisoned_memory():
                out = planned.attend(layer, q, k, v)[: len(case.q)]
            expected = case.expected(1)
            torch.testing.assert_close(out.double().cpu(), expected, atol=1e-5, rtol=1e-5)


class _Layers:
    """The second layer of each pool."""

    def __init__(self, cases: list[Case]) -> None:
        self._pools = [case.pool for case in cases]
        self.page_size, self.num_pages = cases[0].page_size, cases[0].pool.num_pages
        self.dtype = cases[0].q.dtype

    def get_keys(self, layer: int) -> torch.Tensor:
        return self._pools[layer].get_keys(1)

    def get_values(self, layer: int) -> torch.Tensor:
        return self._pools[layer].get_values(1)

    def get_scales(self, layer: int) -> KVScales:
        return self._pools[layer].get_scales(1)


@pytest.mark.parametrize("window", [1, 16, 70])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("step", STEPS, ids=["decode", "chunks", "trees"])
def test_pages_before_windows_are_never_read(
    step: list[tuple[int, int, bool]], window: int, page_size: int
) -> None:
    tables = Tables(step, window, page_size, TorchAttention)
    tables.backend.plan(tables.batch)
    tables.check(tables.backend)


class TestTriton:
    @pytest.fixture(autouse=True)
    def triton(self) -> None:
        pytest.importorskip("triton", reason="Triton is not installed")
        from pd.kernels.attention.triton_backend import TritonAttention

        self.kind = TritonAttention

    def test_a_step(self) -> None:
        tables = Tables(STEPS[2], 20, 16, self.kind)
        tables.backend.plan(tables.batch)
        tables.check(tables.backend)

    def test_a_decode_graph(self) -> None:
        tables = Tables(STEPS[0], 20, 16, self.kind)
        graph = tables.backend.make_decode_graph(5, 400)
        assert graph is not None
        graph.plan(tables.batch.starts, tables.pages)
        tables.check(graph, 5)

    def test_a_mixed_graph(self) -> None:
        tables = Tables([(40, 1, False), (150, 40, False), (7, 1, False)], 20, 16, self.kind)
        graph = tables.backend.make_mixed_graph(50, 3, 2, 400)
        assert graph is not None
        graph.plan(tables.batch.starts, tables.batch.lengths, tables.pages)
        tables.check(graph, 50)

    def test_a_verify_graph_whose_sequences_start_later_than_the_host_knows(self) -> None:
        tables = Tables([(40, 6, True), (150, 4, False), (9, 1, False)], 20, 4, self.kind)
        graph = tables.backend.make_verify_graph(14, 400)
        assert graph is not None and graph.takes_unread
        batch = tables.batch
        later, most = np.array([3, 0, 5]), np.array([5, 5, 5])
        # Pages that cover the most accepted guesses, and the window of the earliest start.
        spare = [np.concatenate((t, t[:, -1:], t[:, -1:]), axis=1) for t in tables.pages]
        for case, table in zip(spare, tables.cases[1].pages, strict=True):
            case[1, : len(table)] = table
        counts = torch.zeros(14, dtype=torch.int64)
        counts[: batch.lengths.sum()] = torch.from_numpy(np.repeat(later, batch.lengths))
        unread = UnreadStarts(most, counts.to(DEVICE))
        graph.plan(batch.starts - later, batch.lengths, spare, batch.trees, unread)
        tables.check(graph, 14)
