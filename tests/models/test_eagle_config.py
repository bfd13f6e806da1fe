"""What is read from the ``config.json`` of published EAGLE heads, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pd.core.errors import UnsupportedModelError, UsageError
from pd.models.config import ModelConfig, RopeConfig
from pd.models.eagle_config import EagleConfig

if TYPE_CHECKING:
    from pathlib import Path

TARGET = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    context_length=131072,
    rms_norm_eps=1e-5,
    rope=RopeConfig(500000.0),
)
QWEN3 = dataclasses.replace(TARGET, vocab_size=151936, num_layers=94)
# The files of the authors' EAGLE-1 and EAGLE-3 heads for Llama-3 8B.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 128256,
}
AUTHORS_EAGLE = {**LLAMA, "rope_theta": 500000.0, "bias": False}
AUTHORS_EAGLE3 = {**LLAMA, "draft_vocab_size": 32000}
SGLANG_EAGLE = {**AUTHORS_EAGLE, "architectures": ["LlamaForCausalLMEagle"]}
SGLANG_EAGLE3 = {**AUTHORS_EAGLE3, "architectures": ["LlamaForCausalLMEagle3"]}
# SpecForge's for Qwen3-235B-A22B, abridged.
SPECFORGE = {
    **SGLANG_EAGLE3,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 46, 90],
        "use_aux_hidden_state": True,
    },
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "intermediate_size": 24576,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "vocab_size": 151936,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32000,
    "norm_before_fc": False,
    "norm_before_residual": True,
    "speculators_config": {"algorithm": "eagle3"},
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": {**LLAMA, "model_type": "llama"},
}


def read(raw: dict[str, Any], target: ModelConfig = TARGET) -> EagleConfig:
    return EagleConfig.from_dict(raw, target)


class TestLayouts:
    @pytest.mark.parametrize("raw", [AUTHORS_EAGLE, SGLANG_EAGLE])
    def test_eagle_1(self, raw: dict[str, Any]) -> None:
        config = read(raw)
        assert (config.algorithm, config.normed, config.aux_layers) == ("eagle", True, (32,))
        assert (config.draft_vocab_size, config.feature_size) == (128256, 4096)
        assert config.layer.rope == RopeConfig(500000.0)
        layer = config.layer
        assert (layer.num_layers, layer.num_heads, layer.num_kv_heads) == (1, 32, 8)
        assert (layer.head_dim, config.hidden_size) == (128, 4096)

    @pytest.mark.parametrize("raw", [AUTHORS_EAGLE3, SGLANG_EAGLE3])
    def test_eagle_3(self, raw: dict[str, Any]) -> None:
        config = read(raw)
        assert (config.algorithm, config.normed, config.aux_layers) == (
            "eagle3",
            False,
            (2, 16, 29),
        )
        assert (config.draft_vocab_size, config.feature_size) == (32000, 3 * 4096)
        assert not config.norm_before_residual

    def test_specforge_names_layers_whose_output_is_read(self) -> None:
        config = read(SPECFORGE, QWEN3)
        assert config.aux_layers == (2, 47, 91)
        layer = config.layer
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (64, 4, 128)

    def test_speculators_names_layers_whose_input_is_read(self) -> None:
        config = read({**SPECULATORS, "eagle_aux_hidden_state_layer_ids": [2, 18, 32]})
        assert config.aux_layers == (2, 18, 32)
        assert config.norm_before_residual
        assert not config.layer.qk_norm
        assert read(SPECULATORS).aux_layers == (2, 16, 29)

    def test_speculators_with_a_layer_of_qwen3(self) -> None:
        layer = {**LLAMA, "model_type": "qwen3"}
        assert read({**SPECULATORS, "transformer_layer_config": layer}).layer.qk_norm

    def test_hidden_states_are_fused_in_the_order_of_layers(self) -> None:
        raw = {**SGLANG_EAGLE3, "eagle_aux_hidden_state_layer_ids": [29, 0, 16, 32]}
        config = read(raw)
        assert config.aux_layers == (0, 16, 29, 32)
        assert config.feature_size == 4 * 4096

    @pytest.mark.parametrize("key", ["qkv_bias", "attention_bias"])
    def test_biases(self, key: str) -> None:
        layer = read({**SGLANG_EAGLE, key: True}).layer
        assert layer.attention_bias
        assert layer.output_bias == (key == "attention_bias")
        assert read({**SGLANG_EAGLE, "bias": True}).fc_bias

    def test_settings_of_modelopt_that_say_what_eagle_3_is(self) -> None:
        settings = {
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "parallel_draft_step": 1,
        }
        assert read({**SGLANG_EAGLE3, "eagle_config": settings}) == read(SGLANG_EAGLE3)


class TestRefusals:
    @pytest.mark.parametrize(
        ("base", "key", "value"),
        [
            (SGLANG_EAGLE3, "fc_norm", True),
            (SGLANG_EAGLE3, "norm_output", True),
            (SPECULATORS, "norm_before_fc", True),
            (SGLANG_EAGLE, "add_para_norm", True),
            (SGLANG_EAGLE3, "parallel_drafting", True),
            (SGLANG_EAGLE, "hot_vocab_size", 32000),
            (SGLANG_EAGLE, "logit_scale", 0.5),
            (SGLANG_EAGLE3, "is_causal", False),
            (SGLANG_EAGLE3, "num_hidden_layers", 2),
            (SGLANG_EAGLE, "draft_vocab_size", 32000),
            (SGLANG_EAGLE3, "draft_vocab_size", 128257),
            (SGLANG_EAGLE3, "tie_word_embeddings", True),
            (SGLANG_EAGLE3, "quantization_config", {"bits": 4}),
            (SGLANG_EAGLE3, "hidden_act", "gelu"),
            (SGLANG_EAGLE3, "rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
            (SGLANG_EAGLE3, "rope_scaling", {"rope_type": "default", "mrope_section": [16, 24]}),
            (SPECULATORS, "speculators_model_type", "eagle"),
        ],
    )
    def test_what_changes_results_is_refused_by_name(
        self, base: dict[str, Any], key: str, value: object
    ) -> None:
        named = {"tie_word_embeddings": "draft_vocab_size = 32000"}.get(key, key)
        with pytest.raises(UnsupportedModelError, match=named):
            read({**base, key: value})

    @pytest.mark.parametrize(
        ("base", "key", "value"),
        [
            (SGLANG_EAGLE3, "use_aux_hidden_state", False),
            (SGLANG_EAGLE3, "use_input_layernorm_in_first_layer", False),
            (SGLANG_EAGLE3, "use_last_layernorm", False),
            (SGLANG_EAGLE3, "use_mtp_layernorm", True),
            (SGLANG_EAGLE3, "parallel_draft_step", 4),
            (SGLANG_EAGLE, "use_aux_hidden_state", True),
            (SGLANG_EAGLE, "use_input_layernorm_in_first_layer", True),
            (SGLANG_EAGLE, "use_last_layernorm", True),
        ],
    )
    def test_also_inside_eagle_config(self, base: dict[str, Any], key: str, value: object) -> None:
        with pytest.raises(UnsupportedModelError, match=rf"eagle_config\.{key} = {value}"):
            read({**base, "eagle_config": {key: value}})

    @pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "DFlashDraftModel", None])
    def test_other_architectures(self, name: str | None) -> None:
        raw = {**LLAMA, "architectures": None if name is None else [name]}
        with pytest.raises(UnsupportedModelError, match="not an EAGLE head; known: LlamaFor"):
            read(raw)

    def test_a_layer_that_speculators_does_not_explain(self) -> None:
        layer = {**LLAMA, "model_type": "mistral"}
        with pytest.raises(UnsupportedModelError, match=r"layer_config\.model_type = 'mistral'"):
            read({**SPECULATORS, "transformer_layer_config": layer})

    def test_speculators_say_where_the_residual_stream_starts(self) -> None:
        raw = {key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"}
        with pytest.raises(UsageError, match="norm_before_residual must be true or false"):
            read(raw)

    @pytest.mark.parametrize("ids", [[2, 2, 16], [-2, 16, 29], [2, 16, 33]])
    @pytest.mark.parametrize("nested", [False, True])
    def test_layers_that_the_model_does_not_have(self, ids: list[int], nested: bool) -> None:
        raw = dict(SGLANG_EAGLE3)
        name = "eagle_aux_hidden_state_layer_ids"
        raw |= {"eagle_config": {name: ids}} if nested else {name: ids}
        with pytest.raises(UsageError, match=r"does not name different layers of a model of 32"):
            read(raw)

    @pytest.mark.parametrize("ids", ["2,16,29", [2, 16.0, 29], [True, 16, 29]])
    def test_layers_that_are_no_numbers(self, ids: object) -> None:
        with pytest.raises(UsageError, match="must be a list of integers"):
            read({**SGLANG_EAGLE3, "eagle_aux_hidden_state_layer_ids": ids})

    def test_a_small_model_needs_layers_to_be_named(self) -> None:
        with pytest.raises(UsageError, match="no default for a model of 6 layers"):
            read(SGLANG_EAGLE3, dataclasses.replace(TARGET, num_layers=6))


class TestTarget:
    def from_file(self, tmp_path: Path, raw: dict[str, Any], **changes: Any) -> EagleConfig:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return EagleConfig.from_pretrained(tmp_path, dataclasses.replace(TARGET, **changes))

    def test_the_right_one(self, tmp_path: Path) -> None:
        assert self.from_file(tmp_path, SGLANG_EAGLE3) == read(SGLANG_EAGLE3)

    def test_another_vocabulary(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="128256 tokens in its vocabulary, the model has 32"):
            self.from_file(tmp_path, SGLANG_EAGLE3, vocab_size=32)

    def test_another_width(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="of size 4096, those of the model have 5120"):
            self.from_file(tmp_path, SGLANG_EAGLE3, hidden_size=5120)

    def test_a_head_may_be_narrower_unless_it_shares_the_output_head(self, tmp_path: Path) -> None:
        narrow = {"hidden_size": 5120}
        config = self.from_file(tmp_path, {**SGLANG_EAGLE3, "target_hidden_size": 5120}, **narrow)
        assert (config.hidden_size, config.feature_size) == (4096, 3 * 5120)
        with pytest.raises(UsageError, match="hidden_size 4096 and shares the output head"):
            self.from_file(tmp_path, {**SGLANG_EAGLE, "target_hidden_size": 5120}, **narrow)

    def test_a_file_that_cannot_be_used(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"hidden_size must be a positive integer"):
            self.from_file(tmp_path, {**SGLANG_EAGLE3, "hidden_size": "wide"})

    def test_what_is_refused_is_said_to_be_of_the_head(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModelError, match=r"--speculative-draft-model .*norm_output"):
            self.from_file(tmp_path, {**SGLANG_EAGLE3, "norm_output": True})


class TestFingerprint:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(SGLANG_EAGLE3))
        (tmp_path / "model.safetensors").write_bytes(bytes(8) + b"weights")
        return tmp_path

    def test_depends_on_what_determines_kv(self, path: Path) -> None:
        config = read(SGLANG_EAGLE3)
        first = config.compute_fingerprint(path)
        same = read({**SGLANG_EAGLE3, "eos_token_id": 7, "max_position_embeddings": 4096})
        assert same.compute_fingerprint(path) == first
        for changed in (
            {"eagle_aux_hidden_state_layer_ids": [2, 16, 30]},
            {"rope_theta": 7.0},
            {"norm_before_residual": True},
        ):
            assert read({**SGLANG_EAGLE3, **changed}).compute_fingerprint(path) != first
        (path / "model.safetensors").write_bytes(bytes(8) + b"Weights")
        assert config.compute_fingerprint(path) != first

    def test_dummies_depend_on_the_seed(self, path: Path) -> None:
        config = read(SGLANG_EAGLE3)
        found = {config.compute_fingerprint(path, "dummy", seed) for seed in (0, 1)}
        assert len(found | {config.compute_fingerprint(path)}) == 3


def test_reading_a_configuration_does_not_import_torch() -> None:
    code = "import sys, pd.models.eagle_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
