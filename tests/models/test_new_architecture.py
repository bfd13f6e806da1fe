"""A new architecture takes one file and one line in the table: here one that pd does not have."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from greedy_engine import generate
from safetensors.torch import load_file, save_file
from torch.nn import functional

from pd.core.config import NodeConfig
from pd.core.errors import UnsupportedModelError
from pd.engine.engine import Engine
from pd.engine.model_runner import ModelRunner
from pd.models import registry
from pd.models.config_reader import read_model_config

if TYPE_CHECKING:
    from pathlib import Path

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 128, 32, 2, 4, 2, 48
HEAD_DIM, EPS, THETA = HIDDEN // HEADS, 1e-6, 10000.0
CONFIG = {
    "architectures": ["SquaredReluForCausalLM"],
    "model_type": "squared_relu",
    "hidden_size": HIDDEN,
    "ffn_size": FFN,
    "max_position_embeddings": 512,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
}


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line in the table."""
    line = registry.ListedArchitecture("SquaredReluForCausalLM", "squared_relu:SquaredRelu")
    monkeypatch.setitem(registry.ARCHITECTURES, "squared_relu", line)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    kv = KV_HEADS * HEAD_DIM
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    norms = ["model.norm"]
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        shapes |= {
            f"{layer}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{layer}.self_attn.k_proj": (kv, HIDDEN),
            f"{layer}.self_attn.v_proj": (kv, HIDDEN),
            f"{layer}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"{layer}.ffn.up": (FFN, HIDDEN),
            f"{layer}.ffn.down": (HIDDEN, FFN),
        }
    weights = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    weights |= {f"{name}.weight": 1 + 0.1 * torch.randn(HIDDEN) for name in norms}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def reference_logits(weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Logits of the last token, in plain torch and without a cache."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weights[f"{name}.weight"]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            (h @ weights[f"{layer}.self_attn.{name}_proj.weight"].T)
            .view(len(tokens), -1, HEAD_DIM)
            .transpose(0, 1)
            for name in "qkv"
        )
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (rotated(k), v))
        attended = functional.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        attended = attended.transpose(0, 1).flatten(1)
        x = x + attended @ weights[f"{layer}.self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        wide = functional.relu(h @ weights[f"{layer}.ffn.up.weight"].T) ** 2
        x = x + wide @ weights[f"{layer}.ffn.down.weight"].T
    return norm(x[-1], "model.norm") @ weights["lm_head.weight"].T


def test_without_its_line_it_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="SquaredReluForCausalLM"):
        read_model_config(checkpoint)


@pytest.mark.usefixtures("listed")
def test_an_engine_generates_what_a_reference_does(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    config = NodeConfig(role="unified", model=checkpoint, kv_cache_tokens=1024)
    engine = Engine.build(config)
    assert isinstance(engine.runner, ModelRunner)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in (1, 20, 70)]
    sequences = generate(engine.runner, prompts, 8, max_chunk=16, seed=0)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        tokens = list(prompt)
        for token, logits in zip(sequence.output, sequence.logits, strict=True):
            expected = reference_logits(weights, tokens)
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
            assert token == int(expected.argmax())
            tokens.append(token)
