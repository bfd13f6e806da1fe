"""Checkpoints whose experts are in MXFP4 compute what transformers does with dequantized ones."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import (
    VOCAB_SIZE,
    is_greedy,
    make_checkpoint,
    reference_generate,
    reference_logits,
)
from cluster import Cluster, random_prompts
from greedy_engine import generate
from safetensors.torch import load_file, save_file
from threaded_ranks import Rank, Threads, make_runner
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pd.core.errors import PDError, UnsupportedModelError, UsageError
from pd.models.config_reader import parse_model_config, read_model_config
from pd.models.loader import load_model
from pd.models.tensor_parallel import SINGLE

if TYPE_CHECKING:
    from pathlib import Path

SHARD = "model.safetensors"
SIZES = {"hidden_size": 96, "intermediate_size": 128}


def make_mxfp4_checkpoint(directory: Path) -> tuple[Path, Path]:
    """Write a checkpoint in MXFP4 as OpenAI does, and one with the weights that it stands for."""
    mxfp4, plain = directory / "mxfp4", directory / "plain"
    make_checkpoint("gpt_oss", plain, **SIZES)
    shutil.copytree(plain, mxfp4)
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, weight in load_file(plain / SHARD).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = meant[name] = weight
            continue
        count, inputs, outputs = weight.shape
        shape = count, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        # Exponents of -5 to -3: a random code has a magnitude of about 3.
        scales = torch.randint(122, 125, shape, generator=generator).to(torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        wide = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        meant[name] = wide.contiguous()
    save_file(stored, mxfp4 / SHARD, {"format": "pt"})
    save_file(meant, plain / SHARD, {"format": "pt"})
    config = json.loads((mxfp4 / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (mxfp4 / "config.json").write_text(json.dumps(config))
    return mxfp4, plain


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_mxfp4_checkpoint(tmp_path_factory.mktemp("mxfp4"))


@pytest.mark.parametrize(("size", "ep_size"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_ranks_equal_transformers(both: tuple[Path, Path], size: int, ep_size: int) -> None:
    path, plain = both
    random = np.random.default_rng(size)
    prompts = [random.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 40, 90)]

    def work(rank: Rank) -> Any:
        tp = rank if size > 1 else SINGLE
        runner = make_runner(path, tp, ep_size=ep_size)
        return generate(runner, prompts, 12, max_chunk=30, seed=0)

    for sequences in Threads(size).run(work):
        assert [s.output for s in sequences] == reference_generate(plain, prompts, 12)
        for prompt, sequence in zip(prompts, sequences, strict=True):
            logits = reference_logits(plain, prompt + sequence.output[:-1])[len(prompt) - 1 :]
            torch.testing.assert_close(torch.stack(sequence.logits), logits, atol=2e-4, rtol=0)


def test_nodes_serve_it_alone_and_split(both: tuple[Path, Path], seed: int) -> None:
    path, plain = both
    prompts = list(random_prompts(seed, [5, 70]))
    settings: dict[str, Any] = {"prefill_settings": {"page_size": 4}}
    with Cluster(path, unified=1, chunked_prefill_size=16, **settings) as cluster:
        for where in (cluster.pair, cluster.unified):
            sent = [cluster.client.generate(p, where, max_tokens=20) for p in prompts]
            for prompt, request in zip(prompts, sent, strict=True):
                assert is_greedy(plain, prompt, request.tokens(60)), seed


def test_bfloat16_holds_the_same_weights(both: tuple[Path, Path]) -> None:
    one, other = (
        load_model(path, read_model_config(path), dtype=torch.bfloat16, device="cpu")
        for path in both
    )
    mine, theirs = (dict(model.named_parameters()) for model in (one, other))
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize("size", [1, 2])
def test_dummies_have_about_the_variance_of_a_matrix(both: tuple[Path, Path], size: int) -> None:
    """The ranks divide the same codes."""
    path, _ = both
    parts = Threads(size).run(lambda rank: make_runner(path, rank, load_format="dummy").model)
    whole = make_runner(path, SINGLE, load_format="dummy").model
    for layer in range(3):
        for name, dim, inputs in (("gate_up", 1, 96), ("down", 2, 128)):
            expected = whole.layers[layer].mlp.experts.get_submodule(name).values
            found = [part.layers[layer].mlp.experts.get_submodule(name).values for part in parts]
            assert torch.equal(torch.cat(found, dim), expected)
            assert 0.5 < float(expected.std()) * inputs**0.5 < 2


class TestErrors:
    def spoil(self, both: tuple[Path, Path], directory: Path, **changes: Any) -> Path:
        """Copy the checkpoint with another tensor, or without it if it is None."""
        shutil.copytree(both[0], directory, dirs_exist_ok=True)
        tensors = load_file(directory / SHARD)
        for name, tensor in changes.items():
            tensors[f"model.layers.1.mlp.experts.{name}"] = tensor
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, directory / SHARD, {"format": "pt"})
        return directory

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"down_proj_scales": None}, r"lacks tensor .*1\.mlp\.experts\.down_proj_scales"),
            ({"down_proj": torch.zeros(4, 128, 96)}, "which the model lacks"),
            (
                {"down_proj_scales": torch.zeros(4, 96, 3, dtype=torch.uint8)},
                r"is \[4, 96, 3\], config\.json makes it \[4, 96, 4\]",
            ),
            ({"down_proj_scales": torch.zeros(4, 96, 4)}, "torch.float32, but MXFP4 is stored in"),
            (
                {"down_proj_bias": torch.zeros(4, 96, dtype=torch.uint8)},
                "down_proj_bias is torch.uint8 without a scale",
            ),
        ],
    )
    def test_a_tensor_is_named(
        self, both: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], message: str
    ) -> None:
        path = self.spoil(both, tmp_path, **changes)
        with pytest.raises(UsageError, match=message):
            make_runner(path, SINGLE)

    @pytest.mark.parametrize(
        ("size", "ep_size", "settings", "message"),
        [
            (
                2,
                1,
                {},
                "--tp-size 2 leaves experts in mxfp4 a width of 48, which is no multiple of",
            ),
            (4, 2, {}, "--tp-size 4 / --ep-size 2 leaves experts in mxfp4 a width of 48"),
            (1, 1, {"intermediate_size": 80}, "--tp-size 1 leaves experts in mxfp4 a width of 80"),
            (1, 1, {"hidden_size": 80}, "hidden_size 80 with mxfp4 is no multiple of 32"),
        ],
    )
    def test_ranks_have_whole_blocks(
        self, tmp_path: Path, size: int, ep_size: int, settings: dict[str, Any], message: str
    ) -> None:
        config = make_checkpoint("gpt_oss", tmp_path, **settings) / "config.json"
        raw = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
        with pytest.raises(PDError, match=message):
            parse_model_config(raw).split_by_ranks(size, ep_size)

    def test_other_architectures_refuse_it(self, both: tuple[Path, Path]) -> None:
        raw = json.loads((both[0] / "config.json").read_text())
        del raw["architectures"]
        raw |= {"model_type": "mixtral", "layer_types": None, "rope_parameters": None}
        with pytest.raises(UnsupportedModelError, match="quant_method = 'mxfp4'"):
            parse_model_config(raw)
