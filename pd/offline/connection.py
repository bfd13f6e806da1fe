"""The proxy of a program, and the thread on which the program talks to it."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from pd.core.errors import UsageError
from pd.offline.deployment import LocalDeployment
from pd.offline.loop_thread import CLOSED, LoopThread
from pd.offline.transport import HttpTransport

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator

    from pd.offline.engine_process import EngineProcess
    from pd.offline.settings import OfflineSettings
    from pd.offline.transport import Transport

T = TypeVar("T")


class Connection:
    """Runs requests on a thread of its own. Any thread may call its methods.

    It closes itself when nothing refers to it any more, and at the end of the program.

    Attributes:
        transport: takes requests, on the thread.
        engine: the process that answers, if it is ours.
    """

    def __init__(
        self,
        thread: LoopThread,
        transport: Transport,
        end: Callable[[], Coroutine[Any, Any, None]],
        engine: EngineProcess | None = None,
    ) -> None:
        """``end``: ends everything except the thread."""
        self.transport = transport
        self.engine = engine
        self._thread = thread
        # The arguments must not refer to this object.
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _close_thread, thread, end, self._process)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result. Ctrl-C cancels it."""
        self._check_open(work)
        return self._thread.run(work)

    async def run_for_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine for a task of another event loop."""
        self._check_open(work)
        return await self._thread.run_for_loop(work)

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of a generator that runs on the thread."""
        self._check_open(None)
        return self._thread.iterate(items)

    def close(self) -> None:
        """End requests under way and, if it is ours, the engine. Closing again does nothing."""
        self._finalizer()

    def _check_open(self, work: Coroutine[Any, Any, object] | None) -> None:
        is_ours = os.getpid() == self._process
        if self._finalizer.alive and is_ours:
            return
        if work is not None:
            work.close()
        raise UsageError(
            CLOSED
            if is_ours
            else "the model belongs to the process that made it, and this one was forked from it; "
            "make a model here, or use processes that are spawned"
        )


def connect_local(settings: OfflineSettings) -> Connection:
    """Load a model for this program. Raises UsageError or SetupError."""
    thread = LoopThread("offline")
    try:
        deployment = thread.run(LocalDeployment.start(settings))
    except BaseException:
        thread.close()
        raise
    return Connection(thread, deployment.transport, deployment.stop, deployment.engine)


def connect_remote(url: str, api_key: str | None, connections: int) -> Connection:
    """Talk to a running proxy. Raises UsageError for an invalid address."""
    transport = HttpTransport(url, api_key, connections)
    return Connection(LoopThread("offline"), transport, transport.close)


def _close_thread(
    thread: LoopThread, end: Callable[[], Coroutine[Any, Any, None]], process: int
) -> None:
    """End a deployment or a connection, and the thread on which it runs, in its process."""
    if os.getpid() != process:  # a fork, which has no such thread
        return
    if thread.is_current:  # its garbage collection found the connection
        threading.Thread(
            target=_close_thread, args=(thread, end, process), name="offline-close"
        ).start()
        return
    try:
        thread.run(end())
    finally:
        thread.close()
