"""Norm, rotation, activation and products against their formulas in float64."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from pd.kernels.activation import silu_and_mul
from pd.kernels.linear import linear, pack_weight
from pd.kernels.norm import rms_norm
from pd.kernels.rope import apply_rope, compute_rotations, inverse_frequencies

torch.set_num_threads(1)
DTYPES = pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=error, rtol=error)


class TestRMSNorm:
    @DTYPES
    def test_equals_its_formula(self, dtype: torch.dtype, error: float) -> None:
        x, weight = normal(5, 3, 32).to(dtype), normal(32, seed=1).to(dtype)
        wide = x.double()
        scale = (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        out = rms_norm(x, weight, 1e-5)
        assert out.dtype == dtype
        assert_near(out, wide / scale * weight.double(), error)

    def test_epsilon_matters_for_small_inputs(self) -> None:
        out = rms_norm(torch.full((1, 4), 1e-4), torch.ones(4), 1e-6)
        assert_near(out, torch.full((1, 4), 1e-4 / math.sqrt(1e-8 + 1e-6)), 1e-6)


class TestRope:
    @DTYPES
    def test_rotates_pairs_by_position_times_frequency(
        self, dtype: torch.dtype, error: float
    ) -> None:
        positions = torch.tensor([0, 1, 7, 1999])
        frequencies = inverse_frequencies(8, 10000.0)
        x = normal(4, 3, 8).to(dtype)
        out = apply_rope(x, compute_rotations(positions, frequencies))
        assert out.dtype == dtype
        pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
        angles = positions[:, None, None] * frequencies.double()
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        assert_near(out, torch.cat((turned.real, turned.imag), -1), max(error, 3e-4))

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_copies_what_is_after_the_rotated_part(self, interleaved: bool) -> None:
        x = normal(2, 3, 20)
        cos_sin = compute_rotations(torch.tensor([3, 4]), inverse_frequencies(8, 10000.0))
        out = apply_rope(x, cos_sin, interleaved=interleaved)
        assert torch.equal(out[..., :8], apply_rope(x[..., :8], cos_sin, interleaved=interleaved))
        assert torch.equal(out[..., 8:], x[..., 8:])

    def test_takes_heads_that_are_a_part_of_a_wider_tensor(self) -> None:
        wide = normal(2, 5, 8)
        cos_sin = compute_rotations(torch.tensor([3, 4]), inverse_frequencies(8, 10000.0))
        assert torch.equal(
            apply_rope(wide[:, 1:3], cos_sin), apply_rope(wide[:, 1:3].contiguous(), cos_sin)
        )

    def test_default_frequencies_are_a_geometric_series(self) -> None:
        assert_near(inverse_frequencies(8, 100.0), 100.0 ** -(torch.arange(4) / 4), 1e-6)

    def test_linear_scaling_stretches_every_wavelength(self) -> None:
        plain = inverse_frequencies(8, 100.0)
        assert_near(inverse_frequencies(8, 100.0, "linear", 4.0), plain / 4, 1e-7)

    def test_llama3_scaling_stretches_long_wavelengths_only(self) -> None:
        plain = inverse_frequencies(128, 500000.0)
        scaled = inverse_frequencies(128, 500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
        wavelengths = 2 * math.pi / plain
        is_short, is_long = wavelengths < 8192 / 4, wavelengths > 8192
        assert torch.equal(scaled[is_short], plain[is_short])
        assert torch.equal(scaled[is_long], plain[is_long] / 8)
        between = ~is_short & ~is_long
        assert between.any()
        assert (scaled[between] < plain[between]).all()
        assert (scaled[between] > plain[between] / 8).all()


class TestActivation:
    @DTYPES
    def test_equals_its_formula(self, dtype: torch.dtype, error: float) -> None:
        x = normal(4, 12).to(dtype)
        before = x.clone()
        gate, up = x.double().chunk(2, -1)
        assert_near(silu_and_mul(x), functional.silu(gate) * up, error)
        assert torch.equal(x, before)


MEMORY = """
import torch
from pd.kernels.linear import linear, pack_weight

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

torch.set_num_threads(1)
weights = [pack_weight(torch.randn(256 + 8 * i, 256)) for i in range(4)]
for rows in range(1, 400):
    for weight in weights:
        linear(torch.randn(rows, 256), weight)
    if rows == 100:
        before = resident()
print(resident() - before)
"""


class TestLinear:
    @pytest.mark.full
    def test_prompts_of_many_lengths_need_no_more_memory(self) -> None:
        """In a process of its own, for nobody else may have set up the caches."""
        done = subprocess.run(
            [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=60
        )
        assert int(done.stdout) < 64, f"{done.stdout} MiB more after 300 more lengths"

    @DTYPES
    @pytest.mark.parametrize("rows", [0, 1, 2, 17])
    def test_equals_its_formula(self, dtype: torch.dtype, error: float, rows: int) -> None:
        x, weight, bias = normal(rows, 6).to(dtype), normal(5, 6).to(dtype), normal(5).to(dtype)
        exact = x.double() @ weight.double().T
        with torch.inference_mode():
            assert_near(linear(x, weight), exact, error)
            assert_near(linear(x, weight, bias), exact + bias.double(), error)
            assert_near(linear(x, pack_weight(weight), bias), exact + bias.double(), error)

    @pytest.mark.parametrize("rows", [1, 16, 300])
    def test_packed_weights_serve_any_number_of_rows(self, rows: int) -> None:
        x, weight = normal(rows, 100), normal(70, 100, seed=1)
        with torch.inference_mode():
            assert_near(linear(x, pack_weight(weight)), x.double() @ weight.double().T, 1e-4)

    def test_takes_inputs_that_are_a_part_of_a_wider_tensor(self) -> None:
        wide, weight = normal(4, 12), normal(5, 6)
        assert_near(linear(wide[:, 3:9], weight), wide[:, 3:9] @ weight.T, 1e-5)
