"""Tests of the proxy once more on uvloop's event loop, which proxies have where it is installed. It
reads, writes and closes connections in its own way."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "every"),
    [
        ("proxy/test_proxy_writing.py", 1),
        ("proxy/test_slow_readers.py", 1),
        ("proxy/test_proxy_loop.py", 1),
        ("proxy/test_proxy_lifecycle.py", 1),
        ("proxy/test_proxy_bodies.py", 1),
        ("proxy/test_proxy_heartbeats.py", 1),
        ("proxy/test_proxy_failover.py", 1),
        ("proxy/test_proxy_generate.py", 3),
        ("security/test_connections.py", 1),
    ],
)
def test_with_uvloop(file: str, every: int) -> None:
    assert version("uvloop")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["-rs", "-m", "not full", "--every", str(every), str(TESTS / file)]
    done = subprocess.run(
        command,
        env=os.environ | {"PD_TEST_LOOP": "uvloop"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout
