"""An offline model that is closed, or used in another process, refuses calls instead of hanging."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pd.core.errors import UsageError
from pd.offline.connection import Connection
from pd.offline.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


async def end_nothing() -> None:
    """End a connection without an engine."""


async def wait_forever(began: threading.Event) -> None:
    began.set()
    await asyncio.Event().wait()


async def count_forever() -> AsyncGenerator[int, None]:
    yield 1
    await asyncio.Event().wait()


def test_closing_ends_calls_of_other_threads() -> None:
    connection = Connection(LoopThread("test"), None, end_nothing)  # type: ignore[arg-type]
    errors: list[Exception] = []
    began = [threading.Event() for _ in range(3)]

    def run(call: Any) -> None:
        with pytest.raises(UsageError, match="the model is closed") as refused:
            call()
        errors.append(refused.value)

    def iterate() -> None:
        for _ in connection.iterate(count_forever()):
            began[2].set()

    calls = [
        lambda: connection.run(wait_forever(began[0])),
        lambda: asyncio.run(connection.run_for_loop(wait_forever(began[1]))),
        iterate,
    ]
    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread, event in zip(threads, began, strict=True):
        thread.start()
        assert event.wait(5)
    connection.close()
    for thread in threads:
        thread.join(5)
    assert len(errors) == 3


def test_a_closed_thread_refuses_calls_and_leaves_iterators_in_peace() -> None:
    thread = LoopThread("test")
    items = thread.iterate(count_forever())
    assert next(items) == 1
    thread.close()
    thread.close()
    items.close()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="the model is closed"):
        thread.run(end_nothing())
    with pytest.raises(UsageError, match="the model is closed"):
        asyncio.run(thread.run_for_loop(end_nothing()))


def test_a_forked_process_refuses_calls_and_ends_nothing() -> None:
    connection = Connection(LoopThread("test"), None, end_nothing)  # type: ignore[arg-type]

    def use_in_child() -> None:
        with pytest.raises(UsageError, match="belongs to the process that made it"):
            connection.run(end_nothing())
        connection.close()

    child = multiprocessing.get_context("fork").Process(target=use_in_child)
    child.start()
    child.join(10)
    assert child.exitcode == 0
    connection.run(end_nothing())
    connection.close()
