"""Settings of ``config.json`` that change results and are not implemented. We refuse them by
name."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pd.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pd.models.settings import Settings

# Implemented rope types, and the numbers that each needs.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}

# Harmless values of settings; None stands for null or absent. Most of these settings belong to
# relatives of our architectures, whose checkpoints are labelled like ours.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_sinks": (None, False, 0),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "rope_interleave": (None, False),
    "rope_interleaved": (None, False),
    "rope_traditional": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "attention_chunk_size": (None,),
    "attn_temperature_tuning": (None, False, 0),
    "no_rope_layers": (None, []),
    "use_parallel_residual": (None, False),
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
    "n_shared_experts": (None, 0),
    "num_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "first_k_dense_replace": (None, 0),
    "moe_layer_freq": (None, 1),
    "n_group": (None, 0, 1),
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"),
    "routed_scaling_factor": (None, 1, 1.0),
    "per_layer_config": (None, {}),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}


def check_supported(
    cfg: Settings, implemented: Collection[str], neutral: Mapping[str, tuple[object, ...]]
) -> None:
    """Raise UnsupportedModelError for the first setting that is not implemented. The message has
    its name and value.

    Args:
        implemented, neutral: of the :class:`pd.models.architecture.Architecture`.
    """
    common = {k: v for k, v in _NEUTRAL.items() if k not in implemented}
    check_neutral(cfg, {**common, **neutral})
    _check_rope(cfg, implemented)


def check_neutral(
    cfg: Settings, neutral: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> None:
    """Raise UnsupportedModelError for the first key of ``neutral`` whose value in ``cfg`` is not
    listed there; None stands for null or absent.

    Args:
        prefix: precedes the key in the message if ``cfg`` is a part of the file.
    """
    for key, values in neutral.items():
        value = cfg.get(key)
        if not any(value is each or value == each for each in values):
            refuse_setting(prefix + key, value)


def get_rope_type(rope: Settings, name: str) -> str:
    """Return the type of the rope setting ``name``, a key of :data:`ROPE_TYPES`. Its key is
    ``rope_type``, or ``type`` in old files.

    Raises:
        UnsupportedModelError: the type is not implemented.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        refuse_setting(f"{name}.rope_type", kind)
    return kind


def refuse_setting(key: str, value: object) -> NoReturn:
    """Raise UnsupportedModelError for a setting of ``config.json`` and its value."""
    text = repr(value)
    text = text if len(text) <= 100 else text[:97] + "..."
    raise UnsupportedModelError(f"config.json: {key} = {text} is not supported")


def _check_rope(cfg: Settings, implemented: Collection[str]) -> None:
    one, other = (_describe_scaling(cfg.get(name)) for name in ("rope_parameters", "rope_scaling"))
    if one and other and one != other:
        # transformers takes one of them, depending on its version.
        refuse_setting("rope_scaling beside another rope_parameters", cfg["rope_scaling"])
    for name in ("rope_parameters", "rope_scaling"):
        rope = cfg.get(name)
        if not rope:
            continue
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            refuse_setting(name, rope)
        get_rope_type(rope, name)
        part = "partial_rotary_factor"
        if part not in implemented and rope.get(part) not in (None, 1, 1.0):
            refuse_setting(f"{name}.partial_rotary_factor", rope["partial_rotary_factor"])
        if rope.get("mrope_section"):
            refuse_setting(f"{name}.mrope_section", rope["mrope_section"])


def _describe_scaling(rope: object) -> dict[str, object]:
    """Return the type and the numbers of a rope setting."""
    if not isinstance(rope, dict):
        return {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    numbers = {k: v for k, v in rope.items() if k not in ("rope_type", "type", "rope_theta")}
    return {"rope_type": kind, **numbers}
