"""Tests of the proxy once more on uvloop's event loop, which proxies have where it is installed. It
reads, writes and closes connections in its own way."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from again import run_again


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "every"),
    [
        ("proxy/http/test_background.py", 1),
        ("proxy/api/test_proxy_writing.py", 1),
        ("proxy/api/test_slow_readers.py", 1),
        ("proxy/workers/test_proxy_loop.py", 1),
        ("proxy/dispatch/test_proxy_lifecycle.py", 1),
        ("proxy/http/test_proxy_tls.py", 1),
        ("proxy/http/test_proxy_bodies.py", 1),
        ("proxy/nodes/test_proxy_heartbeats.py", 1),
        ("proxy/dispatch/test_proxy_failover.py", 1),
        ("proxy/api/test_proxy_generate.py", 3),
        ("security/test_connections.py", 1),
        ("security/test_tls_records.py", 1),
        ("security/test_unread_and_unending.py", 1),
    ],
)
def test_with_uvloop(file: str, every: int) -> None:
    assert version("uvloop")
    run_again(file, every, PD_TEST_LOOP="uvloop")
