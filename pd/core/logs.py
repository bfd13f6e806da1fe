"""Logging of the processes of pd."""

from __future__ import annotations

import logging
import sys

# Libraries that log every request or step of theirs at "info".
_NOISY = ("httpx", "httpcore", "asyncio", "uvicorn")


def configure_logging(level: int, name: str = "") -> None:
    """Log to standard error. ``name``: tells this process from others that log there."""
    where = f"[{name}] " if name else ""
    log_format = f"%(asctime)s %(levelname)s {where}%(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=level, format=log_format)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
