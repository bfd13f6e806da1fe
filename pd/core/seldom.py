"""A limit to how often the same warning is logged, for those that strangers can cause."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

SECONDS = 1.0


class Seldom:
    """Logs at most once a second, and then how often it happened. For one thread."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next = 0.0
        self._count = 0

    def warn(self, message: str) -> None:
        """``message`` may change from one time to the next."""
        self._count += 1
        now = time.monotonic()
        if now >= self._next:
            times = f" ({self._count} times)" if self._count > 1 else ""
            self._logger.warning("%s%s", message, times)
            self._next, self._count = now + SECONDS, 0
