"""The grouped product in fp8 by the loop over experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import poisoned_memory
from kernels.test_fp8_triton import make_weight, move_weight, normal_there
from triton_device import (
    DEVICE,
    EACH_DTYPE,
    ON_GPU,
    SEED,
    normal,
    seeded,
    skip_unless_interpreter_works,
)

from pd.kernels import moe
from pd.kernels.fp8 import Fp8Inputs, Fp8Rows, Fp8Weight, quantize_rows
from pd.kernels.local_experts import LocalExperts
from pd.kernels.moe import moe_mlp, route_tokens


def make_stack(
    random: torch.Generator, count: int, outputs: int, inputs: Fp8Inputs, rows: int
) -> Fp8Weight:
    stack = [make_weight(random, outputs, inputs, rows) for _ in range(count)]
    values = torch.stack([each.values.view(torch.uint8) for each in stack])
    scales = torch.stack([each.scales for each in stack])
    return Fp8Weight(values.view(stack[0].values.dtype), scales, rows, inputs)


def make_experts(
    random: torch.Generator, count: int, hidden: int, size: int, group: int, lead: int = 0
) -> tuple[Fp8Weight, Fp8Weight]:
    """gate_up and down. Up begins in the middle of a block if ``size`` is no multiple of 128."""
    rows = 32 if group else 1
    gate_up = make_stack(random, count, 2 * size, Fp8Inputs(hidden, group), rows)
    down = Fp8Inputs(size, group, lead)
    return gate_up, make_stack(random, count, hidden, down, 128 if group else 1)


def replace_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert with torch, because the interpreter converts some numbers wrongly."""
    from pd.kernels import moe_fp8_triton

    def convert(x: torch.Tensor, inputs: Fp8Inputs, limit: torch.Tensor | None = None) -> Fp8Rows:
        if limit is not None:  # the rest may hold NaN, and the result must not depend on it
            x = x.clone()
            x[int(limit) :] = 1e4
        return quantize_rows(x, inputs)

    if not ON_GPU:
        monkeypatch.setattr(moe_fp8_triton, "quantize_rows", convert)


