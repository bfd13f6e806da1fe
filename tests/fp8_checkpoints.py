"""Tiny checkpoints in fp8, and what transformers makes of them with inputs that it rounds to fp8.

Nothing here uses our conversion: weights and inputs are rounded by code of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from checkpoints import make_checkpoint, reference_model
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FP8 = torch.float8_e4m3fn
BLOCK = 128
# Inputs above 448 times this saturate. Some of a norm's outputs do.
STATIC_SCALE = 1.5 / 448
# The projections of one fused weight. In static checkpoints the largest of their scales counts.
_SMALLER = ("q_proj", "gate_proj")
# Splits its inputs among ranks.
_REDUCED = ("o_proj", "down_proj")
# Sizes that are no multiples of 128, nor is the half of them that each of two ranks has.
SHAPES: dict[str, dict[str, Any]] = {
    "llama3": {"hidden_size": 160, "intermediate_size": 352},
    "qwen3_moe": {"hidden_size": 160, "moe_intermediate_size": 176},
    "deepseek_v3": {
        "hidden_size": 160,
        "intermediate_size": 352,
        "moe_intermediate_size": 176,
        "kv_lora_rank": 144,
    },
}
_GROUP = {"num_bits": 8, "type": "float", "symmetric": True}
_DYNAMIC: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
SETTINGS: dict[str, dict[str, Any]] = {
    "block": {**_DYNAMIC, "weight_block_size": [BLOCK, BLOCK]},
    "ue8m0": {**_DYNAMIC, "weight_block_size": [BLOCK, BLOCK], "scale_fmt": "ue8m0"},
    "tensor": _DYNAMIC,
    "static": {"quant_method": "fp8", "activation_scheme": "static"},
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_GROUP, "strategy": "channel", "dynamic": False},
                "input_activations": {**_GROUP, "strategy": "token", "dynamic": True},
            }
        },
    },
    "modelopt": {
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        }
    },
}
KINDS = tuple(SETTINGS)
_PER_TENSOR = ("tensor", "static", "modelopt")
_IN_BLOCKS = ("block", "ue8m0")
_STATIC = ("static", "modelopt")


def make_fp8_checkpoint(
    architecture: str,
    kind: str,
    directory: Path,
    plain_modules: tuple[str, ...] = (),
    make: Callable[..., Path] = make_checkpoint,
) -> tuple[Path, Path]:
    """Write a checkpoint in fp8, and one with the weights that it stands for.

    Args:
        kind: one of :data:`KINDS`.
        plain_modules: ends of names of modules that are not quantized.
        make: writes the checkpoint that is quantized.
    """
    fp8, plain = directory / "fp8", directory / "plain"
    make(architecture, plain, **SHAPES[architecture])
    shutil.copytree(plain, fp8)
    for shard in plain.glob("*.safetensors"):
        stored, meant = {}, {}
        for name, weight in load_file(shard).items():
            module = name.removesuffix(".weight")
            if not module.endswith("_proj") or module.endswith(plain_modules or "no module"):
                stored[name] = meant[name] = weight
                continue
            stored[name], scale, meant[name] = quantize_weight(weight, kind)
            ending = "weight_scale_inv" if kind in _IN_BLOCKS else "weight_scale"
            stored[f"{module}.{ending}"] = scale
            if kind in _STATIC:
                factor = 0.5 if module.endswith(_SMALLER) else 1.0
                stored[f"{module}.input_scale"] = torch.tensor(STATIC_SCALE * factor)
            if kind == "modelopt" and module.endswith(("k_proj", "v_proj")):
                stored[f"{module}.{module[-6]}_scale"] = torch.tensor(0.5)
        save_file(stored, fp8 / shard.name, {"format": "pt"})
        save_file(meant, shard, {"format": "pt"})
    add_settings(fp8, kind)
    return fp8, plain


def add_settings(directory: Path, kind: str) -> None:
    """Say in a checkpoint's files that its weights are quantized."""
    if kind == "modelopt":
        (directory / "hf_quant_config.json").write_text(json.dumps(SETTINGS[kind]))
        return
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": SETTINGS[kind]}
    path.write_text(json.dumps(config))


