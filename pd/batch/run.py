"""Runs a batch: a bounded number of requests at a time, each until it has its answer."""

from __future__ import annotations

import asyncio
import signal
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.batch.attempts import try_request
from pd.batch.requests import id_digest
from pd.batch.results import BatchError, BatchResult, is_final, is_success
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from pd.batch.attempts import BatchAttempt
    from pd.batch.output import BatchOutput
    from pd.batch.requests import BatchRequest
    from pd.batch.server import BatchServer

# How long we wait for answers after an interrupt.
GRACE_SECONDS = 30.0
# The run ends after so many failures in a row, or more if more requests are under way.
_MIN_FAILURES_IN_A_ROW = 10
# Let the event loop run after skipping so many finished requests.
_SKIPPED_AT_A_TIME = 256


@dataclass
class BatchCounts:
    """Counts of the input's requests by outcome.

    Attributes:
        total: all of them.
        earlier: done by earlier runs.
        answered: successful in this run.
        refused: rejected in this or an earlier run, because of the request itself.
        failed: failed in this run; a later run asks again.
    """

    total: int
    earlier: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        """Requests with an answer, or with a reason why they will never have one."""
        return self.earlier + self.answered + self.refused


class BatchRun:
    """Sends the unfinished requests, and writes their answers as they come.

    Args:
        concurrency: most requests under way.
        max_retries: most further attempts at a request in this run.
        progress: called after each request that ends.
        report: called with a line for the user.
    """

    def __init__(
        self,
        requests: Iterator[BatchRequest],
        output: BatchOutput,
        server: BatchServer,
        counts: BatchCounts,
        *,
        concurrency: int,
        max_retries: int,
        progress: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        self.counts = counts
        self.interrupted = False
        self._requests = requests
        self._output = output
        self._server = server
        self._concurrency = concurrency
        self._max_retries = max_retries
        self._progress = progress
        self._report = report
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._under_way = 0
        self._skipped = 0
        self._failures_in_a_row = 0
        self._unreachable = False

    async def run(self) -> None:
        """Send everything. On SIGINT or SIGTERM, only wait for requests under way.

        Raises SetupError if the server rejects the API key, is gone or fails one request after
        another, or if the output cannot be written.
        """
        if self.counts.done == self.counts.total:
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_interrupt)
        try:
            await self._run_tasks([self._server.check_models()])
            workers = min(self._concurrency, self.counts.total - self.counts.done)
            await self._run_tasks([self._answer_requests() for _ in range(workers)])
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _run_tasks(self, work: Sequence[Coroutine[None, None, None]]) -> None:
        """Wait for all of them. The first error ends the others and is raised."""
        self._tasks = [asyncio.create_task(one) for one in work]
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in self._tasks:
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            self._cancel_tasks()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_interrupt(self) -> None:
        """Take no further request. A second call, or a timeout, ends those under way."""
        if self.interrupted or not self._under_way:
            self._cancel_tasks()
        else:
            self._report(
                f"waiting up to {GRACE_SECONDS:.0f} s for {self._under_way} requests under way; "
                "Ctrl-C again ends them"
            )
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._cancel_tasks)
        self.interrupted = True
        self._stopping.set()

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _answer_requests(self) -> None:
        """Answer one request after another. All workers share the requests."""
        for request in self._requests:
            if self._stopping.is_set():
                return
            if id_digest(request.custom_id) in self._output.done:
                self._skipped += 1
                if self._skipped % _SKIPPED_AT_A_TIME == 0:
                    await asyncio.sleep(0)
                continue
            await self._answer_request(request)

    async def _answer_request(self, request: BatchRequest) -> None:
        """Write the result of a request, unless the run ends before."""
        result = BatchResult(f"batch_req_{uuid.uuid4().hex}", request.custom_id, None, None)
        attempt = None
        if request.refusal is not None:
            result.error = BatchError(*request.refusal)
        else:
            self._under_way += 1
            try:
                attempt = await self._try_request(request, result.id)
            finally:
                self._under_way -= 1
            if attempt is None:
                return
            result.response, result.error = attempt.response, attempt.error
        self._output.append_line(result.to_line())
        self._count_result(attempt)
        self._progress()

    async def _try_request(self, request: BatchRequest, name: str) -> BatchAttempt | None:
        """Return the last attempt at a request; None if the run ends while it waits for another."""

        async def send() -> BatchAttempt:
            attempt = await self._server.send_request(request.url, request.content, name)
            # The next attempts take a while, so tell the user once that the server is gone.
            if attempt.unreachable and not self._unreachable and self._max_retries:
                self._report(f"{attempt.reason}; trying again up to {self._max_retries} times")
            self._unreachable = attempt.unreachable
            return attempt

        attempt = await try_request(send, self._stopping, self._max_retries)
        if attempt is not None and attempt.unreachable:
            raise SetupError(f"{attempt.reason} (tried {self._max_retries + 1} times)")
        return attempt

    def _count_result(self, attempt: BatchAttempt | None) -> None:
        """Count a written result. Raises SetupError after too many failures in a row."""
        counts = self.counts
        response = None if attempt is None else attempt.response
        if response is not None and is_success(response.status_code):
            counts.answered += 1
        elif attempt is None or (response is not None and is_final(response.status_code)):
            counts.refused += 1
        else:
            counts.failed += 1
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= max(self._concurrency, _MIN_FAILURES_IN_A_ROW):
                raise SetupError(
                    f"{self._failures_in_a_row} requests in a row failed, the last one with: "
                    f"{attempt.reason}"
                )
            return
        self._failures_in_a_row = 0
