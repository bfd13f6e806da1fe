"""Other work on the CPUs of a test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Ends with the test's process, should that be killed.
_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@contextlib.contextmanager
def two_cores() -> Iterator[None]:
    """Restrict everything that this thread starts to two cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run so many processes, each of which occupies a core."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            loops.append(subprocess.Popen([sys.executable, "-c", _LOOP]))  # noqa: PERF401
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
