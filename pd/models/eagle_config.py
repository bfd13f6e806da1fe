"""The configuration of an EAGLE head, read from the ``config.json`` of a published checkpoint.

An EAGLE head is one decoder layer that drafts tokens for a larger model, the target, from the
target's hidden states. EAGLE-1 and EAGLE-2 (Li et al., 2024) use the last one, and differ only in
how they search drafts. EAGLE-3 (Li et al., 2025) uses several layers. We support the layouts of
SGLang, vLLM, SpecForge and speculators. Importing this does not import torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pd.core.errors import UnsupportedModelError, UsageError
from pd.models.checkpoint import find_checkpoint, hash_weights
from pd.models.config_reader import parse_model_config
from pd.models.refusals import check_neutral, refuse_setting
from pd.models.registry import ARCHITECTURES
from pd.models.settings import get_mapping, get_positive_int_or, read_json

if TYPE_CHECKING:
    from pathlib import Path

    from pd.core.config import NodeConfig
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings

EAGLE, EAGLE3 = "eagle", "eagle3"

# Algorithm and ``model_type`` of the layer by the first name under ``architectures``. The heads of
# EAGLE's authors say LlamaForCausalLM; their EAGLE-3 heads have a draft vocabulary.
_ARCHITECTURES: dict[str, tuple[str, str]] = {
    "LlamaForCausalLMEagle": (EAGLE, "llama"),
    "EagleLlamaForCausalLM": (EAGLE, "llama"),
    "Qwen2ForCausalLMEagle": (EAGLE, "qwen2"),
    "LlamaForCausalLMEagle3": (EAGLE3, "llama"),
    "Eagle3LlamaForCausalLM": (EAGLE3, "llama"),
    "Qwen3ForCausalLMEagle3": (EAGLE3, "qwen3"),
}
_AUTHORS_NAME = "LlamaForCausalLM"

# Harmless values of a head's settings, as in pd.models.refusals.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "fc_norm": (None, False),
    "norm_output": (None, False),
    "norm_before_fc": (None, False),
    "add_para_norm": (None, False),
    "parallel_drafting": (None, False),
    "hot_vocab_size": (None,),
    "logit_scale": (None, 1, 1.0),
    "is_causal": (None, True),
    "quantization_config": (None,),
    "compression_config": (None,),
}
_NEUTRAL_EAGLE_CONFIG: dict[str, tuple[object, ...]] = {
    "use_mtp_layernorm": (None, False),
    "parallel_draft_step": (None, 1),
}
_NEUTRAL_OF: dict[str, dict[str, tuple[object, ...]]] = {
    EAGLE: {
        "use_aux_hidden_state": (None, False),
        "use_input_layernorm_in_first_layer": (None, False),
        "use_last_layernorm": (None, False),
    },
    EAGLE3: {
        "use_aux_hidden_state": (None, True),
        "use_input_layernorm_in_first_layer": (None, True),
        "use_last_layernorm": (None, True),
    },
}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE head and the states of the target that it reads.

    Attributes:
        algorithm: ``eagle`` (EAGLE-1 and EAGLE-2) or ``eagle3``.
        layer: the decoder layer, as a model of one layer. Its vocabulary is the target's.
        aux_layers: layers of the target before which its residual stream is read, ascending. The
            target's number of layers stands for the last layer's output.
        normed: whether the last layer's output is read after the target's last norm.
        target_hidden_size: hidden size of the target.
        draft_vocab_size: rows of the output head.
        fc_bias: whether ``fc`` has a bias. A checkpoint with weights determines that itself.
        norm_before_residual: whether the layer's residual stream starts with the normalized fused
            hidden state instead of the fused hidden state.
    """

    algorithm: str
    layer: ModelConfig
    aux_layers: tuple[int, ...]
    normed: bool
    target_hidden_size: int
    draft_vocab_size: int
    fc_bias: bool = False
    norm_before_residual: bool = False

    plane_name: ClassVar[str] = "eagle"

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def feature_size(self) -> int:
        """Width of a token's features: the hidden states of ``aux_layers`` side by side."""
        return len(self.aux_layers) * self.target_hidden_size

    @classmethod
    def from_pretrained(cls, path: str | Path, target: ModelConfig) -> EagleConfig:
        """Read the directory of a head (or the id of one in the local cache) for ``target``.

        Raises:
            UsageError: the directory does not exist, its config.json is unreadable, or the head
                belongs to a model of another shape.
            UnsupportedModelError: this is not an EAGLE head, or a setting that changes results is
                not implemented.
        """
        file = find_checkpoint(path) / "config.json"
        raw = read_json(file)
        try:
            config = cls.from_dict(raw, target)
        except UsageError as error:
            # Name the head, because the target has a config.json, too.
            raise type(error)(f"--speculative-draft-model {path}: {error}") from None
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"{file} cannot be used: {error}") from None
        config._check_target(path, target)
        return config

    @classmethod
    def from_dict(cls, raw: Settings, target: ModelConfig) -> EagleConfig:
        """Read the parsed ``config.json``. Raises the same errors as :meth:`from_pretrained`."""
        algorithm, model_type = _find_kind(raw)
        cfg = _flatten_config(raw)
        eagle_config = get_mapping(cfg, "eagle_config")
        check_neutral(cfg, _NEUTRAL)
        check_neutral(eagle_config, _NEUTRAL_EAGLE_CONFIG, "eagle_config.")
        check_neutral(eagle_config, _NEUTRAL_OF[algorithm], "eagle_config.")
        layer = parse_model_config({**cfg, "architectures": [ARCHITECTURES[model_type].class_name]})
        if layer.num_layers != 1:
            refuse_setting("num_hidden_layers", layer.num_layers)
        if cfg.get("qkv_bias"):
            layer = dataclasses.replace(layer, attention_bias=True)
        draft_vocab_size = get_positive_int_or(cfg, "draft_vocab_size", layer.vocab_size)
        if draft_vocab_size > layer.vocab_size or (
            draft_vocab_size < layer.vocab_size
            and (algorithm == EAGLE or layer.tie_word_embeddings)
        ):
            refuse_setting("draft_vocab_size", draft_vocab_size)
        return cls(
            algorithm=algorithm,
            layer=layer,
            aux_layers=_find_aux_layers(algorithm, cfg, eagle_config, target),
            normed=algorithm == EAGLE,
            target_hidden_size=get_positive_int_or(cfg, "target_hidden_size", layer.hidden_size),
            draft_vocab_size=draft_vocab_size,
            fc_bias=bool(cfg.get("bias")),
            norm_before_residual=bool(cfg.get("norm_before_residual")),
        )

    def _check_target(self, path: str | Path, target: ModelConfig) -> None:
        what = f"--speculative-draft-model {path}"
        if self.layer.vocab_size != target.vocab_size:
            raise UsageError(
                f"{what} has {self.layer.vocab_size} tokens in its vocabulary, the model has "
                f"{target.vocab_size}"
            )
        if self.target_hidden_size != target.hidden_size:
            raise UsageError(
                f"{what} reads hidden states of size {self.target_hidden_size}, those of the model "
                f"have {target.hidden_size}"
            )
        if self.hidden_size != target.hidden_size and (
            self.algorithm == EAGLE or self.layer.tie_word_embeddings
        ):
            raise UsageError(
                f"{what} has hidden_size {self.hidden_size} and shares the output head of the "
                f"model, whose hidden_size is {target.hidden_size}"
            )

    def identify(self, config: NodeConfig) -> str:
        """See :class:`pd.models.draft_head.HeadConfig`."""
        path = config.speculative_draft_model
        assert path is not None, "EAGLE heads have a checkpoint of their own"
        fingerprint = self.compute_fingerprint(path, config.load_format, config.seed)
        return f"{self.algorithm} {fingerprint}"

    def compute_fingerprint(
        self, path: str | Path, load_format: str = "auto", seed: int = 0
    ) -> str:
        """Hash the configuration and the weights of the head to 16 hex digits. Together with the
        identity of the target (:mod:`pd.engine.identity`) they determine the values of its KV. For
        random weights we hash the seed."""
        settings = dataclasses.asdict(self)
        for name in ("dtype", "eos_token_ids", "eos_problems", "bos_token_id", "context_length"):
            del settings["layer"][name]
        weights = f"seed {seed}" if load_format == "dummy" else hash_weights(path)
        data = json.dumps([settings, weights], sort_keys=True).encode()
        return hashlib.sha256(data).hexdigest()[:16]


