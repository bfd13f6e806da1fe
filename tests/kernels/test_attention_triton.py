"""The Triton kernel by the torch reference: on a GPU, or interpreted on the CPU."""

from __future__ import annotations

import itertools
import os
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from attention_cases import Case, poisoned_memory

from pd.kernels.kv_store import store_kv

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

    from pd.kernels.attention.triton_graphs import TritonDecode

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

from pd.kernels.attention.triton_backend import TritonAttention  # noqa: E402
from pd.kernels.attention.triton_work import SplitPolicy, Tiles  # noqa: E402

SEED = int(os.environ.get("PD_TEST_SEED", "0"))
DEVICE = "cuda:0" if ON_GPU else "cpu"
# The interpreter's bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Steps of decode tokens, of chunks, and of both; short contexts and such as are split.
STEPS = [
    [(6, 1), (300, 1), (0, 1), (63, 1), (64, 1)],
    [(0, 50), (90, 40), (33, 2)],
    [(29, 1), (3, 4), (170, 1), (0, 20), (130, 3), (15, 1)],
]
# KV heads, query heads per KV head, head size, page size.
SHAPES = [
    (2, 2, 16, 4),
    (1, 7, 64, 16),
    (2, 4, 128, 16),
    (1, 1, 80, 1),
    (1, 20, 96, 64),
    (1, 2, 256, 8),
]


@pytest.fixture
def seed() -> int:
    print(f"seed {SEED}")
    return SEED


def make_case(step: list[tuple[int, int]], shape: tuple, dtype: torch.dtype, seed: int) -> Case:
    kv_heads, group, head_dim, page_size = shape
    case = Case(step, page_size, kv_heads, group, dtype, seed, head_dim, DEVICE)
    case.spoil()
    return case


def assert_right(out: torch.Tensor, case: Case) -> None:
    error = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float().cpu(), case.reference(), atol=error, rtol=error)


