"""The end of a process: at once, and even if a library is stuck."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

# Names of threads that may wait in a library for ever begin with this.
STUCK_PREFIX = "may be stuck: "


def leave_within(seconds: float, status: int) -> None:
    """End the process with this exit status unless it has ended by then: a thread may wait
    for a GPU that hangs."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def leave(status: int) -> NoReturn:
    """End the process with this exit status, without the interpreter's own end.

    That end has nothing left to do, and takes half a second once torch is loaded. Threads that come
    back from a library after it are ended by unwinding their stack, which aborts the process where
    C++ is on it. What was registered with :mod:`atexit` is run, unless a thread is stuck in a
    library, for which it might wait.
    """
    if not any(thread.name.startswith(STUCK_PREFIX) for thread in threading.enumerate()):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # The stream may be closed, or nobody may read it any more.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)
