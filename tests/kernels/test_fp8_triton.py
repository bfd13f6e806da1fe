"""Kernels of fp8 equal the reference, which runs on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from triton_device import (
    DEVICE,
    EACH_DTYPE,
    ON_GPU,
    SEED,
    assert_near,
    normal,
    seeded,
    skip_unless_interpreter_works,
)

from pd.kernels.activation import silu_and_mul
from pd.kernels.fp8 import (
    FP8,
    Fp8Inputs,
    Fp8Rows,
    Fp8Weight,
    can_multiply_blocks,
    can_multiply_scaled,
    can_multiply_values,
    compute_scales,
    dequantize_rows,
    multiply_blocks,
    multiply_fp8,
    multiply_scaled,
    multiply_values,
    quantize_rows,
)
from pd.kernels.linear import linear
from pd.kernels.norm import add_rms_norm, rms_norm

# Sizes that are no multiple of 128 or of a tile, and first inputs in the middle of a group.
INPUTS = {
    "channel": Fp8Inputs(200),
    "wide": Fp8Inputs(1040),
    "static": Fp8Inputs(96, scale=torch.full((1,), 0.004)),
    "block": Fp8Inputs(384, 128),
    "tail": Fp8Inputs(576, 128, lead=64),
    "ue8m0": Fp8Inputs(1300, 128, rounds_scales=True),
}
KIND = pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())


def move(inputs: Fp8Inputs) -> Fp8Inputs:
    return inputs if inputs.scale is None else replace(inputs, scale=inputs.scale.to(DEVICE))


def normal_there(random: torch.Generator, *shape: int) -> torch.Tensor:
    """Draw float32 on the generator's device."""
    return torch.randn(shape, generator=random, device=random.device)


