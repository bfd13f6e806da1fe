"""Tiny checkpoints with a layer for drafts (MTP), and the drafts that transformers makes of it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from checkpoints import make_checkpoint, reference_model
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

if TYPE_CHECKING:
    from pathlib import Path

    from pd.engine.draft_tree import DraftTree

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
# A difference of two logits that rounding may turn around.
TIE = 1e-4


def make_mtp_checkpoint(architecture: str, directory: Path, **overrides: Any) -> Path:
    """Write a checkpoint as :func:`checkpoints.make_checkpoint` does, with a layer for drafts.

    The layer has random weights, and copies of embedding and head that are all zero: nobody reads
    them.
    """
    path = make_checkpoint(architecture, directory, **overrides)
    file = path / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(7)
    # The last layer is one of experts, as the layer for drafts is.
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    own = {}
    for name, tensor in tensors.items():
        if name.startswith(f"model.layers.{last}."):
            own[name.replace(f".{last}.", f".{last + 1}.", 1)] = _make_noise(tensor, generator)
    hidden = tensors["model.norm.weight"]
    prefix = f"model.layers.{last + 1}"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        own[f"{prefix}.{name}.weight"] = _make_noise(hidden, generator)
    joined = torch.empty(len(hidden), 2 * len(hidden))
    own[f"{prefix}.eh_proj.weight"] = _make_noise(joined, generator)
    embedding = tensors["model.embed_tokens.weight"]
    for name in ("embed_tokens", "shared_head.head"):
        own[f"{prefix}.{name}.weight"] = torch.zeros_like(embedding)
    save_file({**tensors, **own}, file, {"format": "pt"})
    return path


def _make_noise(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.dim() == 1:
        return torch.rand(like.shape, generator=generator) + 0.5
    noise = torch.randn(like.shape, generator=generator)
    return noise * 1.8 * like.shape[-1] ** -0.5


@functools.lru_cache(maxsize=16)
def reference_mtp(directory: Path) -> Any:
    """Load transformers' model of the layer, float32 on the CPU, cached."""
    model = reference_model(directory)
    config = model.config
    # transformers knows the layer by its number in published checkpoints.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_hidden_layers}\..*"]
    if config.model_type == "glm4_moe_lite":  # transformers does not say what its layer is
        config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ["sparse"]
    return MtpModel.from_pretrained(model).eval()


@torch.inference_mode()
def reference_draft_logits(directory: Path, known: list[int], drafts: list[int]) -> torch.Tensor:
    """Compute the logits of each draft and of one more, ``[1 + len(drafts), vocab_size]``: a plain
    loop without a cache.

    Args:
        known: tokens of the sequence. The model has computed all but the last one.
        drafts: drafted tokens after them.
    """
    model, mtp = reference_model(directory), reference_mtp(directory)
    hidden = model.model(torch.tensor([known[:-1]])).last_hidden_state
    found = []
    for count in range(len(drafts) + 1):
        tokens = torch.tensor([known[1:] + drafts[:count]])
        positions = torch.arange(1, tokens.shape[1] + 1)[None]
        out = mtp.forward_layer(0, hidden, positions, None, input_ids=tokens)
        found.append(model.lm_head(out[0, -1]))
        hidden = torch.cat((hidden, out[:, -1:]), dim=1)
    return torch.stack(found)


def are_drafted(
    directory: Path, known: list[int], tokens: list[int], tree: DraftTree, ranks: tuple[int, ...]
) -> bool:
    """Whether greedy guesses are those of the plain loop after their branch, up to ties.

    Args:
        ranks: rank of each guess among the likeliest tokens at its place, from 0 on.
    """
    for guess, path in enumerate(tree.paths):
        if guess in tree.parents:
            continue
        branch = [tokens[each] for each in path]
        rows = reference_draft_logits(directory, known, branch[:-1])
        for logits, token, each in zip(rows, branch, path, strict=True):
            expected = logits.topk(ranks[each] + 1).values[-1]
            if abs(logits[token] - expected) > TIE:
                return False
    return True
