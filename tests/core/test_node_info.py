"""What nodes publish, and the transfer backend that follows from it."""

from __future__ import annotations

import pytest

from pd.core.errors import HandshakeError, TransferError
from pd.core.node_info import KVLayout, NodeInfo, choose_transfer
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


def test_nvlink_is_used_where_the_decode_gpu_can_be_mapped() -> None:
    """P maps D's memory; whether D could map P's is of no interest."""
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
def test_where_nvlink_cannot_work_the_next_backend_is_used_or_the_reason_told(
    change: dict[str, str], reason: str
) -> None:
    decode = B | change
    both = node("prefill", "tcp", nvlink=A), node("decode", "tcp", nvlink=decode)
    assert choose_transfer(*both) == "tcp"
    with pytest.raises(HandshakeError, match=reason):
        choose_transfer(node("prefill", nvlink=A), node("decode", nvlink=decode))


def test_none_in_common_names_both_lists() -> None:
    with pytest.raises(HandshakeError, match=r"P offers nixl, tcp, decode node D offers mooncake"):
        choose_transfer(node("prefill", "nixl", "tcp"), node("decode", "mooncake"))
    with pytest.raises(HandshakeError, match="decode node D offers none"):
        choose_transfer(node("prefill", "tcp"), node("decode"))


def test_the_address_of_a_backend_that_is_not_offered_is_an_error() -> None:
    assert node("decode", tcp={"port": "1"}).address_of("tcp") == {"port": "1"}
    with pytest.raises(TransferError, match="D does not offer transfer backend nixl, only tcp"):
        node("decode", "tcp").address_of("nixl")
