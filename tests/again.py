"""Runs a file of tests once more in a process of its own, under other circumstances."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run_again(file: str, every: int, chosen: str = "", **environment: str) -> None:
    """Assert that the tests of ``file`` pass, and that none is skipped.

    Args:
        every: run one of so many tests.
        chosen: an expression that leaves out some.
        environment: variables of the other circumstances.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["-rs", "-m", "not full", "--every", str(every), "-k", chosen]
    command += [str(TESTS / file)]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=TESTS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout
