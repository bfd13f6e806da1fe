"""Tests of the proxy once more with two processes behind its port. They are those that look at it
from outside only: a test that patches the proxy, or looks into it, has it in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("file", "every"),
    [
        ("proxy/test_proxy_lifecycle.py", 3),
        ("proxy/test_proxy_completions.py", 4),
        ("proxy/test_proxy_chat.py", 4),
        ("proxy/test_proxy_choices.py", 4),
        ("proxy/test_proxy_reasoning.py", 4),
        ("proxy/test_proxy_stream_interval.py", 4),
        ("proxy/test_proxy_openai_client.py", 1),
        ("security/test_rids.py", 1),
    ],
)
def test_with_two_processes(file: str, every: int) -> None:
    """Only some tests run of long files about single requests, which one process serves alone."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["-rs", "-m", "not full", "--every", str(every), str(TESTS / file)]
    done = subprocess.run(
        command,
        env=os.environ | {"PD_TEST_PROXY_WORKERS": "2"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout
