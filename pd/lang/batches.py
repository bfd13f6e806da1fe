"""Runs the jobs of a batch on threads, and returns their states in order."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Protocol

import tqdm

from pd.core.errors import UsageError
from pd.lang.run import cancel_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.lang.run import ProgramRun
    from pd.lang.state import ProgramState

# Runs wait for the server most of the time, so there are many threads for each core.
_THREADS_PER_CORE = 16
_MIN_THREADS = 96


class BatchJob(Protocol):
    """One run of a program on its arguments.

    Attributes:
        state: its state, also before it has begun.
        runs: the runs whose requests to abort.
    """

    state: ProgramState
    runs: list[ProgramRun]

    def run_to_end(self) -> None:
        """Run the program, and wait for everything. Keep an error in the state."""


def count_threads(num_threads: int | str) -> int:
    """Return the number of runs at a time. Raises UsageError for a wrong one."""
    if num_threads == "auto":
        return max(_MIN_THREADS, _THREADS_PER_CORE * (os.cpu_count() or 1))
    if not isinstance(num_threads, int) or num_threads < 1:
        raise UsageError(f"invalid num_threads {num_threads!r}; use a number or 'auto'")
    return num_threads


def run_in_order(
    jobs: Sequence[BatchJob], num_threads: int | str, *, progress_bar: bool
) -> Iterator[ProgramState]:
    """Run jobs, and yield their states in order, each once it is complete.

    If the caller stops early, or Ctrl-C comes, the requests of all jobs are aborted.
    """
    done = [threading.Event() for _ in jobs]
    numbers = iter(range(len(jobs)))
    lock = threading.Lock()
    is_over = False
    progress = tqdm.tqdm(total=len(jobs), disable=not progress_bar)

    def work() -> None:
        while True:
            with lock:
                number = None if is_over else next(numbers, None)
            if number is None:
                return
            try:
                jobs[number].run_to_end()
            finally:
                done[number].set()
                with lock:
                    progress.update()

    # We make daemons, because Ctrl-C should end the process even while a body goes on.
    for _ in range(min(count_threads(num_threads), len(jobs))):
        threading.Thread(target=work, name="batch", daemon=True).start()
    try:
        for job, event in zip(jobs, done, strict=True):
            event.wait()
            yield job.state
    finally:
        with lock:
            is_over = True
        left = [job for job, event in zip(jobs, done, strict=True) if not event.is_set()]
        cancel_runs([run for job in left for run in job.runs])
        progress.close()
