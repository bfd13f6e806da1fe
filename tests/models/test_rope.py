"""Rotary embeddings are those of transformers, in both spellings of their settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pd.core.errors import UsageError
from pd.models.config_reader import parse_model_config
from pd.models.layers import Rotary

_SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}
_QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
_DEEPSEEK = {**_QWEN, "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

SETTINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {**_LLAMA3, "original_max_position_embeddings": 1024},
    _QWEN,
    {"rope_type": "yarn", "factor": 1.0},
    {**_DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**_DEEPSEEK, "mscale": 1.0},
    {**_DEEPSEEK, "truncate": False, "rope_theta": 150000.0},
    {**_DEEPSEEK, "beta_fast": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    {**_DEEPSEEK, "attention_factor": 1.25, "mscale": 0.707, "mscale_all_dim": 1.0},
]


@pytest.mark.parametrize("rope", SETTINGS)
@pytest.mark.parametrize("version", [4, 5])
def test_rotations_equal_transformers(rope: dict[str, Any], version: int) -> None:
    theta = rope.get("rope_theta", 10000.0)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if version == 4:
        settings = {"rope_theta": theta, "rope_scaling": {"type": scaling.pop("rope_type")}}
        settings["rope_scaling"] |= scaling
    else:
        settings = {"rope_parameters": {"rope_theta": theta, **scaling}}
    config = parse_model_config({**_SHAPE, **settings})
    reference = LlamaConfig(
        **{key: value for key, value in _SHAPE.items() if key != "model_type"},
        rope_parameters={"rope_theta": theta, **rope},
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](reference, torch.device("cpu"))
    positions = torch.tensor([0, 1, 17, 300, 8191])
    found = Rotary(config, torch.device("cpu")).compute_rotations(positions)
    angles = positions.float()[:, None, None] * frequencies
    expected = torch.stack((angles.cos(), angles.sin())) * scale
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_yarn_stretches_the_original_context() -> None:
    """Checkpoints such as Qwen's get YaRN by hand, without another max_position_embeddings."""
    shape = {**_SHAPE, "max_position_embeddings": 40960}
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert parse_model_config({**shape, "rope_scaling": rope}).context_length == 131072
    del rope["original_max_position_embeddings"]
    assert parse_model_config({**shape, "rope_scaling": rope}).context_length == 163840
    linear = {"rope_type": "linear", "factor": 4.0}
    assert parse_model_config({**shape, "rope_scaling": linear}).context_length == 40960


@pytest.mark.parametrize("missing", ["yarn", "dynamic", "linear"])
def test_a_missing_factor_is_named(missing: str) -> None:
    with pytest.raises(UsageError, match=f"rope type '{missing}' needs a number for 'factor'"):
        parse_model_config({**_SHAPE, "rope_scaling": {"rope_type": missing}})
