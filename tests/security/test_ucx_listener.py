"""UCX's TCP listener writes what a stranger sends to any address of the process, so a node has none
unless its operator trusts the network.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from processes import deployment
from security.listening import listening, other_sockets
from tiny import tiny_cluster, tiny_model, tiny_node
from transfer.transfer_helpers import is_installed, make_pool

from pd.core.errors import SetupError
from pd.core.transfer_choice import choose_backend
from pd.transfer.registry import make_transfer_manager
from pd.transfer.staged import nixl_transports
from pd.transfer.staged.nixl import NixlMover

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not is_installed("nixl") and not os.environ.get("CI"), reason="the library nixl is missing"
)

PROMPT = [7, 5, 3, 2] * 16
# Of UCX's src/uct/tcp/tcp.h.
MAGIC = 0xCAFEBABE12345678
CONNECT, PUT = 32, 33
CONNECT_REQUEST = 1


def put_of_a_stranger(own: tuple[str, int], address: int, data: bytes) -> bytes:
    """UCX's opening of a connection, and a write of ``data`` to ``address`` of the process."""
    inet = struct.pack("=H", socket.AF_INET) + struct.pack("!H", own[1]) + socket.inet_aton(own[0])
    request = struct.pack("=IBQ", CONNECT_REQUEST, 0, 1) + inet + bytes(8)
    write = struct.pack("=QQI", address, len(data), 1)
    return b"".join(
        [
            struct.pack("=Q", MAGIC),
            struct.pack("=BI", CONNECT, len(request)) + request,
            struct.pack("=BI", PUT, len(write)) + write + data,
        ]
    )


@pytest.fixture
def slots() -> torch.Tensor:
    return torch.zeros(2, 4096, dtype=torch.uint8)


def test_a_stranger_writes_anywhere_through_the_port_that_ucx_opens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, slots: torch.Tensor
) -> None:
    """Why the port is not opened unasked: nothing here knows a key, and the memory that changes was
    never registered with the library."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    before = listening()
    with caplog.at_level(logging.WARNING):
        mover = NixlMover("D", "127.0.0.1")
    assert "UCX listens on unauthenticated ports, on device lo" in caplog.text
    target = mover.make_target(slots, "P", "127.0.0.1")
    victim = np.zeros(64, dtype=np.uint8)
    try:
        ((host, port),) = listening() - before
        assert host == "127.0.0.1", "UCX is kept to its device"
        with socket.create_connection((host, port)) as stranger:
            packet = put_of_a_stranger(stranger.getsockname(), victim.ctypes.data, b"\x2a" * 64)
            assert len(packet) < 150
            stranger.sendall(packet)
            deadline = time.monotonic() + 10.0
            while not victim.any() and time.monotonic() < deadline:
                target.make_progress()
        assert (victim == 0x2A).all()
    finally:
        target.close()


def ports_of(server: Any) -> set[int]:
    """Those that a node opens itself; each asks for the cluster key, or is HTTP."""
    node = server.node
    urls = [server.url, node.endpoint, *([server.bootstrap_url] if server.bootstrap_url else [])]
    data = [int(address["port"]) for address in node.transfers[0].addresses().values()]
    return {urlsplit(url).port or 0 for url in urls} | set(data)


def test_between_nodes_of_one_host_nixl_opens_no_port() -> None:
    before, others = listening(), other_sockets()
    with tiny_cluster(transfer_backend="auto") as cluster:
        cluster.client.generate(PROMPT, cluster.pair).tokens()
        for server in cluster.pair:
            (peer,) = server.node.transfer_peers()
            assert server.node.transfers[0].backend_of(peer.instance_id) == "nixl"
        own = {port for server in cluster.pair for port in ports_of(server)}
        assert {port for _, port in listening() - before} == own
        assert not other_sockets() - others
        cluster.wait_idle()


@pytest.mark.full
@pytest.mark.parametrize("flag", ["auto", "nixl"])
def test_processes_of_one_host_open_no_port_of_a_library(tmp_path: Path, flag: str) -> None:
    with deployment(
        tiny_model(), tmp_path, node_flags=["--transfer-backend", flag, "--load-format", "dummy"]
    ) as running:
        assert running.stream(PROMPT, 8).join().succeeded()
        for node in running.nodes:
            info = node.server_info()
            assert info["transfer_backend"] == "nixl" and not info["trust_network"]
            urls = [node.url, *info["endpoints"].values()]
            known = {urlsplit(url).port for url in urls if url}
            offered = len(info["transfer_backends"])
            data = {port for _, port in listening(node.child.pid)} - known
            assert len(data) == offered, "one data port for each backend"
            assert not other_sockets(node.child.pid)
            for port in data:
                assert not answer_to_a_stranger(port), "it speaks UCX's protocol"
            assert node.healthy()
        assert running.stream(PROMPT, 8).join().succeeded()


def answer_to_a_stranger(port: int) -> bytes:
    """What comes until the other side closes the connection, which begins as UCX's do. UCX would
    answer, or end its process."""
    # Longer than pd's hello, for all of which pd waits.
    data = bytes(1024)
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30.0) as stranger:
        stranger.sendall(put_of_a_stranger(stranger.getsockname(), 1, data))
        with contextlib.suppress(ConnectionResetError):
            while part := stranger.recv(4096):
                answer += part
    return answer


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"UCX_TLS": "tcp"}, "UCX_TLS=tcp lets UCX open ports"),
        ({}, "forbids process_vm_writev"),
    ],
)
def test_auto_leaves_nixl_out_where_ucx_would_open_a_port(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, str],
    reason: str,
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nixl_transports, "can_copy_between_processes", lambda: False)
    with caplog.at_level(logging.INFO):
        manager = make_transfer_manager("auto", make_pool(16, 4), "X")
    manager.close()
    assert list(manager.addresses()) == ["tcp"]
    assert reason in caplog.text and "--trust-network" in caplog.text


@pytest.mark.parametrize(("scope", "possible"), [(0, True), (1, True), (2, False), (3, False)])
def test_processes_that_may_not_trace_each_other_cannot_do_without_a_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: int, possible: bool
) -> None:
    if not nixl_transports.can_copy_between_processes():
        pytest.skip("this kernel or container forbids process_vm_writev")
    file = tmp_path / "ptrace_scope"
    file.write_text(f"{scope}\n")
    monkeypatch.setattr(nixl_transports, "_PTRACE_SCOPE", file)
    assert nixl_transports.can_copy_between_processes() is possible


def test_auto_opens_ports_of_a_library_where_the_network_is_trusted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with caplog.at_level(logging.WARNING):
        manager = make_transfer_manager("auto", make_pool(16, 4), "X", trust_network=True)
    manager.close()
    assert list(manager.addresses()) == ["nixl", "tcp"]
    assert "--trust-network: transfer libraries may open unauthenticated ports" in caplog.text
    assert "UCX listens on unauthenticated ports, on device lo" in caplog.text


@pytest.mark.parametrize("trusted", [False, True])
def test_beyond_loopback_auto_needs_a_trusted_network_for_more_than_one_host(
    monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setattr(nixl_transports, "find_device", lambda address: "lo")
    manager = make_transfer_manager(
        "auto",
        make_pool(16, 4),
        "X",
        "127.0.0.1",
        advertise_host="192.0.2.77",
        cluster_key=b"k" * 32,
        trust_network=trusted,
    )
    manager.close()
    reach = manager.addresses()["nixl"]["reach"]
    assert (reach == "network") is trusted


def test_an_explicit_nixl_beyond_loopback_opens_ports_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(nixl_transports, "find_device", lambda address: "eth7")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with caplog.at_level(logging.WARNING):
        mover = NixlMover("X", "192.0.2.77")
    assert not mover.transports.is_local
    assert "UCX listens on unauthenticated ports" in caplog.text and "device eth7" in caplog.text


def test_ucx_is_not_let_onto_every_device_where_none_has_the_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where addresses are translated; the operator names the devices."""
    nobodys = "192.0.2.250"
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SetupError, match=f"no network device has .*{nobodys}.* UCX_NET_DEVICES"):
        NixlMover("X", nobodys)
    manager = make_transfer_manager(
        "auto",
        make_pool(16, 4),
        "X",
        "127.0.0.1",
        advertise_host=nobodys,
        cluster_key=b"k" * 32,
        trust_network=True,
    )
    manager.close()
    assert list(manager.addresses()) == ["tcp"]
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    with caplog.at_level(logging.WARNING):
        mover = NixlMover("X", nobodys)
    assert mover.transports.devices == "eth7" and "on device eth7" in caplog.text


