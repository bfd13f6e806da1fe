"""Attention to rows of latents: the torch backend by its definition, Triton's by the torch one."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from attention_cases import Case, DraftStep, poisoned_memory, random_tree

from pd.kernels.attention import LatentShape
from pd.kernels.attention.torch_backend import TorchAttention
from pd.kernels.kv_store import store_kv
from pd.kernels.latent import LatentHeads

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = "cuda:0" if ON_GPU else "cpu"
# The interpreter's bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Heads, width of the latent, width of the rotated key, page size. The last one is DeepSeek's.
SHAPES = [(4, 32, 8, 4), (5, 48, 2, 1), (20, 16, 16, 16), (16, 512, 64, 64)]
STEPS = [
    [(6, 1), (300, 1), (0, 1), (63, 1), (64, 1)],
    [(0, 30), (70, 20), (33, 2)],
    [(29, 1), (3, 4), (170, 1), (0, 20), (15, 1)],
]


def make_case(
    step: list[tuple[int, int]],
    shape: tuple[int, ...] = SHAPES[0],
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    trees: list[np.ndarray | None] | None = None,
) -> Case:
    heads, rank, rope, page_size = shape
    latent = LatentShape(rank, 0.7 * (rank + rope) ** -0.5, key_dim=16 + rope, head_value_dim=24)
    case = Case(
        step, page_size, 1, heads, dtype, 0, rank + rope, device, trees=trees, latent=latent
    )
    case.spoil()
    return case


@pytest.mark.parametrize(("step", "shape"), list(zip(STEPS, SHAPES[:3], strict=True)))
def test_the_torch_backend_does_what_the_definition_says(
    step: list[tuple[int, int]], shape: tuple[int, ...]
) -> None:
    case = make_case(step, shape, device="cpu")
    out = case.attend(TorchAttention(case.pool, shape[0], case.latent))
    torch.testing.assert_close(out.double(), case.expected(1), atol=1e-5, rtol=1e-5)


def test_the_torch_backend_follows_trees_and_drafts() -> None:
    random = np.random.default_rng(1)
    trees = [random_tree(7, random), None, random_tree(12, random)]
    case = make_case([(20, 7), (30, 1), (0, 12)], device="cpu", trees=trees)
    backend = TorchAttention(case.pool, 4, case.latent)
    torch.testing.assert_close(
        case.attend(backend).double(), case.expected(1), atol=1e-5, rtol=1e-5
    )
    draft = DraftStep(make_case([(0, 40), (90, 1)], device="cpu"), [0, 1, 1, 0], random)
    graph = TorchAttention(draft.case.pool, 4, draft.case.latent).make_draft_graph(6, 100)
    graph.plan(draft.limits, draft.pages)
    found = draft.attend(graph)[:4].double()
    torch.testing.assert_close(found, draft.expected(), atol=1e-5, rtol=1e-5)


class TestTriton:
    @pytest.fixture(autouse=True)
    def triton(self) -> None:
        pytest.importorskip("triton", reason="Triton is not installed")

    @pytest.mark.parametrize(
        ("step", "shape", "dtype"),
        [
            pytest.param(
                step,
                shape,
                dtype,
                id=f"step{i}-shape{j}-{str(dtype).removeprefix('torch.')}",
                marks=() if ON_GPU or (i == j and d == i % 2) else pytest.mark.full,
            )
            for i, step in enumerate(STEPS)
            for j, shape in enumerate(SHAPES)
            for d, dtype in enumerate(DTYPES)
        ],
    )
    def test_steps_are_those_of_the_reference(
        self, step: list[tuple[int, int]], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        from pd.kernels.attention.triton_backend import TritonAttention

        case = make_case(step, shape, dtype)
        out = case.attend(TritonAttention(case.pool, shape[0], case.latent))
        assert out.is_contiguous()
        error = TOLERANCE[dtype]
        torch.testing.assert_close(out.float().cpu(), case.reference(), atol=error, rtol=error)

    def test_trees_are_those_of_the_reference(self) -> None:
        from pd.kernels.attention.triton_backend import TritonAttention

        random = np.random.default_rng(1)
        trees = [random_tree(7, random), None, random_tree(12, random)]
        case = make_case([(20, 7), (30, 1), (0, 12)], trees=trees)
        out = case.attend(TritonAttention(case.pool, 4, case.latent))
        torch.testing.assert_close(out.cpu(), case.reference(), atol=1e-5, rtol=1e-5)

    def test_graphs_are_those_of_the_reference(self) -> None:
        from pd.kernels.attention.triton_backend import TritonAttention

        case = make_case([(40, 1), (3, 1), (150, 1)])
        graph = TritonAttention(case.pool, 4, case.latent).make_decode_graph(5, 200)
        starts = np.array([start for start, _ in case.shapes], np.int64)
        graph.plan(starts, case.pages)
        q, k = (torch.cat((x, torch.ones_like(x[:2]))) for x in (case.q, case.k))
        store_kv(case.pool.get_keys(1), case.pool.get_values(1), graph.slots, k, k)
        with poisoned_memory():
            out = graph.attend(1, q, k, k[..., : case.value_dim])
        assert out.shape == (5, 4, case.value_dim)
        torch.testing.assert_close(out[:3].cpu(), case.reference(), atol=1e-5, rtol=1e-5)
        random = np.random.default_rng(2)
        for first_key in (0, 1):
            case = make_case([(0, 40), (90, 1)])
            draft = DraftStep(case, [0, 1, 1, 0], random, first_key)
            backend = TritonAttention(case.pool, 4, case.latent)
            drafting = backend.make_draft_graph(6, 100, first_key)
            drafting.plan(draft.limits, draft.pages)
            found = draft.attend(drafting)[:4].cpu()
            torch.testing.assert_close(found, draft.reference(), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [
            pytest.param(
                shape, dtype, marks=() if ON_GPU or j == d else pytest.mark.full, id=f"{j}-{d}"
            )
            for j, shape in enumerate(SHAPES)
            for d, dtype in enumerate(DTYPES)
        ],
    )
    def test_expanded_chunks_are_those_of_the_absorbed_form(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Of several chunks after prefixes of every length, beside single tokens and short
        chunks; layers need not be in order."""
        from pd.kernels.attention import expanded
        from pd.kernels.attention.triton_backend import TritonAttention

        monkeypatch.setattr(expanded, "LEAST_TOKENS", 10)
        heads, rank = shape[:2]
        for step in ([(0, 30)], [(29, 1), (3, 4), (100, 70), (0, 64), (15, 1), (64, 10)]):
            case = make_case(step, shape, dtype)
            weight = torch.randn(
                heads * (16 + 24), rank, generator=torch.Generator().manual_seed(1)
            )
            weights = LatentHeads((weight * rank**-0.5).to(DEVICE, dtype), heads, 16)
            q = case.q[..., : 16 + shape[2]].contiguous()
            backend = TritonAttention(case.pool, heads, case.latent)
            backend.plan(case.batch)
            absorbed = TorchAttention(case.pool, heads, case.latent)
            absorbed.plan(case.batch)
            for layer in (1, 0):
                store_kv(*(case.pool.get_keys(layer),) * 2, backend.slots, case.k, case.k)
                with poisoned_memory():
                    found = backend.attend_latents(layer, q, case.k, weights)
                wanted = absorbed.attend_latents(layer, q, case.k, weights)
                assert found.is_contiguous()
                error = 4 * TOLERANCE[dtype]
                torch.testing.assert_close(found.float(), wanted.float(), atol=error, rtol=error)
