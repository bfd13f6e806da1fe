"""A thread that is stuck in a library must not change a process's exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from pd.core.exit import STUCK_PREFIX, leave

def stuck():
    started.set()
    threading.Event().wait()

started = threading.Event()
threading.Thread(target=stuck, name={name}, daemon={daemon}).start()
started.wait()
print("said")
leave(3)
sys.exit(4)
"""


@pytest.mark.parametrize(
    ("name", "daemon", "status"),
    [("STUCK_PREFIX + 'x'", False, 3), ("'other'", True, 4)],
)
def test_only_a_stuck_thread_cuts_the_end_short(name: str, daemon: bool, status: int) -> None:
    program = PROGRAM.format(name=name, daemon=daemon)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (status, "said\n"), done


def test_a_process_that_cannot_end_is_ended() -> None:
    program = (
        "import threading\n"
        "from pd.core.exit import leave_within\n"
        "leave_within(0.2, 3)\n"
        "threading.Event().wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=30)
    assert done.returncode == 3
