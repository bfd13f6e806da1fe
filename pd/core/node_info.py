"""What a node says about itself: in the handshake, in ``/server_info`` and to the proxy."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pd.core.errors import HandshakeError

Role = Literal["prefill", "decode", "unified"]


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of one node's KV cache. Page size and sharding may differ between peers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    tp_size: int = 1
    layout: str = "layer_major"

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers."""
        width = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * width


class NodeInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process's life: a restart makes a new ``instance_id``.

    Attributes:
        model_id: fingerprint of what determines the KV values (architecture and weights source).
        endpoint: ``tcp://host:port`` of the node's message socket.
        bootstrap: ``http://host:port`` of a prefill node's registry, else empty.
        transfer_backend: the backend's name.
        transfer_address: published by the backend, understood by the same backend only.
        kv_digest: commits carry a digest of the KV, which is verified.
    """

    instance_id: str
    role: Role
    model_id: str
    kv: KVLayout
    endpoint: str
    bootstrap: str
    transfer_backend: str
    transfer_address: dict[str, str]
    kv_digest: bool = False


# What cannot be converted between peers. Page size, by contrast, may differ freely.
_MUST_MATCH_KV = ("num_layers", "num_kv_heads", "head_dim", "dtype", "layout", "tp_size")


def check_compatible(prefill: NodeInfo, decode: NodeInfo) -> None:
    """Raise HandshakeError naming both values of the first thing that cannot be converted."""
    pairs: list[tuple[str, Any, Any]] = [
        ("model", prefill.model_id, decode.model_id),
        ("transfer backend", prefill.transfer_backend, decode.transfer_backend),
        ("--kv-digest", prefill.kv_digest, decode.kv_digest),
    ]
    pairs += [(n, getattr(prefill.kv, n), getattr(decode.kv, n)) for n in _MUST_MATCH_KV]
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise HandshakeError(
                f"{name} differs: prefill node {prefill.instance_id} has {ours!r}, "
                f"decode node {decode.instance_id} has {theirs!r}"
            )
