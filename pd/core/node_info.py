"""Description of a node, published in the handshake.

:mod:`pd.node.info` writes ``/server_info``, the description for clients and proxies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec

from pd.core.brief import short_repr
from pd.core.errors import HandshakeError, TransferError, UsageError
from pd.core.release import RELEASE, REMEDY, describe_release
from pd.core.sampling_params import SamplingDefaults
from pd.core.transfer_choice import choose_backend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Role = Literal["prefill", "decode", "unified"]

# Name of the settings changed by --generation-config, in error messages.
SAMPLING_DEFAULTS = "recommended sampling (--generation-config)"
# Error messages say this about a node without a drafter, if its peer's drafter needs data.
NO_HEAD = "no draft head"

# Limits on a peer's addresses. The longest honest value is a library's connection record in base64,
# a few kilobytes.
MAX_BACKENDS = 8
MAX_ADDRESS_FIELDS = 16
MAX_ADDRESS_CHARS = 16 << 10
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
_Value = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS)]
Address = Annotated[dict[_Name, _Value], msgspec.Meta(max_length=MAX_ADDRESS_FIELDS)]
Transfers = Annotated[dict[_Name, Address], msgspec.Meta(max_length=MAX_BACKENDS)]


# Settings with an influence on a node's answers, by name; see :mod:`pd.engine.identity`.
MAX_IDENTITY_CHARACTERS = 256
_SettingName = Annotated[str, msgspec.Meta(max_length=64, pattern=r"\A[\w.,:() -]+\Z")]
_SettingValue = Annotated[str, msgspec.Meta(max_length=MAX_IDENTITY_CHARACTERS)]
Identity = Annotated[dict[_SettingName, _SettingValue], msgspec.Meta(max_length=128)]
# Limit on further different settings named in an error message.
MAX_NAMED = 3

MAX_PLANES = 8
MAX_LAYERS = 4096
MODEL_PLANE = "model"
# Planes begin at multiples of this in a pool's memory, as CUDA's own allocations do.
PLANE_ALIGNMENT = 512
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
# Dtype of the vectors of planes with scales.
FP8 = "float8_e4m3fn"

DType = Literal["float32", "bfloat16", "float16"]
PlaneRanks = Literal["divided", "copied", "first"]
_PLACES = {"divided": "divided among ranks", "copied": "on every rank", "first": "on rank 0"}
_Layers = Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
_Heads = Annotated[int, msgspec.Meta(ge=1, le=4096)]
_HeadDim = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Group = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PLANES)]
_PageSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Window = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=1024)]
# Limits of scales, within which a float32 has an inverse.
MIN_SCALE, MAX_SCALE = 2.0**-100, 2.0**100
_Scale = Annotated[float, msgspec.Meta(ge=MIN_SCALE, le=MAX_SCALE)]
_Scales = Annotated[tuple[_Scale, ...], msgspec.Meta(max_length=2 * MAX_LAYERS)]


class Plane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Vectors of one shape and dtype, kept by a pool for every token in some layers.

    The fields have bounds because peers publish them.

    Attributes:
        name: ``model`` for the K and V of the model itself.
        num_heads, head_dim: shape of one vector, with the heads of all tensor-parallel ranks.
        vectors: number of vectors per token and layer: 2 for K and V, or 1.
        ranks: what the tensor-parallel ranks have. With ``divided``, the heads are divided among
            them; if there are more ranks than heads, neighbouring ranks have the same head, which
            travels once. With ``copied``, each has the whole plane, which travels once. With
            ``first``, rank 0 has the whole plane and the others have nothing.
        group: planes of one group are cached together, so a node has equally many leading tokens
            of a prompt in all of them.
        dtype: of the vectors that the model writes and reads.
        scales: None if the pool keeps the vectors in ``dtype``. Otherwise it keeps them in fp8
            (:data:`FP8`), divided by these scales: one for each vector of each layer, K before V.
        window: number of keys that a token sees in these layers; 0 for all. The pages of a window
            are freed when no later token sees them, so planes with a window have page tables of
            their own. All planes of a group have the same window.

    Raises:
        ValueError: there is not one scale for each vector of each layer (a ValidationError of
            msgspec on decoding).
    """

    name: _Name
    num_layers: _Layers
    num_heads: _Heads
    head_dim: _HeadDim
    dtype: DType
    vectors: Literal[1, 2] = 2
    ranks: PlaneRanks = "divided"
    group: _Group = 0
    window: _Window = 0
    scales: _Scales | None = None

    def __post_init__(self) -> None:
        if self.scales is not None and len(self.scales) != self.num_layers * self.vectors:
            raise ValueError(
                f"plane {self.name!r} has {len(self.scales)} scales for {self.num_layers} layers "
                f"with {self.vectors} vectors per token"
            )

    @property
    def stored_dtype(self) -> str:
        """Dtype in which the pool keeps the vectors."""
        return self.dtype if self.scales is None else FP8

    def get_scales(self, layer: int) -> tuple[float, ...]:
        """Return the scale of each vector of a layer; 1 if the pool keeps them in ``dtype``."""
        if self.scales is None:
            return (1.0,) * self.vectors
        return self.scales[layer * self.vectors : (layer + 1) * self.vectors]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's vectors in all layers."""
        width = _WIDTHS[self.dtype] if self.scales is None else 1
        row = self.num_heads * self.head_dim * width
        return self.num_layers * self.vectors * row

    def __str__(self) -> str:
        vectors = "K and V" if self.vectors == 2 else "one vector"
        where = _PLACES[self.ranks]
        kept = "" if self.scales is None else f" kept in {FP8}"
        window = f", window {self.window}" if self.window else ""
        return (
            f"{vectors} of {self.num_layers} layers, {self.num_heads} heads x {self.head_dim}, "
            f"{self.dtype}{kept}, {where}, group {self.group}{window}"
        )


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of one node's KV cache. Page size and sharding may differ between peers.

    Attributes:
        planes: the model's K and V first. Layers are numbered through all planes in this order.

    Raises:
        ValueError: two planes have the same name, the groups are not numbered 0, 1, ... without
            gaps, planes of a group have different windows, the first plane has one, or there are
            too many layers (a ValidationError of msgspec on decoding).
    """

    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]
    page_size: _PageSize
    tp_size: _Ranks = 1
    layout: str = "layer_major"

    def __post_init__(self) -> None:
        names = [plane.name for plane in self.planes]
        if len(set(names)) < len(names):
            raise ValueError(f"planes need different names, not {', '.join(names)}")
        groups = sorted({plane.group for plane in self.planes})
        if groups != list(range(len(groups))):
            raise ValueError(f"groups of planes are numbered from 0 without gaps, not {groups}")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"{self.num_layers} layers are more than {MAX_LAYERS}")
        windows = {(plane.group, plane.window) for plane in self.planes}
        if len(windows) > len(groups):
            raise ValueError("planes of one group need the same window")
        if self.planes[0].window:
            raise ValueError(f"plane {names[0]!r} is the first, but has a window")

    @classmethod
    def of_model(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        page_size: int,
        tp_size: int = 1,
        extra_planes: Sequence[Plane] = (),
    ) -> KVLayout:
        """Make the layout of a model's K and V and further planes."""
        if dtype not in _WIDTHS:
            raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(_WIDTHS)}")
        known = cast("DType", dtype)
        model = Plane(MODEL_PLANE, num_layers, num_kv_heads, head_dim, known)
        return cls((model, *extra_planes), page_size, tp_size)

    @property
    def model(self) -> Plane:
        """The plane of the model's own K and V."""
        return self.planes[0]

    @property
    def num_layers(self) -> int:
        """Layers of all planes."""
        return sum(plane.num_layers for plane in self.planes)

    @property
    def num_groups(self) -> int:
        return 1 + max(plane.group for plane in self.planes)

    @property
    def group_windows(self) -> tuple[int, ...]:
        """Window of each group of planes; 0 for a group without one."""
        groups = {plane.group: plane.window for plane in self.planes}
        return tuple(groups[group] for group in sorted(groups))

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows with page tables of their own, in the order of their tables. The first table of a
        sequence is that of all planes without a window."""
        return tuple(window for window in self.group_windows if window)

    @property
    def num_tables(self) -> int:
        """Page tables of each sequence."""
        return 1 + len(self.windows)

    def find_table(self, plane: Plane) -> int:
        """Return the number of the page table that says where a plane's tokens are."""
        if not plane.window:
            return 0
        return 1 + sorted({p.group for p in self.planes if p.window}).index(plane.group)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers of all planes."""
        return sum(plane.token_bytes for plane in self.planes)

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot of the pool takes. Each page has room for the planes of any one
        table."""
        sizes = [0] * self.num_tables
        for plane in self.planes:
            sizes[self.find_table(plane)] += plane.token_bytes
        return max(sizes)

    def missing_bytes(self, cached: Sequence[int], num_tokens: int) -> int:
        """Count the uncached bytes of a prompt.

        Args:
            cached: number of cached leading tokens for each group of planes.
            num_tokens: length of the prompt.
        """
        return sum((num_tokens - cached[p.group]) * p.token_bytes for p in self.planes)

    def of_rank(self, rank: int) -> KVLayout:
        """Return the layout of one tensor-parallel rank's pool. It numbers its own layers.

        Raises:
            UsageError: the heads of a plane cannot be divided among the ranks.
        """
        if self.tp_size == 1:
            return self
        planes = []
        for plane in self.planes:
            if plane.ranks == "divided":
                heads, rest = divmod(plane.num_heads, self.tp_size)
                if rest and self.tp_size % plane.num_heads:
                    raise UsageError(
                        f"--tp-size {self.tp_size} does not divide the {plane.num_heads} heads of "
                        f"plane {plane.name!r}"
                    )
                planes.append(msgspec.structs.replace(plane, num_heads=max(heads, 1)))
            elif plane.ranks == "copied" or rank == 0:
                planes.append(plane)
        # Ranks need no group of which they have no plane.
        groups = sorted({plane.group for plane in planes})
        planes = [msgspec.structs.replace(p, group=groups.index(p.group)) for p in planes]
        return msgspec.structs.replace(self, planes=tuple(planes))

    def plane_extents(self, num_slots: int) -> list[range]:
        """Return the bytes of each plane in the memory of a pool of ``num_slots``.

        Planes of rank 0 alone come last. The memory of a rank without them therefore has
        everything else in the same places. Planes of different page tables lie over each other,
        because each page belongs to one table at a time.
        """
        extents, ends = [range(0)] * len(self.planes), [0] * self.num_tables
        for is_last in (False, True):
            for index, plane in enumerate(self.planes):
                if (plane.ranks == "first") is is_last:
                    table = self.find_table(plane)
                    start = -(-ends[table] // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
                    ends[table] = start + num_slots * plane.token_bytes
                    extents[index] = range(start, ends[table])
        return extents


class NodeInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node as it introduces itself. It gets a new ``instance_id`` when it restarts.

    Nodes of other releases may have other fields, see :func:`decode_node_info`.

    Attributes:
        model_id: digest of ``identity``.
        endpoint: ``tcp://host:port`` of the node's message socket.
        bootstrap: ``http://host:port`` of a prefill node's registry, else empty.
        transfers: addresses of the node's transfer backends, in order of preference.
            Only the same backend understands an address.
        kv_digest: commits carry a digest of the KV, and the receiver verifies it.
        sampling_defaults: the model's recommended sampling.
        drafter: describes a drafter that needs data of the prefilling node: algorithm,
            fingerprint, widths and dtype. Empty for other drafters.
        identity: settings with an influence on the node's answers, by name.
        release: release of pd (:mod:`pd.core.release`).
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
    identity: Identity = {}
    release: str = RELEASE

    def address_of(self, backend: str) -> dict[str, str]:
        """Return the address for ``backend``. Raises TransferError if there is none."""
        address = self.transfers.get(backend)
        if address is None:
            offered = ", ".join(self.transfers) or "nothing"
            raise TransferError(
                f"{self.instance_id} does not offer transfer backend {backend}, only {offered}"
            )
        return address


class _StatedRelease(msgspec.Struct):
    """The fields stated by every release."""

    instance_id: str = ""
    release: str = ""


# NOTE: we make decoders while only one thread runs, see :mod:`pd.bootstrap.client`.
_stated_decoder = msgspec.json.Decoder(_StatedRelease)
_info_decoder = msgspec.json.Decoder(NodeInfo)


def decode_node_info(data: bytes, own: NodeInfo) -> NodeInfo:
    """Parse another node's description.

    Raises:
        HandshakeError: the node runs another release. The message names both.
        msgspec.DecodeError: the data is no NodeInfo.
    """
    stated = _stated_decoder.decode(data)
    if stated.release != own.release:
        raise HandshakeError(
            f"version differs: {own.role} node {own.instance_id} runs "
            f"{describe_release(own.release)}, {short_repr(stated.instance_id)} runs "
            f"{describe_release(stated.release)}; {REMEDY}"
        )
    return _info_decoder.decode(data)


def choose_transfer(prefill: NodeInfo, decode: NodeInfo) -> str:
    """Choose the backend of a pair: the first of P's that D offers and both can use.

    Both ends call this with the same two arguments, so they agree without asking each other.

    Raises:
        HandshakeError: no backend works. The message names both lists and the obstacles.
    """
    backend, obstacles = choose_backend(prefill.transfers, decode.transfers)
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
    """Raise HandshakeError if two nodes cannot work together, naming both values."""
    choose_transfer(prefill, decode)
    pairs: list[tuple[str, object, object]] = [
        *identity_differences(prefill.identity, decode.identity),
        ("model", prefill.model_id, decode.model_id),
        ("--kv-digest", prefill.kv_digest, decode.kv_digest),
        ("--speculative-algorithm", prefill.drafter or NO_HEAD, decode.drafter or NO_HEAD),
        (SAMPLING_DEFAULTS, str(prefill.sampling_defaults), str(decode.sampling_defaults)),
        ("layout", prefill.kv.layout, decode.kv.layout),
        *plane_differences(prefill.kv, decode.kv),
    ]
    differences = [pair for pair in pairs if pair[1] != pair[2]]
    if differences:
        name, ours, theirs = differences[0]
        others = ", ".join(name for name, *_ in differences[1 : 1 + MAX_NAMED])
        raise HandshakeError(
            f"{name} differs: prefill node {prefill.instance_id} has {ours!r}, "
            f"decode node {decode.instance_id} has {theirs!r}"
            + (f" (different, too: {others})" if others else "")
        )


def identity_differences(ours: Identity, theirs: Identity) -> list[tuple[str, str, str]]:
    """List different settings of the identity: names and both values.

    If a node states none, we can only compare the digests.
    """
    if not ours or not theirs or ours == theirs:
        return []
    return [
        (name, ours.get(name, "nothing"), theirs.get(name, "nothing"))
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]


def plane_differences(ours: KVLayout, theirs: KVLayout) -> list[tuple[str, object, object]]:
    """List inconvertible differences between two layouts: names and both values.

    Page sizes and the numbers of ranks may differ.
    """
    mine, other = ({p.name: p for p in kv.planes} for kv in (ours, theirs))
    only_here: list[tuple[str, object, object]]
    only_here = [(f"plane {name!r}", str(mine[name]), "none") for name in mine if name not in other]
    only_there = [
        (f"plane {name!r}", "none", str(other[name])) for name in other if name not in mine
    ]
    if only_here or only_there:
        return only_here + only_there
    if list(mine) != list(other):
        return [("order of planes", ", ".join(mine), ", ".join(other))]
    return [
        (f"plane {name!r}: {field}", ours, theirs)
        for name in mine
        for field, ours, theirs in _field_differences(mine[name], other[name])
    ]


def _field_differences(ours: Plane, theirs: Plane) -> Iterator[tuple[str, object, object]]:
    """List the fields in which two planes differ, and both values. Of the scales, which are long,
    name those of the first layer that differ."""
    for field in Plane.__struct_fields__:
        values = getattr(ours, field), getattr(theirs, field)
        if values[0] == values[1]:
            continue
        if field != "scales":
            yield field, *values
        elif None in values:
            yield "dtype in the pool", ours.stored_dtype, theirs.stored_dtype
        else:
            for layer in range(min(ours.num_layers, theirs.num_layers)):
                pair = ours.get_scales(layer), theirs.get_scales(layer)
                if pair[0] != pair[1]:
                    yield f"scales of layer {layer}", *pair
                    break
