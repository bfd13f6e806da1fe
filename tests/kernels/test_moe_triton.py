"""Routing and the grouped matrix product by the loop over experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import poisoned_memory
from torch.nn import functional
from triton_device import (
    DEVICE,
    EACH_DTYPE,
    ON_GPU,
    assert_near,
    normal,
    seeded,
)

from pd.kernels.activation import ClampedGate
from pd.kernels.local_experts import LocalExperts
from pd.kernels.moe import moe_mlp, route_tokens

pytestmark = pytest.mark.usefixtures("triton_works")


def experts(
    tokens: int, count: int, top_k: int, hidden: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """x, weights, ids, gate_up and down."""
    random = seeded()
    x, weights, ids = draw_tokens(random, tokens, count, top_k, hidden, dtype)
    gate_up = normal(random, count, 2 * size, hidden, scale=hidden**-0.5).to(dtype)
    down = normal(random, count, hidden, size, scale=size**-0.5).to(dtype)
    return x, weights, ids, gate_up, down


def draw_tokens(
    random: torch.Generator, tokens: int, count: int, top_k: int, hidden: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Draw tokens, and the weights and numbers of the experts that they choose."""
    x = normal(random, tokens, hidden).to(dtype)
    return x, *route_tokens(normal(random, tokens, count).to(dtype), top_k, True)


def make_clamp(
    gate_up: torch.Tensor, down: torch.Tensor, alpha: float = 1.3, limit: float = 0.7
) -> ClampedGate:
    """Biases for these weights. The limit is so small that most values are clamped."""
    random = seeded()
    bias = normal(random, *gate_up.shape[:2]).to(gate_up.dtype)
    return ClampedGate(alpha, limit, bias, normal(random, *down.shape[:2]).to(down.dtype))


def move(clamp: ClampedGate, *args: Any) -> ClampedGate:
    biases = clamp.gate_up_bias.to(*args), clamp.down_bias.to(*args)
    return ClampedGate(clamp.alpha, clamp.limit, *biases)


class TestReference:
    def test_is_the_sum_over_each_tokens_experts(self) -> None:
        x, weights, ids, gate_up, down = experts(7, 5, 3, 16, 12, torch.float32)
        expected = torch.zeros_like(x)
        for token in range(7):
            for weight, expert in zip(weights[token], ids[token], strict=True):
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                expected[token] += weight * (down[expert] @ (functional.silu(gate) * up))
        assert_near(moe_mlp(x, weights, ids, gate_up, down), expected, 1e-5)

    def test_clamped_experts_alternate_gate_and_up(self) -> None:
        x, weights, ids, gate_up, down = experts(7, 5, 3, 16, 12, torch.float32)
        clamp = make_clamp(gate_up, down)
        expected, clamped = torch.zeros_like(x), 0
        for token in range(7):
            for weight, expert in zip(weights[token], ids[token], strict=True):
                both = gate_up[expert] @ x[token] + clamp.gate_up_bias[expert]
                inner = []
                for gate, up in both.view(-1, 2).tolist():
                    clamped += (gate > 0.7) + (abs(up) > 0.7)
                    gate, up = min(gate, 0.7), max(min(up, 0.7), -0.7)
                    inner.append((up + 1) * gate / (1 + math.exp(-1.3 * gate)))
                out = down[expert] @ torch.tensor(inner) + clamp.down_bias[expert]
                expected[token] += weight * out
        assert clamped > 50
        assert_near(moe_mlp(x, weights, ids, gate_up, down, clamp), expected, 1e-5)

    def test_normalized_weights_are_a_softmax_over_the_chosen(self) -> None:
        logits = normal(seeded(), 6, 10)
        weights, ids = route_tokens(logits, 4, True)
        assert_near(weights, torch.softmax(logits.gather(1, ids), -1), 1e-6)
        weights, ids = route_tokens(logits, 4, False)
        assert_near(weights, torch.softmax(logits, -1).gather(1, ids), 1e-6)


@pytest.mark.sample
@EACH_DTYPE
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("tokens", "count", "top_k"), [(1, 8, 2), (9, 60, 8), (3, 5, 5), (0, 4, 2)]
)
def test_routing(
    tokens: int, count: int, top_k: int, normalize: bool, dtype: torch.dtype, error: float
) -> None:
    from pd.kernels import moe_triton

    # No two logits of a token are equal, in any dtype.
    logits = torch.rand(tokens, count, generator=seeded()).argsort(-1).to(dtype) / 8
    expected_weights, expected_ids = route_tokens(logits, top_k, normalize)
    weights, ids = moe_triton.route_tokens(logits.to(DEVICE), top_k, normalize)
    assert torch.equal(ids.cpu(), expected_ids)
    assert weights.dtype == dtype
    assert_near(weights, expected_weights, error)


