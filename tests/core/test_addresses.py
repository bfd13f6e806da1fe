"""Sockets of HTTP servers and hosts in URLs."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pd.core.addresses import bind, in_url
from pd.core.errors import SetupError


def test_ipv6_stands_in_brackets() -> None:
    assert [in_url(host) for host in ("::1", "127.0.0.1", "host")] == ["[::1]", "127.0.0.1", "host"]


def test_a_name_is_bound_by_the_first_address_that_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where ``localhost`` has ::1 first and there is no IPv6. 192.0.2.1 is no address of
    this host (RFC 5737)."""
    found: list[Any] = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    with bind("a-name", 0) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_at_one_address_is_not_had_at_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients of the name would reach either server."""
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        found: list[Any] = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
        with pytest.raises(SetupError, match="in use"):
            bind("a-name", port)


def test_an_address_that_cannot_be_had_is_named_with_its_flag() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"127.0.0.1:{port}: .*in use; choose another --x or"):
            bind("127.0.0.1", port, "--x")
    with pytest.raises(SetupError, match=r"cannot use the address no\.such\.name\.invalid:1"):
        bind("no.such.name.invalid", 1)
