"""The end of a process in which a library may be stuck."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# Names of threads that may wait in a library for ever begin with this.
STUCK_PREFIX = "may be stuck: "


def leave_within(seconds: float, status: int) -> None:
    """End the process with this exit status unless it has ended by then: a GPU that hangs may hold
    up whoever waits for what it computes."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def leave(status: int) -> None:
    """End the process with this exit status if a thread is stuck; otherwise return.

    Python ends threads that come back from a library after its own end by unwinding their stack,
    which aborts the process where C++ is on it.
    """
    if any(thread.name.startswith(STUCK_PREFIX) for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            # It may be closed, or nobody may read it any more.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(status)
