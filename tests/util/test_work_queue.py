"""Work queues, also if the system has no room for a thread."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import pytest
from cluster import wait_until

from pd.core.errors import UnavailableError
from pd.util.work_queue import WorkQueue

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


def test_work_is_refused_and_dropped_if_no_thread_can_start(
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


def test_running_threads_take_work_if_no_further_one_can_start(
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


def test_owners_and_groups_take_turns_and_an_owner_gets_a_part_of_the_threads() -> None:
    done: queue.Queue[str] = queue.Queue()
    go = {name: threading.Event() for name in ("a1", "a2", "a3", "a4", "b1")}

    def work(item: str) -> None:
        assert go[item].wait(20)
        done.put(item)

    todo = WorkQueue("pd-test", 2, work, 1)
    for item, group in (("a1", 1), ("a2", 1), ("a3", 1), ("a4", 2)):
        todo.put(item, "a", group)
    todo.put("b1", "b")
    go["b1"].set()
    assert done.get(timeout=20) == "b1"  # though all of the other owner wait
    for event in go.values():
        event.set()
    order = [done.get(timeout=20) for _ in range(4)]
    assert order[0] == "a1" and order[3] == "a3"
    todo.close()


def test_all_threads_are_prepared_with_the_first_item_and_waiting_items_are_counted() -> None:
    done: queue.Queue[int] = queue.Queue()
    prepared: queue.Queue[str] = queue.Queue()
    go = threading.Event()

    def work(item: int) -> None:
        assert go.wait(20)
        done.put(item)

    todo = WorkQueue(
        "pd-test", 2, work, prepare=lambda: prepared.put(threading.current_thread().name)
    )
    todo.put(1, "a")
    assert len({prepared.get(timeout=20) for _ in range(2)}) == 2
    for item in (2, 3, 4):
        todo.put(item, "a")
    todo.put(5, "b")
    # Both threads take an item at some time, and then wait.
    wait_until(lambda: todo.count_waiting() == 3, 20)
    assert todo.count_waiting("a") >= 2
    assert todo.count_waiting() == todo.count_waiting("a") + todo.count_waiting("b")
    assert not todo.wait_until_idle(0.01)
    go.set()
    assert todo.wait_until_idle(20)
    assert done.qsize() == 5
    assert not todo.count_waiting()
    assert prepared.empty()
    todo.close()
