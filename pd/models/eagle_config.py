"""The configuration of an EAGLE head, read from the ``config.json`` of a published checkpoint.

An EAGLE head is one decoder layer that drafts tokens for a larger model, the target, from the
target's hidden states: EAGLE-1 and EAGLE-2 (Li et al., 2024), which differ only in how drafts are
searched, from the last one, and EAGLE-3 (Li et al., 2025) from those of several layers. The layouts
are those that SGLang, vLLM, SpecForge and speculators write. Importing this does not import torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.errors import UnsupportedModelError, UsageError
from pd.models.config import ModelConfig, find_checkpoint, hash_weights
from pd.models.refusals import check_neutral, refuse
from pd.models.registry import ARCHITECTURES
from pd.models.settings import mapping, positive_int_or, read_json

if TYPE_CHECKING:
    from pathlib import Path

    from pd.models.settings import Settings

EAGLE, EAGLE3 = "eagle", "eagle3"

# Algorithm and ``model_type`` of the layer by the first name under ``architectures``. The heads of
# EAGLE's authors say LlamaForCausalLM; those for EAGLE-3 have a draft vocabulary.
_ARCHITECTURES: dict[str, tuple[str, str]] = {
    "LlamaForCausalLMEagle": (EAGLE, "llama"),
    "EagleLlamaForCausalLM": (EAGLE, "llama"),
    "Qwen2ForCausalLMEagle": (EAGLE, "qwen2"),
    "LlamaForCausalLMEagle3": (EAGLE3, "llama"),
    "Eagle3LlamaForCausalLM": (EAGLE3, "llama"),
    "Qwen3ForCausalLMEagle3": (EAGLE3, "qwen3"),
}
_AUTHORS_NAME = "LlamaForCausalLM"

# Values with which a setting of a head leaves results as they are, as in pd.models.refusals.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "fc_norm": (None, False),
    "norm_output": (None, False),
    "norm_before_fc": (None, False),
    "add_para_norm": (None, False),
    "parallel_drafting": (None, False),
    "hot_vocab_size": (None,),
    "logit_scale": (None, 1, 1.0),
    "is_causal": (None, True),
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
    """An EAGLE head and what it reads of its target.

    Attributes:
        algorithm: ``eagle`` (EAGLE-1 and EAGLE-2) or ``eagle3``.
        layer: the decoder layer, as a model of one layer; its vocabulary is the target's.
        aux_layers: layers of the target before which its residual stream is read, ascending;
            the target's number of layers stands for the last layer's output.
        normed: whether the last layer's output is read after the target's last norm.
        target_hidden_size: hidden size of the target.
        draft_vocab_size: rows of the output head.
        fc_bias: whether ``fc`` has a bias; a checkpoint with weights decides that itself.
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

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def feature_size(self) -> int:
        """Width of a token's features: the hidden states of ``aux_layers`` side by side."""
        return len(self.aux_layers) * self.target_hidden_size

    @property
    def num_layers(self) -> int:
        """Layers with KV, always 1."""
        return self.layer.num_layers

    @property
    def num_heads(self) -> int:
        return self.layer.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.layer.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layer.head_dim

    @classmethod
    def from_pretrained(cls, path: str | Path, target: ModelConfig) -> EagleConfig:
        """Read the directory of a head (or the id of one in the local cache) for ``target``.

        Raises:
            UsageError: there is no such directory, its config.json cannot be read, or the head was
                made for a model of another shape.
            UnsupportedModelError: it is no EAGLE head, or a setting changes results and is not
                implemented.
        """
        file = find_checkpoint(path) / "config.json"
        raw = read_json(file)
        try:
            config = cls.from_dict(raw, target)
        except UsageError as error:
            # There is a config.json of the target, too.
            raise type(error)(f"--speculative-draft-model {path}: {error}") from None
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"{file} cannot be used: {error}") from None
        config._check_target(path, target)
        return config

    @classmethod
    def from_dict(cls, raw: Settings, target: ModelConfig) -> EagleConfig:
        """Read the parsed ``config.json``; raises the errors of :meth:`from_pretrained`."""
        algorithm, model_type = _kind_of(raw)
        cfg = _flat(raw)
        eagle_config = mapping(cfg, "eagle_config")
        check_neutral(cfg, _NEUTRAL)
        check_neutral(eagle_config, _NEUTRAL_EAGLE_CONFIG, "eagle_config.")
        check_neutral(eagle_config, _NEUTRAL_OF[algorithm], "eagle_config.")
        layer = ModelConfig.from_dict(
            {**cfg, "architectures": [ARCHITECTURES[model_type].class_name]}
        )
        if layer.num_layers != 1:
            refuse("num_hidden_layers", layer.num_layers)
        if cfg.get("qkv_bias"):
            layer = dataclasses.replace(layer, attention_bias=True)
        draft_vocab_size = positive_int_or(cfg, "draft_vocab_size", layer.vocab_size)
        if draft_vocab_size > layer.vocab_size or (
            draft_vocab_size < layer.vocab_size
            and (algorithm == EAGLE or layer.tie_word_embeddings)
        ):
            refuse("draft_vocab_size", draft_vocab_size)
        return cls(
            algorithm=algorithm,
            layer=layer,
            aux_layers=_aux_layers(algorithm, cfg, eagle_config, target),
            normed=algorithm == EAGLE,
            target_hidden_size=positive_int_or(cfg, "target_hidden_size", layer.hidden_size),
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

    def fingerprint(self, path: str | Path, load_format: str = "auto", seed: int = 0) -> str:
        """Hash the configuration and the weights of the head, which with the target's fingerprint
        determine the values of its KV; see :meth:`pd.models.config.ModelConfig.fingerprint`."""
        settings = dataclasses.asdict(self)
        for name in ("dtype", "eos_token_ids", "bos_token_id", "context_length"):
            del settings["layer"][name]
        return hash_weights(settings, path, load_format, seed)


def _kind_of(raw: Settings) -> tuple[str, str]:
    """Return algorithm and ``model_type`` of the layer.

    Raises:
        UnsupportedModelError: this is not the configuration of an EAGLE head that is known.
    """
    speculators = raw.get("speculators_model_type")
    if speculators is not None:
        if speculators != EAGLE3:
            refuse("speculators_model_type", speculators)
        model_type = mapping(raw, "transformer_layer_config").get("model_type")
        if model_type not in ("llama", "qwen3"):
            refuse("transformer_layer_config.model_type", model_type)
        return EAGLE3, str(model_type)
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name == _AUTHORS_NAME:
        return (EAGLE3 if raw.get("draft_vocab_size") else EAGLE), "llama"
    if name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    known = ", ".join(_ARCHITECTURES)
    raise UnsupportedModelError(f"architecture {name!r} is not an EAGLE head; known: {known}")


def _flat(raw: Settings) -> dict[str, object]:
    """Bring a configuration of speculators, which keeps the layer's settings in an object of their
    own, into the form of the others."""
    if raw.get("speculators_model_type") is None:
        return dict(raw)
    if not isinstance(raw.get("norm_before_residual"), bool):
        raise UsageError(
            "config.json: norm_before_residual must be true or false, not "
            f"{raw.get('norm_before_residual')!r}"
        )
    layer = mapping(raw, "transformer_layer_config")
    own = {key: value for key, value in raw.items() if key != "transformer_layer_config"}
    return {**layer, **own, "num_hidden_layers": layer.get("num_hidden_layers", 1)}


def _aux_layers(
    algorithm: str, cfg: Settings, eagle_config: Settings, target: ModelConfig
) -> tuple[int, ...]:
    """Return the layers before which the target's residual stream is read.

    At the top of the file, ids have this meaning (vLLM, speculators). In ``eagle_config`` an id is
    that of the layer whose output is read (SGLang, SpecForge). Without ids the layers are those of
    EAGLE-3's authors. Hidden states are fused in the order of the layers whatever the order of ids.
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