@pytest.mark.sample
@EACH_DTYPE
@pytest.mark.parametrize("is_clamped", [False, True])
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "size", "ranks"),
    [
        (1, 16, 4, 32, 16, 8),
        (5, 8, 2, 48, 20, 2),
        pytest.param(33, 6, 3, 40, 24, 3, marks=pytest.mark.full),
        (40, 2, 1, 32, 48, 2),
        (0, 4, 2, 8, 8, 2),
    ],
)
def test_ranks_with_different_experts_sum_to_the_whole(
    tokens: int,
    count: int,
    top_k: int,
    hidden: int,
    size: int,
    ranks: int,
    is_clamped: bool,
    dtype: torch.dtype,
    error: float,
) -> None:
    """Results of other ranks' assignments stay NaN, which must not reach a sum."""
    from pd.kernels import moe_triton

    x, weights, ids, gate_up, down = experts(tokens, count, top_k, hidden, size, dtype)
    clamp = make_clamp(gate_up, down) if is_clamped else None
    each = count // ranks
    sums = torch.zeros(tokens, hidden, dtype=torch.float32)
    for first in range(0, count, each):
        mine = slice(first, first + each)
        some = None
        if clamp is not None:
            biases = clamp.gate_up_bias[mine], clamp.down_bias[mine]
            some = ClampedGate(clamp.alpha, clamp.limit, *biases)
        local = LocalExperts(first, count)
        arguments = x, weights, ids, gate_up[mine], down[mine]
        there = None if some is None else move(some, DEVICE)
        with poisoned_memory():
            out = moe_triton.moe_mlp(*(t.to(DEVICE) for t in arguments), there, local)
        wide = x.float(), weights.float(), ids, gate_up[mine].float(), down[mine].float()
        part = moe_mlp(*wide, None if some is None else move(some, torch.float32), local)
        assert out.dtype == dtype
        assert_near(out, part, 2 * error)
        sums += part
    wide = x.float(), weights.float(), ids, gate_up.float(), down.float()
    whole = moe_mlp(*wide, None if clamp is None else move(clamp, torch.float32))
    assert_near(sums, whole, 1e-5)


@pytest.mark.sample
@EACH_DTYPE
@pytest.mark.parametrize("is_clamped", [False, True])
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "size"),
    [
        (1, 16, 4, 32, 16),
        (5, 8, 2, 48, 20),
        (33, 5, 3, 40, 24),
        (40, 2, 1, 32, 48),
        (0, 4, 2, 8, 8),
    ],
)
def test_grouped_product(
    tokens: int,
    count: int,
    top_k: int,
    hidden: int,
    size: int,
    is_clamped: bool,
    dtype: torch.dtype,
    error: float,
) -> None:
    from pd.kernels import moe_triton

    arguments = experts(tokens, count, top_k, hidden, size, dtype)
    x, weights, ids, gate_up, down = arguments
    clamp = make_clamp(gate_up, down) if is_clamped else None
    there = None if clamp is None else move(clamp, DEVICE)
    out = moe_triton.moe_mlp(*(each.to(DEVICE) for each in arguments), there)
    assert out.dtype == dtype
    wide_clamp = None if clamp is None else move(clamp, torch.float32)
    wide = moe_mlp(x.float(), weights.float(), ids, gate_up.float(), down.float(), wide_clamp)
    assert_near(out, wide, 2 * error)


def test_all_tokens_may_choose_one_expert() -> None:
    from pd.kernels import moe_triton

    x, weights, _, gate_up, down = experts(20, 6, 1, 16, 16, torch.float32)
    for expert in (0, 3, 5):
        ids = torch.full((20, 1), expert)
        out = moe_triton.moe_mlp(*(t.to(DEVICE) for t in (x, weights, ids, gate_up, down)))
        assert_near(out, moe_mlp(x, weights, ids, gate_up, down), 1e-5)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 4, 64, 1000, 5000])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sizes_of_qwen3_30b_on_a_gpu_in_a_graph(tokens: int, ranks: int) -> None:
    """With two ranks, each has half of the experts."""
    random = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        wide = torch.randn(shape, device=DEVICE, generator=random, dtype=torch.bfloat16)
        return wide.mul_(scale)

    x, gate_up = draw(tokens, 2048, scale=1.0), draw(128, 1536, 2048, scale=0.02)
    down, logits = draw(128, 2048, 768, scale=0.03), draw(tokens, 128, scale=1.0)

    def run() -> torch.Tensor:
        routed, each = route_tokens(logits, 8, True), 128 // ranks
        parts = [
            moe_mlp(
                x,
                *routed,
                gate_up[begin : begin + each],
                down[begin : begin + each],
                local=LocalExperts(begin, 128) if ranks > 1 else None,
            )
            for begin in range(0, 128, each)
        ]
        return torch.stack(parts).sum(0)

    first = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    assert torch.equal(out, first)
    weights, ids = (each.cpu() for each in route_tokens(logits, 8, True))
    chosen = slice(0, tokens, max(1, tokens // 16))
    expected = moe_mlp(
        x[chosen].float().cpu(),
        weights[chosen].float(),
        ids[chosen],
        gate_up.float().cpu(),
        down.float().cpu(),
    )
    assert_near(out[chosen], expected, 3e-2)
