"""Ends a process at once, even if a library is stuck."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

from pd.util.output import wait_for_output

# Prefix of the names of threads possibly stuck in a library.
STUCK_PREFIX = "may be stuck: "


def exit_within(seconds: float, status: int) -> None:
    """End the process after some seconds if it still runs, because a GPU may hang a thread.

    Args:
        status: exit status.
    """
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def exit_now(status: int) -> NoReturn:
    """End the process with this exit status and skip the interpreter's finalization.

    Finalization has nothing left to do and takes half a second once torch is loaded. Besides, it
    ends threads that return from a library by unwinding their stack, and that aborts the process
    if C++ frames are on it. We run :mod:`atexit` callbacks, unless a thread is stuck in a library,
    because a callback might wait for that thread.
    """
    if not any(thread.name.startswith(STUCK_PREFIX) for thread in threading.enumerate()):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # The stream may be closed, or nobody may read it any more.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    wait_for_output()
    os._exit(status)
