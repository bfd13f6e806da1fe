"""Published descriptions of nodes, and the choice of the transfer backend."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pd.core.errors import HandshakeError, TransferError, UsageError
from pd.core.node_info import KVLayout, NodeInfo, Plane, check_compatible, choose_transfer
from pd.core.transfer_choice import nvlink_obstacle

KV = KVLayout.of_model(num_layers=2, num_kv_heads=4, head_dim=8, dtype="float32", page_size=16)
A = {"host_id": "boot:1:2", "device": "GPU-a", "reachable": "GPU-a,GPU-b", "ipc": "00"}
B = {"host_id": "boot:1:2", "device": "GPU-b", "reachable": "GPU-b", "ipc": "11"}


def node(role: str, *plain: str, **transfers: dict[str, str]) -> NodeInfo:
    return NodeInfo(
        instance_id=role[0].upper(),
        role=role,  # type: ignore[arg-type]
        model_id="m",
        kv=KV,
        endpoint=f"tcp://{role}",
        bootstrap="",
        transfers=transfers | {name: {} for name in plain},
    )


def test_the_prefill_node_s_order_decides() -> None:
    assert choose_transfer(node("prefill", "nixl", "tcp"), node("decode", "tcp", "nixl")) == "nixl"
    assert choose_transfer(node("prefill", "nixl", "tcp"), node("decode", "tcp")) == "tcp"


def test_nvlink_is_used_if_p_can_map_the_decode_gpu() -> None:
    """P maps D's memory; it does not matter whether D could map P's."""
    assert choose_transfer(node("prefill", "tcp", nvlink=A), node("decode", nvlink=B)) == "nvlink"
    assert nvlink_obstacle(A, A | {"ipc": "11"}) is None, "two processes on one GPU"
    assert "cannot map the decode node's GPU GPU-a" in str(nvlink_obstacle(B, A))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"host_id": "boot:1:3"}, "not on one host"),
        ({"device": "GPU-c"}, "cannot map the decode node's GPU GPU-c"),
        ({"device": ""}, "decode node published no device"),
        ({"host_id": ""}, "decode node published no host_id"),
    ],
)
def test_without_nvlink_the_next_backend_is_used_or_the_error_says_why(
    change: dict[str, str], reason: str
) -> None:
    decode = B | change
    both = node("prefill", "tcp", nvlink=A), node("decode", "tcp", nvlink=decode)
    assert choose_transfer(*both) == "tcp"
    with pytest.raises(HandshakeError, match=reason):
        choose_transfer(node("prefill", nvlink=A), node("decode", nvlink=decode))


def test_without_a_common_backend_the_error_names_both_lists() -> None:
    with pytest.raises(HandshakeError, match=r"P offers nixl, tcp, decode node D offers mooncake"):
        choose_transfer(node("prefill", "nixl", "tcp"), node("decode", "mooncake"))
    with pytest.raises(HandshakeError, match="decode node D offers none"):
        choose_transfer(node("prefill", "tcp"), node("decode"))


def test_asking_for_the_address_of_a_missing_backend_is_an_error() -> None:
    assert node("decode", tcp={"port": "1"}).address_of("tcp") == {"port": "1"}
    with pytest.raises(TransferError, match="D does not offer transfer backend nixl, only tcp"):
        node("decode", "tcp").address_of("nixl")


LATENT = Plane("latent", 1, 1, 24, "bfloat16", vectors=1, ranks="first", group=1)
HEAD = Plane("head", 1, 4, 8, "float16", group=2)
PLANES = KVLayout.of_model(2, 2, 16, "float32", 16, 1, (LATENT, HEAD))


def test_sizes_include_all_planes() -> None:
    assert (PLANES.num_layers, PLANES.num_groups) == (4, 3)
    model, latent, head = 2 * 2 * 2 * 16 * 4, 24 * 2, 2 * 4 * 8 * 2
    assert PLANES.token_bytes == model + latent + head
    assert PLANES.missing_bytes((3, 0, 10), 10) == 7 * model + 10 * latent


def test_planes_are_consecutive_with_those_of_rank_0_last() -> None:
    model, latent, head = PLANES.plane_extents(10)
    assert [len(extent) for extent in (model, latent, head)] == [5120, 480, 1280]
    assert (model.start, head.start, latent.start) == (0, 5120, 6656)
    assert all(extent.start % 512 == 0 for extent in (model, latent, head))


def test_a_rank_has_a_part_of_each_divided_plane_in_the_same_place() -> None:
    two = msgspec.structs.replace(PLANES, tp_size=2)
    first, second = two.of_rank(0), two.of_rank(1)
    assert [(p.name, p.num_heads) for p in first.planes] == [
        ("model", 1),
        ("latent", 1),
        ("head", 2),
    ]
    assert [(p.name, p.num_heads) for p in second.planes] == [("model", 1), ("head", 2)]
    assert [first.plane_extents(10)[index] for index in (0, 2)] == second.plane_extents(10)
    assert PLANES.of_rank(0) == PLANES
    with pytest.raises(
        UsageError, match="--tp-size 3 does not divide the 2 heads of plane 'model'"
    ):
        msgspec.structs.replace(PLANES, tp_size=3).of_rank(0)


def test_several_ranks_have_the_same_head_if_there_are_fewer_heads() -> None:
    four = msgspec.structs.replace(PLANES, tp_size=4)
    for rank in range(4):
        heads = {plane.name: plane.num_heads for plane in four.of_rank(rank).planes}
        assert heads == {"model": 1, "head": 1} | ({"latent": 1} if rank == 0 else {})


def test_every_rank_has_all_of_a_copied_plane() -> None:
    rows = Plane("model", 2, 1, 24, "bfloat16", vectors=1, ranks="copied")
    layout = KVLayout((rows, LATENT), 16, 2)
    assert layout.of_rank(0).planes == (rows, LATENT)
    assert layout.of_rank(1).planes == (rows,)
    assert layout.of_rank(0).plane_extents(10)[0] == layout.of_rank(1).plane_extents(10)[0]


def with_planes(*planes: Plane) -> NodeInfo:
    kv = KVLayout.of_model(2, 2, 16, "float32", 16, 1, planes)
    return msgspec.structs.replace(node("decode", "tcp"), kv=kv)


@pytest.mark.parametrize(
    ("planes", "complaint"),
    [
        (
            (LATENT,),
            "plane 'head' differs: prefill node P has 'K and V of 1 layers, 4 heads x 8, float16, "
            "divided among ranks, group 2', decode node D has 'none'",
        ),
        (
            (LATENT, HEAD, Plane("other", 3, 1, 2, "float32", vectors=1)),
            "plane 'other' differs: prefill node P has 'none', decode node D has 'one vector of "
            "3 layers, 1 heads x 2, float32, divided among ranks, group 0'",
        ),
        (
            (HEAD, LATENT),
            "order of planes differs: prefill node P has 'model, latent, head', decode node D has "
            "'model, head, latent'",
        ),
        *(
            (
                (LATENT, msgspec.structs.replace(HEAD, **{field: theirs})),
                f"plane 'head': {field} differs: prefill node P has {getattr(HEAD, field)!r}, "
                f"decode node D has {theirs!r}",
            )
            for field, theirs in {
                "num_layers": 2,
                "vectors": 1,
                "num_heads": 2,
                "head_dim": 16,
                "dtype": "bfloat16",
                "ranks": "first",
                "group": 0,
            }.items()
        ),
    ],
)
def test_other_planes_are_refused_naming_both_values(
    planes: tuple[Plane, ...], complaint: str
) -> None:
    prefill = msgspec.structs.replace(node("prefill", "tcp"), kv=PLANES)
    check_compatible(prefill, with_planes(LATENT, HEAD))
    with pytest.raises(HandshakeError) as raised:
        check_compatible(prefill, with_planes(*planes))
    assert str(raised.value) == complaint


def test_page_size_and_ranks_may_differ() -> None:
    prefill = msgspec.structs.replace(node("prefill", "tcp"), kv=PLANES)
    other = msgspec.structs.replace(PLANES, page_size=1, tp_size=2)
    check_compatible(prefill, msgspec.structs.replace(prefill, kv=other))


def published(**changes: Any) -> dict[str, Any]:
    """Return a layout as a peer sends it, with changes to its last plane."""
    layout = msgspec.to_builtins(PLANES)
    return layout | {"planes": [*layout["planes"][:-1], layout["planes"][-1] | changes]}


def test_a_layout_survives_the_wire() -> None:
    assert msgspec.convert(published(), KVLayout, strict=False) == PLANES


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (published(name=""), "length >= 1"),
        (published(name="model"), "planes need different names, not model, latent, model"),
        (published(num_layers=0), ">= 1"),
        (published(num_layers=4094), "4097 layers are more than 4096"),
        (published(num_layers=1 << 40), "<= 4096"),
        (published(num_heads=1 << 40), "<= 4096"),
        (published(head_dim=1 << 40), "<= 65536"),
        (published(dtype="int8"), "Invalid enum value 'int8'"),
        (published(vectors=3), "Invalid enum value 3"),
        (published(group=3), r"without gaps, not \[0, 1, 3\]"),
        (published(group=8), "<= 7"),
        (published(surprise=1), "unknown field"),
        (published() | {"planes": []}, "length >= 1"),
        (published() | {"planes": 9 * published()["planes"][:1]}, "length <= 8"),
        (published() | {"page_size": 0}, ">= 1"),
        (published() | {"tp_size": 0}, ">= 1"),
    ],
)
def test_impossible_layouts_are_refused_on_decoding(sent: dict[str, Any], complaint: str) -> None:
    data = msgspec.msgpack.encode(sent)
    with pytest.raises(msgspec.ValidationError, match=complaint):
        msgspec.msgpack.decode(data, type=KVLayout)


HALVES = Plane("head", 2, 4, 8, "float16", scales=(0.5, 1.0, 0.5, 2.0))


def test_vectors_in_fp8_take_a_byte_per_number() -> None:
    plain = msgspec.structs.replace(HALVES, scales=None)
    assert (plain.token_bytes, HALVES.token_bytes) == (2 * 2 * 4 * 8 * 2, 2 * 2 * 4 * 8)
    assert (plain.stored_dtype, HALVES.stored_dtype) == ("float16", "float8_e4m3fn")
    assert (plain.get_scales(1), HALVES.get_scales(1)) == ((1.0, 1.0), (0.5, 2.0))
    two = KVLayout((HALVES,), 16, 2)
    assert two.of_rank(1).planes == (msgspec.structs.replace(HALVES, num_heads=2),)


@pytest.mark.parametrize(
    ("scales", "complaint"),
    [
        (
            None,
            "plane 'head': dtype in the pool differs: prefill node P has 'float8_e4m3fn', decode "
            "node D has 'float16'",
        ),
        (
            (0.5, 1.0, 0.5, 4.0),
            "plane 'head': scales of layer 1 differs: prefill node P has (0.5, 2.0), decode node D "
            "has (0.5, 4.0)",
        ),
    ],
)
def test_planes_in_fp8_fit_only_with_the_same_scales(
    scales: tuple[float, ...] | None, complaint: str
) -> None:
    other = msgspec.structs.replace(HALVES, scales=scales)
    prefill = msgspec.structs.replace(with_planes(HALVES), instance_id="P", role="prefill")
    check_compatible(prefill, with_planes(HALVES))
    with pytest.raises(HandshakeError) as raised:
        check_compatible(prefill, with_planes(other))
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    "scales",
    ["[1,1,1]", "[1,1,1,0]", "[1,1,1,-2]", "[1,1,1,1e-40]", "[1,1,1,1e300]", "[1,1,1,1e999]"],
)
def test_a_peer_s_scales_are_checked(scales: str) -> None:
    text = msgspec.json.encode(HALVES).decode()
    known = text[text.index("[") : text.index("]") + 1]
    assert msgspec.json.decode(text, type=Plane) == HALVES
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text.replace(known, scales), type=Plane)
