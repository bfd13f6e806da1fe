"""The configuration of a model in one form for all architectures, read from ``config.json``.

Reads the spellings of transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and 5
(``rope_parameters``, ``dtype``). A setting that changes results is either represented here or
refused by :mod:`pd.models.refusals`; nothing is ignored. Importing this does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pd.core.errors import UnsupportedModelError, UsageError
from pd.core.node_info import MAX_LAYERS
from pd.models.refusals import ROPE_TYPES, check_supported, rope_type
from pd.models.registry import find_architecture, model_type_of
from pd.models.settings import mapping, number, positive_int, positive_int_or, read_json

if TYPE_CHECKING:
    from hashlib import _Hash

    from pd.models.settings import Settings

INDEX = "model.safetensors.index.json"
_ORIGINAL_CONTEXT = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        type: ``default``, ``linear`` or ``llama3``.
        factor: ``linear`` and ``llama3`` stretch wavelengths by it.
        low_freq_factor, high_freq_factor, original_context: bounds between which ``llama3``
            interpolates (see :func:`pd.kernels.rope.inverse_frequencies`).
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    The attributes are as many as the settings of ``config.json`` that change results, and flat as
    they are there: a reader who knows that file knows this class.

    Attributes:
        architecture: the ``model_type``, a key of :data:`pd.models.registry.ARCHITECTURES`.
        context_length: ``max_position_embeddings``, in tokens.
        intermediate_size: width of the MLP, or of one expert when ``num_experts`` > 0.
        attention_bias: whether the q, k and v projections have biases.
        output_bias: whether the projection behind attention has one.
        qk_norm: whether q and k are RMS-normalized per head before the rotation.
        num_experts: experts of a layer; 0 in a dense model.
        norm_topk_prob: whether the chosen experts' weights are scaled to sum to 1.
        dtype: dtype of the checkpoint (``float32``, ``bfloat16``, ``float16``, …) or None.
        eos_token_ids: ids in ``config.json`` and ``generation_config.json`` together, ascending.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def token_flops(self) -> int:
        """Floating-point operations of a token's products with the layers' weights, two for each
        weight. In a mixture of experts these are the router's weights and the chosen experts'."""
        return int(2 * self.num_layers * self.layer_weights(self.num_experts_per_tok or 1))

    @property
    def pair_flops(self) -> int:
        """Floating-point operations of the attention of one token to one other, in all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    def layer_weights(self, num_experts: float) -> float:
        """Count the weights of one layer's matrices with ``num_experts`` of its experts (1 in a
        dense model)."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (heads + kv)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return attention + self.hidden_size * self.num_experts + num_experts * mlp

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read a Hugging Face model directory (or the id of a model in the local cache).

        Raises:
            UsageError: there is no such directory, or its config.json cannot be read.
            UnsupportedModelError: a setting changes results and is not implemented.
        """
        directory = find_checkpoint(path)
        raw = read_json(directory / "config.json")
        path = directory / "generation_config.json"
        generation = read_json(path) if path.exists() else {}
        try:
            return cls.from_dict(raw, generation)
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"{directory / 'config.json'} cannot be used: {error}") from None

    @classmethod
    def from_dict(cls, raw: Settings, generation: Settings | None = None) -> ModelConfig:
        """Read the parsed ``config.json`` and ``generation_config.json``; raises the errors of
        :meth:`from_pretrained`."""
        model_type = model_type_of(raw)
        architecture = find_architecture(model_type)
        cfg = {**architecture.defaults, **raw}
        check_supported(architecture, cfg)
        heads = positive_int(cfg, "num_attention_heads")
        hidden = positive_int(cfg, "hidden_size")
        dtype = cfg.get("dtype") or cfg.get("torch_dtype")
        bos_token_id = cfg.get("bos_token_id")
        shared = cls(
            architecture=model_type,
            vocab_size=positive_int(cfg, "vocab_size"),
            hidden_size=hidden,
            num_layers=positive_int(cfg, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=positive_int_or(cfg, "num_key_value_heads", heads),
            head_dim=positive_int_or(cfg, "head_dim", hidden // heads),
            intermediate_size=positive_int(cfg, architecture.width_key),
            context_length=positive_int(cfg, "max_position_embeddings"),
            rms_norm_eps=number(cfg, "rms_norm_eps", 1e-6),
            rope=_rope(cfg),
            tie_word_embeddings=bool(cfg.get("tie_word_embeddings", False)),
            num_experts=_num_experts(cfg) if architecture.has_experts else 0,
            num_experts_per_tok=(
                positive_int(cfg, "num_experts_per_tok") if architecture.has_experts else 0
            ),
            dtype=str(dtype).removeprefix("torch.") if dtype else None,
            eos_token_ids=_eos_token_ids(raw, generation or {}, default=architecture.default_eos),
            bos_token_id=bos_token_id if isinstance(bos_token_id, int) else None,
        )
        config = architecture.adapt(shared, cfg)
        config._check_shape(architecture.has_experts)
        return config

    def _check_shape(self, has_experts: bool) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.num_layers > MAX_LAYERS:
            raise UnsupportedModelError(
                f"num_hidden_layers {self.num_layers} is more than {MAX_LAYERS}"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim {self.head_dim} is odd")
        if has_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise UnsupportedModelError(
                f"num_experts_per_tok {self.num_experts_per_tok} of {self.num_experts} experts"
            )

    def divided(self, tp_size: int) -> ModelConfig:
        """Return the configuration of one of ``tp_size`` ranks' parts: heads and the width of the
        MLPs are divided. The vocabulary stays whole, though the output head is divided too.

        Raises:
            UsageError: one of these numbers is not a multiple of ``tp_size``.
        """
        for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"):
            value = getattr(self, name)
            if value % tp_size:
                raise UsageError(f"--tp-size {tp_size} does not divide the model's {name} {value}")
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // tp_size,
            num_kv_heads=self.num_kv_heads // tp_size,
            intermediate_size=self.intermediate_size // tp_size,
        )

    def fingerprint(self, path: str | Path, load_format: str = "auto", seed: int = 0) -> str:
        """Hash the configuration and the weights, which determine KV values; returns 16 hex digits.

        The sizes, the headers and a sample of the weight files are hashed, so that a fine-tuned
        model differs from its base without reading all of it. Dummy weights are hashed as their
        seed.
        """
        settings = dataclasses.asdict(self)
        for name in ("dtype", "eos_token_ids", "bos_token_id", "context_length"):
            del settings[name]
        return hash_weights(settings, path, load_format, seed)


def find_checkpoint(path: str | Path) -> Path:
    """Find the model directory: ``path`` itself, or an ``owner/name`` in the Hugging Face cache.

    Raises:
        UsageError: neither exists; the message says what to do.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise UsageError(f"{directory} has no config.json: pass a Hugging Face model directory")
        return directory
    # A user without a home directory has no cache, unless a variable names one.
    with contextlib.suppress(RuntimeError):
        home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
        cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
        cached = cache / f"models--{str(path).replace('/', '--')}"
        revision = cached / "refs" / "main"
        if revision.is_file():
            snapshot = cached / "snapshots" / revision.read_text().strip()
            if (snapshot / "config.json").is_file():
                return snapshot
    raise UsageError(
        f"model {str(path)!r} is neither a directory nor in the Hugging Face cache: "
        "download it first and pass its directory"
    )


def _num_experts(cfg: Settings) -> int:
    """transformers 5 writes ``num_local_experts`` where version 4 wrote ``num_experts``."""
    value = cfg.get("num_local_experts", cfg.get("num_experts"))
    return positive_int({"num_experts": value}, "num_experts") if value else 0


def _rope(cfg: Settings) -> RopeConfig:
    """Version 5 keeps everything in ``rope_parameters``; version 4 keeps ``rope_theta`` apart from
    ``rope_scaling``."""
    rope = mapping(cfg, "rope_parameters", "rope_scaling")
    theta = number(rope, "rope_theta") or number(cfg, "rope_theta") or 10000.0
    kind = rope_type(rope, "rope_parameters")
    missing = [key for key in ROPE_TYPES[kind] if not isinstance(rope.get(key), int | float)]
    if missing:
        raise UsageError(f"config.json: rope type {kind!r} needs a number for {missing[0]!r}")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, number(rope, "factor"))
    context, original = positive_int(cfg, "max_position_embeddings"), _ORIGINAL_CONTEXT
    return RopeConfig(
        theta,
        kind,
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        # As in transformers, the key of the file goes before that of the rope setting.
        original_context=positive_int_or(cfg, original, positive_int_or(rope, original, context)),
    )


def _eos_token_ids(*configs: Settings, default: int | None) -> tuple[int, ...]:
    if not any("eos_token_id" in config for config in configs):
        return () if default is None else (default,)
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int):
                raise UsageError(f"config.json: eos_token_id must be integers, not {value!r}")
            ids.add(token)
    return tuple(sorted(ids))


def hash_weights(settings: Settings, path: str | Path, load_format: str, seed: int) -> str:
    """Hash settings and the weights that belong to them, as :meth:`ModelConfig.fingerprint` says;
    returns 16 hex digits."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    if load_format == "dummy":
        digest.update(f"dummy {seed}".encode())
    else:
        for file in _weight_files(find_checkpoint(path)):
            if file.exists():  # a link may lead nowhere; what the model needs has been read
                _hash_sample(file, digest)
    return digest.hexdigest()[:16]


def _weight_files(directory: Path) -> list[Path]:
    """The files that the index names, as the loader reads them; without one, all of the name that
    the only file has."""
    index = directory / INDEX
    if not index.exists():
        return sorted(directory.glob("model*.safetensors"))
    names = mapping(read_json(index), "weight_map").values()
    return [directory / name for name in sorted(set(map(str, names)))]


def _hash_sample(file: Path, digest: _Hash, spots: int = 16, width: int = 4096) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}".encode())
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(min(header, size)))
        for spot in range(spots):
            stream.seek(8 + header + (size - 8 - header) * spot // spots)
            digest.update(stream.read(width))


def draft_config(path: Path, target: ModelConfig) -> ModelConfig:
    """Read the configuration of a model that drafts tokens for another.

    Raises:
        UsageError: the two do not have equally many tokens, or it cannot be read.
    """
    config = ModelConfig.from_pretrained(path)
    if config.vocab_size != target.vocab_size:
        raise UsageError(
            f"--speculative-draft-model {path} has {config.vocab_size} tokens in its vocabulary, "
            f"the model has {target.vocab_size}"
        )
    return config
