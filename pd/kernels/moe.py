"""A mixture of gated MLPs. Each token uses a few of them (Shazeer et al., 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd.kernels.activation import clamped_swiglu
from pd.kernels.dispatch import uses_triton
from pd.kernels.fp8 import Fp8Weight
from pd.kernels.linear import gate_up_silu, linear
from pd.kernels.mxfp4 import Mxfp4Weight

if TYPE_CHECKING:
    from pd.kernels.activation import ClampedGate
    from pd.kernels.fp8 import Weight
    from pd.kernels.local_experts import LocalExperts


def route_tokens(
    router_logits: torch.Tensor, top_k: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token.

    Args:
        router_logits: ``[tokens, experts]``.
        top_k: experts of a token.
        normalize: whether to scale the weights of a token to sum to 1, which makes them a softmax
            over the chosen experts alone. Otherwise they are probabilities of a softmax over all.

    Returns:
        weights in the dtype of the logits and ids int64, both ``[tokens, top_k]``, likeliest first.
    """
    if uses_triton(router_logits):
        from pd.kernels import moe_triton

        return moe_triton.route_tokens(router_logits, top_k, normalize)
    probabilities = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    weights, ids = probabilities.topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(router_logits.dtype), ids


def route_in_groups(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    scores: str,
    num_groups: int,
    num_chosen_groups: int,
    group_best: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token as DeepSeek-V2 and V3 do: first groups of experts, then
    experts in these groups.

    Args:
        logits: float32 ``[tokens, experts]``.
        bias: float32 ``[experts]``, added to the scores for the choice but not for the weights;
            None for none.
        top_k: experts of a token, all within ``num_chosen_groups``.
        scores: ``softmax`` over all experts, or ``sigmoid``.
        num_groups: groups of equally many adjacent experts.
        num_chosen_groups: groups of a token.
        group_best: a group's score is the sum of this many of its best experts.
        normalize: whether to scale the weights of a token to sum to 1.
        scale: factor of all weights, in the end.

    Returns:
        weights float32 and ids int64, both ``[tokens, top_k]``.
    """
    scored = logits.sigmoid() if scores == "sigmoid" else logits.softmax(dim=-1)
    choice = scored if bias is None else scored + bias
    if num_groups > 1:
        groups = choice.view(len(choice), num_groups, -1)
        best = groups.topk(group_best, dim=-1).values.sum(dim=-1)
        hidden = torch.ones_like(best, dtype=torch.bool)
        hidden.scatter_(1, best.topk(num_chosen_groups, dim=-1).indices, False)
        choice = groups.masked_fill(hidden[..., None], float("-inf")).flatten(1)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scored.gather(1, ids)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids


def moe_mlp(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Weight | Mxfp4Weight,
    down: Weight | Mxfp4Weight,
    clamp: ClampedGate | None = None,
    local: LocalExperts | None = None,
) -> torch.Tensor:
    """Compute the weighted sum of each token's experts, ``down(silu(gate(x)) * up(x))`` each.

    Args:
        x: ``[tokens, hidden]``.
        weights, ids: from :func:`route_tokens` or :func:`route_in_groups`. The ids of a token
            differ.
        gate_up: ``[experts, 2 * size, hidden]``, gate then up, contiguous, in fp8 or in MXFP4.
        down: ``[experts, hidden, size]`` in the same format.
        clamp: another activation than silu, and biases. Then the rows of ``gate_up`` alternate gate
            and up.
        local: which of the layer's experts ``gate_up`` and ``down`` have; None for all. Other
            experts add nothing to the sums.

    Returns:
        A new tensor like ``x``.
    """
    if uses_triton(x) and isinstance(gate_up, Fp8Weight):
        assert isinstance(down, Fp8Weight) and clamp is None
        from pd.kernels import moe_fp8_triton

        return moe_fp8_triton.moe_mlp(x, weights, ids, gate_up, down, local)
    if uses_triton(x) and isinstance(gate_up, torch.Tensor | Mxfp4Weight):
        assert isinstance(down, torch.Tensor | Mxfp4Weight)
        from pd.kernels import moe_triton

        return moe_triton.moe_mlp(x, weights, ids, gate_up, down, clamp, local)
    top_k = ids.shape[1]
    # Assignments (token, expert) in the order of experts, so each expert's are one slice.
    assigned, order = ids.flatten().sort(stable=True)
    tokens, weights = order // top_k, weights.flatten()[order, None]
    counts = torch.bincount(assigned).tolist()
    out = torch.zeros_like(x)
    first_expert = 0 if local is None else local.first
    stop = sum(counts[:first_expert])
    mine_only = counts[first_expert : first_expert + _count_matrices(gate_up)]
    for expert, count in enumerate(mine_only):
        if count == 0:
            continue
        start, stop = stop, stop + count
        mine = tokens[start:stop]
        first, second = (_select_matrix(each, expert, x.dtype) for each in (gate_up, down))
        if clamp is None:
            result = linear(gate_up_silu(x[mine], first), second)
        else:
            both = linear(x[mine], first, clamp.gate_up_bias[expert])
            inner = clamped_swiglu(both, clamp.alpha, clamp.limit)
            result = linear(inner, second, clamp.down_bias[expert])
        out.index_add_(0, mine, result.mul_(weights[start:stop]))
    return out


def _count_matrices(weights: Weight | Mxfp4Weight) -> int:
    if isinstance(weights, Mxfp4Weight):
        return len(weights.blocks)
    return len(weights if isinstance(weights, torch.Tensor) else weights.values)


def _select_matrix(weights: Weight | Mxfp4Weight, expert: int, dtype: torch.dtype) -> Weight:
    if isinstance(weights, Mxfp4Weight):
        return weights.dequantize_matrix(expert, dtype)
    return weights[expert] if isinstance(weights, torch.Tensor) else weights.select(expert)
