"""Whether this process compiles kernels: a step that does takes far longer than others."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

# Programs that libraries such as FlashInfer start to compile kernels.
_COMPILERS = frozenset({"ninja", "nvcc", "cicc", "cudafe++", "ptxas"})


def compilers_run() -> bool:
    """Whether this user's processes compile kernels. It need not be this process that started
    them: of several that need the same kernel, one compiles it and the others wait for that."""
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
    """Context in which kernels are compiled; thread-safe.

    Args:
        compilers_run: whether kernels are compiled by programs, outside the context.
    """

    def __init__(self, compilers_run: Callable[[], bool] = compilers_run) -> None:
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

    def since(self, moment: float) -> bool:
        """Whether anything was compiled after ``time.monotonic()`` was ``moment``, as far as this
        was asked meanwhile. It takes milliseconds."""
        by_programs = self._compilers_run()
        with self._lock:
            if by_programs:
                self._ended = time.monotonic()
            return self._active > 0 or self._ended >= moment


# Kernels of this process.
COMPILING = Compiling()
