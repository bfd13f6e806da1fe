"""Work for threads, also where the system has no room for a thread."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import pytest

from pd.core.errors import UnavailableError
from pd.core.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def done() -> queue.Queue[int]:
    return queue.Queue()


@pytest.fixture
def todo(done: queue.Queue[int]) -> Iterator[WorkQueue[int]]:
    made: WorkQueue[int] = WorkQueue("pd-test", 2, done.put)
    yield made
    made.close()


def no_thread(self: object) -> None:
    raise RuntimeError("can't start new thread")


def test_what_no_thread_can_take_is_refused_and_never_done(
    todo: WorkQueue[int], done: queue.Queue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        for item in (1, 2):
            with pytest.raises(UnavailableError, match="can't start new thread"):
                todo.put(item)
    todo.put(3)
    todo.put(4)
    assert {done.get(timeout=20) for _ in range(2)} == {3, 4}
    assert done.empty()


def test_threads_that_run_take_what_no_further_one_can_start_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: queue.Queue[int] = queue.Queue()
    began, go = threading.Event(), threading.Event()

    def work(item: int) -> None:
        began.set()
        assert go.wait(20)
        done.put(item)

    todo = WorkQueue("pd-test", 2, work)
    todo.put(1)
    assert began.wait(20)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        todo.put(2)
    go.set()
    assert [done.get(timeout=20) for _ in range(2)] == [1, 2]
    todo.close()


def test_work_that_fails_does_not_end_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    done: queue.Queue[int] = queue.Queue()

    def work(item: int) -> None:
        if item == 1:
            raise ValueError("a bug")
        done.put(item)

    todo = WorkQueue("pd-test", 1, work)
    todo.put(1)
    todo.put(2)
    assert done.get(timeout=20) == 2
    assert "a bug" in caplog.text
    todo.close()


def test_nothing_begins_after_the_end(done: queue.Queue[int]) -> None:
    todo = WorkQueue("pd-test", 1, done.put)
    todo.close()
    with pytest.raises(UnavailableError, match="stopping"):
        todo.put(1)
    assert done.empty()
