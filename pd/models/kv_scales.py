"""Reads the scales with which a checkpoint wants K and V kept in fp8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import UsageError
from pd.core.node_info import MAX_SCALE, MIN_SCALE
from pd.models.checkpoint import find_checkpoint
from pd.models.loader import list_shards, open_shard

if TYPE_CHECKING:
    from pathlib import Path

    from pd.models.config import ModelConfig

_LAYERS, _ATTENTION = "model.layers.", ".self_attn."
# Names below ``self_attn``, and the vectors they are for. compressed-tensors writes the first two,
# modelopt the next two, and older checkpoints the others.
_VECTORS = {
    "k_scale": "k",
    "v_scale": "v",
    "k_proj.k_scale": "k",
    "v_proj.v_scale": "v",
    "k_proj.output_scale": "k",
    "v_proj.output_scale": "v",
    "kv_scale": "kv",
}


def read_kv_scales(path: str | Path, config: ModelConfig, load_format: str) -> tuple[float, ...]:
    """Read the scale of each vector of each layer, K before V (see
    :class:`pd.core.node_info.Plane`). Without scales in the checkpoint, or with dummy weights, all
    are 1. Rows of latents have the scale of K.

    Raises:
        UsageError: a scale is no single positive number, or a layer has one of the two only.
    """
    vectors = "kv" if config.latent is None else "k"
    found = {} if load_format == "dummy" else _read_all(path)
    scales = []
    for layer in range(config.num_layers):
        for vector in vectors:
            scale = found.get((layer, vector))
            if scale is None and any((layer, other) in found for other in vectors):
                raise UsageError(
                    f"{path}: layer {layer} has no {vector}_scale, but one of the other vector; "
                    "use --kv-cache-dtype auto"
                )
            scales.append(1.0 if scale is None else scale)
    return tuple(scales)


def _read_all(path: str | Path) -> dict[tuple[int, str], float]:
    """Read all scales of a checkpoint by layer and vector."""
    found: dict[tuple[int, str], float] = {}
    for shard in list_shards(find_checkpoint(path)):
        with open_shard(shard) as stored:
            for name in stored.keys():  # noqa: SIM118
                layer, attention, kind = name.removeprefix(_LAYERS).partition(_ATTENTION)
                if not attention or kind not in _VECTORS or not layer.isdecimal():
                    continue
                tensor = stored.get_tensor(name)
                if tensor.numel() != 1 or not MIN_SCALE <= float(tensor) <= MAX_SCALE:
                    shown = float(tensor) if tensor.numel() == 1 else list(tensor.shape)
                    raise UsageError(
                        f"{shard}: tensor {name} is {shown}; --kv-cache-dtype fp8_e4m3 needs one "
                        "positive scale of each layer's K and V"
                    )
                for vector in _VECTORS[kind]:
                    found[int(layer), vector] = float(tensor)
    return found