def make_weight(
    random: torch.Generator, outputs: int, inputs: Fp8Inputs, rows: int | None = None
) -> Fp8Weight:
    """Make random weights whose padding is zero. Scales differ by up to 4 times."""
    rows = rows or (128 if inputs.group else 1)
    values = torch.zeros(outputs, inputs.width)
    drawn = normal_there(random, outputs, inputs.size) * 100
    values[:, inputs.lead : inputs.lead + inputs.size] = drawn
    scales = 1 + 3 * torch.rand(-(-outputs // rows), inputs.num_groups, generator=random)
    scales *= inputs.size**-0.5 / 200
    return Fp8Weight(values.clamp(-448, 448).to(FP8), scales, rows, inputs)


def move_weight(weight: Fp8Weight) -> Fp8Weight:
    values, scales = weight.values.to(DEVICE), weight.scales.to(DEVICE)
    return replace(weight, values=values, scales=scales, inputs=move(weight.inputs))


def move_rows(rows: Fp8Rows, device: str) -> Fp8Rows:
    return Fp8Rows(rows.values.to(device), rows.scales.to(device), rows.dtype)


def multiply_exactly(rows: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of the values that fp8 stands for, on the CPU."""
    wide = dequantize_rows(move_rows(rows, "cpu"), weight.inputs)
    return functional.linear(wide.double(), weight.dequantize_weight().double(), bias)


@pytest.mark.sample
@EACH_DTYPE
@KIND
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rows_are_quantized_as_by_the_reference(
    inputs: Fp8Inputs, tokens: int, dtype: torch.dtype, error: float
) -> None:
    from pd.kernels import fp8_rows_triton

    skip_unless_interpreter_works()
    # A slice of wider rows, a token of zeros, and numbers beyond the range of a scale from the
    # checkpoint.
    x = normal(seeded(), tokens, inputs.size + 8, scale=3.0)[:, : inputs.size].to(dtype)
    x[1:2] = 0
    x[2:3] *= 100
    expected = quantize_rows(x, inputs)
    found = fp8_rows_triton.quantize_rows(x.to(DEVICE), move(inputs))
    assert found.values.shape == (tokens, inputs.width)
    assert torch.equal(found.scales.cpu(), expected.scales)
    assert_same_values(found, expected)


def assert_same_values(found: Fp8Rows, expected: Fp8Rows, error: float = 0.0) -> None:
    """Assert that values in fp8 are the same, except for a share ``error`` of neighbours."""
    mine, other = found.values.cpu().float(), expected.values.cpu().float()
    if ON_GPU and error == 0:
        assert torch.equal(mine, other)
        return
    difference = (mine - other).abs()
    is_off = difference > (0 if ON_GPU else other.abs() / 8 + 2**-9)
    if not ON_GPU:
        # The interpreter loses the carry of some numbers that round up to a power of two.
        assert float(is_off.sum()) <= 0.05 * is_off.numel()
        assert bool((difference <= other.abs() / 2).logical_or(~is_off).all())
        return
    assert float(is_off.sum()) <= error * is_off.numel()
    assert bool((difference <= other.abs() / 4 + 2**-8).all())


@pytest.mark.sample
@EACH_DTYPE
@KIND
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_activations_are_quantized_as_after_the_gate(
    inputs: Fp8Inputs, tokens: int, dtype: torch.dtype, error: float
) -> None:
    from pd.kernels import fp8_rows_triton

    skip_unless_interpreter_works()
    gate_up = normal(seeded(), tokens, 2 * inputs.size, scale=2.0).to(dtype)
    expected = quantize_rows(silu_and_mul(gate_up), inputs)
    found = fp8_rows_triton.silu_and_quantize(gate_up.to(DEVICE), move(inputs))
    assert found.dtype == dtype
    assert_near(found.scales, expected.scales, max(error, 1e-5))
    assert_same_values(found, expected, 0.1)


@pytest.mark.sample
@EACH_DTYPE
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("lead", [0, 16])
def test_long_rows_are_quantized_in_blocks(
    is_gated: bool, lead: int, dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pd.kernels import fp8_rows_triton

    skip_unless_interpreter_works()
    inputs = Fp8Inputs(1300, lead=lead)
    x = normal(seeded(), 5, (1 + is_gated) * inputs.size, scale=2.0).to(dtype).to(DEVICE)
    x[2] = 0
    expected = fp8_rows_triton.quantize_rows(x, inputs, is_gated)
    monkeypatch.setattr(fp8_rows_triton, "_LONG_ROWS", 4)
    monkeypatch.setattr(fp8_rows_triton, "_LONG_BLOCK", 512)
    launched = []
    launch = fp8_rows_triton.launch_kernel
    monkeypatch.setattr(
        fp8_rows_triton,
        "launch_kernel",
        lambda *args, **kw: (launched.append(args[0]), launch(*args, **kw)),
    )
    found = fp8_rows_triton.quantize_rows(x, inputs, is_gated)
    assert launched == [fp8_rows_triton._quantize_long_rows]
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.values.float(), expected.values.float())


@pytest.mark.sample
@EACH_DTYPE
@KIND
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("adds", [False, True])
def test_norms_are_quantized_as_after_the_norm(
    inputs: Fp8Inputs, tokens: int, adds: bool, dtype: torch.dtype, error: float
) -> None:
    from pd.kernels import fp8_rows_triton

    skip_unless_interpreter_works()
    inputs = replace(inputs, lead=0)
    random = seeded()
    x, residual = (normal(random, tokens, inputs.size).to(dtype) for _ in range(2))
    weight = (1 + 0.1 * normal(random, inputs.size)).to(dtype)
    there = residual.to(DEVICE, copy=True) if adds else None
    found = fp8_rows_triton.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5, move(inputs), there)
    normed = add_rms_norm(residual, x, weight, 1e-5) if adds else rms_norm(x, weight, 1e-5)
    if there is not None:
        assert_near(there, residual, error)
    expected = quantize_rows(normed, inputs)
    assert found.dtype == dtype
    assert_near(found.scales, expected.scales, max(error, 1e-5))
    assert_same_values(found, expected, 0.1)


@KIND
def test_scales_of_tokens_do_not_depend_on_their_neighbours(inputs: Fp8Inputs) -> None:
    from pd.kernels import fp8_rows_triton

    skip_unless_interpreter_works()
    x = normal(seeded(), 5, inputs.size).to(DEVICE)
    together = fp8_rows_triton.quantize_rows(x, move(inputs))
    for row in range(5):
        alone = fp8_rows_triton.quantize_rows(x[row : row + 1], move(inputs))
        assert torch.equal(alone.scales[0], together.scales[row])
        assert torch.equal(alone.values[0].float(), together.values[row].float())


@pytest.mark.parametrize("rounds", [False, True])
def test_the_largest_input_uses_the_whole_range(rounds: bool) -> None:
    from pd.kernels import fp8_rows_triton

    skip_unless_interpreter_works()
    largest = torch.tensor([[1e-30], [0.37], [448.0], [3e38]])
    x = torch.cat((largest, -largest / 2), 1)
    inputs = Fp8Inputs(2, rounds_scales=rounds)
    found = fp8_rows_triton.quantize_rows(x.to(DEVICE), inputs)
    assert torch.equal(found.scales.cpu(), compute_scales(largest, rounds))
    low = 223.0 if rounds else 447.0
    assert bool((found.values[1:, 0].float().cpu() > low).all())


@pytest.mark.sample
@EACH_DTYPE
@KIND
@pytest.mark.parametrize(
    ("tokens", "outputs", "has_bias"),
    [(1, 48, False), (5, 300, True), (20, 96, True), (130, 130, False), (0, 16, False)],
)
def test_products(
    inputs: Fp8Inputs,
    tokens: int,
    outputs: int,
    has_bias: bool,
    dtype: torch.dtype,
    error: float,
) -> None:
    from pd.kernels import fp8_triton

    skip_unless_interpreter_works()
    random = seeded()
    x = normal(random, tokens, inputs.size).to(dtype)
    bias = normal(random, outputs).to(dtype) if has_bias else None
    # Fused projections may share scales among fewer rows.
    weight = make_weight(random, outputs, inputs, 2 if inputs.group and outputs == 300 else None)
    rows = quantize_rows(x, inputs)
    expected = multiply_exactly(rows, weight, None if bias is None else bias.double())
    out = fp8_triton.multiply_rows(
        move_rows(rows, DEVICE),
        move_weight(weight),
        None if bias is None else bias.to(DEVICE),
    )
    assert out.dtype == dtype
    # Tensor cores of Hopper add products of fp8 with 14 bits.
    assert_near(out, expected, max(error, 2e-3))


@pytest.mark.sample
@EACH_DTYPE
@KIND
@pytest.mark.parametrize("outputs", [48, 300])
@pytest.mark.parametrize("depth", [256, 2048])
def test_products_of_one_row(
    inputs: Fp8Inputs, outputs: int, depth: int, dtype: torch.dtype, error: float
) -> None:
    from pd.kernels import fp8_triton

    skip_unless_interpreter_works()
    random = seeded()
    bias = normal(random, outputs).to(dtype) if outputs == 300 else None
    weight = make_weight(random, outputs, inputs, 16 if inputs.group and outputs == 48 else None)
    rows = quantize_rows(normal(random, 1, inputs.size).to(dtype), inputs)
    expected = multiply_exactly(rows, weight, None if bias is None else bias.double())
    out = fp8_triton.multiply_row(
        move_rows(rows, DEVICE),
        move_weight(weight),
        None if bias is None else bias.to(DEVICE),
        fp8_triton.Fp8Tile(1, 8, depth, 4, 4),
    )
    assert out.dtype == dtype
    assert_near(out, expected, error)


def skip_unless_torch_multiplies() -> None:
    """Skip on a CPU if torch has its products of fp8 rows for GPUs alone, as torch 2.11 does."""
    skip_unless_interpreter_works()
    if DEVICE == "cpu":
        inputs = INPUTS["channel"]
        rows = quantize_rows(torch.ones(16, inputs.size).bfloat16(), inputs)
        try:
            multiply_scaled(rows, make_weight(seeded(), 16, inputs), None)
        except NotImplementedError:
            pytest.skip("this torch multiplies rows in fp8 on GPUs alone")


def test_torch_multiplies_with_a_scale_for_each_row() -> None:
    from pd.kernels import fp8_rows_triton

    skip_unless_torch_multiplies()
    random = seeded()
    inputs = INPUTS["channel"]
    x, weight = normal(random, 80, inputs.size).bfloat16(), make_weight(random, 96, inputs)
    bias = normal(random, 96).bfloat16()
    rows = quantize_rows(x, inputs)
    assert can_multiply_scaled(rows, weight)
    assert not can_multiply_scaled(quantize_rows(x.float(), inputs), weight)
    assert not can_multiply_scaled(rows, make_weight(random, 90, inputs))
    assert not can_multiply_scaled(rows, make_weight(random, 96, INPUTS["block"]))
    expected = multiply_exactly(rows, weight, bias.double())
    # In memory as kernels lay it out.
    there = fp8_rows_triton.quantize_rows(x.to(DEVICE), inputs)
    there.values.copy_(rows.values)
    there.scales.copy_(rows.scales)
    out = multiply_scaled(there, move_weight(weight), bias.to(DEVICE))
    assert out.dtype == torch.bfloat16
    assert_near(out, expected, 1.5e-2)


@pytest.mark.sample
@EACH_DTYPE
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_sums_of_torch_are_scaled(
    tokens: int, has_bias: bool, dtype: torch.dtype, error: float
) -> None:
    from pd.kernels import fp8_triton

    skip_unless_torch_multiplies()
    random = seeded()
    inputs = INPUTS["wide"]
    weight = make_weight(random, 1040, inputs)
    bias = normal(random, 1040).to(dtype) if has_bias else None
    rows = quantize_rows(normal(random, tokens, inputs.size).to(dtype), inputs)
    assert can_multiply_values(rows, weight)
    assert not can_multiply_values(rows, make_weight(random, 1041, inputs))
    assert not can_multiply_values(rows, make_weight(random, 1040, INPUTS["block"]))
    expected = multiply_exactly(rows, weight, None if bias is None else bias.double())
    there, moved = move_rows(rows, DEVICE), move_weight(weight)
    out = fp8_triton.scale_sums(
        multiply_values(there, moved), there, moved, None if bias is None else bias.to(DEVICE)
    )
    assert out.dtype == dtype
    assert_near(out, expected, max(error, 2e-3))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [17, 33, 64, 65, 1001])
@pytest.mark.parametrize("has_bias", [False, True])
def test_cublas_multiplies_blocks_on_a_gpu(tokens: int, has_bias: bool) -> None:
    from pd.kernels import fp8_rows_triton

    random = seeded()
    inputs = Fp8Inputs(1000, 128)
    weight = move_weight(make_weight(random, 384, inputs))
    x = normal(random, tokens, inputs.size).bfloat16()
    # Rows differ much, so that scales of other rows would be seen.
    x *= 10 ** (4 * torch.rand(tokens, 1, generator=random) - 2).bfloat16()
    bias = normal(random, 384).bfloat16() if has_bias else None
    rows = fp8_rows_triton.quantize_rows(x.to(DEVICE), inputs)
    assert can_multiply_blocks(rows, weight)
    assert not can_multiply_blocks(move_rows(rows, "cpu"), weight)
    assert not can_multiply_blocks(rows._replace(dtype=torch.float16), weight)
    for outputs, shared in ((385, 128), (384, 64)):
        other = move_weight(make_weight(random, outputs, inputs, shared))
        assert not can_multiply_blocks(rows, other)
    out = multiply_blocks(rows, weight, None if bias is None else bias.to(DEVICE))
    assert out.shape == (tokens, 384)
    assert out.is_contiguous()
    here = Fp8Weight(weight.values.cpu(), weight.scales.cpu(), 128, inputs)
    expected = multiply_exactly(rows, here, None if bias is None else bias.double())
    for row in range(tokens):
        assert_near(out[row], expected[row], 1e-2)


def test_scales_of_a_group_are_next_to_each_other() -> None:
    from pd.kernels import fp8_rows_triton

    skip_unless_interpreter_works()
    inputs = INPUTS["tail"]
    for tokens in (1, 7, 33):
        x = normal(seeded(), tokens, inputs.size)
        found = fp8_rows_triton.quantize_rows(x.to(DEVICE), inputs)
        expected = quantize_rows(x, inputs)
        for rows in (found, expected):
            assert tokens == 1 or rows.scales.stride(0) == 1
            assert rows.values.is_contiguous()
        assert torch.equal(found.scales.cpu(), expected.scales)
        padded = found.scales.stride(1)
        assert padded == -(-tokens // 16) * 16
        assert found.values.untyped_storage().nbytes() == padded * inputs.width


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64, 65, 200, 1001, 2048])
@pytest.mark.parametrize(
    ("outputs", "size"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (704, 1408)]
)
def test_sizes_of_models_on_a_gpu_in_a_graph(
    group: int, tokens: int, outputs: int, size: int
) -> None:
    random = torch.Generator(DEVICE).manual_seed(SEED)
    with torch.device(DEVICE):
        weight = make_weight(random, outputs, Fp8Inputs(size, group))
        x = normal_there(random, tokens, size).bfloat16()

    def run() -> torch.Tensor:
        return linear(x, weight)

    first = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    assert torch.equal(out, first)
    chosen = slice(0, tokens, max(1, tokens // 8))
    rows = quantize_rows(x[chosen].float(), weight.inputs)
    assert_near(out[chosen], multiply_fp8(rows, weight), 1.5e-2)
