"""Failures of the disk, of which the log has each one once in a while."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

# When the same failure is logged again.
_REPEAT_SECONDS = 600.0


class FailureLog:
    """Logs failures. A full disk fails every request, but one message about it is enough."""

    def __init__(self) -> None:
        self._last: dict[tuple[type, int | None], float] = {}

    def report(self, directory: Path, error: Exception) -> None:
        """Log the exception under way with its traceback, unless that was done lately."""
        # Messages name files, and these are never the same.
        code = getattr(error, "errno", getattr(error, "sqlite_errorcode", None))
        kind, now = (type(error), code), time.monotonic()
        if now >= self._last.get(kind, -math.inf) + _REPEAT_SECONDS:
            self._last[kind] = now
            logger.exception("the storage in %s failed", directory)
