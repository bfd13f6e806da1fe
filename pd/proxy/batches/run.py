"""One batch of a proxy: sends its requests, and writes their results to its files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pd.batch.attempts import try_request
from pd.batch.output import open_output
from pd.batch.requests import BatchInput, BatchRequest, id_digest
from pd.batch.results import BatchError, BatchResult
from pd.core.errors import UsageError
from pd.proxy.storage.batches import (
    OUTPUT_PURPOSE,
    BatchProblem,
    BatchProgress,
    Outcome,
    StoredBatch,
)
from pd.proxy.storage.files import StoredFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pd.batch.attempts import BatchAttempt
    from pd.batch.output import BatchOutput
    from pd.proxy.batches.sender import BatchSender
    from pd.proxy.dispatch.proxy_metrics import Metrics
    from pd.proxy.storage.batches import BatchStore
    from pd.proxy.storage.files import FileStore

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# Most requests of a batch, as OpenAI has it.
MAX_REQUESTS = 50_000
# Further attempts at a request that fails. Attempts that find the proxy full do not count.
MAX_RETRIES = 5
# Few requests of more than this many bytes are in memory at a time.
LARGE_BYTES = 1 << 20
# Results of requests without an answer, by the outcome of their batch.
_UNANSWERED = {
    "expired": BatchError(
        "batch_expired",
        "the completion window of the batch ended before the request had its answer",
    ),
    "cancelled": BatchError(
        "batch_cancelled", "the batch was cancelled before the request had its answer"
    ),
}
_FULL = BatchProblem(
    "storage_full",
    "your files and the results of your batches have no more room (--files-mb of the proxy); "
    "delete some, and send the requests that have no result as another batch",
)


class BatchFiles:
    """The input and the results of a batch, used by a thread of its own.

    Every result is on the disk once it is added. So a later run, maybe of another process, repeats
    no request that has one.

    Attributes:
        progress: results so far.
    """

    def __init__(self, batch: StoredBatch, get_path: Callable[[str], Path]) -> None:
        self._batch = batch
        self._input, self._output, self._errors = (
            get_path(name) for name in (batch.input_file_id, batch.output_name, batch.error_name)
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch")
        self._source: BatchInput | None = None
        self._requests: Iterator[BatchRequest] = iter(())
        self._results: list[BatchOutput] = []
        self._done: set[bytes] = set()
        self.progress = BatchProgress(batch.completed, batch.failed, batch.size)

    async def call(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call a method below on the thread. It is finished even if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._thread, lambda: function(*args, **options))
        return await asyncio.shield(call)

    async def close(self) -> None:
        """Close everything after the calls under way."""
        await self.call(self._close_files)
        self._thread.shutdown(wait=False)

    # ---- on the thread

    def open(self) -> None:
        """Read the results of earlier runs, and open the input.

        Raises UsageError and SetupError, see :func:`pd.batch.output.open_output`.
        """
        for path in (self._output, self._errors):
            self._results.append(open_output(path, keeps_failures=True))
        output, errors = self._results
        self._done = set(output.done) | set(errors.done)
        self.progress = BatchProgress(
            len(output.done), len(self._done) - len(output.done), output.size + errors.size
        )
        self._source = BatchInput(self._input, name="the file", endpoint=self._batch.endpoint)
        self._requests = self._source.read_requests()

    def read_request(self) -> BatchRequest | None:
        """Read the next request without a result; None at the end. Raises UsageError."""
        for request in self._requests:
            if id_digest(request.custom_id) not in self._done:
                return request
        return None

    def add_result(self, result: BatchResult, room: int) -> bool:
        """Write a result, unless the file then has more than ``room`` bytes. Returns whether it
        did. Raises SetupError if the disk is full or broken."""
        line = result.to_line()
        completed, failed, size = self.progress
        if size + len(line) > room:
            return False
        is_successful = result.is_success
        self._results[0 if is_successful else 1].append_line(line)
        self._done.add(id_digest(result.custom_id))
        self.progress = BatchProgress(
            completed + is_successful, failed + (not is_successful), size + len(line)
        )
        return True

    def add_unanswered(self, error: BatchError, room: int) -> None:
        """Write this error as the result of every request that has none, as far as there is room.
        Raises as :meth:`read_request` and :meth:`add_result` do."""
        assert self._source is not None
        self._requests = self._source.read_requests()
        while (request := self.read_request()) is not None:
            name = f"batch_req_{uuid.uuid4().hex}"
            if not self.add_result(BatchResult(name, request.custom_id, None, error), room):
                return

    def describe(self, seconds: float) -> list[StoredFile]:
        """Describe the files that have results, once these are on the disk; remove the others."""
        self._close_files()
        now, found = time.time(), []
        for path, kind in ((self._output, "output"), (self._errors, "error")):
            size = path.stat().st_size if path.exists() else 0
            if not size:
                path.unlink(missing_ok=True)
                continue
            filename = f"{self._batch.name}_{kind}.jsonl"
            found.append(StoredFile(path.name, now, now + seconds, size, filename, OUTPUT_PURPOSE))
        return found

    def _close_files(self) -> None:
        for output in self._results:
            output.close()
        self._results.clear()
        if self._source is not None:
            self._source.close()
            self._source = None


class BatchLimits:
    """Limits of everything that a proxy's batches do at a time.

    Attributes:
        lines: requests under way.
        large_lines: large requests in memory.
    """

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.lines = asyncio.Semaphore(concurrency)
        self.large_lines = asyncio.Semaphore(4)


class RunningBatch:
    """Takes a batch from its present status to its end. Runs on the event loop.

    Attributes:
        batch: as last read or written.
        room: bytes that its results may have.
    """

    def __init__(
        self,
        owner: str,
        batch: StoredBatch,
        store: BatchStore,
        files: FileStore,
        sender: BatchSender,
        limits: BatchLimits,
        metrics: Metrics,
        stopping: asyncio.Event,
    ) -> None:
        """``stopping``: set when the proxy drains. Requests under way get their answers."""
        self.owner = owner
        self.batch = batch
        self.room = 0
        self._store = store
        self._sender = sender
        self._limits = limits
        self._metrics = metrics
        self._stopping = stopping
        self._ended = asyncio.Event()
        self._reading = asyncio.Lock()
        self._outcome: Outcome = batch.outcome
        self._problems: tuple[BatchProblem, ...] = ()
        self._files = BatchFiles(batch, files.get_path)

    @property
    def progress(self) -> BatchProgress:
        """How far the batch is."""
        return self._files.progress

    @property
    def has_unsaved_progress(self) -> bool:
        """Whether the database does not know the progress."""
        return self.progress != BatchProgress(
            self.batch.completed, self.batch.failed, self.batch.size
        )

    def note_stored(self, batch: StoredBatch, used: int, limit: int) -> None:
        """Take over a cancellation and the key's room from the database. Ends the batch if its time
        is up.

        Args:
            used: bytes of the key's files and results, as stored.
            limit: most bytes of them.
        """
        self.batch, self.room = batch, max(0, limit - used) + batch.size
        if batch.status == "cancelling":
            self.end("cancelled")
        elif time.time() >= batch.expires and batch.status != "finalizing":
            self.end("expired")

    def end(self, outcome: Outcome, *problems: BatchProblem) -> None:
        """Send nothing more, and abort requests under way. The first call decides the outcome."""
        if not self._ended.is_set():
            self._outcome, self._problems = outcome, problems
            self._ended.set()

    async def run(self) -> None:
        """Run the batch to its end, unless the proxy drains before.

        Raises PDError if the storage failed, after which another run may try again.
        """
        try:
            try:
                await self._files.call(self._files.open)
                if self.batch.status == "in_progress":
                    await self._answer_requests()
            except UsageError as error:  # somebody else changed the files on the disk
                self.end("failed", BatchProblem("invalid_file", error.message))
            if self._stopping.is_set() and not self._ended.is_set():
                return
            if self.batch.status == "in_progress":
                await self._finalize()
            # Lines that nobody has checked are no requests.
            if self.batch.outcome in _UNANSWERED and self.batch.total:
                await self._add_unanswered(_UNANSWERED[self.batch.outcome])
            found = await self._files.call(self._files.describe, self.batch.output_seconds)
            await self._store.end_batch(self.owner, self.batch.name, self.progress, found)
            self._metrics.ended_batches.labels(self.batch.outcome).inc()
            logger.info("%s is %s", self.batch.name, self.batch.outcome)
        finally:
            await self._files.close()

    async def _add_unanswered(self, error: BatchError) -> None:
        failed = self.progress.failed
        try:
            await self._files.call(self._files.add_unanswered, error, self.room)
        except UsageError as problem:  # somebody else changed the input on the disk
            logger.error("%s has no result for some requests: %s", self.batch.name, problem)
        self._metrics.batch_requests.labels("failed").inc(self.progress.failed - failed)

    async def _finalize(self) -> None:
        """Decide how the batch ends. A cancellation may come first."""
        outcome, problems = self._outcome, self._problems

        def change(batch: StoredBatch) -> StoredBatch:
            if batch.status != "in_progress":
                return batch
            return batch.move_to("finalizing", outcome=outcome, problems=problems)

        self.batch = await self._store.change_batch(self.batch.name, change)

    async def _answer_requests(self) -> None:
        """Answer the requests without a result, until the end, a failure or :meth:`end`."""
        tasks = [asyncio.create_task(self._answer_some()) for _ in range(self._limits.concurrency)]
        ending = asyncio.create_task(self._ended.wait())
        try:
            left = set(tasks)
            while left and not ending.done():
                done, _ = await asyncio.wait({*left, ending}, return_when=asyncio.FIRST_COMPLETED)
                left -= done
                for task in done - {ending}:
                    task.result()
        finally:
            for task in (*tasks, ending):
                task.cancel()
            await asyncio.gather(*tasks, ending, return_exceptions=True)

    async def _answer_some(self) -> None:
        """Answer one request after another. All tasks of the batch share the requests."""
        while True:
            async with self._limits.lines, contextlib.AsyncExitStack() as held:
                if self._stopping.is_set() or self._ended.is_set():
                    return
                # Nobody reads another request while a large one waits.
                async with self._reading:
                    request = await self._files.call(self._files.read_request)
                    if request is None:
                        return
                    if len(request.content) > LARGE_BYTES:
                        await held.enter_async_context(self._limits.large_lines)
                await self._answer_request(request)

    async def _answer_request(self, request: BatchRequest) -> None:
        """Write the result of a request, unless the run ends before."""
        result = BatchResult(f"batch_req_{uuid.uuid4().hex}", request.custom_id, None, None)
        if request.refusal is not None:
            result.error = BatchError(*request.refusal)
        else:

            async def send() -> BatchAttempt:
                return await self._sender.send_request(self.owner, request, result.id)

            attempt = await try_request(send, self._stopping, MAX_RETRIES, has_patience=True)
            if attempt is None:
                return
            result.response, result.error = attempt.response, attempt.error
        if await self._files.call(self._files.add_result, result, self.room):
            outcome = "completed" if result.is_success else "failed"
            self._metrics.batch_requests.labels(outcome).inc()
        else:
            self.end("failed", _FULL)


def check_input(path: Path, endpoint: str) -> tuple[int, tuple[BatchProblem, ...]]:
    """Return the number of requests in the input of a batch, and the problems of its lines.

    Reads the whole file, so it takes seconds.
    """
    try:
        source = BatchInput(path, name="the file", endpoint=endpoint)
    except UsageError as error:
        return 0, (BatchProblem("invalid_file", error.message),)
    try:
        survey = source.survey_lines(MAX_REQUESTS)
    except UsageError as error:
        return 0, (BatchProblem("invalid_file", error.message),)
    finally:
        source.close()
    problems = [
        BatchProblem(error.code, error.message, error.line or None) for error in survey.errors
    ]
    return len(survey.ids), tuple(problems)
