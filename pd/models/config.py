"""What a checkpoint's ``config.json`` says, in one architecture-neutral form.

Reads the spellings of transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and 5
(``rope_parameters``, ``dtype``). A setting that changes results is either represented here or
refused by :mod:`pd.models.refusals`; nothing is ignored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd.core.errors import UnsupportedModelError, UsageError
from pd.models.refusals import ROPE_TYPES, check_supported

# Class names that may stand in ``architectures``, by ``model_type``.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

# Those with experts in every layer.
_SPARSE = ("mixtral", "qwen3_moe")

# What transformers assumes for a key that config.json leaves out, where it is not the same for all.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        type: ``default``, ``linear`` or ``llama3``.
        factor: by which ``linear`` and ``llama3`` stretch wavelengths.
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

    Attributes:
        architecture: the ``model_type``, a key of :data:`ARCHITECTURES`.
        context_length: ``max_position_embeddings``, tokens.
        intermediate_size: width of the MLP, or of one expert when ``num_experts`` > 0.
        attention_bias: of the q, k and v projections; ``output_bias``: of the output projection.
        qk_norm: whether q and k are RMS-normalized per head before the rotation.
        num_experts: 0 for a dense model.
        norm_topk_prob: whether the chosen experts' weights are scaled to sum to 1.
        dtype: the checkpoint's (``float32``, ``bfloat16``, ``float16``, …) or None.
        eos_token_ids: of ``config.json`` and ``generation_config.json`` together, ascending.
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
        weight; of a mixture of experts with the router's and the chosen experts'."""
        return int(2 * self.num_layers * self.layer_weights(self.num_experts_per_tok or 1))

    @property
    def pair_flops(self) -> int:
        """Floating-point operations of one token's attention to one, in all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    def layer_weights(self, num_experts: float) -> float:
        """Weights of one layer's matrices, of its experts so many (1 for a dense model)."""
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
    def from_dict(
        cls, raw: dict[str, Any], generation: dict[str, Any] | None = None
    ) -> ModelConfig:
        """The same from the parsed ``config.json`` and ``generation_config.json``."""
        architecture = _architecture(raw)
        cfg = {**_DEFAULTS[architecture], **raw}
        check_supported(architecture, cfg)
        heads = _number(cfg, "num_attention_heads")
        hidden = _number(cfg, "hidden_size")
        experts = cfg.get("num_local_experts", cfg.get("num_experts"))
        is_moe = architecture in _SPARSE
        width = "moe_intermediate_size" if architecture == "qwen3_moe" else "intermediate_size"
        bias = bool(cfg.get("attention_bias")) and architecture in ("llama", "qwen3", "qwen3_moe")
        dtype = cfg.get("dtype") or cfg.get("torch_dtype")
        config = cls(
            architecture=architecture,
            vocab_size=_number(cfg, "vocab_size"),
            hidden_size=hidden,
            num_layers=_number(cfg, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=cfg.get("num_key_value_heads") or heads,
            head_dim=cfg.get("head_dim") or hidden // heads,
            intermediate_size=_number(cfg, width),
            context_length=_number(cfg, "max_position_embeddings"),
            rms_norm_eps=float(cfg.get("rms_norm_eps", 1e-6)),
            rope=_rope(cfg),
            tie_word_embeddings=bool(cfg.get("tie_word_embeddings", False)),
            attention_bias=bias or architecture == "qwen2",
            output_bias=bias,
            mlp_bias=bool(cfg.get("mlp_bias")) and architecture == "llama",
            qk_norm=architecture in ("qwen3", "qwen3_moe"),
            num_experts=int(experts) if is_moe and experts else 0,
            num_experts_per_tok=int(cfg["num_experts_per_tok"]) if is_moe else 0,
            norm_topk_prob=architecture != "qwen3_moe" or bool(cfg.get("norm_topk_prob", False)),
            dtype=str(dtype).removeprefix("torch.") if dtype else None,
            eos_token_ids=_eos_token_ids(cfg, generation or {}),
            bos_token_id=cfg.get("bos_token_id"),
        )
        config._check_shape()
        return config

    def _check_shape(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim {self.head_dim} is odd")
        is_moe = self.architecture in _SPARSE
        if is_moe and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise UnsupportedModelError(
                f"num_experts_per_tok {self.num_experts_per_tok} of {self.num_experts} experts"
            )

    def divided(self, tp_size: int) -> ModelConfig:
        """The part of one of ``tp_size`` ranks: heads and the MLPs' width divided among them. The
        vocabulary stays whole, though the output head is divided too.

        Raises:
            UsageError: something is not a multiple of ``tp_size``.
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
        """16 hex digits of what determines KV values: the configuration and the weights.

        Of the weights, sizes, headers and a sample of each file are hashed, so that a fine-tuned
        model differs from its base without reading all of it. Dummy weights are their seed.
        """
        what = dataclasses.asdict(self)
        for name in ("dtype", "eos_token_ids", "bos_token_id", "context_length"):
            del what[name]
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode())
        if load_format == "dummy":
            digest.update(f"dummy {seed}".encode())
        else:
            for file in sorted(find_checkpoint(path).glob("model*.safetensors")):
                _hash_sample(file, digest)
        return digest.hexdigest()[:16]


def find_checkpoint(path: str | Path) -> Path:
    """The model directory: a path as it is, or an ``owner/name`` in the Hugging Face cache.

    Raises UsageError, saying what to do, if neither exists.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise UsageError(f"{directory} has no config.json: pass a Hugging Face model directory")
        return directory
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises UsageError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} does not hold a JSON object")
    return value


def _architecture(raw: dict[str, Any]) -> str:
    known = ", ".join(ARCHITECTURES.values())
    names = raw.get("architectures") or []
    if not names:
        model_type = raw.get("model_type")
        if model_type in ARCHITECTURES:
            return str(model_type)
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported; known: {known}")
    for model_type, name in ARCHITECTURES.items():
        if names[0] == name:
            return model_type
    raise UnsupportedModelError(f"architecture {names[0]!r} is not supported; known: {known}")


def _number(cfg: dict[str, Any], key: str) -> int:
    value = cfg.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UsageError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _rope(cfg: dict[str, Any]) -> RopeConfig:
    """Version 5 keeps all in ``rope_parameters``, version 4 scaling apart from ``rope_theta``."""
    rope = cfg.get("rope_parameters") or cfg.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or cfg.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    missing = [key for key in ROPE_TYPES[kind] if not isinstance(rope.get(key), int | float)]
    if missing:
        raise UsageError(f"config.json: rope type {kind!r} needs a number for {missing[0]!r}")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(rope["factor"]))
    original = rope.get("original_max_position_embeddings") or cfg["max_position_embeddings"]
    return RopeConfig(
        theta,
        kind,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context=int(original),
    )


def _eos_token_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))


def _hash_sample(file: Path, digest: Any, spots: int = 16, width: int = 4096) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}".encode())
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(min(header, size)))
        for spot in range(spots):
            stream.seek(8 + header + (size - 8 - header) * spot // spots)
            digest.update(stream.read(width))