def every_step() -> list[ParameterSet]:
    """Every step, shape and dtype. Interpreted, ``make test`` has every shape once, with each step
    and dtype in turn; the rest is full."""
    places = itertools.product(range(len(STEPS)), range(len(SHAPES)), range(len(DTYPES)))
    return [
        pytest.param(
            STEPS[step],
            SHAPES[shape],
            DTYPES[dtype],
            id=f"step{step}-shape{shape}-{str(DTYPES[dtype]).removeprefix('torch.')}",
            marks=()
            if ON_GPU or (step, dtype) == (shape % 3, shape // 3 % 2)
            else pytest.mark.full,
        )
        for step, shape, dtype in places
    ]


@pytest.mark.parametrize(("step", "shape", "dtype"), every_step())
def test_steps_are_those_of_the_reference(
    step: list[tuple[int, int]], shape: tuple, dtype: torch.dtype, seed: int
) -> None:
    """With NaN in every slot that no sequence has."""
    case = make_case(step, shape, dtype, seed)
    out = case.attend(TritonAttention(case.pool, case.q.shape[1]))
    assert out.is_contiguous()
    assert_right(out, case)


def test_many_sequences_have_a_tile_shape_of_their_own(seed: int) -> None:
    rng = random.Random(seed)
    step = [(rng.randrange(200), 1) for _ in range(40)] + [(20, 5)]
    case = make_case(step, (1, 4, 64, 16), torch.float16, seed)
    backend = TritonAttention(case.pool, case.q.shape[1])
    assert backend.kernels.get_decode_kernel(40) is not backend.kernels.get_decode_kernel(5)
    assert_right(case.attend(backend), case)


def test_queries_may_be_a_slice_of_fused_projections(seed: int) -> None:
    case = make_case(STEPS[2], SHAPES[2], torch.float32, seed)
    fused = torch.cat((case.q, case.k, case.v), dim=1)
    heads = case.q.shape[1]
    case.q = fused[:, :heads]
    assert not case.q.is_contiguous()
    assert_right(case.attend(TritonAttention(case.pool, heads)), case)


def test_one_backend_serves_step_after_step(seed: int) -> None:
    """What splits of one step left behind does not show in the next."""
    case = make_case([(400, 1), (3, 1), (200, 30)], SHAPES[0], torch.float32, seed)
    backend = TritonAttention(case.pool, case.q.shape[1])
    first = case.attend(backend)
    assert_right(first, case)
    assert torch.equal(case.attend(backend), first)


class TestGraph:
    """What a graph replays: captured in ``tests/gpu``, called here."""

    def test_rows_and_padding(self, seed: int) -> None:
        case = make_case(STEPS[0], SHAPES[2], torch.float32, seed)
        backend = TritonAttention(case.pool, case.q.shape[1])
        graph = backend.make_decode_graph(8, 512)
        starts = np.array([start for start, _ in case.shapes])
        for n in (5, 2):
            graph.plan(starts[:n], case.pages[:n])
            pad = [
                torch.zeros(8 - n, *x.shape[1:], device=DEVICE) for x in (case.q, case.k, case.v)
            ]
            q, k, v = (
                torch.cat((x[:n], p)) for x, p in zip((case.q, case.k, case.v), pad, strict=True)
            )
            assert graph.slots[n:].tolist() == [case.pool.num_pages * case.page_size] * (8 - n)
            store_kv(case.pool.get_keys(1), case.pool.get_values(1), graph.slots, k, v)
            with poisoned_memory():
                out = graph.attend(1, q, k, v)
            assert not out.isnan().any()
            torch.testing.assert_close(out[:n].cpu(), case.reference()[:n], atol=3e-6, rtol=3e-6)

    def test_addresses_stay(self) -> None:
        case = make_case(STEPS[0], SHAPES[0], torch.float32, 0)
        backend = TritonAttention(case.pool, case.q.shape[1])
        large, small = backend.make_decode_graph(6, 400), backend.make_decode_graph(2, 400)
        before = addresses(large)
        assert small.slots.data_ptr() == before[0], "they share memory"
        large.plan(np.array([300, 2]), case.pages[1:3])
        assert addresses(large) == before


def addresses(graph: TritonDecode) -> list[int]:
    launch = graph._launch
    tensors = (graph.slots, launch.works[0].num_items, launch.works[0].items, launch.tables)
    return [tensor.data_ptr() for tensor in tensors]


class TestWork:
    @pytest.mark.parametrize("items", [1, 7, 132])
    def test_splits_cover_every_key_once_and_fit(self, items: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        policy = SplitPolicy(items, granule=64)
        for _ in range(50):
            n = int(random.integers(1, 40))
            starts = random.integers(0, 10 ** random.integers(1, 6), n)
            lengths = random.integers(1, 200, n)
            tiles = Tiles.cut_chunks(
                np.cumsum(lengths) - lengths, starts, lengths, np.arange(n), 32
            )
            assert tiles.tokens.sum() == lengths.sum()
            assert tiles.tokens.max() <= 32
            ends = dict(zip(tiles.rows.tolist(), tiles.positions + tiles.tokens, strict=True))
            work = policy.split_tiles(tiles)
            assert len(work) <= len(tiles.rows) + policy.max_slots
            slots: list[int] = []
            for row in np.unique(work[:, 0]):
                mine = work[work[:, 0] == row]
                mine = mine[np.argsort(mine[:, 4])]
                assert mine[0, 4] == 0
                assert mine[-1, 5] == ends[row]
                assert (mine[1:, 4] == mine[:-1, 5]).all()
                assert (mine[:, 8] == len(mine)).all()
                if len(mine) > 1:
                    assert (mine[:, 6] == mine[0, 7] + np.arange(len(mine))).all()
                    slots += mine[:, 6].tolist()
            assert len(set(slots)) == len(slots)
            assert not slots or max(slots) < policy.max_slots
