"""Starved is not dead: how long this process and its peers were ready to run and got no CPU.

The *run delay* of a process is the time, in seconds and since the first reading, during which its
most delayed thread was runnable and did not run. Linux counts it for each thread
(``/proc/self/task/TID/schedstat``, the second number). Where there is no such count, the lateness
of a thread that wants to run twice a second takes its place. Heartbeats carry the number.

:class:`Patience` extends limits on progress by it. A thread that is blocked or idle adds nothing,
so a cut link or a stopped process fails in the same time as on an idle machine.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Upper bound of an extended limit, however long the ends got no CPU. Timers inside libraries,
# which cannot be extended, are set to it.
CEILING_SECONDS = 30.0
READING_INTERVAL = 0.5

_TASKS = "/proc/self/task"
# Readings are kept somewhat longer than the longest wait, which ends at the ceiling.
_HISTORY_SECONDS = CEILING_SECONDS + 5.0
_MAX_PEERS = 4096


class Delay(Protocol):
    """Run delay of one process over time."""

    def growth(self, since: float) -> float:
        """Seconds by which the run delay grew since ``time.monotonic()`` was ``since``."""


class DelayHistory:
    """Readings of a cumulative run delay, as many as a wait may need. Not thread-safe."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()

    @property
    def last_read(self) -> float:
        """Time at which the last reading was added, or minus infinity."""
        return self._readings[-1][0] if self._readings else float("-inf")

    @property
    def last(self) -> float:
        """The last reading, or 0."""
        return self._readings[-1][1] if self._readings else 0.0

    def add(self, now: float, total: float) -> None:
        """Note a reading. Smaller ones than before, which cannot be, count as equal."""
        readings = self._readings
        readings.append((now, max(total, self.last)))
        while len(readings) > 1 and readings[1][0] < now - _HISTORY_SECONDS:
            readings.popleft()

    def growth(self, since: float) -> float:
        """Growth from the last reading at or before ``since`` to the last of all."""
        if not self._readings:
            return 0.0
        base = self._readings[0][1]
        for read_at, total in reversed(self._readings):
            if read_at <= since:
                base = total
                break
        return self.last - base


def read_run_delays(tasks: str = _TASKS) -> dict[int, float] | None:
    """Run delay in seconds of every thread of this process, by thread id, or of the process whose
    threads have their files in the directory ``tasks``.

    None where the kernel does not count it: the files are missing or count nothing, not even the
    time that threads ran. Takes about 7 µs for each thread.
    """
    delays: dict[int, float] = {}
    counts = False
    try:
        threads = os.listdir(tasks)
    except OSError:
        return None
    for thread in threads:
        times = _read_times(thread, tasks)
        if times is not None:
            counts = counts or times[0] > 0
            delays[int(thread)] = times[1]
    return delays if counts else None


def most_delayed(last: Mapping[int, float], delays: Mapping[int, float]) -> float:
    """Growth of a process's run delay from one reading of :func:`read_run_delays` to the next: that
    of its most delayed thread. A thread that began in between was delayed since then only."""
    grown = (delay - last.get(thread, 0.0) for thread, delay in delays.items())
    return max(grown, default=0.0)


def thread_run_delay(thread: int, tasks: str = _TASKS) -> float:
    """Run delay in seconds of one thread of this process since it began; 0 where the kernel does
    not count it."""
    times = _read_times(str(thread), tasks)
    return 0.0 if times is None else times[1]


def _read_times(thread: str, tasks: str) -> tuple[float, float] | None:
    """Seconds that a thread ran and that it was ready to run but did not. None when the thread has
    ended, or the kernel counts neither."""
    try:
        with open(f"{tasks}/{thread}/schedstat", "rb", buffering=0) as file:
            ran, waited, *_ = map(int, file.read(128).split())
    except (OSError, ValueError):
        return None
    return ran * 1e-9, waited * 1e-9


