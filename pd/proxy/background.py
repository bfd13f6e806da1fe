"""Work that takes too long for the event loop, on few threads.

Everybody waits for the event loop, so one client must not hold it up. What costs more than half a
millisecond (parsing a large body, rendering a chat template, tokenizing, writing down thousands of
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

# Work on up to so many bytes of JSON or text is done at once, if they are not tokenized.
INLINE_BYTES = 8 << 10
# Text that is tokenized is so only up to this number: a byte of prose takes 0.15 us, one of digits
# or punctuation marks 0.6.
INLINE_TEXT_BYTES = 1 << 10
# Bytes of the work of each pool of threads at most, but for the last one: a client with an ordinary
# request does not wait for one with a long text, nor that one seconds for one with a huge one.
SHORT_BYTES, LONG_BYTES = 64 << 10, 1 << 20
_THREADS = (2, 2, 1)


class Background:
    """Runs functions, small ones at once. For the event loop's thread."""

    def __init__(self) -> None:
        self._short, self._long, self._huge = (
            ThreadPoolExecutor(count, f"background-{name}")
            for count, name in zip(_THREADS, ("short", "long", "huge"), strict=True)
        )

    async def run(self, size: int, function: Callable[..., T], *args: object) -> T:
        """Call ``function(*args)``, which works on about ``size`` bytes of JSON or text."""
        if size <= INLINE_BYTES:
            return function(*args)
        return await self.run_on_thread(size, function, *args)

    async def run_on_thread(self, size: int, function: Callable[..., T], *args: object) -> T:
        """Call ``function(*args)`` on another thread, however small ``size`` is."""
        pool = self._huge
        if size <= LONG_BYTES:
            pool = self._short if size <= SHORT_BYTES else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself."""
        for pool in (self._short, self._long, self._huge):
            pool.shutdown(wait=False, cancel_futures=True)
