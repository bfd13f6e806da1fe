"""Ends children that hang, so that others take their places."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.starvation import most_delayed, read_run_delays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pd.proxy.ledger import Ledger
    from pd.proxy.processes.process import ChildProcess

logger = logging.getLogger(__name__)

# A child whose event loop did not turn for so long is ended, time without a CPU not counted.
HANG_SECONDS = 60.0
_LOOKS = 60  # in that time


@dataclass
class _Stillness:
    """The state of a child whose event loop has not turned since the last look.

    Attributes:
        turned: when it turned last, as the ledger has it.
        delays: of its threads at the last look; None before the second one, and where the kernel
            does not count them.
        seconds: how long it stood still and could have run.
        is_ended: it was sent SIGKILL.
    """

    turned: int
    delays: Mapping[int, float] | None = None
    seconds: float = 0.0
    is_ended: bool = False


class HangWatch:
    """Looks at the children's event loops again and again, and ends those that hang.

    No look counts more than the time that was to pass since the one before, so that a parent which
    was stopped or got no CPU itself sees children turn before it ends any. The run delay of a child
    (:mod:`pd.core.starvation`) is not counted: starved is not dead. A stopped process has none.

    Args:
        children: those that have not ended.
        ledger: says when each child's event loop turned last.
        read: returns the run delay of every thread of the process with this id, or None.
        clock: ``time.monotonic`` but in tests.
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
        self._looked = clock()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            interval = HANG_SECONDS / _LOOKS
            self._looked = self._clock()
            await asyncio.sleep(interval)
            self.look(interval)

    def look(self, interval: float) -> None:
        """Look at all children, ``interval`` seconds after the last look if all goes well."""
        now = self._clock()
        late = max(0.0, now - self._looked - interval)
        self._looked = now
        before, self._still = self._still, {}
        for child in self._children():
            turned = self._ledger.turned(child.number)
            if not turned:  # it imports its modules
                continue
            still = before.get(child)
            if still is None or still.turned != turned:
                still = _Stillness(turned)
            else:
                self._count(child, still, interval, late)
            self._still[child] = still

    def _count(self, child: ChildProcess, still: _Stillness, interval: float, late: float) -> None:
        """Count the time since the last look, during which a child did not turn, and end it if
        it hangs."""
        last, still.delays = still.delays, self._read(child.pid)
        if still.delays is None:
            # Where one process gets no CPU others get none either.
            delayed = late
        elif last is None:
            return  # delays are known from now on
        else:
            delayed = most_delayed(last, still.delays)
        still.seconds += max(0.0, interval - delayed)
        # Rounding must not cost a further look.
        if still.seconds > HANG_SECONDS - interval / 2 and not still.is_ended:
            logger.error(
                "proxy process %d (pid %d) hangs: its event loop has not turned for %.1f s, %.1f s"
                " of them with a CPU; it is ended",
                child.number,
                child.pid,
                self._ledger.stood_still(child.number),
                still.seconds,
            )
            still.is_ended = True
            child.kill()
