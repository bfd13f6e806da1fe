"""Failures of the disk, of which the log has each one once in a while."""

from __future__ import annotations

import logging
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
        self._last: dict[str, float] = {}

    def report(self, directory: Path, error: Exception) -> None:
        """Log the exception under way with its traceback, unless that was done lately."""
        now = time.monotonic()
        self._last = {text: at for text, at in self._last.items() if now < at + _REPEAT_SECONDS}
        if str(error) not in self._last:
            self._last[str(error)] = now
            logger.exception("the storage in %s failed", directory)
