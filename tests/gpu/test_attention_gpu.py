"""FlashInfer by the torch reference, and decode attention of every backend inside CUDA graphs."""

from __future__ import annotations

import importlib.util
import os
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from attention_cases import Case, poisoned_memory

from pd.kernels.attention import find_attention_backend
from pd.kernels.kv_store import store_kv

if TYPE_CHECKING:
    from pd.kernels.attention import AttentionBackend, DecodeAttention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
)

SEED = int(os.environ.get("PD_TEST_SEED", "0"))
DEVICE = "cuda:0"
BF16 = {"atol": 2e-2, "rtol": 2e-2}  # float16 is finer
# Steps of decode tokens, of short and long chunks, in orders that mix them.
STEPS = [
    [(6, 1), (3000, 1), (0, 1), (63, 1), (64, 1)],
    [(0, 50), (900, 400), (33, 2), (0, 1000)],
    [(29, 1), (3, 4), (0, 300), (170, 1), (2000, 200), (15, 1), (130, 3)],
    [(31000, 16)],
]
# KV heads, query heads per KV head, head size, page size.
SHAPES = [
    (8, 4, 128, 16),
    (8, 8, 128, 16),
    (2, 7, 64, 16),
    (2, 1, 128, 1),
    (1, 8, 64, 64),
    (4, 2, 256, 16),
]
# With these head sizes all that FlashInfer is chosen for (registry.py). It compiles for each, about
# a minute.
DTYPES = [torch.bfloat16, torch.float16]
over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def seed() -> int:
    print(f"seed {SEED}")
    return SEED


def make_backend(name: str, case: Case) -> AttentionBackend:
    sample = case.pool.get_keys(0)
    cls = find_attention_backend(name, sample.device, sample.dtype, sample.shape[-1])
    return cls(case.pool, case.q.shape[1])


@needs_flashinfer
@over_shapes
@over_dtypes
@pytest.mark.parametrize("step", STEPS)
def test_flashinfer_is_the_reference(
    step: list[tuple[int, int]], dtype: torch.dtype, shape: tuple, seed: int
) -> None:
    """With NaN in every slot that no sequence has."""
    kv_heads, group, head_dim, page_size = shape
    case = Case(step, page_size, kv_heads, group, dtype, seed, head_dim, DEVICE)
    case.spoil()
    out = case.attend(make_backend("flashinfer", case))
    assert out.is_contiguous()
    torch.testing.assert_close(out.float().cpu(), case.reference(), **BF16)


@needs_flashinfer
@pytest.mark.parametrize("step", [[(900, 400)], [(960, 320), (640, 320), (10, 1)], STEPS[1]])
def test_adjacent_pages_are_attended_where_they_lie(step: list[tuple[int, int]], seed: int) -> None:
    case = Case(step, 16, 8, 4, torch.bfloat16, seed, 128, DEVICE, adjacent=True)
    case.spoil()
    out = case.attend(make_backend("flashinfer", case))
    torch.testing.assert_close(out.float().cpu(), case.reference(), **BF16)


@needs_flashinfer
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_long_prefixes_for_which_there_is_no_memory_are_not_gathered(seed: int) -> None:
    """And those that are gathered stay within it."""
    steps = [(20000, 400), (0, 300), (30000, 200), (10000, 130), (3000, 1)]
    case = Case(steps, 16, 8, 4, torch.bfloat16, seed, 128, DEVICE)
    case.spoil()
    backend = make_backend("flashinfer", case)
    token_bytes, expected = 2 * 8 * 128 * 2, case.reference()
    # With the 300 new tokens of the second alone nothing has to be gathered.
    for tokens, gathered in ((0, 0), (10429, 0), (10430, 10430), (30829, 10430), (61030, 61030)):
        backend.scratch_bytes = tokens * token_bytes
        case.attend(backend)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = case.attend(backend)
        took = torch.cuda.max_memory_allocated() - before
        print(f"{tokens} tokens: {took / 2**20:.0f} MiB")
        assert 0 <= took - gathered * token_bytes < 64 << 20
        torch.testing.assert_close(out.float().cpu(), expected, **BF16)


@needs_flashinfer
def test_auto_is_both() -> None:
    case = Case([(0, 1)], 16, 8, 4, torch.bfloat16, 0, 128, DEVICE)
    assert make_backend("auto", case).name == "flashinfer+triton"


class Captured:
    """A graph of one layer's KV write and attention over static inputs."""

    def __init__(self, case: Case, decode: DecodeAttention, rows: int) -> None:
        widths = [x.shape[1:] for x in (case.q, case.k, case.v)]
        dtype = case.q.dtype
        self.q, self.k, self.v = (
            torch.zeros(rows, *width, dtype=dtype, device=DEVICE) for width in widths
        )
        self._case, self._decode = case, decode
        self._step()  # compiles
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self._step()

    def _step(self) -> torch.Tensor:
        pool = self._case.pool
        store_kv(pool.get_keys(1), pool.get_values(1), self._decode.slots, self.k, self.v)
        return self._decode.attend(1, self.q, self.k, self.v)

    def replay(self, chosen: list[int]) -> torch.Tensor:
        """The result for these sequences; the rest is padding."""
        n, case = len(chosen), self._case
        self._decode.plan(
            np.array([case.shapes[i][0] for i in chosen], np.int64), [case.pages[i] for i in chosen]
        )
        for ours, theirs in ((self.q, case.q), (self.k, case.k), (self.v, case.v)):
            ours[:n] = theirs[chosen]
        self.out.fill_(float("nan"))
        self.graph.replay()
        assert not self.out.isnan().any(), "padding rows attend to zeros"
        return self.out[:n].clone()