def test_rdma_devices_are_used_besides_and_the_environment_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, slots: torch.Tensor
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setattr(nixl_transports, "_rdma_devices", lambda: ["mlx5_0:1"])
    mover = NixlMover("D", "127.0.0.1")
    assert mover.transports.devices == "lo,mlx5_0:1"
    with mover.transports.use_environment():
        assert os.environ["UCX_NET_DEVICES"] == "lo,mlx5_0:1"
    before = listening()
    target = mover.make_target(slots, "P", "127.0.0.1")
    try:
        assert {host for host, _ in listening() - before} == {"127.0.0.1"}, "UCX read it"
        assert "UCX_NET_DEVICES" not in os.environ
    finally:
        target.close()


def test_the_environment_that_child_processes_inherit_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, slots: torch.Tensor
) -> None:
    """A node on another host's address, started with this process's environment, would otherwise
    look for its peers on the loopback device and never reach them."""
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    NixlMover("D", "127.0.0.1").make_target(slots, "P", "127.0.0.1").close()
    assert "UCX_TLS" not in os.environ and "UCX_NET_DEVICES" not in os.environ


def test_a_mover_that_must_not_listen_refuses_rather_than_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    with pytest.raises(SetupError, match="UCX_TLS=all lets UCX open ports"):
        NixlMover("X", "127.0.0.1", local_only=True)


def test_a_node_shows_that_its_network_is_trusted() -> None:
    for trusted in (False, True):
        server = tiny_node("decode", trust_network=trusted)
        try:
            assert server.node.server_info()["trust_network"] is trusted
        finally:
            server.stop()


def test_the_device_of_an_address_is_found() -> None:
    assert nixl_transports.find_device("127.0.0.1") == "lo"
    assert nixl_transports.find_device("192.0.2.250") == "", "nobody's address (RFC 5737)"
    for device, address in nixl_transports._list_addresses():
        if not address.startswith(("127.", "fe80:")):
            assert nixl_transports.find_device(address) in dict(socket.if_nameindex()).values()
            assert device


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ("network", "network", None),
        ("boot/pid/ipc/0", "boot/pid/ipc/0", None),
        ("boot/pid/ipc/0", "network", "the prefill node's UCX opens no port"),
        ("network", "boot/pid/ipc/0", "the decode node's UCX opens no port"),
        ("boot/pid/ipc/0", "boot/pid/ipc/1", "processes of one host, user"),
    ],
)
def test_a_pair_uses_nixl_only_if_ucx_can_reach_both(
    prefill: str, decode: str, reason: str | None
) -> None:
    offers = [{"nixl": {"reach": reach}, "tcp": {}} for reach in (prefill, decode)]
    name, obstacles = choose_backend(*offers)
    assert name == ("tcp" if reason else "nixl")
    if reason:
        assert reason in obstacles[0] and "--trust-network" in obstacles[0]
