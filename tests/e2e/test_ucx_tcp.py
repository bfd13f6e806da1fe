"""The tests that run nodes in their own process, once more over nixl with UCX kept to sockets.

UCX reads ``UCX_TLS`` once for each process; so each file runs in a pytest of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from backends import NIXL_TCP, Backend, over

HERE = Path(__file__).parent


@over([NIXL_TCP])
@pytest.mark.parametrize(
    ("file", "only"),
    [
        pytest.param("test_digest.py", "intact and nixl", marks=pytest.mark.full),
        pytest.param("test_parity.py", "every_backend and nixl", marks=pytest.mark.full),
        pytest.param("test_serving.py", "nixl", marks=pytest.mark.full),
        pytest.param("test_load.py", "nixl", marks=pytest.mark.full),
        pytest.param("test_recall.py", "survives and nixl", marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(1200)
def test_with_ucx_over_tcp(backend: Backend, file: str, only: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["-rs", str(HERE / file), "-k", only]
    done = subprocess.run(
        command,
        # Options for tests are for those that are looked at.
        env=os.environ | backend.env | {"PYTEST_ADDOPTS": ""},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout
