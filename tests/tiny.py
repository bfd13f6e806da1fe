"""A model so small that whole nodes start in a tenth of a second: ``config.json`` alone."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import Cluster, start_node

if TYPE_CHECKING:
    from pd.launch import NodeServer

VOCAB_SIZE = 256
CONTEXT = 1024

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 254,
    "eos_token_id": 255,
    "tie_word_embeddings": False,
}
# K and V of one token: 2 layers of 2 heads of 8 float32.
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


@functools.cache
def tiny_model(**overrides: int) -> Path:
    """Return its directory. Weights are dummies, the same in every node."""
    directory = Path(tempfile.mkdtemp(prefix="pd-tiny-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "config.json").write_text(json.dumps(_CONFIG | overrides))
    return directory


@functools.cache
def tiny_head(algorithm: str = "eagle3", **overrides: int) -> Path:
    """Return the directory of an EAGLE head for the tiny model, which drafts at random."""
    config = {**_CONFIG, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    config |= overrides
    if algorithm == "eagle3":
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 192,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        }
    else:
        config["architectures"] = ["LlamaForCausalLMEagle"]
    directory = Path(tempfile.mkdtemp(prefix="pd-tiny-head-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def tiny_cluster(prefill: int = 1, decode: int = 1, unified: int = 0, **settings: Any) -> Cluster:
    """Start a :class:`cluster.Cluster` of the tiny model."""
    return Cluster(tiny_model(), prefill, decode, unified, **_defaults(settings))


def tiny_node(role: str, **settings: Any) -> NodeServer:
    """Start one node of the tiny model."""
    return start_node(role, tiny_model(), **_defaults(settings))


def _defaults(settings: dict[str, Any]) -> dict[str, Any]:
    return {"load_format": "dummy", "page_size": 4, "kv_cache_tokens": 2048, **settings}
