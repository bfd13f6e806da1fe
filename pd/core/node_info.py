"""Description of a node, published in the handshake, in ``/server_info`` and to proxies."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pd.core.errors import HandshakeError, TransferError
from pd.core.sampling_params import SamplingDefaults
from pd.core.transfer_choice import choose

Role = Literal["prefill", "decode", "unified"]

# Name in messages of the settings that --generation-config changes.
SAMPLING_DEFAULTS = "recommended sampling (--generation-config)"

# Limits on what a peer may publish. The longest honest value is a library's connection record in
# base64, a few kilobytes.
MAX_BACKENDS = 8
MAX_ADDRESS_FIELDS = 16
MAX_ADDRESS_CHARS = 16 << 10
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
_Value = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS)]
Address = Annotated[dict[_Name, _Value], msgspec.Meta(max_length=MAX_ADDRESS_FIELDS)]
Transfers = Annotated[dict[_Name, Address], msgspec.Meta(max_length=MAX_BACKENDS)]


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
        transfers: the transfer backends offered, in order of preference, and what each of them
            publishes, which only the same backend understands.
        kv_digest: commits carry a digest of the KV, which is verified.
        sampling_defaults: what the model recommends for requests that do not say otherwise.
        drafter: describes a drafter that needs something of the node which computes the prompt:
            algorithm, fingerprint, widths and dtype. Empty for others.
    """

    instance_id: str
    role: Role
    model_id: str
    kv: KVLayout
    endpoint: str
    bootstrap: str
    transfers: Transfers
    kv_digest: bool = False
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    drafter: str = ""

    def address_of(self, backend: str) -> dict[str, str]:
        """Address published for ``backend``. Raises TransferError if there is none."""
        address = self.transfers.get(backend)
        if address is None:
            offered = ", ".join(self.transfers) or "nothing"
            raise TransferError(
                f"{self.instance_id} does not offer transfer backend {backend}, only {offered}"
            )
        return address


# Properties that must be equal, since KV cannot be converted between peers. Page size and sharding
# may differ.
_MUST_MATCH_KV = ("num_layers", "num_kv_heads", "head_dim", "dtype", "layout")


def choose_transfer(prefill: NodeInfo, decode: NodeInfo) -> str:
    """The backend that a pair uses: the first of P's that D offers and that can work for the pair.

    Both ends call this with the same two arguments, so they agree without asking each other.

    Raises:
        HandshakeError: there is none; the message names both lists and why a shared one is no use.
    """
    backend, obstacles = choose(prefill.transfers, decode.transfers)
    if backend:
        return backend
    offers = (
        f"prefill node {prefill.instance_id} offers {', '.join(prefill.transfers) or 'none'}, "
        f"decode node {decode.instance_id} offers {', '.join(decode.transfers) or 'none'}"
    )
    if obstacles:
        raise HandshakeError(f"no transfer backend works ({'; '.join(obstacles)}): {offers}")
    raise HandshakeError(f"transfer backend differs: {offers}")


def check_compatible(prefill: NodeInfo, decode: NodeInfo) -> None:
    """Raise HandshakeError naming both values of the first thing that cannot be converted."""
    choose_transfer(prefill, decode)
    pairs: list[tuple[str, object, object]] = [
        ("model", prefill.model_id, decode.model_id),
        ("--kv-digest", prefill.kv_digest, decode.kv_digest),
        ("--speculative-algorithm", prefill.drafter, decode.drafter),
        (SAMPLING_DEFAULTS, str(prefill.sampling_defaults), str(decode.sampling_defaults)),
    ]
    pairs += [(n, getattr(prefill.kv, n), getattr(decode.kv, n)) for n in _MUST_MATCH_KV]
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise HandshakeError(
                f"{name} differs: prefill node {prefill.instance_id} has {ours!r}, "
                f"decode node {decode.instance_id} has {theirs!r}"
            )
