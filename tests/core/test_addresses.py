"""Addresses: sockets of HTTP servers and hosts in URLs."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pd.core.addresses import bind_socket, format_host
from pd.core.errors import SetupError


def test_ipv6_addresses_get_brackets() -> None:
    assert [format_host(host) for host in ("::1", "127.0.0.1", "host")] == [
        "[::1]",
        "127.0.0.1",
        "host",
    ]


def test_a_name_is_bound_to_its_first_free_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``localhost`` may have ::1 first on a host without IPv6. 192.0.2.1 is no address of
    this host (RFC 5737)."""
    found: list[Any] = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    with bind_socket("a-name", 0) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"


def test_a_port_taken_at_one_address_is_not_tried_at_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients of the name would reach either server."""
    with bind_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        found: list[Any] = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
        with pytest.raises(SetupError, match="in use"):
            bind_socket("a-name", port)


def test_the_error_names_the_address_and_its_flag() -> None:
    with bind_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"127.0.0.1:{port}: .*in use; choose another --x or"):
            bind_socket("127.0.0.1", port, "--x")
    with pytest.raises(SetupError, match=r"cannot use the address no\.such\.name\.invalid:1"):
        bind_socket("no.such.name.invalid", 1)
