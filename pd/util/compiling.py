"""Tracks whether kernels are being compiled, because a compiling step takes far longer."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

# Libraries such as FlashInfer start these programs to compile kernels.
_COMPILERS = frozenset({"ninja", "nvcc", "cicc", "cudafe++", "ptxas"})


def are_compilers_running() -> bool:
    """Whether processes of this user compile kernels.

    Compilers of other processes count, too: if several processes need the same kernel, one compiles
    it and the others wait.
    """
    user = os.getuid()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "comm").read_text().strip()
            if name in _COMPILERS and process.stat().st_uid == user:
                return True
        except OSError:
            continue  # it has ended
    return False


class Compiling:
    """Context for code that compiles kernels. Thread-safe.

    Args:
        compilers_run: tells whether programs compile kernels outside the context.
    """

    def __init__(self, compilers_run: Callable[[], bool] = are_compilers_running) -> None:
        self._compilers_run = compilers_run
        self._lock = threading.Lock()
        self._active = 0
        self._ended = float("-inf")

    def __enter__(self) -> None:
        with self._lock:
            self._active += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._active -= 1
            self._ended = time.monotonic()

    def was_active_since(self, moment: float) -> bool:
        """Whether anything was compiled since ``moment``, a time of ``time.monotonic()``.

        We only notice programs running during the call. A call takes milliseconds.
        """
        by_programs = self._compilers_run()
        with self._lock:
            if by_programs:
                self._ended = time.monotonic()
            return self._active > 0 or self._ended >= moment


# Kernels of this process.
COMPILING = Compiling()
