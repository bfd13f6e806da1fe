"""Processes end at once, with their chosen exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading
from pd.util.exit import STUCK_PREFIX, exit_now

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
exit_now(3)
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
def test_exit_runs_atexit_callbacks_but_skips_finalization(
    name: str, daemon: bool, shown: str
) -> None:
    program = PROGRAM.format(name=name, daemon=daemon)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (3, shown), done


def test_exit_keeps_the_status_after_the_reader_has_left() -> None:
    program = "import os; from pd.util.exit import exit_now; print('x'); os.close(1); exit_now(3)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30)
    assert (done.returncode, done.stderr) == (3, b"")


def test_a_stuck_process_is_ended() -> None:
    program = (
        "import threading\n"
        "from pd.util.exit import exit_within\n"
        "exit_within(0.2, 3)\n"
        "threading.Event().wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=30)
    assert done.returncode == 3
