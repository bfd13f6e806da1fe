"""The settings that determine a node's answers, by name, so that two nodes can say how they differ.

Suppose the nodes of a pair have different end tokens, rope bases or chat templates. Then an answer
would depend on the node that computed each token. Every setting of this kind appears here with its
value, or with a digest if the value is long.

Paths are left out, because equal checkpoints may lie in different directories. We also leave out
settings that may differ: page sizes, ranks, attention backends, drafters and capacities.
:class:`pd.core.node_info.NodeInfo` itself has the settings that determine how KV travels.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pd.core.node_info import MAX_IDENTITY_CHARACTERS
from pd.models.checkpoint import find_checkpoint, hash_weights
from pd.models.checkpoint_tokenizer import hash_bytes, read_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pd.core.config import NodeConfig
    from pd.models.config import ModelConfig

# We compare the dtype of the KV instead, and the context length is a capacity. No node reads the id
# of the token that starts a prompt. Ranks may have any experts.
_DECIDES_NOTHING = ("dtype", "context_length", "bos_token_id", "eos_problems", "ep_size")


def build_identity(config: NodeConfig, model: ModelConfig) -> dict[str, str]:
    """Collect all settings that determine the answers of a node with this model."""
    found = dict(_flatten_settings(dataclasses.asdict(model)))
    for name in _DECIDES_NOTHING:
        del found[name]
    tokenizer = read_tokenizer(find_checkpoint(config.model)).identity
    found |= {
        **tokenizer,
        "weights": identify_weights(config),
        "--kv-cache-dtype": config.kv_cache_dtype,
        "--grammar-backend": config.grammar_backend,
        "--grammar-jump-forward": "on" if config.grammar_jump_forward else "off",
    }
    return {name: _shorten_value(value) for name, value in found.items()}


def identify_weights(config: NodeConfig) -> str:
    """Identify the weights by a digest, or random ones by their seed."""
    if config.load_format == "dummy":
        return f"random with --seed {config.seed}"
    return hash_weights(config.model)


def digest_identity(identity: Mapping[str, str]) -> str:
    """Hash an identity to 16 hex digits."""
    return hash_bytes("\n".join(f"{n!r}: {v!r}" for n, v in sorted(identity.items())).encode())


def _flatten_settings(
    settings: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield settings by name. A setting inside an object is called ``object.name``."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flatten_settings(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            yield prefix + name, ", ".join(map(str, value)) or "none"
        else:
            yield prefix + name, str(value)


def _shorten_value(value: str) -> str:
    """Make a value fit for other nodes: short, and encodable even if a file holds lone
    surrogates."""
    data = value.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_IDENTITY_CHARACTERS:
        return data.decode()
    return f"{value[:32].encode('utf-8', 'replace').decode()}... ({hash_bytes(data)})"