def quantize_weight(
    weight: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the values in fp8, their scales as stored, and the float32 weight that they mean."""
    if kind in _IN_BLOCKS:
        rows, columns = (range(0, size, BLOCK) for size in weight.shape)
        scale = torch.stack(
            [
                torch.stack([weight[r : r + BLOCK, c : c + BLOCK].abs().max() for c in columns])
                for r in rows
            ]
        )
        scale = scale / 448
        if kind == "ue8m0":
            scale = 2.0 ** torch.ceil(torch.log2(scale))
        full = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        full = full[: weight.shape[0], : weight.shape[1]]
    elif kind in _PER_TENSOR:
        full = scale = weight.abs().max() / 448
    else:
        full = scale = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / full).to(FP8)
    stored = scale.to(torch.float8_e8m0fnu) if kind == "ue8m0" else scale
    return values, stored, values.float() * full


def round_inputs(x: torch.Tensor, kind: str, parts: int = 1) -> torch.Tensor:
    """Round the inputs of a weight as a checkpoint of this kind does.

    Args:
        parts: number of ranks among which the inputs are divided; each has scales of its own.
    """
    step = BLOCK if kind in _IN_BLOCKS else x.shape[-1]
    cuts = set(range(0, x.shape[-1], step)) | set(range(0, x.shape[-1], x.shape[-1] // parts))
    rounded = torch.empty_like(x)
    for start, stop in zip(sorted(cuts), [*sorted(cuts)[1:], x.shape[-1]], strict=True):
        group = x[..., start:stop]
        scale = group.abs().amax(-1, keepdim=True) / 448
        if kind in _STATIC:
            scale = torch.full_like(scale, STATIC_SCALE)
        elif kind == "ue8m0":
            scale = 2.0 ** torch.ceil(torch.log2(scale))
        scale = scale.where(scale > 0, 1.0)
        rounded[..., start:stop] = (group / scale).clamp(-448, 448).to(FP8).float() * scale
    return rounded


@torch.inference_mode()
def compute_logits(
    plain: Path,
    kind: str,
    token_ids: list[int],
    parts: int = 1,
    plain_modules: tuple[str, ...] = (),
    expert_parts: int | None = None,
) -> torch.Tensor:
    """Have transformers compute the logits ``[tokens, vocabulary]`` of the weights at ``plain``
    with rounded inputs.

    Args:
        plain_modules: ends of names of modules whose inputs stay as they are.
        expert_parts: number of ranks that divide an expert, if not ``parts``.
    """
    model = reference_model(plain)
    with inputs_rounded(model, kind, parts, plain_modules, expert_parts):
        return model(torch.tensor([token_ids])).logits[0]


@contextlib.contextmanager
def inputs_rounded(
    model: torch.nn.Module,
    kind: str,
    parts: int = 1,
    plain_modules: tuple[str, ...] = (),
    expert_parts: int | None = None,
) -> Iterator[None]:
    """Have a model of transformers round the inputs of weights; arguments as of
    :func:`compute_logits`."""
    for_experts = parts if expert_parts is None else expert_parts
    # The up-projection of latents is part of attention, so its inputs stay as they are.
    exact, added = ("kv_b_proj", *plain_modules), []
    for name, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, torch.nn.Parameter):
            module.forward = functools.partial(_run_experts, module, kind, for_experts)
        elif name.endswith("_proj") and not name.endswith(exact):
            mine = parts if name.endswith(_REDUCED) else 1
            added.append(module.register_forward_pre_hook(functools.partial(_round, kind, mine)))
    try:
        yield
    finally:
        for hook in added:
            hook.remove()


def _round(kind: str, parts: int, module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (round_inputs(args[0], kind, parts),)


def _run_experts(
    module: Any, kind: str, parts: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    out = []
    for token, experts, shares in zip(x, ids, weights, strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(experts, shares, strict=True):
            gate, up = (module.gate_up_proj[expert] @ round_inputs(token, kind)).chunk(2)
            inner = round_inputs(torch.nn.functional.silu(gate) * up, kind, parts)
            total += share * (module.down_proj[expert] @ inner)
        out.append(total)
    return torch.stack(out)
