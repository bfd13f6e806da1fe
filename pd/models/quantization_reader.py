"""Reads how the weights of a checkpoint are quantized to fp8 (``float8_e4m3fn``).

Three libraries write such checkpoints: transformers and DeepSeek (``fp8``), ``compressed-tensors``
and ``modelopt``. They differ in their settings, but all store each quantized weight with its
scales. Which weights are quantized follows from the scales in the checkpoint, so we do not read the
lists of modules that are left out. Importing this does not import torch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pd.core.errors import UsageError
from pd.models.config import BLOCK, QuantizationConfig
from pd.models.refusals import check_neutral, refuse_setting
from pd.models.settings import get_mapping

if TYPE_CHECKING:
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings

# Settings of modelopt may be in a file of their own.
MODELOPT_FILE = "hf_quant_config.json"
_KEYS = ("quantization_config", "compression_config")


def read_quantization(cfg: Settings, has_mxfp4: bool = False) -> QuantizationConfig | None:
    """Read ``quantization_config`` of the content of ``config.json``; None without it, or if it is
    MXFP4.

    Args:
        has_mxfp4: of the :class:`pd.models.architecture.Architecture`.

    Raises:
        UnsupportedModelError: the method or one of its settings is not implemented.
    """
    settings = get_mapping(cfg, *_KEYS)
    if not settings or (has_mxfp4 and is_mxfp4(cfg)):
        return None
    method = settings.get("quant_method")
    if method == "fp8":
        return _read_fp8(settings)
    if method == "compressed-tensors":
        return _read_groups(settings)
    if method == "modelopt":
        return _read_modelopt(settings)
    refuse_setting("quantization_config.quant_method", method)


def is_mxfp4(cfg: Settings) -> bool:
    """Whether experts are in MXFP4. Their tensors have names of their own, so we do not read the
    list of modules that are left out."""
    return get_mapping(cfg, *_KEYS).get("quant_method") == "mxfp4"


def quantize_at_load(config: ModelConfig, quantization: str) -> ModelConfig:
    """Apply ``--quantization``. A checkpoint in fp8 stays as it is.

    Args:
        quantization: ``auto`` or ``fp8``, which quantizes other checkpoints: each row of a weight
            gets a scale, and so does each token.

    Raises:
        UsageError: the model's experts have biases.
    """
    if quantization == "auto" or config.quantization is not None:
        return config
    if config.clamp is not None:
        raise UsageError(
            f"--quantization {quantization}: {config.architecture} has experts with biases, which "
            "pd does not quantize; leave the flag out"
        )
    return dataclasses.replace(
        config, quantization=QuantizationConfig(in_blocks=False, at_load=True)
    )


def _read_fp8(settings: Settings) -> QuantizationConfig:
    """Read the settings of DeepSeek, Qwen and transformers."""
    neutral: dict[str, tuple[object, ...]] = {
        "fmt": (None, "e4m3"),
        "activation_scheme": (None, "dynamic", "static"),
        "scale_fmt": (None, "float", "ue8m0"),
        "weight_block_size": (None, [BLOCK, BLOCK]),
    }
    check_neutral(settings, neutral, "quantization_config.")
    in_blocks = settings.get("weight_block_size") is not None
    is_static = settings.get("activation_scheme") == "static"
    if in_blocks and is_static:
        refuse_setting("quantization_config.activation_scheme with blocks", "static")
    return QuantizationConfig(in_blocks, is_static, settings.get("scale_fmt") == "ue8m0")


def _read_groups(settings: Settings) -> QuantizationConfig:
    """Read the settings of compressed-tensors. Its groups of modules must be quantized alike,
    except that some may have a scale for each row and others a single one."""
    neutral: dict[str, tuple[object, ...]] = {
        "format": (None, "float-quantized", "naive-quantized"),
        "sparsity_config": (None, {}),
        "transform_config": (None, {}),
    }
    check_neutral(settings, neutral, "quantization_config.")
    groups = get_mapping(settings, "config_groups")
    if not groups:
        refuse_setting("quantization_config.config_groups", groups)
    found = {_read_group(get_mapping(groups, name), name) for name in groups}
    if len(found) > 1:
        refuse_setting("quantization_config.config_groups of several kinds", list(groups))
    return found.pop()


def _read_group(group: Settings, name: str) -> QuantizationConfig:
    where = f"quantization_config.config_groups.{name}."
    number: dict[str, tuple[object, ...]] = {
        "num_bits": (8,),
        "type": ("float",),
        "symmetric": (None, True),
    }
    weights, inputs = get_mapping(group, "weights"), get_mapping(group, "input_activations")
    check_neutral(weights, number, f"{where}weights.")
    check_neutral(weights, {"dynamic": (None, False)}, f"{where}weights.")
    check_neutral(inputs, number, f"{where}input_activations.")
    is_static = not inputs.get("dynamic")
    strategies = weights.get("strategy"), inputs.get("strategy")
    if strategies == ("block", "group") and not is_static:
        sizes: dict[str, tuple[object, ...]] = {"block_structure": ([BLOCK, BLOCK],)}
        check_neutral(weights, sizes, f"{where}weights.")
        check_neutral(inputs, {"group_size": (BLOCK,)}, f"{where}input_activations.")
        return QuantizationConfig(in_blocks=True)
    supported = ("tensor", "token") if not is_static else ("tensor",)
    if strategies[0] not in ("tensor", "channel") or strategies[1] not in supported:
        refuse_setting(f"{where}strategy of weights and inputs", strategies)
    if strategies[1] == "tensor" and not is_static:
        # One scale for all tokens of a step would make each depend on the others.
        refuse_setting(f"{where}input_activations.strategy with dynamic", strategies[1])
    return QuantizationConfig(in_blocks=False, has_input_scales=is_static)


def _read_modelopt(settings: Settings) -> QuantizationConfig:
    """Read the settings of modelopt, from ``config.json`` or a file of their own."""
    algorithms: dict[str, tuple[object, ...]] = {
        "quant_algo": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"),
    }
    check_neutral(settings, algorithms, "quantization_config.")
    is_static = settings.get("quant_algo") == "FP8"
    return QuantizationConfig(in_blocks=False, has_input_scales=is_static)


def add_modelopt_settings(raw: dict[str, object], own: Settings) -> dict[str, object]:
    """Put the content of :data:`MODELOPT_FILE` into that of ``config.json``, unless it has settings
    already."""
    if any(raw.get(key) for key in _KEYS):
        return raw
    settings = get_mapping(own, "quantization")
    if not settings:
        raise UsageError(f"{MODELOPT_FILE} has no object 'quantization'")
    return {**raw, _KEYS[0]: {"quant_method": "modelopt", **settings}}
