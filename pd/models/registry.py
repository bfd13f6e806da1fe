"""The table of architectures. A new one needs its own file and a line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from pd.models.architecture import Architecture
    from pd.models.settings import Settings


class ListedArchitecture(NamedTuple):
    """One line of the table.

    Attributes:
        class_name: name of the architecture in ``config.json`` under ``architectures``.
        location: ``module:class`` of the :class:`pd.models.architecture.Architecture`. It is
            imported when a checkpoint of this architecture is read.
    """

    class_name: str
    location: str


# Keys are the ``model_type``.
ARCHITECTURES: dict[str, ListedArchitecture] = {
    "llama": ListedArchitecture("LlamaForCausalLM", "pd.models.llama:Llama"),
    "mistral": ListedArchitecture("MistralForCausalLM", "pd.models.mistral:Mistral"),
    "qwen2": ListedArchitecture("Qwen2ForCausalLM", "pd.models.qwen2:Qwen2"),
    "qwen3": ListedArchitecture("Qwen3ForCausalLM", "pd.models.qwen3:Qwen3"),
    "mixtral": ListedArchitecture("MixtralForCausalLM", "pd.models.mixtral:Mixtral"),
    "qwen3_moe": ListedArchitecture("Qwen3MoeForCausalLM", "pd.models.qwen3_moe:Qwen3Moe"),
    "deepseek_v2": ListedArchitecture("DeepseekV2ForCausalLM", "pd.models.deepseek_v2:DeepseekV2"),
    "deepseek_v3": ListedArchitecture("DeepseekV3ForCausalLM", "pd.models.deepseek_v3:DeepseekV3"),
    "glm4_moe_lite": ListedArchitecture(
        "Glm4MoeLiteForCausalLM", "pd.models.glm4_moe_lite:Glm4MoeLite"
    ),
    "glm4_moe": ListedArchitecture("Glm4MoeForCausalLM", "pd.models.glm4_moe:Glm4Moe"),
    "gpt_oss": ListedArchitecture("GptOssForCausalLM", "pd.models.gpt_oss:GptOss"),
    "phi3": ListedArchitecture("Phi3ForCausalLM", "pd.models.phi3:Phi3"),
    "kimi_k2": ListedArchitecture("DeepseekV3ForCausalLM", "pd.models.deepseek_v3:DeepseekV3"),
}


def find_architecture(model_type: str) -> Architecture:
    """Return the architecture of a key of :data:`ARCHITECTURES`."""
    module, _, name = ARCHITECTURES[model_type].location.partition(":")
    made: Architecture = getattr(importlib.import_module(module), name)()
    return made


def find_model_type(raw: Settings) -> str:
    """Return the key of :data:`ARCHITECTURES` for the content of a ``config.json``: by the first
    name under ``architectures``, or by ``model_type`` if there is none.

    Raises:
        UnsupportedModelError: the architecture is not in the table.
    """
    known = ", ".join(listed.class_name for listed in ARCHITECTURES.values())
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        model_type = raw.get("model_type")
        if isinstance(model_type, str) and model_type in ARCHITECTURES:
            return model_type
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported; known: {known}")
    for model_type, listed in ARCHITECTURES.items():
        if names[0] == listed.class_name:
            return model_type
    raise UnsupportedModelError(f"architecture {names[0]!r} is not supported; known: {known}")