@pytest.mark.sample
@EACH_DTYPE
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "ranks"),
    [
        (1, 8, 4, 4),
        (5, 6, 2, 2),
        pytest.param(33, 3, 3, 3, marks=pytest.mark.full),
        (0, 4, 2, 2),
    ],
)
def test_ranks_with_different_experts_sum_to_the_whole(
    tokens: int,
    count: int,
    top_k: int,
    ranks: int,
    group: int,
    dtype: torch.dtype,
    error: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results of other ranks' assignments stay NaN, which must not reach a sum."""
    from pd.kernels import moe_fp8_triton

    skip_unless_interpreter_works()
    replace_conversion(monkeypatch)
    random = seeded()
    x = normal(random, tokens, 96).to(dtype)
    weights, ids = route_tokens(normal(random, tokens, count).to(dtype), top_k, True)
    experts = make_experts(random, count, 96, 160, group, 64 if group else 0)
    each = count // ranks
    sums = torch.zeros(tokens, 96, dtype=torch.float32)
    for first in range(0, count, each):
        some = [take_experts(weight, first, each) for weight in experts]
        local = LocalExperts(first, count)
        there = [each.to(DEVICE) for each in (x, weights, ids)]
        moved = [move_weight(each) for each in some]
        with poisoned_memory():
            out = moe_fp8_triton.moe_mlp(*there, *moved, local)
        assert out.dtype == dtype
        assert bool(torch.isfinite(out).all())
        part = moe_mlp(x, weights, ids, *some, local=local).float()
        assert float((out.cpu().float() - part).norm()) <= max(error, 0.02) * float(part.norm())
        sums += part
    whole = moe_mlp(x, weights, ids, *experts).float()
    assert float((sums - whole).norm()) <= 4 * error * float(whole.norm())


def take_experts(weight: Fp8Weight, first: int, count: int) -> Fp8Weight:
    """Some matrices of a stack."""
    mine = slice(first, first + count)
    return replace(weight, values=weight.values[mine], scales=weight.scales[mine])


@pytest.mark.parametrize("limit", [0, 4, 9])
@pytest.mark.parametrize(("group", "is_long"), [(0, False), (128, False), (0, True)])
def test_conversion_ends_at_a_limit(
    group: int, is_long: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows from there on are not even written."""
    from pd.kernels import fp8_rows_triton

    skip_unless_interpreter_works()
    if is_long:
        monkeypatch.setattr(fp8_rows_triton, "_LONG_BLOCK", 128)
        monkeypatch.setattr(fp8_rows_triton, "_LONG_ROWS", 8)
    inputs = Fp8Inputs(300, group)
    x = normal(seeded(), 9, 300).half().to(DEVICE)
    whole = fp8_rows_triton.quantize_rows(x, inputs)
    with poisoned_memory():
        found = fp8_rows_triton.quantize_rows(
            x, inputs, limit=torch.tensor([limit]).int().to(DEVICE)
        )
    assert torch.equal(
        found.values[:limit].view(torch.uint8), whole.values[:limit].view(torch.uint8)
    )
    assert torch.equal(found.scales[:limit], whole.scales[:limit])
    assert bool(found.scales[limit:].isnan().all())


@pytest.mark.sample
@EACH_DTYPE
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "size", "lead"),
    [
        (1, 8, 4, 64, 32, 0),
        (5, 6, 2, 96, 160, 64),
        (33, 3, 3, 200, 96, 32),
        (100, 1, 1, 96, 64, 0),
        (0, 4, 2, 32, 32, 0),
    ],
)
def test_grouped_product(
    tokens: int,
    count: int,
    top_k: int,
    hidden: int,
    size: int,
    lead: int,
    group: int,
    dtype: torch.dtype,
    error: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pd.kernels import moe_fp8_triton

    skip_unless_interpreter_works()
    replace_conversion(monkeypatch)
    random = seeded()
    x = normal(random, tokens, hidden).to(dtype)
    weights, ids = route_tokens(normal(random, tokens, count).to(dtype), top_k, True)
    experts = make_experts(random, count, hidden, size, group, lead if group else 0)
    out = moe_fp8_triton.moe_mlp(
        *(each.to(DEVICE) for each in (x, weights, ids)), *(move_weight(each) for each in experts)
    )
    assert out.dtype == dtype
    expected = moe_mlp(x, weights, ids, *experts)
    # A number between two of fp8 may become either.
    assert out.shape == expected.shape
    difference = (out.cpu().float() - expected.float()).norm()
    assert float(difference) <= max(error, 0.02) * float(expected.float().norm())


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize(("count", "top_k", "size"), [(64, 6, 704), (128, 8, 768)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sizes_of_models_on_a_gpu_in_a_graph(
    group: int,
    tokens: int,
    count: int,
    top_k: int,
    size: int,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two ranks, each has half of the experts."""
    random = torch.Generator(DEVICE).manual_seed(SEED)
    with torch.device(DEVICE):
        experts = make_experts(random, count, 2048, size, group)
        x = normal_there(random, tokens, 2048).bfloat16()
        logits = normal_there(random, tokens, count).bfloat16()

    def run() -> torch.Tensor:
        routed, each = route_tokens(logits, top_k, True), count // ranks
        parts = [
            moe_mlp(
                x,
                *routed,
                *(take_experts(weight, begin, each) for weight in experts),
                local=LocalExperts(begin, count) if ranks > 1 else None,
            )
            for begin in range(0, count, each)
        ]
        return torch.stack(parts).sum(0)

    first = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    assert torch.equal(out, first)
    routed = route_tokens(logits, top_k, True)
    monkeypatch.setattr(moe, "uses_triton", lambda _: False)
    expected = moe_mlp(x, *routed, *experts).float()
    # A number between two of fp8 may become either.
    assert float((out.float() - expected).norm()) <= 0.03 * float(expected.norm())


def test_a_stack_is_selected_by_expert() -> None:
    random = seeded()
    stack = make_stack(random, 3, 64, Fp8Inputs(200, 128), 32)
    wide = stack.dequantize_weight()
    for expert in range(3):
        alone = stack.select(expert)
        assert torch.equal(replace(alone).dequantize_weight(), wide[expert])
