"""Triton kernels of a decoder layer by their torch references on the CPU, in float32."""

from __future__ import annotations

import pytest
import torch
from triton_device import (
    DEVICE,
    DTYPES,
    EACH_DTYPE,
    ON_GPU,
    assert_near,
    normal,
    seeded,
)

from pd.kernels.activation import silu_and_mul
from pd.kernels.linear import gate_up_silu, linear
from pd.kernels.norm import add_rms_norm, rms_norm
from pd.kernels.rope import apply_rope, compute_rotations, inverse_frequencies, rotate_and_store

pytestmark = pytest.mark.usefixtures("triton_works")


class TestNorm:
    @EACH_DTYPE
    @pytest.mark.parametrize(("rows", "size"), [(1, 96), (5, 64), (3, 1000), (0, 64)])
    def test_norm_and_added_norm(
        self, rows: int, size: int, dtype: torch.dtype, error: float
    ) -> None:
        from pd.kernels import norm_triton

        random = seeded()
        x, residual = (normal(random, rows, size).to(dtype) for _ in range(2))
        weight = normal(random, size).to(dtype)
        out = norm_triton.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5)
        assert out.dtype == dtype
        assert_near(out, rms_norm(x, weight, 1e-5), error)
        there = residual.clone().to(DEVICE)
        out = norm_triton.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5, there)
        assert_near(out, add_rms_norm(residual, x, weight, 1e-5), error)
        assert torch.equal(there.cpu(), residual)

    def test_takes_rows_of_a_wider_tensor(self) -> None:
        from pd.kernels import norm_triton

        x, weight = normal(seeded(), 4, 100), torch.ones(40)
        out = norm_triton.rms_norm(x.to(DEVICE)[:, 30:70], weight.to(DEVICE), 1e-5)
        assert_near(out, rms_norm(x[:, 30:70], weight, 1e-5), 1e-5)


class TestActivation:
    @EACH_DTYPE
    @pytest.mark.parametrize("shape", [(1, 6), (3, 2200), (2, 3, 32), (0, 8)])
    def test_silu_and_mul(self, shape: tuple[int, ...], dtype: torch.dtype, error: float) -> None:
        from pd.kernels import activation_triton

        x = normal(seeded(), *shape, scale=3).to(dtype)
        out = activation_triton.silu_and_mul(x.to(DEVICE))
        assert_near(out, silu_and_mul(x), error)


