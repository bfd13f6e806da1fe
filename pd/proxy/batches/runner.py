"""Decides which batches of a proxy run. One of its processes runs them all."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import PDError
from pd.proxy.batches.run import BatchLimits, RunningBatch, check_input
from pd.proxy.storage.batches import BatchProblem

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from pd.proxy.batches.sender import BatchSender
    from pd.proxy.dispatch.proxy_metrics import Metrics
    from pd.proxy.http.access import Access
    from pd.proxy.storage.batches import BatchStatus, BatchStore, OpenBatch, StoredBatch
    from pd.proxy.storage.database import Database
    from pd.proxy.storage.files import FileStore

logger = logging.getLogger(__name__)

# How soon other processes' batches and cancellations are noticed, and progress is saved.
POLL_SECONDS = 0.5
# When a batch is tried again after the storage failed. The time doubles with each failure.
RETRY_SECONDS, MAX_RETRY_SECONDS = 30.0, 600.0
# Batches whose requests are sent at a time, per key and of all keys. They share the proxy's
# `--batch-concurrency` evenly.
MAX_KEY_RUNNING, MAX_RUNNING = 2, 32
_LOCK = "batches.lock"
# Statuses of batches that have not ended, as the metrics show them.
_OPEN: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
_REVOKED = BatchProblem("invalid_api_key", "the proxy does not accept the batch's key any more")


class _Retry(NamedTuple):
    """When to run a batch again.

    Attributes:
        at: by the monotonic clock.
        seconds: time from the failure to ``at``.
        size: bytes of results at the failure.
    """

    at: float
    seconds: float
    size: int


class BatchRunner:
    """Runs the open batches, if no other process of the proxy does. Runs on the event loop.

    The kernel releases the lock of a process that dies. So another process takes over its batches,
    and nothing depends on clocks.

    Args:
        access: tells which keys exist. A restarted proxy may have fewer.
        concurrency: most requests under way, of all batches together.
    """

    def __init__(
        self,
        database: Database,
        store: BatchStore,
        files: FileStore,
        sender: BatchSender,
        access: Access,
        metrics: Metrics,
        concurrency: int,
    ) -> None:
        self._database = database
        self._store = store
        self._files = files
        self._sender = sender
        self._access = access
        self._metrics = metrics
        self._limits = BatchLimits(concurrency)
        self._lock: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._runs: dict[str, RunningBatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Batches whose last run failed.
        self._retries: dict[str, _Retry] = {}
        # Whether the last look at the batches failed.
        self._is_failing = False
        # The input of one batch at a time is checked.
        self._is_checking = False
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for batches."""
        self._watching = asyncio.create_task(self._watch_batches())

    def wake(self) -> None:
        """Look for batches now."""
        self._changed.set()

    async def drain(self) -> None:
        """Send no further requests, and wait for the results of requests under way."""
        self._stopping.set()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def stop(self) -> None:
        """Abort everything. The next start of the proxy continues it."""
        self._stopping.set()
        tasks = [*self._tasks.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _watch_batches(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._check_batches()
                self._is_failing = False
            except (PDError, OSError) as error:
                if not self._is_failing:
                    logger.error("batches wait until they can be read and written: %s", error)
                self._is_failing = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_SECONDS)

    async def _check_batches(self) -> None:
        """Save and read the state of open batches, and start those whose turn it is."""
        loop = asyncio.get_running_loop()
        # The thread may be busy with an input once we have the lock.
        if self._lock is None and not await loop.run_in_executor(self._thread, self._take_lock):
            return
        progress = {
            name: run.progress for name, run in self._runs.items() if run.has_unsaved_progress
        }
        if progress:
            await self._store.save_progress(progress)
        batches = await self._store.list_open()
        counts = Counter(each.batch.status for each in batches)
        for status in _OPEN:
            self._metrics.open_batches.labels(status).set(counts[status])
        for each in batches:
            run = self._runs.get(each.batch.name)
            if run is not None:
                run.note_stored(each.batch, each.used, self._store.limit)
            elif not self._stopping.is_set():
                self._start_if_due(each)

    def _take_lock(self) -> bool:
        """Become the process that runs the batches, unless another one is. A proxy that stores
        nothing has no directory, and needs no such process."""
        if not self._database.exists():
            return False
        lock = os.open(self._database.directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def _start_if_due(self, each: OpenBatch) -> None:
        owner, batch, used = each
        retry = self._retries.get(batch.name)
        if batch.name in self._tasks or (retry is not None and time.monotonic() < retry.at):
            return
        if batch.status == "validating":
            if not self._is_checking:
                self._is_checking = True
                self._start_task(batch.name, self._check_input(batch))
            return
        running = Counter(run.owner for run in self._runs.values())
        has_turn = running.total() < MAX_RUNNING and running[owner] < MAX_KEY_RUNNING
        # Batches that only end need no turn.
        if has_turn or batch.status != "in_progress" or time.time() >= batch.expires:
            run = RunningBatch(
                owner,
                batch,
                self._store,
                self._files,
                self._sender,
                self._limits,
                self._metrics,
                self._stopping,
            )
            run.note_stored(batch, used, self._store.limit)
            if not self._access.has_owner(owner):
                run.end("failed", _REVOKED)
            self._runs[batch.name] = run
            self._start_task(batch.name, run.run())

    def _start_task(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work)
        task.add_done_callback(lambda task: self._note_ended(name, task))

    def _note_ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        run, retry = self._runs.pop(name, None), self._retries.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            size = 0 if run is None else run.progress.size
            # Without a new result, the reason is the same as before.
            if retry is None or size > retry.size:
                logger.error("%s stopped, and is tried again now and then", name, exc_info=error)
                seconds = RETRY_SECONDS
            else:
                seconds = min(2 * retry.seconds, MAX_RETRY_SECONDS)
            self._retries[name] = _Retry(time.monotonic() + seconds, seconds, size)
        self.wake()

    async def _check_input(self, batch: StoredBatch) -> None:
        """Check the lines of a batch's input, and move the batch to its next status."""
        loop = asyncio.get_running_loop()
        path = self._files.get_path(batch.input_file_id)
        try:
            total, problems = await loop.run_in_executor(
                self._thread, check_input, path, batch.endpoint
            )
        finally:
            self._is_checking = False

        def change(batch: StoredBatch) -> StoredBatch:
            if batch.status != "validating":
                return batch
            if problems:
                return batch.move_to("failed", problems=problems)
            return batch.move_to("in_progress", total=total)

        changed = await self._store.change_batch(batch.name, change)
        if changed.status == "failed":
            self._metrics.ended_batches.labels(changed.status).inc()