def _find_kind(raw: Settings) -> tuple[str, str]:
    """Return the algorithm and the ``model_type`` of the layer.

    Raises:
        UnsupportedModelError: this is not the configuration of a known EAGLE head.
    """
    speculators = raw.get("speculators_model_type")
    if speculators is not None:
        if speculators != EAGLE3:
            refuse_setting("speculators_model_type", speculators)
        model_type = get_mapping(raw, "transformer_layer_config").get("model_type")
        if model_type not in ("llama", "qwen3"):
            refuse_setting("transformer_layer_config.model_type", model_type)
        return EAGLE3, str(model_type)
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name == _AUTHORS_NAME:
        return (EAGLE3 if raw.get("draft_vocab_size") else EAGLE), "llama"
    if name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    known = ", ".join(_ARCHITECTURES)
    raise UnsupportedModelError(f"architecture {name!r} is not an EAGLE head; known: {known}")


def _flatten_config(raw: Settings) -> dict[str, object]:
    """Bring a configuration of speculators, which keeps the layer's settings in a nested object,
    into the form of the others."""
    if raw.get("speculators_model_type") is None:
        return dict(raw)
    if not isinstance(raw.get("norm_before_residual"), bool):
        raise UsageError(
            "config.json: norm_before_residual must be true or false, not "
            f"{raw.get('norm_before_residual')!r}"
        )
    layer = get_mapping(raw, "transformer_layer_config")
    own = {key: value for key, value in raw.items() if key != "transformer_layer_config"}
    return {**layer, **own, "num_hidden_layers": layer.get("num_hidden_layers", 1)}


def _find_aux_layers(
    algorithm: str, cfg: Settings, eagle_config: Settings, target: ModelConfig
) -> tuple[int, ...]:
    """Return the layers before which the target's residual stream is read.

    Ids at the top of the file have this meaning (vLLM, speculators). An id in ``eagle_config``
    names the layer whose output is read (SGLang, SpecForge). Without ids we use the layers of
    EAGLE-3's authors. Hidden states are always fused in the order of the layers.
    """
    end = target.num_layers
    if algorithm == EAGLE:
        return (end,)
    for settings, shift, name in (
        (cfg, 0, _LAYER_IDS),
        (eagle_config, 1, f"eagle_config.{_LAYER_IDS}"),
    ):
        ids = settings.get(_LAYER_IDS)
        if not ids:
            continue
        if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
            raise UsageError(f"config.json: {name} must be a list of integers, not {ids!r}")
        layers = sorted(layer + shift for layer in ids)
        if layers[0] < 0 or layers[-1] > end or len(set(layers)) < len(layers):
            raise UsageError(
                f"config.json: {name} = {ids} does not name different layers of a model of {end}"
            )
        return tuple(layers)
    layers = [2, end // 2, end - 3]
    if not 2 < layers[1] < layers[2]:
        raise UsageError(
            f"config.json lacks {_LAYER_IDS}, which has no default for a model of {end} layers"
        )
    return tuple(layers)
