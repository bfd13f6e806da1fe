"""One run of a program: its backend, its settings and its requests under way."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from pd.core.errors import AbortedError
from pd.lang.transcript import make_plain_template

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.lang.backend import Backend
    from pd.lang.ir import GenSettings

_log = logging.getLogger(__name__)

# How long cancelled runs wait for their requests to end.
_CANCEL_SECONDS = 0.8
_ABORT_INTERVAL = 0.1
_ABORT_THREADS = 16


class ProgramRun:
    """One run of a program, shared by its states. All threads may call it.

    A run that a body starts belongs to that of the body, and is cancelled with it.
    """

    def __init__(
        self,
        function: str,
        backend: Backend,
        defaults: GenSettings,
        *,
        streams: bool = False,
        uses_threads: bool = True,
        spec_tokens: int | None = None,
    ) -> None:
        self.function = function
        self.backend = backend
        self.defaults = defaults
        self.streams = streams
        self.uses_threads = uses_threads
        self.spec_tokens = spec_tokens
        self.template = backend.get_chat_template() or make_plain_template()
        self._name = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._requests = 0
        self._in_flight: set[str] = set()
        self._is_cancelled = False
        # Runs started by bodies of this one, as long as they do anything.
        self._started: weakref.WeakSet[ProgramRun] = weakref.WeakSet()
        outer = running_run.get()
        if outer is not None:
            outer.adopt(self)

    def adopt(self, run: ProgramRun) -> None:
        """Note a run that belongs to this one."""
        with self._changed:
            self._started.add(run)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            run.refuse_requests()

    @contextlib.contextmanager
    def name_request(self) -> Iterator[str]:
        """Name a request, because :func:`cancel_runs` aborts requests by their names.

        Raises AbortedError if the run is cancelled before the request or during it.
        """
        with self._changed:
            self._requests += 1
            rid = f"{self._name}-{self._requests}"
            self._check_cancelled()
            self._in_flight.add(rid)
        try:
            yield rid
        finally:
            with self._changed:
                self._in_flight.discard(rid)
                self._changed.notify_all()
        self._check_cancelled()

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise AbortedError("the program was cancelled")

    def refuse_requests(self) -> list[ProgramRun]:
        """Begin to cancel: no further request is sent. Return all runs that this concerns."""
        with self._changed:
            self._is_cancelled = True
            started = list(self._started)
        return [self, *(run for each in started for run in each.refuse_requests())]

    def abort_requests(self) -> None:
        """Ask the backend to end the requests under way."""
        with self._changed:
            names = list(self._in_flight)
        for name in names:
            try:
                self.backend.abort(name)
            except Exception as error:  # noqa: BLE001 (others must be aborted, too)
                _log.warning("could not abort a request of %s: %s", self.function, error)

    def wait_idle(self, seconds: float) -> bool:
        """Wait for the requests under way to end, and tell whether all have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, seconds)


# The run whose body this thread runs.
running_run: contextvars.ContextVar[ProgramRun | None] = contextvars.ContextVar(
    "running_run", default=None
)


def cancel_runs(runs: Sequence[ProgramRun]) -> None:
    """Abort all requests of runs, and refuse new ones. Returns within a second.

    The server may not know a request yet, so we ask again until it has ended. We ask on several
    threads, because a server that is stuck does not answer.
    """
    deadline = time.monotonic() + _CANCEL_SECONDS
    concerned = [each for run in runs for each in run.refuse_requests()]
    left = [run for run in concerned if not run.wait_idle(0)]
    if not left:
        return
    threads = ThreadPoolExecutor(_ABORT_THREADS, "abort")
    try:
        while left and (seconds := deadline - time.monotonic()) > 0:
            wait([threads.submit(run.abort_requests) for run in left], seconds)
            share = _ABORT_INTERVAL / len(left)
            left = [run for run in left if not run.wait_idle(share)]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
