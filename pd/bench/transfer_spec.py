"""One measurement of ``pd-bench transfer``, and its result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from pd.bench.shapes import NAMES, model_directory
from pd.core.errors import UsageError
from pd.core.node_info import MODEL_PLANE, KVLayout, Plane

if TYPE_CHECKING:
    from pd.bench.report import Row
    from pd.core.node_info import DType

DTYPES = ("bfloat16", "float16", "float32")
Layout = Literal["scattered", "contiguous"]
Pattern = Literal["nodes", "groups"]
PATTERNS: tuple[Pattern, ...] = ("nodes", "groups")


@dataclass(frozen=True)
class KVShape:
    """A model's KV: the numbers that its layers keep for each token.

    Attributes:
        token_flops, pair_flops: see :class:`pd.prefill_node.outgoing.PromptCost`.
        vectors: vectors of a token and layer: 2 for K and V, 1 for a row of latents.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    token_flops: float = 0.0
    pair_flops: float = 0.0
    vectors: Literal[1, 2] = 2

    def __str__(self) -> str:
        if self.vectors == 1:
            return f"{self.layers} layers, rows of {self.head_dim}"
        return f"{self.layers} layers, {self.kv_heads} heads x {self.head_dim}"


def load_shape(model: str, dtype: str) -> KVShape:
    """Load the KV shape of a named model, a model directory or a ``config.json``.

    Args:
        dtype: ``auto`` for the checkpoint's.

    Raises:
        UsageError: there is no such model, or its configuration cannot be used.
    """
    from pd.models.config_reader import parse_model_config

    file = model_directory(model)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise UsageError(
            f"--model {model} is neither a model directory nor a config.json nor one of "
            f"{', '.join(NAMES)}"
        )
    try:
        config = parse_model_config(json.loads(file.read_text()))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"{file} cannot be used: {error}") from None
    chosen = (config.dtype or "bfloat16") if dtype == "auto" else dtype
    if chosen not in DTYPES:
        raise UsageError(f"{model} has dtype {chosen}; choose one with --dtype {'|'.join(DTYPES)}")
    shown = model if model in NAMES else file.resolve().parent.name
    return KVShape(
        shown,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        chosen,
        config.token_flops,
        config.pair_flops,
        1 if config.latent else 2,
    )


class TransferSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement, as both ends know it.

    Attributes:
        source_device, target_device: devices of P's and D's pool; D decides about its own.
        connections: number of tcp connections; 0 for the backend's default.
        repeats: least number of timed transfers; more if they take less than ``seconds`` in all.
        pattern: ``nodes`` sends in the portions in which a prefill node would, ``groups`` in
            ``layer_group`` layers of each chunk.
        chunk: tokens of a prefill chunk.
    """

    backend: str
    shape: KVShape
    page_size: int
    tokens: int
    layout: Layout
    source_device: str
    target_device: str
    connections: int
    repeats: int
    seconds: float = 2.0
    pattern: Pattern = "groups"
    layer_group: int = 8
    chunk: int = 8192

    @property
    def kv(self) -> KVLayout:
        shape = self.shape
        dtype = cast("DType", shape.dtype)
        plane = Plane(
            MODEL_PLANE,
            shape.layers,
            shape.kv_heads,
            shape.head_dim,
            dtype,
            vectors=shape.vectors,
        )
        return KVLayout((plane,), self.page_size)

    @property
    def num_pages(self) -> int:
        return -(-self.tokens // self.page_size)

    @property
    def num_bytes(self) -> int:
        return self.tokens * self.kv.token_bytes

    @property
    def device(self) -> str:
        """Both ends' devices; one name if they are both the CPU."""
        ends = (self.source_device, self.target_device)
        return ends[0] if ends == ("cpu", "cpu") else ",".join(ends)

    def __str__(self) -> str:
        return (
            f"{self.backend}, {self.shape.name}, {self.device}, page size {self.page_size}, "
            f"{self.pattern}"
        )


class TransferRates(msgspec.Struct):
    """Rates in GB/s, in the order of the repeats; ``ceiling`` names what we compare with."""

    spec: TransferSpec
    ceiling: str
    rates: list[float]
    ceiling_rates: list[float]
    connections: int | None
    devices: list[str]


def make_row(result: TransferRates) -> Row:
    """Make the row of the result file."""
    spec = result.spec
    gb_s, ceiling = median(result.rates), median(result.ceiling_rates)
    return {
        "backend": spec.backend,
        "device": spec.device,
        "model": spec.shape.name,
        "shape": str(spec.shape),
        "dtype": spec.shape.dtype,
        "page_size": spec.page_size,
        "tokens": spec.tokens,
        "layout": spec.layout,
        "pattern": spec.pattern,
        "bytes": spec.num_bytes,
        "connections": result.connections,
        "repeats": len(result.rates),
        "gb_s": gb_s,
        "best_gb_s": max(result.rates),
        "ceiling": result.ceiling,
        "ceiling_gb_s": ceiling,
        "best_ceiling_gb_s": max(result.ceiling_rates),
        "share_of_ceiling_rate": gb_s / ceiling,
    }
