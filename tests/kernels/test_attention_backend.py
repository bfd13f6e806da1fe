"""Paged attention against a plain computation of its definition."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from attention_cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.core.config import ATTENTION_BACKENDS
from pd.core.errors import UsageError
from pd.kernels.attention import find_attention_backend, make_attention_backend
from pd.kernels.attention import torch_backend as implementation
from pd.kernels.attention.registry import BACKENDS

torch.set_num_threads(1)


def attend(case: Case, layer: int = 1) -> torch.Tensor:
    return case.attend(make_attention_backend("torch", case.pool, case.q.shape[1]), layer)


sequence_shapes = st.one_of(
    st.tuples(st.integers(0, 40), st.just(1)), st.tuples(st.integers(0, 40), st.integers(2, 30))
)


class TestAgainstItsDefinition:
    @settings(max_examples=40, deadline=None)
    @given(
        shapes=st.lists(sequence_shapes, min_size=1, max_size=6),
        page_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
        heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 4), (3, 2)]),
        seed=st.integers(0, 2**16),
    )
    def test_any_mixture_of_chunks_and_decode_steps(
        self, shapes: list[tuple[int, int]], page_size: int, heads: tuple[int, int], seed: int
    ) -> None:
        case = Case(shapes, page_size, *heads, seed=seed)
        out = attend(case)
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), case.expected(1), atol=2e-5, rtol=1e-4)

    @pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
    def test_half_precision(self, dtype: torch.dtype, error: float) -> None:
        case = Case([(30, 1), (0, 20), (7, 1), (12, 9)], 4, dtype=dtype)
        out = attend(case)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), case.expected(1), atol=error, rtol=error)

    def test_chunk_of_several_query_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(implementation, "QUERY_BLOCK", 8)
        case = Case([(5, 27), (16, 8), (0, 9), (3, 1)], 4)
        torch.testing.assert_close(attend(case).double(), case.expected(1), atol=2e-5, rtol=1e-4)

    def test_one_backend_serves_steps_of_growing_and_shrinking_context(self) -> None:
        """The causal mask is kept between steps."""
        for shapes in ([(9, 3)], [(90, 5)], [(2, 2)]):
            case = Case(shapes, 8)
            torch.testing.assert_close(
                attend(case).double(), case.expected(1), atol=2e-5, rtol=1e-4
            )


class TestPool:
    def test_only_slots_of_new_tokens_are_written(self) -> None:
        """Beside them only the rest of a page that a decode step writes, which is cleared."""
        case = Case([(7, 1), (0, 5), (3, 4)], 4)
        before = case.pool.buffer.clone()
        attend(case, layer=0)
        new = torch.cat([case.slots(i, s + n)[s:] for i, (s, n) in enumerate(case.shapes)])
        assert torch.equal(case.pool.get_keys(0)[new], case.k)
        assert torch.equal(case.pool.get_values(0)[new], case.v)
        untouched = torch.ones(before.shape[2], dtype=torch.bool)
        untouched[new] = False
        assert torch.equal(case.pool.buffer[0][:, untouched], before[0][:, untouched])
        assert torch.equal(case.pool.buffer[1], before[1])

    def test_what_other_pages_hold_does_not_matter(self) -> None:
        """Not even NaN, as a page freed by a failed request may hold."""
        case = Case([(6, 1), (29, 1), (3, 4), (30, 1)], 4)
        used = torch.cat([case.slots(i, s + n) for i, (s, n) in enumerate(case.shapes)])
        spoiled = torch.ones(case.pool.buffer.shape[2], dtype=torch.bool)
        spoiled[used] = False
        expected = attend(case).clone()
        for value in (float("nan"), float("inf"), 1e30):
            case.pool.buffer[:, :, spoiled] = value
            assert torch.equal(attend(case), expected)


class TestIndependence:
    def test_rows_hardly_depend_on_their_batch(self) -> None:
        shapes = [(int(n), 1) for n in np.random.default_rng(0).integers(0, 300, 32)]
        case = Case(shapes, 16)
        together = attend(case)
        for i, shape in enumerate(shapes):
            alone = Case([shape], 16)
            alone.pool, alone.pages = case.pool, [case.pages[i]]
            alone.q, alone.k, alone.v = case.q[i : i + 1], case.k[i : i + 1], case.v[i : i + 1]
            torch.testing.assert_close(attend(alone)[0], together[i], atol=1e-6, rtol=1e-5)

    def test_long_sequences_do_not_pad_short_ones(self) -> None:
        totals = np.array([10, 9000, 12, 300, 8000, 150], dtype=np.int64)
        ordered = np.argsort(totals, kind="stable")
        buckets = implementation._split_buckets(ordered, totals)
        assert [list(bucket) for bucket in buckets] == [[0, 2], [3, 5], [1, 4]]


class TestChoice:
    def test_the_command_line_offers_what_the_table_has(self) -> None:
        assert set(ATTENTION_BACKENDS) == {"auto", *BACKENDS}

    def test_auto_finds_one(self) -> None:
        assert make_attention_backend("auto", Case([(0, 1)], 1).pool, 4).name == "torch"

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("flashinfer", "it needs a GPU"),
            ("triton", "it needs a GPU"),
            ("made-up", "there is no such backend"),
        ],
    )
    def test_others_are_refused_saying_why_and_what_there_is(self, name: str, reason: str) -> None:
        with pytest.raises(UsageError) as refusal:
            make_attention_backend(name, Case([(0, 1)], 1).pool, 4)
        message = refusal.value.message
        assert message.startswith(f"attention backend '{name}' is not available here ({reason}")
        assert message.endswith("use one of: auto, torch")

    def test_on_a_gpu_dtype_and_head_size_decide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        gpu = torch.device("cuda")
        assert find_attention_backend("auto", gpu, torch.float32, 128).name == "triton"
        assert find_attention_backend("auto", gpu, torch.bfloat16, 96).name == "triton"
        with pytest.raises(
            UsageError, match=r"it has no float32\); use one of: auto, triton, torch"
        ):
            find_attention_backend("flashinfer", gpu, torch.float32, 128)
        with pytest.raises(UsageError, match="it has no head size 96"):
            find_attention_backend("flashinfer", gpu, torch.bfloat16, 96)

    def test_what_is_not_installed_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UsageError, match="package flashinfer is not installed"):
            find_attention_backend("flashinfer", torch.device("cuda"), torch.bfloat16, 128)
        auto = find_attention_backend("auto", torch.device("cuda"), torch.bfloat16, 128)
        assert auto.name == "torch"
