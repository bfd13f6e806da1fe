"""Reads the rotary embedding of a ``config.json``. Importing this does not import torch.

transformers 5 keeps everything in ``rope_parameters``; version 4 separates ``rope_theta`` from
``rope_scaling``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from pd.core.errors import UsageError
from pd.models.config import RopeConfig
from pd.models.refusals import ROPE_TYPES, get_rope_type
from pd.models.settings import get_mapping, get_number, get_positive_int, get_positive_int_or

if TYPE_CHECKING:
    from pd.models.settings import Settings

_ORIGINAL_CONTEXT = "original_max_position_embeddings"


def read_rope(cfg: Settings) -> RopeConfig:
    """Read the rotary embedding.

    Raises:
        UsageError: a number is missing or is none.
        UnsupportedModelError: the type is not implemented.
    """
    return dataclasses.replace(_read_scaling(cfg), part=_read_part(cfg))


def _read_part(cfg: Settings) -> float:
    """Read which part of a head is rotated."""
    outer = get_number(cfg, "partial_rotary_factor", 1.0)
    part = get_number(_get_setting(cfg), "partial_rotary_factor", outer)
    if not 0 < part <= 1:
        raise UsageError(f"config.json: partial_rotary_factor {part} is not in (0, 1]")
    return part


def _read_scaling(cfg: Settings) -> RopeConfig:
    """Read everything but the part that is rotated."""
    rope = _get_setting(cfg)
    theta = get_number(rope, "rope_theta") or get_number(cfg, "rope_theta") or 10000.0
    kind = get_rope_type(rope, "rope_parameters")
    missing = [key for key in ROPE_TYPES[kind] if not isinstance(rope.get(key), int | float)]
    if missing:
        raise UsageError(f"config.json: rope type {kind!r} needs a number for {missing[0]!r}")
    if kind == "default":
        return RopeConfig(theta)
    scaled = RopeConfig(theta, kind, factor=get_number(rope, "factor"))
    if kind in ("linear", "dynamic"):
        return scaled
    scaled = dataclasses.replace(scaled, original_context=_read_original_context(cfg))
    if kind == "yarn":
        return dataclasses.replace(
            scaled,
            beta_fast=get_number(rope, "beta_fast") or 32.0,
            beta_slow=get_number(rope, "beta_slow") or 1.0,
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_read_attention_factor(rope, scaled.factor),
        )
    return dataclasses.replace(
        scaled,
        low_freq_factor=get_number(rope, "low_freq_factor"),
        high_freq_factor=get_number(rope, "high_freq_factor"),
    )


def read_context_length(cfg: Settings) -> int:
    """Read the longest context. YaRN stretches the original one by its factor, whatever
    ``max_position_embeddings`` says."""
    context = get_positive_int(cfg, "max_position_embeddings")
    rope = _get_setting(cfg)
    if get_rope_type(rope, "rope_parameters") != "yarn":
        return context
    return max(context, int(get_number(rope, "factor") * _read_original_context(cfg)))


def read_score_scale(cfg: Settings, head_dim: int) -> float:
    """Read the factor of the scores of latent attention: ``1 / sqrt(head_dim)``, times the square
    of :func:`_compute_mscale` if the rope setting has ``mscale_all_dim``."""
    rope = _get_setting(cfg)
    all_dim = get_number(rope, "mscale_all_dim")
    if get_rope_type(rope, "rope_parameters") == "default" or not all_dim:
        return float(head_dim**-0.5)
    return float(head_dim**-0.5 * _compute_mscale(get_number(rope, "factor"), all_dim) ** 2)


def _get_setting(cfg: Settings) -> Settings:
    return get_mapping(cfg, "rope_parameters", "rope_scaling")


def _read_original_context(cfg: Settings) -> int:
    """Read the context before the stretching. As in transformers, the key of the file overrides
    that of the rope setting."""
    context = get_positive_int(cfg, "max_position_embeddings")
    inner = get_positive_int_or(_get_setting(cfg), _ORIGINAL_CONTEXT, context)
    return get_positive_int_or(cfg, _ORIGINAL_CONTEXT, inner)


def _read_attention_factor(rope: Settings, factor: float) -> float:
    """Read or compute the factor of cosines and sines."""
    if rope.get("attention_factor") is not None:
        return get_number(rope, "attention_factor")
    mscale, all_dim = get_number(rope, "mscale"), get_number(rope, "mscale_all_dim")
    if mscale and all_dim:
        return _compute_mscale(factor, mscale) / _compute_mscale(factor, all_dim)
    return _compute_mscale(factor)


def _compute_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the factor by which YaRN scales queries and keys (Peng et al., 2023, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
