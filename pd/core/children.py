"""Processes of pd that a process of pd starts, and that end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# A terminal and a service manager send these to all processes at once.
_ENDING = (signal.SIGINT, signal.SIGTERM)
_ROOT = Path(__file__).parents[2]


def module_command(module: str, *arguments: object) -> list[str]:
    """The command line that runs a module of this very pd with this interpreter.

    Python looks for modules in the working directory first, where another ``pd`` may be, such as an
    older clone. So it is kept from that (``-P``), unless this pd stands there.
    """
    try:
        is_here = os.path.samefile(_ROOT, os.curdir)
    except OSError:  # the working directory was removed
        is_here = False
    flags = [] if is_here else ["-P"]
    return [sys.executable, *flags, "-m", module, *map(str, arguments)]


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Processes that this thread starts meanwhile get neither SIGINT nor SIGTERM until they call
    :func:`ignore_ending_signals`: importing modules takes a while. What comes for this process
    meanwhile is not lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ending_signals() -> None:
    """Leave SIGINT and SIGTERM to the process that has started this one, which drains first and
    then ends it."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
