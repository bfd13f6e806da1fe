"""What is read from ``config.json``, in both spellings, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import ARCHITECTURES

from pd.core.config import NodeConfig
from pd.core.errors import SetupError, UnsupportedModelError, UsageError
from pd.engine.engine import Engine
from pd.models.checkpoint import find_checkpoint
from pd.models.config import RopeConfig
from pd.models.config_reader import parse_model_config, read_model_config
from pd.models.quantization_reader import quantize_at_load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Checkpoint = Callable[[str], Path]

# Llama-3.1-8B's and Qwen3-30B-A3B's config.json as transformers 4 wrote them, abridged.
LLAMA_V4: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_MOE_V4: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


def small(model_type: str, **settings: Any) -> dict[str, Any]:
    if model_type in ("qwen3_moe", "glm4_moe"):
        settings = {"moe_intermediate_size": 48, **settings}
    if model_type == "mistral":
        settings = {"sliding_window": None, **settings}
    return {"model_type": model_type, **SMALL, **settings}


class TestSpellings:
    def test_version_4_of_llama(self) -> None:
        config = parse_model_config(LLAMA_V4)
        assert config.rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
        assert config.dtype == "bfloat16"
        assert (config.head_dim, config.num_kv_heads) == (128, 8)
        assert config.eos_token_ids == (128001, 128008, 128009)

    def test_version_5_says_the_same(self) -> None:
        version_5 = dict(LLAMA_V4)
        theta, scaling = version_5.pop("rope_theta"), version_5.pop("rope_scaling")
        version_5["rope_parameters"] = {"rope_theta": theta, **scaling}
        version_5["dtype"] = version_5.pop("torch_dtype")
        assert parse_model_config(version_5) == parse_model_config(LLAMA_V4)

    def test_version_4_of_qwen3_moe(self) -> None:
        config = parse_model_config(QWEN3_MOE_V4)
        assert (config.num_experts, config.num_experts_per_tok) == (128, 8)
        assert config.intermediate_size == 768
        assert config.qk_norm and config.norm_topk_prob

    def test_version_5_renames_the_number_of_experts(self) -> None:
        version_5 = {**QWEN3_MOE_V4, "num_local_experts": 128}
        del version_5["num_experts"]
        assert parse_model_config(version_5) == parse_model_config(QWEN3_MOE_V4)

    def test_old_name_of_the_rope_type(self) -> None:
        raw = small("llama", rope_scaling={"type": "linear", "factor": 2.0})
        assert parse_model_config(raw).rope == RopeConfig(10000.0, "linear", 2.0)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_what_transformers_writes_is_read(
        self, checkpoint: Checkpoint, architecture: str
    ) -> None:
        config = read_model_config(checkpoint(architecture))
        assert (config.num_layers, config.vocab_size) == (3, 320)
        assert config.dtype == "float32"

    @pytest.mark.parametrize(
        ("model_type", "theta", "eps"), [("llama", 1e4, 1e-6), ("mixtral", 1e6, 1e-5)]
    )
    def test_absent_keys_take_transformers_defaults(
        self, model_type: str, theta: float, eps: float
    ) -> None:
        config = parse_model_config(small(model_type))
        assert (config.rope.theta, config.rms_norm_eps) == (theta, eps)
        assert config.head_dim == 16
        assert not config.tie_word_embeddings

    def test_null_kv_heads_means_as_many_as_heads(self) -> None:
        assert parse_model_config(small("llama", num_key_value_heads=None)).num_kv_heads == 4

    def test_biases_follow_the_architecture(self) -> None:
        qwen2 = parse_model_config(small("qwen2"))
        assert qwen2.attention_bias and not qwen2.output_bias
        llama = parse_model_config(small("llama", attention_bias=True, mlp_bias=True))
        assert llama.attention_bias and llama.output_bias and llama.mlp_bias
        mistral = parse_model_config(small("mistral", attention_bias=True))
        assert not mistral.attention_bias

    def test_end_of_sequence_ids_of_both_files_are_united(self) -> None:
        config = parse_model_config(small("llama", eos_token_id=2), {"eos_token_id": [7, 2, 5]})
        assert config.eos_token_ids == (2, 5, 7)
        config = parse_model_config(small("llama", eos_token_id=None))
        assert config.eos_token_ids == ()

    @pytest.mark.parametrize(
        ("kind", "assumed"), [("llama", (2,)), ("mixtral", (2,)), ("qwen3", ())]
    )
    def test_where_no_file_names_an_end_of_sequence_it_is_transformers_own(
        self, kind: str, assumed: tuple[int, ...]
    ) -> None:
        raw = small(kind)
        raw.pop("eos_token_id", None)
        assert parse_model_config(raw).eos_token_ids == assumed
        assert parse_model_config(raw, {"eos_token_id": 7}).eos_token_ids == (7,)

    def test_the_original_context_of_the_file_goes_before_that_of_the_rope_setting(self) -> None:
        rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 4096}
        config = parse_model_config(
            small("llama", rope_scaling=rope, original_max_position_embeddings=8192)
        )
        assert config.rope.original_context == 8192

    def test_two_rope_settings_that_say_the_same_are_one(self) -> None:
        linear = {"type": "linear", "factor": 4.0}
        both = {"rope_scaling": linear, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}
        assert parse_model_config(small("llama", **both)).rope.factor == 4.0


_YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"per_layer_config": {"0": {"num_experts_per_tok": 1}}}, "per_layer_config"),
    (
        "llama",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        "rope_scaling beside another rope_parameters",
    ),
    ("qwen2", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
    ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "'mrope'"),
    ("qwen3", {"rope_scaling": {"rope_type": "made-up"}}, "'made-up'"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "0.5"),
    ("llama", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ("llama", {"sliding_window": 512}, "sliding_window = 512"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 64}, "sliding_window"),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types"),
    ("qwen3", {"layer_types": ["full_attention", "chunked", "full_attention"]}, "'chunked'"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ("llama", {"attention_sinks": True}, "attention_sinks"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
    ("qwen3_moe", {"num_experts": 0}, "8 of 0 experts"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ("llama", {"num_hidden_layers": 1_000_000}, "num_hidden_layers 1000000 is more than 4096"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
    ("gpt2", {}, "'gpt2'"),
    ("gpt_oss", {}, "rope_parameters = None"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "'longrope'"),
    ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type of phi3 = 'yarn'"),
    ("phi3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config of phi3"),
    ("gpt_oss", {**_YARN, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("gpt_oss", {**_YARN, "quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
]


class TestRefusals:
    @pytest.mark.parametrize(("model_type", "settings", "named"), REFUSED)
    def test_one_line_names_setting_and_value(
        self, model_type: str, settings: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(UnsupportedModelError) as error:
            parse_model_config(small(model_type, **settings))
        assert named in error.value.message
        assert "\n" not in error.value.message
        assert error.value.exit_status == 2

    def test_mistral_without_a_window_key_has_one(self) -> None:
        raw = small("mistral", max_position_embeddings=32768)
        del raw["sliding_window"]
        assert parse_model_config(raw).windows == (4096,) * 3

    @pytest.mark.parametrize(
        ("model_type", "settings", "windows"),
        [
            ("mistral", {"sliding_window": 1024}, (1024,) * 3),
            ("mixtral", {"sliding_window": 4095}, (4095,) * 3),
            ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, (0, 0, 64)),
            ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, (64,) * 3),
            ("qwen3_moe", {"use_sliding_window": True}, (64,) * 3),
            ("gpt_oss", _YARN, (64, 0, 64)),
            ("phi3", {}, (64,) * 3),
            (
                "qwen3",
                {
                    "use_sliding_window": True,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                },
                (64, 0, 64),
            ),
        ],
    )
    def test_windows_by_layer(
        self, model_type: str, settings: dict[str, Any], windows: tuple[int, ...]
    ) -> None:
        raw = small(model_type, **{"sliding_window": 64, **settings})
        assert parse_model_config(raw).windows == windows

    @pytest.mark.parametrize("window", [0, -1, "long", 2.5])
    def test_windows_that_are_no_number_of_tokens(self, window: object) -> None:
        with pytest.raises(UsageError, match="sliding_window must be a positive integer"):
            parse_model_config(small("mistral", sliding_window=window))

    @pytest.mark.parametrize(
        ("model_type", "settings"),
        [
            ("mistral", {"sliding_window": 4096}),
            ("qwen2", {"sliding_window": 64, "use_sliding_window": False}),
            (
                "qwen2",
                {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
            ),
            (
                "qwen3",
                {
                    "sliding_window": 64,
                    "use_sliding_window": True,
                    "max_window_layers": 0,
                    "layer_types": ["full_attention"] * 3,
                },
            ),
            ("llama", {"pretraining_tp": 2, "attention_dropout": 0.1, "use_cache": False}),
            ("llama", {"rope_scaling": {"rope_type": "default"}, "hidden_act": "swish"}),
        ],
    )
    def test_settings_that_change_nothing_are_accepted(
        self, model_type: str, settings: dict[str, Any]
    ) -> None:
        parse_model_config(small(model_type, **settings))

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"hidden_size": None}, "hidden_size"),
            ({"vocab_size": "many"}, "'many'"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ],
    )
    def test_broken_values_are_usage_errors(self, settings: dict[str, Any], named: str) -> None:
        with pytest.raises(UsageError, match=named):
            parse_model_config(small("llama", **settings))


def test_quantization_of_experts_with_biases_is_refused() -> None:
    config = parse_model_config(small("gpt_oss", **_YARN))
    with pytest.raises(UsageError, match="--quantization fp8: gpt_oss has experts with biases"):
        quantize_at_load(config, "fp8")


class TestPartialRotation:
    def test_of_glm_is_half_of_a_head_by_default(self) -> None:
        assert parse_model_config(small("glm4_moe", head_dim=32)).rotary_dim == 16

    @pytest.mark.parametrize(
        "settings",
        [
            {"partial_rotary_factor": 0.25},
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            {
                "partial_rotary_factor": 0.5,
                "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
            },
        ],
    )
    def test_is_read_in_both_spellings(self, settings: dict[str, Any]) -> None:
        assert parse_model_config(small("glm4_moe", head_dim=32, **settings)).rotary_dim == 8

    @pytest.mark.parametrize("part", [0, -0.5, 1.5])
    def test_of_more_than_a_head_is_refused(self, part: float) -> None:
        with pytest.raises(UsageError, match=rf"partial_rotary_factor {float(part)} is not in"):
            parse_model_config(small("glm4_moe", partial_rotary_factor=part))

    @pytest.mark.parametrize("part", [0.1, 0.01])
    def test_of_an_odd_number_of_dimensions_is_refused(self, part: float) -> None:
        with pytest.raises(UnsupportedModelError, match=r"part of heads \d is odd or 0"):
            parse_model_config(small("glm4_moe", head_dim=32, partial_rotary_factor=part))


class TestDirectory:
    def test_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="download it first"):
            read_model_config(tmp_path / "nowhere")

    def test_without_a_configuration(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"has no config\.json"):
            read_model_config(tmp_path)

    @pytest.mark.parametrize(
        "text",
        [
            "{",
            "[]",
            '{"a": ' * 100_000,
            json.dumps(small("llama", rms_norm_eps="tiny")),
            json.dumps(small("llama", num_key_value_heads="two")),
            json.dumps(small("llama", max_position_embeddings="long", sliding_window=5)),
            json.dumps(small("llama", rope_scaling={"rope_type": ["llama3"]})),
        ],
    )
    def test_with_a_broken_configuration(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=r"config\.json"):
            read_model_config(tmp_path)

    def test_id_of_a_model_in_the_local_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(small("llama")))
        refs = tmp_path / "models--owner--name" / "refs"
        refs.mkdir()
        (refs / "main").write_text("abc")
        assert find_checkpoint("owner/name") == snapshot

    def test_id_of_a_model_where_the_user_has_no_home(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def homeless(path: Path) -> Path:
            if str(path).startswith("~"):
                raise RuntimeError("Could not determine home directory.")
            return path

        monkeypatch.delenv("HF_HOME", raising=False)
        monkeypatch.setattr("pathlib.Path.expanduser", homeless)
        with pytest.raises(UsageError, match="neither a directory nor in the Hugging Face cache"):
            find_checkpoint("owner/name")


def test_a_model_that_no_memory_holds_is_refused_in_one_line(tmp_path: Path) -> None:
    config = small("llama", vocab_size=10**12)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match="does not fit into the memory that this machine has free"):
        Engine.build(NodeConfig(role="unified", model=tmp_path, load_format="dummy", device="cpu"))
