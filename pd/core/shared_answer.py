"""Answers that anybody may ask for, made once for all who ask at about the same time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

# After an answer nothing is done for so many times as long as it took, so that strangers can have a
# tenth of the time at most; but for no longer than as if it had taken the second number of seconds,
# lest callers wait for long.
_REST, _MOST_SECONDS = 9, 0.05


class SharedAnswer(Generic[T]):
    """Makes one answer at a time, with pauses. Each caller gets one that was begun after the call.

    Everything runs on one event loop.
    """

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        # The answer that callers wait for and that has not begun.
        self._next: asyncio.Task[T] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._rests_until = 0.0

    async def get(self) -> T:
        """The answer. Raises what making it raises."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._answer())
        return await asyncio.shield(self._next)

    async def _answer(self) -> T:
        async with self._one_at_a_time:
            await asyncio.sleep(max(0.0, self._rests_until - time.monotonic()))
            self._next = None
            began = time.monotonic()
            try:
                return await self._make()
            finally:
                now = time.monotonic()
                self._rests_until = now + _REST * min(now - began, _MOST_SECONDS)
