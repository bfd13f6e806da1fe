"""MXFP4: the reference by the format's definition, and the grouped product by the reference."""

from __future__ import annotations

import pytest
import torch
from attention_cases import poisoned_memory
from kernels.test_moe_triton import draw_tokens, make_clamp, move
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from triton_device import (
    DEVICE,
    EACH_DTYPE,
    ON_GPU,
    assert_near,
    normal,
    seeded,
    skip_unless_interpreter_works,
)

from pd.kernels.activation import ClampedGate
from pd.kernels.local_experts import LocalExperts
from pd.kernels.moe import moe_mlp, route_tokens
from pd.kernels.mxfp4 import Mxfp4Weight, allocate_scales, dequantize_mxfp4


def make_mxfp4(
    random: torch.Generator, count: int, outputs: int, inputs: int, device: str = "cpu"
) -> Mxfp4Weight:
    """A stack of random matrices. Neighbouring scales differ by up to 16 times."""
    blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=random)
    scales = torch.randint(-2, 3, (count, outputs, inputs // 32), generator=random)
    # A random code has a magnitude of about 3.
    scales += 127 + round(float(torch.log2(torch.tensor(inputs**-0.5 / 3))))
    memory = allocate_scales(*scales.shape).to(device)
    return Mxfp4Weight(blocks.to(torch.uint8).to(device), memory.copy_(scales))


def read_code(code: int) -> float:
    """E2M1 by its definition."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


class TestReference:
    def test_every_code_and_scale_is_what_the_format_defines(self) -> None:
        blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
        scales = torch.tensor([0, 1, 50, 119, *range(122, 133), 250], dtype=torch.uint8)[None]
        values = dequantize_mxfp4(blocks, scales, torch.float32)[0].tolist()
        for index, value in enumerate(values):
            byte, exponent = index // 2, int(scales[0, index // 32]) - 127
            code = byte >> 4 if index % 2 else byte & 15
            assert value == read_code(code) * 2.0**exponent, index

    def test_equals_transformers_and_is_exact_in_bfloat16(self) -> None:
        weight = make_mxfp4(seeded(), 3, 20, 96)
        expected = convert_moe_packed_tensors(*weight, dtype=torch.float32).transpose(1, 2)
        for index in range(3):
            for dtype in (torch.float32, torch.bfloat16):
                found = weight.dequantize_matrix(index, dtype)
                assert found.dtype == dtype
                assert torch.equal(found.float(), expected[index])

    def test_experts_equal_dequantized_ones(self) -> None:
        random = seeded()
        x = normal(random, 9, 64)
        weights, ids = route_tokens(normal(random, 9, 5), 2, True)
        gate_up, down = make_mxfp4(random, 5, 2 * 32, 64), make_mxfp4(random, 5, 64, 32)
        wide = dequantize(gate_up), dequantize(down)
        clamp = make_clamp(*wide)
        found = moe_mlp(x, weights, ids, gate_up, down, clamp)
        assert torch.equal(found, moe_mlp(x, weights, ids, *wide, clamp))


def dequantize(weight: Mxfp4Weight) -> torch.Tensor:
    count = len(weight.blocks)
    matrices = [weight.dequantize_matrix(index, torch.float32).cpu() for index in range(count)]
    return torch.stack(matrices)


# The larger ones in one dtype only.
@pytest.mark.sample(cells=lambda params: params["tokens"] < 33 or params["dtype"] != torch.float32)
@EACH_DTYPE
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "size"),
    [
        (1, 8, 4, 64, 32),
        (5, 6, 2, 96, 64),
        (33, 3, 3, 32, 160),
        (40, 2, 1, 160, 32),
        (0, 4, 2, 32, 32),
    ],
)
def test_grouped_product(
    tokens: int,
    count: int,
    top_k: int,
    hidden: int,
    size: int,
    dtype: torch.dtype,
    error: float,
) -> None:
    from pd.kernels import moe_triton

    skip_unless_interpreter_works()
    random = seeded()
    x, weights, ids = draw_tokens(random, tokens, count, top_k, hidden, dtype)
    gate_up, down = (
        make_mxfp4(random, count, 2 * size, hidden),
        make_mxfp4(random, count, hidden, size),
    )
    wide = dequantize(gate_up), dequantize(down)
    clamp = make_clamp(*wide)
    there = [Mxfp4Weight(*(each.to(DEVICE) for each in weight)) for weight in (gate_up, down)]
    if tokens == 5:  # of any layout
        there = [Mxfp4Weight(blocks, scales.contiguous()) for blocks, scales in there]
    found = moe_mlp if ON_GPU else moe_triton.moe_mlp
    out = found(
        *(each.to(DEVICE) for each in (x, weights, ids)),
        *there,
        move(clamp, DEVICE, dtype),
    )
    assert out.dtype == dtype
    clamp = move(move(clamp, dtype), torch.float32)  # as rounded to the dtype
    assert_near(out, moe_mlp(x.float(), weights.float(), ids, *wide, clamp), 2 * error)


@EACH_DTYPE
@pytest.mark.parametrize(
    ("tokens", "ranks"), [pytest.param(1, 4, marks=pytest.mark.full), (5, 2), (33, 4)]
)
def test_ranks_with_different_experts_sum_to_the_whole(
    tokens: int, ranks: int, dtype: torch.dtype, error: float
) -> None:
    """Results of other ranks' assignments stay NaN, which must not reach a sum."""
    from pd.kernels import moe_triton

    skip_unless_interpreter_works()
    random = seeded()
    x, weights, ids = draw_tokens(random, tokens, 8, 3, 64, dtype)
    experts = make_mxfp4(random, 8, 2 * 32, 64), make_mxfp4(random, 8, 64, 32)
    clamp = move(make_clamp(*(dequantize(each) for each in experts)), dtype)
    sums = torch.zeros(tokens, 64)
    for first in range(0, 8, 8 // ranks):
        mine = slice(first, first + 8 // ranks)
        local = LocalExperts(first, 8)
        some = [Mxfp4Weight(*(each[mine] for each in weight)) for weight in experts]
        biases = clamp.gate_up_bias[mine], clamp.down_bias[mine]
        gate = ClampedGate(clamp.alpha, clamp.limit, *biases)
        there = [Mxfp4Weight(*(each.to(DEVICE) for each in weight)) for weight in some]
        found = moe_mlp if ON_GPU else moe_triton.moe_mlp
        inputs = [each.to(DEVICE) for each in (x, weights, ids)]
        with poisoned_memory():
            out = found(*inputs, *there, move(gate, DEVICE), local)
        wide = x.float(), weights.float(), ids, *some
        part = moe_mlp(*wide, move(gate, torch.float32), local)
        assert_near(out, part, 2 * error)
        sums += part
    wide = x.float(), weights.float(), ids, *experts
    assert_near(sums, moe_mlp(*wide, move(clamp, torch.float32)), 1e-5)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 4, 64, 400, 1000, 5000])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sizes_of_gpt_oss_20b_on_a_gpu_in_a_graph(tokens: int, ranks: int) -> None:
    random = seeded()
    size = 2880 // ranks
    gate_up, down = (
        make_mxfp4(random, 32, outputs, inputs, DEVICE)
        for outputs, inputs in ((2 * size, 2880), (2880, size))
    )
    x = normal(random, tokens, 2880).to(DEVICE, torch.bfloat16)
    logits = normal(random, tokens, 32).to(DEVICE, torch.bfloat16)
    wide = dequantize(gate_up), dequantize(down)
    clamp = make_clamp(*wide, alpha=1.702, limit=7.0)
    there = move(clamp, DEVICE, torch.bfloat16)

    def run() -> torch.Tensor:
        return moe_mlp(x, *route_tokens(logits, 4, True), gate_up, down, there)

    first = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    assert torch.equal(out, first)
    weights, ids = (each.cpu() for each in route_tokens(logits, 4, True))
    chosen = slice(0, tokens, max(1, tokens // 16))
    expected = moe_mlp(x[chosen].float().cpu(), weights[chosen].float(), ids[chosen], *wide, clamp)
    assert_near(out[chosen], expected, 3e-2)
