"""Processes end at once, with the exit status that they chose."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading
from pd.core.exit import STUCK_PREFIX, leave

class SlowToGo:
    def __del__(self):
        print("torn down")

def wait():
    started.set()
    threading.Event().wait()

slow = SlowToGo()
atexit.register(print, "at exit")
started = threading.Event()
threading.Thread(target=wait, name={name}, daemon={daemon}).start()
started.wait()
print("said")
leave(3)
"""


@pytest.mark.parametrize(
    ("name", "daemon", "shown"),
    [
        ("'other'", True, "said\nat exit\n"),
        ("'other'", False, "said\nat exit\n"),
        ("STUCK_PREFIX + 'x'", False, "said\n"),
    ],
    ids=["daemon", "other", "stuck"],
)
def test_leaving_runs_what_was_registered_but_tears_nothing_down(
    name: str, daemon: bool, shown: str
) -> None:
    program = PROGRAM.format(name=name, daemon=daemon)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (3, shown), done


def test_leaving_after_the_reader_of_the_output_keeps_the_status() -> None:
    program = "import os; from pd.core.exit import leave; print('x'); os.close(1); leave(3)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30)
    assert (done.returncode, done.stderr) == (3, b"")


def test_a_process_that_cannot_end_is_ended() -> None:
    program = (
        "import threading\n"
        "from pd.core.exit import leave_within\n"
        "leave_within(0.2, 3)\n"
        "threading.Event().wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=30)
    assert done.returncode == 3
