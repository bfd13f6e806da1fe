"""Bounds the share of an event loop's time spent on reading from clients."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Time for reading per turn of the event loop, and time for one connection before the next gets its
# turn. A signature with an RSA key takes about a millisecond.
TURN_SECONDS = 0.005
STEP_SECONDS = 0.001


class Turns:
    """Shares the event loop's time among connections with something to read.

    Without it, a thousand simultaneous handshakes or a flood of tiny TLS records or HTTP chunks
    would stall everything else on the loop. Use it on the event loop's thread only.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[float], bool]] = deque()
        self._is_scheduled = False
        self._end = 0.0

    def run_step(self, step: Callable[[float], bool]) -> bool:
        """Call ``step`` now if there is time, and again in later turns until it is done.

        ``step`` receives the monotonic time at which it should return, and returns whether it is
        done. So does this method. If it returns False, do not pass ``step`` again.
        """
        if not self._is_scheduled:
            self._begin_turn()
        now = time.monotonic()
        may_run = not self._waiting and now < self._end
        if may_run and step(min(self._end, now + STEP_SECONDS)):
            return True
        self._waiting.append(step)
        return False

    def _begin_turn(self) -> None:
        self._is_scheduled = True
        self._end = time.monotonic() + TURN_SECONDS
        asyncio.get_running_loop().call_soon(self._run_steps)

    def _run_steps(self) -> None:
        """Run waiting steps in the next turn of the loop."""
        self._is_scheduled = False
        if self._waiting:
            self._begin_turn()
        while self._waiting and (now := time.monotonic()) < self._end:
            step = self._waiting.popleft()
            if not step(min(self._end, now + STEP_SECONDS)):
                self._waiting.append(step)
