"""Distinguishes starved processes from dead ones.

The *run delay* of a process is the time in seconds, since the first reading, in which its most
delayed thread was ready to run but got no CPU. Linux counts it for each thread
(``/proc/self/task/TID/schedstat``, the second number). If the kernel does not count it, we use the
lateness of a thread with a wake-up every half second instead. Heartbeats carry the number.

:class:`Patience` extends limits on progress by the run delay. Blocked and idle threads add nothing
to it, so a broken link or a stopped process still fails as fast as on an idle machine.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Upper bound of an extended limit, however long the ends got no CPU. We also use it for timers
# inside libraries, because we cannot extend those.
CEILING_SECONDS = 30.0
READING_INTERVAL = 0.5

_TASKS = "/proc/self/task"
# We keep readings slightly longer than the longest wait, which ends at the ceiling.
_HISTORY_SECONDS = CEILING_SECONDS + 5.0
_MAX_PEERS = 4096


class Delay(Protocol):
    """Run delay of one process over time."""

    def measure_growth(self, since: float) -> float:
        """Return the growth of the run delay, in seconds, since the monotonic time ``since``."""


class DelayHistory:
    """Recent readings of a cumulative run delay. Not thread-safe."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()

    @property
    def last_read(self) -> float:
        """Time of the last reading, or minus infinity."""
        return self._readings[-1][0] if self._readings else float("-inf")

    @property
    def last(self) -> float:
        """The last reading, or 0."""
        return self._readings[-1][1] if self._readings else 0.0

    def add_reading(self, now: float, total: float) -> None:
        """Add a reading. If it is impossibly smaller than the last, it counts as equal."""
        readings = self._readings
        readings.append((now, max(total, self.last)))
        while len(readings) > 1 and readings[1][0] < now - _HISTORY_SECONDS:
            readings.popleft()

    def measure_growth(self, since: float) -> float:
        """Return the growth from the last reading at or before ``since`` to the latest."""
        if not self._readings:
            return 0.0
        base = self._readings[0][1]
        for read_at, total in reversed(self._readings):
            if read_at <= since:
                base = total
                break
        return self.last - base


def read_run_delays(tasks: str = _TASKS) -> dict[int, float] | None:
    """Read the run delay of every thread of a process in seconds, by thread id.

    Takes about 7 µs for each thread.

    Args:
        tasks: directory of the threads' files; this process's by default.

    Returns:
        None if the kernel does not count run delays: the files are missing, or even the running
        time is 0.
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


def largest_growth(last: Mapping[int, float], delays: Mapping[int, float]) -> float:
    """Return the growth of a process's run delay between two readings of its threads.

    It is the growth of the most delayed thread. The delay of a new thread counts fully.
    """
    grown = (delay - last.get(thread, 0.0) for thread, delay in delays.items())
    return max(grown, default=0.0)


def thread_run_delay(thread: int, tasks: str = _TASKS) -> float:
    """Return the run delay in seconds of one thread since it began; 0 if the kernel counts none."""
    times = _read_times(str(thread), tasks)
    return 0.0 if times is None else times[1]


def _read_times(thread: str, tasks: str) -> tuple[float, float] | None:
    """Return a thread's running time, and the time it was ready but did not run, in seconds.

    None if the thread has ended or the kernel counts neither.
    """
    try:
        with open(f"{tasks}/{thread}/schedstat", "rb", buffering=0) as file:
            ran, waited, *_ = map(int, file.read(128).split())
    except (OSError, ValueError):
        return None
    return ran * 1e-9, waited * 1e-9


class RunDelay:
    """Run delay of this process. Its own thread reads it twice a second. Thread-safe.

    Args:
        read: returns the delay of every thread, see :func:`read_run_delays`.
        clock: ``time.monotonic`` except in tests.
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
        self._history.add_reading(clock(), 0.0)
        self._started = False

    @property
    def total(self) -> float:
        """Seconds of delay at the last reading. Heartbeats carry this number."""
        self._start()
        return self._total

    def measure_growth(self, since: float) -> float:
        """Implement :class:`Delay`. Reads the delay again unless the last reading is recent."""
        self._start()
        if self._clock() > self._history.last_read + READING_INTERVAL / 2:
            self.update_reading(beat=False)
        with self._lock:
            return self._history.measure_growth(since)

    def update_reading(self, *, beat: bool) -> None:
        """Read the delay once.

        Args:
            beat: the caller is the thread whose lateness we measure.
        """
        with self._lock:
            now = self._clock()
            late = max(0.0, now - self._due)
            if beat:
                self._due = now + READING_INTERVAL
            last = self._threads
            if last is None:
                # NOTE: the total only grows with a beat. Until then we add the lateness to the
                # reading, but not to the total.
                self._history.add_reading(now, self._total + late)
                self._total += late if beat else 0.0
                return
            threads = self._read() or last
            self._total += largest_growth(last, threads)
            self._threads = threads
            self._history.add_reading(now, self._total)

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            self._started = True
            self._due = self._clock() + READING_INTERVAL
        # No wait began before this reading, so earlier delay does not count.
        self.update_reading(beat=False)
        threading.Thread(target=self._run, name="pd-run-delay", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(max(0.0, self._due - self._clock()))
            self.update_reading(beat=True)


# The run delay of this process.
RUN_DELAY = RunDelay()


class Patience:
    """Decides when a wait for progress has lasted too long. Thread-safe.

    Args:
        own: run delay of this process.
        ceiling: longest duration of an extended wait. A longer limit applies unextended.
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
        # Start the readings before the first wait.
        own.measure_growth(clock())

    def note_delay(self, peer: str, total: float) -> None:
        """Record the run delay from a peer's heartbeat."""
        with self._lock:
            history = self._peers.pop(peer, None) or DelayHistory()
            while len(self._peers) >= _MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            self._peers[peer] = history
            history.add_reading(self._clock(), total)

    def peer_total(self, peer: str) -> float:
        """Return the last run delay of a peer; 0 if the peer is unknown."""
        with self._lock:
            history = self._peers.get(peer)
            return history.last if history is not None else 0.0

    def is_over(self, since: float, limit: float, peer: str | None = None) -> bool:
        """Whether a wait has outlasted its limit plus the run delay of both ends.

        Args:
            since: monotonic time when the wait began or progress was last seen.
            limit: limit on the wait, in seconds, if both ends have a CPU.
            peer: instance id of the other end. If it is None, the most delayed peer counts.
        """
        waited = self._clock() - since
        if waited <= limit:
            return False
        if waited > max(limit, self._ceiling):
            return True
        return waited > limit + self.compute_extension(since, peer)

    def compute_extension(self, since: float, peer: str | None = None) -> float:
        """Return the current extension of a wait in seconds. See :meth:`is_over`."""
        waited = self._clock() - since
        with self._lock:
            if peer is None:
                histories = list(self._peers.values())
            else:
                histories = [self._peers[peer]] if peer in self._peers else []
            theirs = max((history.measure_growth(since) for history in histories), default=0.0)
        return min(self._own.measure_growth(since), waited) + min(theirs, waited)
