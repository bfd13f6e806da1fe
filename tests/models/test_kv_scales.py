"""Scales of a KV cache in fp8, as checkpoints name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from checkpoints import make_checkpoint
from fp8_checkpoints import make_fp8_checkpoint
from fp8_kv import SCALES, make_scaled_checkpoint
from safetensors.torch import load_file, save_file

from pd.core.errors import UsageError
from pd.models.config_reader import read_model_config
from pd.models.kv_scales import read_kv_scales
from pd.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path


def add_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    shard = max(directory.glob("*.safetensors"))
    prefixed = {f"model.layers.{name}": tensor for name, tensor in tensors.items()}
    save_file(load_file(shard) | prefixed, shard, {"format": "pt"})


def read_scales(directory: Path, load_format: str = "auto") -> tuple[float, ...]:
    return read_kv_scales(directory, read_model_config(directory), load_format)


def test_each_layer_has_scales_of_k_and_v(tmp_path: Path) -> None:
    make_scaled_checkpoint("llama3", tmp_path)  # in several files
    scales = torch.tensor(SCALES).flatten().tolist()
    assert read_scales(tmp_path) == tuple(scales)
    assert read_scales(tmp_path, "dummy") == (1.0,) * 6


def test_rows_of_latents_have_the_scale_of_k(tmp_path: Path) -> None:
    make_scaled_checkpoint("deepseek_v3", tmp_path)
    assert read_scales(tmp_path) == tuple(torch.tensor(SCALES)[:, 0].tolist())


def test_modelopt_writes_scales_below_the_projections(tmp_path: Path) -> None:
    fp8, plain = make_fp8_checkpoint("llama3", "modelopt", tmp_path)
    assert read_scales(fp8) == (0.5,) * 6
    assert read_scales(plain) == (1.0,) * 6


def test_older_checkpoints_have_other_names(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    names = ("0.self_attn.kv_scale", "2.self_attn.k_proj.output_scale")
    names = (*names, "2.self_attn.v_proj.output_scale", "2.self_attn.q_proj.output_scale")
    numbers = (0.25, 0.5, 2.0, -1.0)
    pairs = zip(names, numbers, strict=True)
    add_tensors(tmp_path, {name: torch.tensor(number) for name, number in pairs})
    assert read_scales(tmp_path) == (0.25, 0.25, 1.0, 1.0, 0.5, 2.0)
    # The weights load whether or not the cache is in fp8.
    load_model(tmp_path, read_model_config(tmp_path), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"k_scale": 0.0, "v_scale": 1.0}, "k_scale is 0.0; --kv-cache-dtype fp8_e4m3 needs one"),
        ({"k_scale": 1.0, "v_scale": -1.0}, "v_scale is -1.0"),
        ({"k_scale": float("nan"), "v_scale": 1.0}, "k_scale is nan"),
        ({"k_scale": 1.0, "v_scale": [1.0, 2.0]}, r"v_scale is \[2\]"),
        ({"k_scale": 1.0}, "layer 1 has no v_scale, but one of the other vector"),
    ],
)
def test_unusable_scales_are_refused_by_name(
    tensors: dict[str, float | list[float]], complaint: str, tmp_path: Path
) -> None:
    make_checkpoint("qwen3", tmp_path)
    named = {f"1.self_attn.{name}": torch.tensor(number) for name, number in tensors.items()}
    add_tensors(tmp_path, named)
    with pytest.raises(UsageError, match=complaint):
        read_scales(tmp_path)
