"""Answers open to everybody, computed once for all clients that ask at about the same time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

# After an answer we pause for `_PAUSE_FACTOR` times its duration, so strangers take at most a tenth
# of the time. We count at most `_MAX_SECONDS` as the duration, so callers do not wait for long.
_PAUSE_FACTOR, _MAX_SECONDS = 9, 0.05


class SharedAnswer(Generic[T]):
    """Computes one answer at a time, with pauses. A caller gets an answer begun after its call.

    Use it on one event loop.
    """

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        # The answer that has not begun and has callers waiting.
        self._next: asyncio.Task[T] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._pause_end = 0.0

    async def get_answer(self) -> T:
        """Return the answer, or raise the exception of its computation."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._make_next())
        return await asyncio.shield(self._next)

    async def _make_next(self) -> T:
        async with self._one_at_a_time:
            await asyncio.sleep(max(0.0, self._pause_end - time.monotonic()))
            self._next = None
            began = time.monotonic()
            try:
                return await self._make()
            finally:
                now = time.monotonic()
                self._pause_end = now + _PAUSE_FACTOR * min(now - began, _MAX_SECONDS)
