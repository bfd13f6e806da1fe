"""Model directories in the Hugging Face layout, written and read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from embedded import vocabulary
from embedded.eagle import Eagle1, Eagle3, EagleHead
from embedded.model import CONTEXT_LENGTH, EPS, THETA, Blocks, Qwen3, Shape
from embedded.text import END_OF_TEXT, TURN_END

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

# Directories below pd/assets.
EMBEDDED_DIR, DRAFT_DIR = "embedded", "embedded-draft"
EAGLE_DIR, EAGLE3_DIR = "embedded-eagle", "embedded-eagle3"
WEIGHTS = "model.safetensors"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def save_qwen3(model: Qwen3, tokenizer: Tokenizer, directory: Path, *, drafts: bool) -> None:
    """Write a directory for transformers; ``drafts``: without the tokenizer, which is another's."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {"model.embed_tokens.weight": model.embed_tokens, "model.norm.weight": model.norm}
    _save_tensors(tensors | _by_layer(model.blocks, "model."), directory)
    end, pad = (tokenizer.token_to_id(t) for t in (TURN_END, END_OF_TEXT))
    config = _config(model.shape) | {"eos_token_id": end, "pad_token_id": pad}
    _write_json(config, directory / "config.json")
    _write_json({"eos_token_id": end, "pad_token_id": pad}, directory / "generation_config.json")
    if not drafts:
        vocabulary.save(tokenizer, directory, CONTEXT_LENGTH)


def save_eagle(head: EagleHead, vocab: int, directory: Path) -> None:
    """Write a head in the layout that SGLang and vLLM read.

    Args:
        vocab: size of the embedded model's vocabulary.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # What training keeps apart from fc.
    fc = head.fc[0] * head.scales.repeat_interleave(head.shape.hidden)
    tensors = {"fc.weight": fc}
    config = _config(head.shape) | {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    prefix = "layers.0"
    if isinstance(head, Eagle3):
        assert head.tokens is not None, "EAGLE-3 was trained for some tokens"
        prefix = "midlayer"
        tensors |= {
            "norm.weight": head.norm,
            "lm_head.weight": head.lm_head,
            "d2t": head.tokens - torch.arange(len(head.tokens), device=head.tokens.device),
            "t2d": torch.isin(torch.arange(vocab, device=head.tokens.device), head.tokens),
        }
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": head.shape.vocab,
            # Ids are those of the layers whose output is read.
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.layers],
                "use_aux_hidden_state": True,
            },
        }
    else:
        config["bias"] = False
    del config["use_sliding_window"]
    layer = {stored: getattr(head, name) for name, stored in _eagle_names(head, prefix).items()}
    flat = {name: t[0] if t.dim() == 3 else t for name, t in layer.items()}
    _save_tensors(tensors | flat, directory)
    _write_json(config, directory / "config.json")


def load_qwen3(directory: Path) -> Qwen3:
    """Load the model written by :func:`save_qwen3`, in float32."""
    config = json.loads((directory / "config.json").read_text())
    model = Qwen3(_shape(config))
    tensors = load_file(directory / WEIGHTS)
    with torch.no_grad():
        model.embed_tokens.copy_(tensors["model.embed_tokens.weight"])
        model.norm.copy_(tensors["model.norm.weight"])
        _fill_layers(model.blocks, tensors, "model.")
    return model


def load_eagle(directory: Path) -> EagleHead:
    """Load a head written by :func:`save_eagle`, in float32."""
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / WEIGHTS)
    head: EagleHead
    if "draft_vocab_size" in config:
        ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        shape = replace(_shape(config), vocab=config["draft_vocab_size"])
        head = Eagle3(shape, tuple(layer + 1 for layer in ids))
        head.tokens = tensors["d2t"] + torch.arange(shape.vocab)
        own, prefix = ("norm", "lm_head"), "midlayer"
    else:
        head, own, prefix = Eagle1(_shape(config)), (), "layers.0"
    with torch.no_grad():
        head.fc[0].copy_(tensors["fc.weight"])
        for name in own:
            getattr(head, name).copy_(tensors[f"{name}.weight"])
        for name, stored in _eagle_names(head, prefix).items():
            weight = getattr(head, name)
            weight.copy_(tensors[stored].view_as(weight))
    return head


def _eagle_names(head: EagleHead, prefix: str) -> dict[str, str]:
    """Name in a checkpoint of each weight of the layer of a head."""
    attention = (name for name in _ATTENTION if name.endswith("_proj"))
    norms = ["post_attention_layernorm"]
    if isinstance(head, Eagle3):
        norms += ["input_layernorm", "hidden_norm"]
    return {
        **{name: f"{prefix}.self_attn.{name}.weight" for name in attention},
        **{name: f"{prefix}.mlp.{name}.weight" for name in _MLP},
        **{name: f"{prefix}.{name}.weight" for name in norms},
    }


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def _shape(config: dict[str, Any]) -> Shape:
    return Shape(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        mlp=config["intermediate_size"],
        head_dim=config["head_dim"],
    )


def _names(layer: int, prefix: str) -> dict[str, str]:
    """Name in a checkpoint of each kind of weight of one layer."""
    place = f"{prefix}layers.{layer}"
    return {
        **{name: f"{place}.self_attn.{name}.weight" for name in _ATTENTION},
        **{name: f"{place}.mlp.{name}.weight" for name in _MLP},
        **{name: f"{place}.{name}.weight" for name in _NORMS},
    }


def _by_layer(blocks: Blocks, prefix: str) -> dict[str, torch.Tensor]:
    return {
        stored: getattr(blocks, name)[layer]
        for layer in range(blocks.shape.layers)
        for name, stored in _names(layer, prefix).items()
    }


def _fill_layers(blocks: Blocks, tensors: dict[str, torch.Tensor], prefix: str) -> None:
    for layer in range(blocks.shape.layers):
        for name, stored in _names(layer, prefix).items():
            getattr(blocks, name)[layer].copy_(tensors[stored])


def _save_tensors(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    ready = {
        name: (t.detach().bfloat16() if t.is_floating_point() else t).cpu().contiguous()
        for name, t in tensors.items()
    }
    save_file(ready, directory / WEIGHTS, metadata={"format": "pt"})
    # It is made readable for its owner alone.
    (directory / WEIGHTS).chmod(0o644)


def _write_json(value: object, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
