"""Starts child processes of pd. They end with their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Terminals and service managers send these to all processes at once.
_ENDING = (signal.SIGINT, signal.SIGTERM)
_ROOT = Path(__file__).parents[2]


def module_command(module: str, *arguments: object) -> list[str]:
    """Build the command line for a module of this pd and this interpreter.

    We keep Python from importing modules from the working directory (``-P``), because another
    ``pd`` may be there, such as an older clone. The exception is a working directory with this pd.
    """
    try:
        is_here = os.path.samefile(_ROOT, os.curdir)
    except OSError:  # the working directory was removed
        is_here = False
    flags = [] if is_here else ["-P"]
    return [sys.executable, *flags, "-m", module, *map(str, arguments)]


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Block SIGINT and SIGTERM while this thread starts processes.

    A child inherits the block, because importing modules takes a while, and lifts it with
    :func:`ignore_ending_signals`. Signals for this process arrive after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ending_signals() -> None:
    """Ignore SIGINT and SIGTERM, because the parent drains first and then ends this process."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
