"""A limit on how often a warning is logged, because strangers may cause it endlessly."""

from __future__ import annotations

import logging
import time

SECONDS = 1.0


class WarningLimit(logging.Filter):
    """Logs one warning a second and adds how many it stands for. For one thread.

    Call :meth:`log_warning`, or add this as a filter to the logger of a library.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._next = 0.0
        self._count = 0

    def log_warning(self, message: str) -> None:
        """Log a message. Its text may differ from that of earlier warnings."""
        times = self._count_warning()
        if times is not None:
            self._logger.warning("%s%s", message, times)

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop warnings that come too often. Records of other levels pass."""
        if record.levelno != logging.WARNING:
            return True
        times = self._count_warning()
        if times is None:
            return False
        record.msg, record.args = f"{record.getMessage()}{times}", ()
        return True

    def _count_warning(self) -> str | None:
        """Return what to append to this warning; None if it comes too early and is only counted."""
        self._count += 1
        now = time.monotonic()
        if now < self._next:
            return None
        times = f" ({self._count} times)" if self._count > 1 else ""
        self._next, self._count = now + SECONDS, 0
        return times
