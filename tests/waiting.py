from __future__ import annotations

import time
from typing import Any


def wait_until(
    condition: Any, timeout: float, describe: Any = lambda: "", *, every: float = 0.02
) -> None:
    """Poll until ``condition()`` is true. Fail with ``describe()`` after ``timeout`` seconds.

    ``every``: seconds between two polls.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {describe()}"
        time.sleep(every)
