"""Reads a model's configuration from its ``config.json``.

We accept the spellings of transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and 5
(``rope_parameters``, ``dtype``). A setting that changes results is either represented in
:class:`pd.models.config.ModelConfig` or refused by :mod:`pd.models.refusals`. Importing this does
not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import UsageError
from pd.models.checkpoint import find_checkpoint
from pd.models.checkpoint_tokenizer import NO_TOKENIZER, TokenizerFiles, read_tokenizer
from pd.models.config import ModelConfig
from pd.models.endings import find_endings
from pd.models.quantization_reader import MODELOPT_FILE, add_modelopt_settings, read_quantization
from pd.models.refusals import check_supported
from pd.models.registry import find_architecture, find_model_type
from pd.models.rope_reader import read_context_length, read_rope
from pd.models.settings import (
    get_number,
    get_positive_int,
    get_positive_int_or,
    read_json,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pd.models.settings import Settings


def read_model_config(path: str | Path) -> ModelConfig:
    """Read a Hugging Face model directory (or the id of a model in the local cache).

    Raises:
        UsageError: the directory does not exist, or its config.json is unreadable.
        UnsupportedModelError: a setting that changes results is not implemented.
    """
    directory = find_checkpoint(path)
    raw = read_json(directory / "config.json")
    if (directory / MODELOPT_FILE).exists():
        raw = add_modelopt_settings(raw, read_json(directory / MODELOPT_FILE))
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    try:
        return parse_model_config(raw, generation, read_tokenizer(directory))
    except (TypeError, ValueError, KeyError) as error:
        raise UsageError(f"{directory / 'config.json'} cannot be used: {error}") from None


def parse_model_config(
    raw: Settings,
    generation: Settings | None = None,
    tokenizer: TokenizerFiles = NO_TOKENIZER,
) -> ModelConfig:
    """Read the parsed ``config.json`` and ``generation_config.json``. Raises the same errors as
    :func:`read_model_config`."""
    model_type = find_model_type(raw)
    architecture = find_architecture(model_type)
    cfg = {**architecture.defaults, **raw}
    check_supported(cfg, architecture.implemented, architecture.neutral)
    heads = get_positive_int(cfg, "num_attention_heads")
    hidden = get_positive_int(cfg, "hidden_size")
    dtype = cfg.get("dtype") or cfg.get("torch_dtype")
    bos_token_id = cfg.get("bos_token_id")
    vocab_size = get_positive_int(cfg, "vocab_size")
    endings = find_endings(
        raw, generation or {}, tokenizer, vocab_size, default=architecture.default_eos
    )
    shared = ModelConfig(
        architecture=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=get_positive_int(cfg, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=get_positive_int_or(cfg, "num_key_value_heads", heads),
        head_dim=get_positive_int_or(cfg, "head_dim", hidden // heads),
        intermediate_size=get_positive_int(cfg, architecture.width_key),
        context_length=read_context_length(cfg),
        rms_norm_eps=get_number(cfg, "rms_norm_eps", 1e-6),
        rope=read_rope(cfg),
        windows=architecture.read_windows(cfg),
        tie_word_embeddings=bool(cfg.get("tie_word_embeddings", False)),
        num_experts=_read_num_experts(cfg) if architecture.has_experts else 0,
        num_experts_per_tok=(
            get_positive_int(cfg, "num_experts_per_tok") if architecture.has_experts else 0
        ),
        quantization=read_quantization(cfg, architecture.has_mxfp4),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        eos_token_ids=endings.ids,
        eos_problems=endings.problems,
        bos_token_id=bos_token_id if isinstance(bos_token_id, int) else None,
    )
    config = architecture.adapt_config(shared, cfg)
    config.check_shape(architecture.has_experts)
    return config


def _read_num_experts(cfg: Settings) -> int:
    """Read the number of experts. transformers 5 writes ``num_local_experts`` where version 4 wrote
    ``num_experts``; DeepSeek's name is ``n_routed_experts``."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if cfg.get(name):
            return get_positive_int(cfg, name)
    return 0


def read_draft_config(path: Path, target: ModelConfig) -> ModelConfig:
    """Read the configuration of a model that drafts tokens for another.

    Raises:
        UsageError: the vocabularies differ in size, or the configuration is unreadable.
    """
    config = read_model_config(path)
    if config.vocab_size != target.vocab_size:
        raise UsageError(
            f"--speculative-draft-model {path} has {config.vocab_size} tokens in its vocabulary, "
            f"the model has {target.vocab_size}"
        )
    return config
