"""The configurations of DeepSeek-V2-Lite, DeepSeek-V3 and Kimi-K2, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from pd.core.errors import UnsupportedModelError, UsageError
from pd.models.config import LatentConfig, RopeConfig, RouterConfig
from pd.models.config_reader import parse_model_config, read_model_config
from pd.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

# As published, abridged.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3: dict[str, Any] = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
KIMI_K2: dict[str, Any] = {
    **V3,
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
}
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "num_attention_heads": 20,
    "num_hidden_layers": 2,
    "vocab_size": 154880,
}


def test_deepseek_v2_lite() -> None:
    config = parse_model_config(V2_LITE)
    # The published factor of the scores: 192^-0.5 times (0.1 * 0.707 * ln 40 + 1)^2.
    scale = pytest.approx(0.11472138)
    assert config.latent == LatentConfig(None, 512, 128, 64, 128, scale)  # type: ignore[arg-type]
    assert config.rope == RopeConfig(10000.0, "yarn", 40.0, original_context=4096)
    assert config.router == RouterConfig()
    assert (config.num_dense_layers, config.dense_size) == (1, 10944)
    assert (config.num_shared_experts, config.intermediate_size) == (2, 1408)
    plane = config.make_plane("bfloat16")
    assert (plane.num_heads, plane.head_dim, plane.vectors) == (1, 576, 1)
    assert plane.token_bytes == 27 * 576 * 2  # 31.1 KB
    # 15.7 billion parameters, 2.4 billion of which a token uses, without embedding and head.
    assert config.count_weights(64) == pytest.approx(15.29e9, rel=0.001)
    assert config.token_flops / 2 == pytest.approx(2.24e9, rel=0.01)


def test_deepseek_v3() -> None:
    config = parse_model_config(V3)
    assert config.latent is not None
    assert (config.latent.q_rank, config.latent.interleaved) == (1536, True)
    assert config.router == RouterConfig("sigmoid", True, 8, 4, 2, 2.5)
    assert config.norm_topk_prob and config.num_draft_layers == 1
    assert config.count_weights(256) == pytest.approx(669e9, rel=0.002)


def test_kimi_k2_is_an_architecture_of_deepseek_v3() -> None:
    config = parse_model_config(KIMI_K2)
    assert config.architecture == "deepseek_v3"
    assert config.router == RouterConfig("sigmoid", True, 1, 1, 2, 2.827)
    del (unnamed := dict(KIMI_K2))["architectures"]
    assert parse_model_config(unnamed).router == config.router


@pytest.mark.parametrize(
    ("raw", "settings", "named"),
    [
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob = True"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        (V2_LITE, {"num_key_value_heads": 4}, "num_key_value_heads = 4"),
        (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": 7}, "n_group 7"),
        (V3, {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        (V3, {"n_group": 256}, "n_group 256 does not divide 256 experts into groups of at least 2"),
        (V3, {"topk_group": 9}, "topk_group 9 of n_group 8"),
        (V3, {"n_group": 64, "topk_group": 1}, "topk_group 1 leaves 4 experts"),
        (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd or 0"),
        (GLM, {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types = ['sparse', 'dense']"),
        (V3, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_unsupported_settings_are_named(
    raw: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        parse_model_config({**raw, **settings})
    assert named in error.value.message


def test_ranks_divide_heads_but_not_latents() -> None:
    part = parse_model_config(V2_LITE).split_by_ranks(2)
    assert (part.num_heads, part.num_kv_heads, part.head_dim) == (8, 1, 576)
    assert (part.intermediate_size, part.dense_size) == (704, 5472)
    with pytest.raises(UsageError, match="--tp-size 5 does not divide the model's num_heads 16"):
        parse_model_config(V2_LITE).split_by_ranks(5)


def test_layers_for_drafts_are_ignored_and_others_are_not(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path)
    file = path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.layers.3.enorm.weight": torch.ones(64)}, file)
    config = read_model_config(path)
    model = load_model(path, config, dtype=torch.bfloat16, device="cpu")
    router = model.layers[1].mlp.router  # type: ignore[union-attr]
    assert router.weight.dtype == router.bias.dtype == torch.float32  # type: ignore[union-attr]
    assert model.layers[1].mlp.experts.down.values.dtype == torch.bfloat16  # type: ignore[union-attr]
    save_file({**weights, "model.layers.4.enorm.weight": torch.ones(64)}, file)
    with pytest.raises(UsageError, match=r"model.layers.4.enorm.weight, which the model lacks"):
        load_model(path, config, dtype=torch.float32, device="cpu")
