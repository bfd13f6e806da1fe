"""Ends hanging children, so that others take their places."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.util.starvation import largest_growth, read_run_delays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pd.proxy.workers.ledger import Ledger
    from pd.proxy.workers.process import ChildProcess

logger = logging.getLogger(__name__)

# We end a child whose event loop has not turned for this long, not counting time without a CPU.
HANG_SECONDS = 60.0
_CHECKS = 60  # in that time


@dataclass
class _Stillness:
    """A child whose event loop has not turned since the last check.

    Attributes:
        turned: when it last turned, according to the ledger.
        delays: run delays of its threads at the last check; None before the second check, and where
            the kernel does not count them.
        seconds: how long it stalled although it could have run.
        is_ended: we sent it SIGKILL.
    """

    turned: int
    delays: Mapping[int, float] | None = None
    seconds: float = 0.0
    is_ended: bool = False


class HangWatch:
    """Checks the children's event loops regularly, and ends hanging children.

    No check counts more than the planned time since the one before. A parent that was stopped or
    starved itself therefore sees children turn before it ends any. We do not count the run delay of
    a child (:mod:`pd.util.starvation`), because a starved process is not dead. A stopped process
    has no run delay.

    Args:
        children: returns the living children.
        ledger: shows when each child's event loop last turned.
        read: returns the run delay of every thread of a process, or None.
        clock: ``time.monotonic``, except in tests.
    """

    def __init__(
        self,
        children: Callable[[], Iterable[ChildProcess]],
        ledger: Ledger,
        read: Callable[[int], Mapping[int, float] | None] = lambda pid: read_run_delays(
            f"/proc/{pid}/task"
        ),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._children = children
        self._ledger = ledger
        self._read, self._clock = read, clock
        self._still: dict[ChildProcess, _Stillness] = {}
        self._checked_at = clock()

    async def watch_children(self) -> None:
        """Check until cancelled."""
        while True:
            interval = HANG_SECONDS / _CHECKS
            self._checked_at = self._clock()
            await asyncio.sleep(interval)
            self.check_children(interval)

    def check_children(self, interval: float) -> None:
        """Check all children. ``interval``: planned seconds since the last check."""
        now = self._clock()
        late = max(0.0, now - self._checked_at - interval)
        self._checked_at = now
        before, self._still = self._still, {}
        for child in self._children():
            turned = self._ledger.get_last_turn(child.number)
            if not turned:  # it is importing its modules
                continue
            still = before.get(child)
            if still is None or still.turned != turned:
                still = _Stillness(turned)
            else:
                self._count_stall(child, still, interval, late)
            self._still[child] = still

    def _count_stall(
        self, child: ChildProcess, still: _Stillness, interval: float, late: float
    ) -> None:
        """Count the time since the last check for a stalled child, and end it if it hangs."""
        last, still.delays = still.delays, self._read(child.pid)
        if still.delays is None:
            # If one process gets no CPU, others probably get none either.
            delayed = late
        elif last is None:
            return  # we can subtract delays from the next check on
        else:
            delayed = largest_growth(last, still.delays)
        still.seconds += max(0.0, interval - delayed)
        # Rounding must not cost another check.
        if still.seconds > HANG_SECONDS - interval / 2 and not still.is_ended:
            logger.error(
                "proxy process %d (pid %d) hangs: its event loop has not turned for %.1f s, %.1f s"
                " of them with a CPU; we end it",
                child.number,
                child.pid,
                self._ledger.get_stall_seconds(child.number),
                still.seconds,
            )
            still.is_ended = True
            child.send_kill()
