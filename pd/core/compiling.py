"""Whether this process compiles kernels: a step that does takes far longer than others."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class Compiling:
    """Context in which kernels are compiled; thread-safe."""

    def __init__(self) -> None:
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
        """Whether anything was compiled after ``time.monotonic()`` was ``moment``."""
        with self._lock:
            return self._active > 0 or self._ended >= moment


# Kernels of this process.
COMPILING = Compiling()