@pytest.fixture(
    params=["triton", *(pytest.param(n, marks=needs_flashinfer) for n in ("flashinfer", "auto"))]
)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


class TestGraphs:
    @over_shapes
    @over_dtypes
    def test_replays_follow_their_plans(
        self, name: str, dtype: torch.dtype, shape: tuple, seed: int
    ) -> None:
        kv_heads, group, head_dim, page_size = shape
        step = [(6, 1), (3000, 1), (0, 1), (63, 1), (64, 1), (511, 1), (4095, 1)]
        case = Case(step, page_size, kv_heads, group, dtype, seed, head_dim, DEVICE)
        case.spoil()
        backend = make_backend(name, case)
        graphs = [Captured(case, backend.make_decode_graph(rows, 4096), rows) for rows in (8, 3)]
        expected = case.reference()
        for graph, chosen in (
            (graphs[0], [0, 1, 2, 3, 4, 5, 6]),
            (graphs[1], [1]),
            (graphs[0], [6, 2]),
            (graphs[1], [4, 0, 5]),
            (graphs[0], [1, 6, 0, 3]),
        ):
            out = graph.replay(chosen)
            torch.testing.assert_close(out.float().cpu(), expected[chosen], **BF16)

    def test_graphs_of_few_and_of_many_sequences(self, name: str, seed: int) -> None:
        rng = random.Random(seed)
        step = [(rng.randrange(2000), 1) for _ in range(45)]
        case = Case(step, 16, 8, 4, torch.bfloat16, seed, 128, DEVICE)
        case.spoil()
        backend = make_backend(name, case)
        graphs = {
            rows: Captured(case, backend.make_decode_graph(rows, 2048), rows) for rows in (48, 8)
        }
        expected = case.reference()
        for rows, count in ((48, 45), (8, 5), (48, 33), (8, 8), (48, 1)):
            chosen = rng.sample(range(45), count)
            out = graphs[rows].replay(chosen)
            torch.testing.assert_close(out.float().cpu(), expected[chosen], **BF16)

    def test_plans_overtake_running_steps(self, name: str, seed: int) -> None:
        """Plans and inputs of many steps are queued while the GPU is held up, and none of them
        spoils another's."""
        case = Case([(100 * i, 1) for i in range(8)], 16, 8, 4, torch.bfloat16, seed, 128, DEVICE)
        backend = make_backend(name, case)
        graph = Captured(case, backend.make_decode_graph(4, 1024), 4)
        expected = case.reference()
        choices = [[i, (3 * i + 1) % 8] for i in range(8)]
        indices = [torch.tensor(chosen, device=DEVICE) for chosen in choices]
        torch.cuda._sleep(20_000_000)
        results = []
        for chosen, index in zip(choices, indices, strict=True):
            graph._decode.plan(
                np.array([case.shapes[i][0] for i in chosen], np.int64),
                [case.pages[i] for i in chosen],
            )
            for ours, theirs in ((graph.q, case.q), (graph.k, case.k), (graph.v, case.v)):
                ours[:2] = theirs.index_select(0, index)
            graph.graph.replay()
            results.append(graph.out[:2].clone())
        for chosen, out in zip(choices, results, strict=True):
            torch.testing.assert_close(out.float().cpu(), expected[chosen], **BF16)

    def test_eager_steps_between_replays(self, name: str, seed: int) -> None:
        case = Case([(700, 1), (90, 40), (1300, 1)], 16, 8, 4, torch.bfloat16, seed, 128, DEVICE)
        backend = make_backend(name, case)
        graph = Captured(case, backend.make_decode_graph(2, 2048), 2)
        expected = case.reference()
        for _ in range(2):
            with poisoned_memory():
                step = case.attend(backend)
            torch.testing.assert_close(step.float().cpu(), expected, **BF16)
            # The sequences of one token; their rows are those of the tokens.
            graph._decode.plan(np.array([700, 1300]), [case.pages[0], case.pages[2]])
            for ours, theirs in ((graph.q, case.q), (graph.k, case.k), (graph.v, case.v)):
                ours[:] = theirs[[0, 41]]
            graph.graph.replay()
            torch.testing.assert_close(graph.out.float().cpu(), expected[[0, 41]], **BF16)


@needs_flashinfer
@over_shapes
@over_dtypes
def test_chunk_graphs_follow_their_plans(dtype: torch.dtype, shape: tuple, seed: int) -> None:
    kv_heads, group, head_dim, page_size = shape
    steps = [(3000, 16), (0, 32), (700, 5), (64, 1)]
    case = Case(steps, page_size, kv_heads, group, dtype, seed, head_dim, DEVICE)
    case.spoil()
    chunk = make_backend("flashinfer", case).make_chunk_graph(32, 4096)
    assert chunk is not None
    q, k, v = (
        torch.zeros(32, *x.shape[1:], dtype=dtype, device=DEVICE) for x in (case.q, case.k, case.v)
    )

    def attend() -> torch.Tensor:
        store_kv(case.pool.get_keys(1), case.pool.get_values(1), chunk.slots, k, v)
        return chunk.attend(1, q, k, v)

    attend()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    expected, stops = case.reference(), np.cumsum([length for _, length in steps])
    for i in (0, 3, 1, 2, 0):
        start, length = steps[i]
        rows = slice(stops[i] - length, stops[i])
        chunk.plan(start, length, case.pages[i])
        for ours, theirs in ((q, case.q), (k, case.k), (v, case.v)):
            ours[:length] = theirs[rows]
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out[:length].float().cpu(), expected[rows], **BF16)