class RunDelay:
    """Run delay of this process, read twice a second by a thread of its own. Thread-safe.

    Args:
        read: returns the delay of every thread, see :func:`read_run_delays`.
        clock: ``time.monotonic`` but in tests.
    """

    def __init__(
        self,
        read: Callable[[], dict[int, float] | None] = read_run_delays,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._lock = threading.Lock()
        self._history = DelayHistory()
        self._threads = read()
        self._due = clock() + READING_INTERVAL
        self._total = 0.0
        self._history.add(clock(), 0.0)
        self._started = False

    @property
    def total(self) -> float:
        """Seconds of delay as last read; what heartbeats carry."""
        self._start()
        return self._total

    def growth(self, since: float) -> float:
        """The run delay (:class:`Delay`), read anew unless the last reading is recent."""
        self._start()
        if self._clock() > self._history.last_read + READING_INTERVAL / 2:
            self.update(beat=False)
        with self._lock:
            return self._history.growth(since)

    def update(self, *, beat: bool) -> None:
        """Read the delay once. ``beat``: the caller is the thread whose lateness is measured."""
        with self._lock:
            now = self._clock()
            late = max(0.0, now - self._due)
            if beat:
                self._due = now + READING_INTERVAL
            last = self._threads
            if last is None:
                # NOTE: until the next beat the total stays as it is, and what is not yet in it is
                # added to the reading only.
                self._history.add(now, self._total + late)
                self._total += late if beat else 0.0
                return
            # A thread that began since the last reading was delayed since then only.
            threads = self._read() or last
            self._total += most_delayed(last, threads)
            self._threads = threads
            self._history.add(now, self._total)

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            self._started = True
            self._due = self._clock() + READING_INTERVAL
        # Time that passed before belongs to no wait.
        self.update(beat=False)
        threading.Thread(target=self._run, name="pd-run-delay", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(max(0.0, self._due - self._clock()))
            self.update(beat=True)


# The run delay of this process.
RUN_DELAY = RunDelay()


class Patience:
    """Decides when a wait for progress has lasted too long. Thread-safe.

    Args:
        own: run delay of this process.
        ceiling: no wait lasts longer, unless its limit is longer by itself.
    """

    def __init__(
        self,
        own: Delay = RUN_DELAY,
        *,
        ceiling: float = CEILING_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own, self._ceiling, self._clock = own, ceiling, clock
        self._lock = threading.Lock()
        self._peers: dict[str, DelayHistory] = {}
        # Readings begin before the first wait does.
        own.growth(clock())

    def heard(self, peer: str, total: float) -> None:
        """Note the run delay that a peer's heartbeat carried."""
        with self._lock:
            history = self._peers.pop(peer, None) or DelayHistory()
            while len(self._peers) >= _MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            self._peers[peer] = history
            history.add(self._clock(), total)

    def total(self, peer: str) -> float:
        """The last run delay noted of a peer; 0 for an unknown one."""
        with self._lock:
            history = self._peers.get(peer)
            return history.last if history is not None else 0.0

    def is_over(self, since: float, limit: float, peer: str | None = None) -> bool:
        """Whether a wait has outlasted ``limit`` seconds and what either end was delayed meanwhile.

        Args:
            since: ``time.monotonic()`` when it began, or when progress was last seen.
            limit: seconds that it may last when both ends have a CPU.
            peer: instance id of the other end; None if it is not known, when the most delayed of
                all peers counts.
        """
        waited = self._clock() - since
        if waited <= limit:
            return False
        if waited > max(limit, self._ceiling):
            return True
        return waited > limit + self.delayed(since, peer)

    def delayed(self, since: float, peer: str | None = None) -> float:
        """Seconds by which a wait that began at ``since`` is extended so far; arguments as for
        :meth:`is_over`."""
        waited = self._clock() - since
        with self._lock:
            if peer is None:
                histories = list(self._peers.values())
            else:
                histories = [self._peers[peer]] if peer in self._peers else []
            theirs = max((history.growth(since) for history in histories), default=0.0)
        return min(self._own.growth(since), waited) + min(theirs, waited)