class TestRope:
    def test_angles_of_far_positions(self) -> None:
        from pd.kernels import rope_triton

        frequencies = inverse_frequencies(24, 500000.0)
        positions = torch.tensor([0, 1, 4095, 131071])
        for scale in (1.0, 1.3466):
            out = rope_triton.compute_rotations(positions.to(DEVICE), frequencies.to(DEVICE), scale)
            assert_near(out, compute_rotations(positions, frequencies, scale), 1e-6)

    @EACH_DTYPE
    @pytest.mark.parametrize("has_norm", [False, True])
    @pytest.mark.parametrize(
        ("tokens", "heads", "kv_heads", "head_dim", "rotated"),
        [
            (1, 4, 4, 32, 32),
            (5, 14, 2, 24, 24),
            (3, 9, 3, 128, 128),
            (0, 2, 1, 16, 16),
            (5, 6, 2, 128, 64),
            (3, 5, 1, 24, 18),
            (2, 3, 3, 40, 2),
        ],
    )
    def test_rotates_and_stores(
        self,
        tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotated: int,
        has_norm: bool,
        dtype: torch.dtype,
        error: float,
    ) -> None:
        from pd.kernels import rope_triton

        random = seeded()
        qkv = normal(random, tokens, heads + 2 * kv_heads, head_dim).to(dtype)
        positions = torch.randint(0, 131072, (tokens,), generator=random)
        cos_sin = compute_rotations(positions, inverse_frequencies(rotated, 10000.0))
        pools = [torch.full((11, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)]
        slots = torch.randperm(11, generator=random)[:tokens]
        weights = [normal(random, head_dim).to(dtype) if has_norm else None for _ in range(2)]
        there = [pool.clone().to(DEVICE) for pool in pools]
        found = rope_triton.rotate_and_store(
            qkv.clone().to(DEVICE),
            heads,
            kv_heads,
            cos_sin.to(DEVICE),
            *there,
            slots.to(DEVICE),
            *(None if weight is None else weight.to(DEVICE) for weight in weights),
            1e-6,
        )
        expected = rotate_and_store(
            qkv, heads, kv_heads, cos_sin, *pools, slots, *weights, eps=1e-6
        )
        for mine, theirs in zip((*found, *there), (*expected, *pools), strict=True):
            assert mine.shape == theirs.shape and mine.stride()[-2:] == (head_dim, 1)
            assert_near(mine, theirs, error)

    def test_reference_is_norm_then_rotation_then_a_write(self) -> None:
        random = seeded()
        qkv, weight = normal(random, 2, 4, 8), normal(random, 8)
        cos_sin = compute_rotations(torch.tensor([3, 9]), inverse_frequencies(8, 10000.0))
        keys, values = torch.zeros(5, 1, 8), torch.zeros(5, 1, 8)
        slots = torch.tensor([4, 1])
        q, k, v = rotate_and_store(
            qkv, 2, 1, cos_sin, keys, values, slots, weight, 2 * weight, 1e-6
        )
        assert torch.equal(q, apply_rope(rms_norm(qkv[:, :2], weight, 1e-6), cos_sin))
        assert torch.equal(k, apply_rope(rms_norm(qkv[:, 2:3], 2 * weight, 1e-6), cos_sin))
        assert torch.equal(v, qkv[:, 3:])
        assert torch.equal(keys[slots], k) and torch.equal(values[slots], v)
        assert int((keys != 0).any(-1).sum()) == 2


class TestLinear:
    @pytest.mark.parametrize(("dtype", "error"), DTYPES[1:])
    @pytest.mark.parametrize("is_gated", [False, True])
    @pytest.mark.parametrize(
        ("rows", "outputs", "inputs", "has_bias"),
        [
            (1, 40, 1040, True),
            (1, 35, 2048, False),
            (1, 12, 528, True),
            (1, 7, 2064, True),
            (2, 72, 560, True),
            (16, 33, 512, False),
        ],
    )
    def test_few_rows(
        self,
        rows: int,
        outputs: int,
        inputs: int,
        has_bias: bool,
        is_gated: bool,
        dtype: torch.dtype,
        error: float,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from pd.kernels import linear_triton

        monkeypatch.setattr(linear_triton, "_TINY", 8)
        monkeypatch.setattr(linear_triton, "_NARROW", 16)
        random = seeded()
        x = normal(random, rows, inputs).to(dtype)
        weight = normal(random, outputs * (1 + is_gated), inputs, scale=0.05).to(dtype)
        bias = normal(random, len(weight)).to(dtype) if has_bias else None
        assert linear_triton.can_multiply(x, weight)
        out = linear_triton.linear(
            x.to(DEVICE), weight.to(DEVICE), None if bias is None else bias.to(DEVICE), is_gated
        )
        assert out.dtype == dtype
        wide = None if bias is None else bias.float()
        expected = (gate_up_silu if is_gated else linear)(x.float(), weight.float(), wide)
        assert_near(out, expected, error)

    def test_what_does_not_fit(self) -> None:
        from pd.kernels import linear_triton

        weight = torch.zeros(8, 64, dtype=torch.float16)
        x = torch.zeros(linear_triton.MAX_ROWS, 64, dtype=torch.float16)
        assert linear_triton.can_multiply(x, weight)
        assert not linear_triton.can_multiply(torch.cat((x, x[:1])), weight)
        assert not linear_triton.can_multiply(x[:0], weight)
        assert not linear_triton.can_multiply(x.float(), weight.float())
        assert not linear_triton.can_multiply(x[:, :60], weight[:, :60])
        assert not linear_triton.can_multiply(x[:, :32], weight[:, :32])

    @pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
    @pytest.mark.parametrize("rows", [1, 2, 8, 16, 17])
    @pytest.mark.parametrize(
        ("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 896), (32, 2880)]
    )
    def test_sizes_of_models_on_a_gpu(self, rows: int, outputs: int, inputs: int) -> None:
        torch.manual_seed(0)
        x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) * 0.02
        assert_near(linear(x, weight), x.double() @ weight.double().T, 1e-2)
        gate, up = (x.double() @ weight.double().T).chunk(2, -1)
        silu = torch.nn.functional.silu(gate) * up
        assert_near(gate_up_silu(x, weight), silu, 1.5e-2)

    def test_which_many_rows_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from pd.kernels import gate_up_triton

        monkeypatch.setattr(gate_up_triton, "_count_programs", lambda device: 1)
        fits = gate_up_triton.can_multiply
        x, weight = (torch.zeros(n, 64, dtype=torch.float16) for n in (700, 256))
        assert fits(x, weight)
        assert not fits(x[:600], weight)
        assert not fits(x.float(), weight.float())
        assert not fits(x.bfloat16(), weight)
        assert not fits(x, weight[:248])
        assert not fits(x[:, :60].contiguous(), weight[:, :60].contiguous())
        assert not fits(x[:, :32], weight[:, :32])
        # Where in memory they begin.
        assert not fits(x.view(-1)[1:-63].view(-1, 64), weight)
        assert not fits(x, weight.view(-1)[1:-1023].view(-1, 64))
        monkeypatch.setattr(gate_up_triton, "_count_programs", lambda device: 0)
        assert not fits(x, weight)

    @pytest.mark.skipif(
        ON_GPU and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    )
    @pytest.mark.parametrize(("dtype", "error"), DTYPES[1:])
    @pytest.mark.parametrize(
        ("rows", "size", "inputs"), [(1, 128, 64), (130, 136, 72), (300, 8, 200), (257, 304, 128)]
    )
    def test_many_rows(
        self, rows: int, size: int, inputs: int, dtype: torch.dtype, error: float
    ) -> None:
        """Of whole tiles and of some that reach over every edge."""
        from pd.kernels import gate_up_triton

        random = seeded()
        x = normal(random, rows, inputs).to(dtype)
        weight = normal(random, 2 * size, inputs, scale=0.05).to(dtype)
        out = gate_up_triton.gate_up_silu(x.to(DEVICE), weight.to(DEVICE))
        assert out.dtype == dtype
        assert_near(out, gate_up_silu(x.float(), weight.float()), error)

    @pytest.mark.skipif(
        not ON_GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    )
    @pytest.mark.parametrize("rows", [1023, 1024, 5000])
    @pytest.mark.parametrize(("size", "inputs"), [(14336, 4096), (18944, 3584), (13000, 1000)])
    def test_many_rows_of_models_on_a_gpu(self, rows: int, size: int, inputs: int) -> None:
        from pd.kernels import gate_up_triton

        torch.manual_seed(0)
        x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.randn(2 * size, inputs, device=DEVICE, dtype=torch.bfloat16) * 0.02
        assert gate_up_triton.can_multiply(x, weight)
        gate, up = (x.double() @ weight.double().T).chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
        out = gate_up_silu(x, weight)
        assert_near(out, expected, 1.5e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = gate_up_silu(x, weight)
        graph.replay()
        assert torch.equal(again, out)

    @pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
    def test_overlapping_kernels_see_each_others_results(self) -> None:
        """A chain of kernels, launched as it is in a model and in a CUDA graph, equals the same
        operations one at a time."""
        torch.manual_seed(0)
        rows, size, layers = 4, 4096, 6
        shape = (layers, size, size)
        first, second = (torch.randn(shape, device=DEVICE).bfloat16() * 0.02 for _ in range(2))
        weight = torch.ones(size, device=DEVICE, dtype=torch.bfloat16)
        start = torch.randn(rows, size, device=DEVICE).bfloat16()

        def chain(is_serial: bool) -> torch.Tensor:
            residual, x = start.clone(), torch.zeros_like(start)
            for layer in range(layers):
                for matrix in (first[layer], second[layer]):
                    x = add_rms_norm(residual, x, weight, 1e-5)
                    if is_serial:
                        torch.cuda.synchronize()
                    x = linear(x, matrix)
                    if is_serial:
                        torch.cuda.synchronize()
            return add_rms_norm(residual, x, weight, 1e-5)

        expected = chain(is_serial=True)
        assert torch.equal(chain(is_serial=False), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(is_serial=False)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)
