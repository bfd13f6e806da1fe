"""Trees by FlashInfer, and CUDA graphs that verify and draft, by the torch reference."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from attention_cases import Case, DraftStep, random_tree

from pd.kernels.attention import find_attention_backend
from pd.kernels.attention.base import UnreadStarts
from pd.kernels.kv_store import store_kv

if TYPE_CHECKING:
    from pd.kernels.attention import AttentionBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
)

SEED = int(os.environ.get("PD_TEST_SEED", "0"))
DEVICE = "cuda:0"
BF16 = {"atol": 2e-2, "rtol": 2e-2}
# (tokens in the pool, new tokens, whether they are a tree) of each sequence.
STEPS = [
    [(1000, 4, True), (3, 4, True), (0, 7, True)],
    [(700, 300, False), (31000, 64, True), (90, 1, False), (511, 9, True), (60, 5, False)],
]
# KV heads, query heads per KV head, head size, page size.
SHAPES = [(8, 4, 128, 16), (2, 7, 64, 16), (2, 1, 128, 1), (1, 8, 64, 64)]
over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def random() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def make_case(step: list[tuple[int, int, bool]], shape: tuple, random: np.random.Generator) -> Case:
    trees = [random_tree(n, random) if is_tree else None for _, n, is_tree in step]
    kv_heads, group, head_dim, page_size = shape
    shapes = [(start, n) for start, n, _ in step]
    dtype = torch.bfloat16
    case = Case(shapes, page_size, kv_heads, group, dtype, SEED, head_dim, DEVICE, trees=trees)
    case.spoil()
    return case


def make_backend(name: str, case: Case) -> AttentionBackend:
    sample = case.pool.get_keys(0)
    cls = find_attention_backend(name, sample.device, sample.dtype, sample.shape[-1])
    return cls(case.pool, case.q.shape[1])


@pytest.mark.parametrize("name", ["triton", pytest.param("flashinfer", marks=needs_flashinfer)])
@over_shapes
@pytest.mark.parametrize("step", STEPS)
def test_trees_are_those_of_the_reference(
    step: list, shape: tuple, name: str, random: np.random.Generator
) -> None:
    case = make_case(step, shape, random)
    backend = make_backend(name, case)
    torch.testing.assert_close(case.attend(backend).float().cpu(), case.reference(), **BF16)
    case.trees = None
    torch.testing.assert_close(case.attend(backend).float().cpu(), case.reference(), **BF16)


@pytest.fixture(params=["triton", pytest.param("auto", marks=needs_flashinfer)])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    "name", ["triton", *(pytest.param(n, marks=needs_flashinfer) for n in ("auto", "flashinfer"))]
)
@over_shapes
def test_verify_graphs_follow_their_plans(
    name: str, shape: tuple, random: np.random.Generator
) -> None:
    case = make_case([(3000, 16, True), (0, 4, True), (700, 5, True), (64, 1, True)], shape, random)
    rows = 28
    verify = make_backend(name, case).make_verify_graph(rows, 4096)
    inputs = [
        torch.zeros(rows, *x.shape[1:], dtype=x.dtype, device=DEVICE)
        for x in (case.q, case.k, case.v)
    ]

    def step() -> torch.Tensor:
        q, k, v = inputs
        store_kv(case.pool.get_keys(1), case.pool.get_values(1), verify.slots, k, v)
        return verify.attend(1, q, k, v)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    expected = case.reference()
    ends = np.cumsum([n for _, n in case.shapes])
    for members in ([0, 1, 2], [3], [2, 0], [], [1, 3, 0]):
        taken = np.concatenate(
            [np.arange(0), *(np.arange(ends[i] - case.shapes[i][1], ends[i]) for i in members)]
        )
        starts, lengths = np.array([case.shapes[i] for i in members], np.int64).reshape(-1, 2).T
        pages, trees = [case.pages[i] for i in members], [case.trees[i] for i in members]
        # Once as the host says, once where only the device knows where the sequences start.
        for later in (False, True):
            by = np.minimum(starts, random.integers(0, 9, len(members))) * later
            unread = None
            if later:
                most = by + random.integers(0, 40, len(members))
                counts = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
                counts[: len(taken)] = torch.from_numpy(np.repeat(by, lengths)).to(DEVICE)
                unread = UnreadStarts(most, counts)
                # What a sequence may need and does not is neither read nor written.
                pages = [np.concatenate((mine, np.repeat(case.pages[0][:1], 50))) for mine in pages]
            verify.plan(starts - by, lengths, pages, trees, unread)
            for ours, theirs in zip(inputs, (case.q, case.k, case.v), strict=True):
                ours[: len(taken)] = theirs[torch.from_numpy(taken).to(DEVICE)]
            out.fill_(float("nan"))
            graph.replay()
            assert not out.isnan().any()
            torch.testing.assert_close(out[: len(taken)].float().cpu(), expected[taken], **BF16)


@over_shapes
def test_draft_graphs_follow_what_the_device_says(
    name: str, shape: tuple, random: np.random.Generator
) -> None:
    """Three steps in one graph, whose places are known on the device when they run."""
    rows, steps = 8, 3
    case = make_case([(3000, 1, False), (100, 1, False), (700, 1, False)], shape, random)
    draft = make_backend(name, case).make_draft_graph(rows, 4096)
    widths = [x.shape[1:] for x in (case.q, case.k, case.v)]
    inputs = [
        [torch.zeros(rows, *w, dtype=case.q.dtype, device=DEVICE) for w in widths]
        for _ in range(steps)
    ]
    said = torch.zeros(steps, 3, rows, dtype=torch.int64, device=DEVICE)

    def run() -> list[torch.Tensor]:
        outs = []
        for (q, k, v), (places, bases, masks) in zip(inputs, said, strict=True):
            draft.places.copy_(places)
            draft.bases.copy_(bases)
            draft.masks.copy_(masks)
            draft.locate_slots()
            store_kv(case.pool.get_keys(1), case.pool.get_values(1), draft.slots, k, v)
            outs.append(draft.attend(1, q, k, v))
        return outs

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for sequences in ([0, 1, 2], [2, 2, 0, 2, 1], [1]):
        n = len(sequences)
        case.pool.buffer.normal_()
        drafts = [DraftStep(case, sequences, random) for _ in range(steps)]
        draft.plan(drafts[0].limits, drafts[0].pages)
        expected, pool = [], case.pool
        case.pool = case.pool_copy()
        for i, step in enumerate(drafts):
            # A reference that keeps what earlier steps wrote.
            expected.append(step.reference())
            slots = [
                int(case.slots(s, int(p) + 1)[-1])
                for s, p in zip(sequences, step.places, strict=True)
            ]
            case.pool.get_keys(1)[slots] = step.k.float().cpu()
            case.pool.get_values(1)[slots] = step.v.float().cpu()
            said[i].fill_(7)
            for row, values in enumerate((step.places, step.bases, step.masks)):
                said[i, row, :n] = torch.from_numpy(values)
            for ours, theirs in zip(inputs[i], (step.q, step.k, step.v), strict=True):
                ours[:n] = theirs
        case.pool = pool
        graph.replay()
        for out, right in zip(outs, expected, strict=True):
            torch.testing.assert_close(out[:n].float().cpu(), right, **BF16)
