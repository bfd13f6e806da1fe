"""Checkpoints with scales of a KV cache in fp8, and what transformers makes of such a cache.

Nothing here uses our conversion: K and V are rounded by code of its own.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from checkpoints import make_checkpoint, reference_model
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

if TYPE_CHECKING:
    from pathlib import Path

# Scales per layer, K and V: powers of two and others, and one with which K saturates.
SCALES = [(0.5, 0.013), (1 / 700, 1.0), (0.03, 0.25)]
Scales = list[tuple[float, float]]


def make_scaled_checkpoint(
    architecture: str, directory: Path, scales: Scales = SCALES, **settings: Any
) -> Path:
    """Write a checkpoint with a scale of K and V in each layer, some in each way of naming them."""
    make_checkpoint(architecture, directory, **settings)
    write_scales(directory, scales)
    return directory


def write_scales(directory: Path, scales: Scales) -> None:
    """Write scales into the last file of a checkpoint."""
    shard = max(directory.glob("*.safetensors"))
    tensors = load_file(shard)
    for layer, (k, v) in enumerate(scales):
        prefix = f"model.layers.{layer}.self_attn"
        names = ("k_proj.k_scale", "v_proj.v_scale") if layer % 2 else ("k_scale", "v_scale")
        for name, scale in zip(names, (k, v), strict=True):
            tensors[f"{prefix}.{name}"] = torch.tensor([scale][: 1 + layer] if layer % 2 else scale)
    save_file(tensors, shard, {"format": "pt"})


def round_to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Round to the nearest multiple of ``scale`` times a number of float8_e4m3fn: three bits of
    mantissa, exponents down to -6, at most 448. Ties go to even."""
    scaled = (x / scale).clamp(-448, 448)
    exponent = scaled.abs().clamp(min=2.0**-6).log2().floor()
    step = torch.exp2(exponent - 3)
    return (scaled / step).round() * step * scale


class Fp8Cache(DynamicCache):
    """Rounds everything that it gets: keys after the rotation, and values. With latent attention
    these are latents and the rotated key, which have one scale.

    ``noise``: relative error that all of it gets before, by chance.
    """

    def __init__(self, scales: Scales, noise: float = 0.0) -> None:
        super().__init__()
        self._scales_of, self._noise = scales, noise

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, **rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._scales_of[layer_idx]
        rounded = (
            round_to_fp8(x * (1 + self._noise * torch.randn_like(x)), scale)
            for x, scale in ((key_states, k), (value_states, v))
        )
        return super().update(*rounded, layer_idx, **rest)


@torch.inference_mode()
def fp8_logits(
    directory: Path, token_ids: list[int], scales: Scales, noise: float = 0.0
) -> torch.Tensor:
    """Compute float32 logits ``[len(token_ids), vocab_size]`` of a whole sequence whose K and V are
    rounded to fp8 before they are attended to; ``noise`` as in :class:`Fp8Cache`."""
    model = reference_model(directory)
    if hasattr(model.config, "kv_lora_rank"):
        scales = [(k, k) for k, _ in scales]
    cache = Fp8Cache(scales, noise)
    return model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True).logits[0]


def is_fp8_greedy(
    directory: Path, prompt: list[int], tokens: list[int], scales: Scales, tie: float = 2e-3
) -> bool:
    """Return whether each token is the best one with a cache in fp8, or within ``tie``.

    A number between two of fp8 may become either one, because rounding errors of float32 differ
    with the size of a batch. This moves logits a little, or a lot if a token gets another expert.
    So a token may also be the best one with errors of that size in what is rounded.
    """
    wanted = torch.tensor(tokens)[:, None]
    right = torch.zeros(len(tokens), dtype=torch.bool)
    for noise in (0.0, *[1e-5] * 20):
        logits = fp8_logits(directory, prompt + tokens, scales, noise)[len(prompt) - 1 : -1]
        right |= logits.max(dim=1).values - logits.gather(1, wanted)[:, 0] <= tie
        if right.all():
            return True
    return False


def repeated_prompts(seed: int) -> list[list[int]]:
    """Texts that repeat themselves, so that n-grams find something, and two with a common
    beginning."""
    rng = random.Random(seed)
    texts = [
        [rng.randrange(256) for _ in range(size)] * rng.randrange(2, 5) for size in (9, 20, 40)
    ]
    return [*texts, texts[2][:70] + texts[0], [rng.randrange(256)]]
