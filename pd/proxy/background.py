"""Work that takes too long for the event loop, on few threads.

Everybody waits for the event loop, so one client must not hold it up. What costs more than a few
milliseconds (parsing a large body, rendering a chat template, tokenizing, writing down thousands of
log probabilities) runs here. Python code on these threads gives way to the loop after the
interpreter's switch interval; a single call into C does not, so callers bound what one such call
gets.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Work on up to so many bytes of JSON or text is done at once: tokenizing takes up to a microsecond
# for each.
INLINE_BYTES = 8 << 10
# Work on more bytes has a thread of its own, so that a client with an ordinary request does not
# wait seconds for one with a huge one.
LONG_BYTES = 1 << 20
_THREADS = 2


class Background:
    """Runs functions, small ones at once. For the event loop's thread."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_THREADS, "background")
        self._long = ThreadPoolExecutor(1, "background-long")

    async def run(self, size: int, function: Callable[..., T], *args: object) -> T:
        """Call ``function(*args)``, which works on about ``size`` bytes of JSON or text."""
        if size <= INLINE_BYTES:
            return function(*args)
        pool = self._short if size <= LONG_BYTES else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
