"""One thread that calls functions for others."""

from __future__ import annotations

import queue
import threading
from functools import partial

import pytest

from pd.util.call_thread import CallThread
from pd.util.exit import STUCK_PREFIX


def test_calls_keep_their_order_and_all_are_made_before_the_end() -> None:
    seen: list[tuple[int, str]] = []
    thread = CallThread("pd-test")

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    for number in range(100):
        thread.post(partial(note, number))
    assert thread.close()
    assert seen == [(number, "pd-test") for number in range(100)]


def test_a_call_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    done: queue.Queue[int] = queue.Queue()
    thread = CallThread("pd-test")
    thread.post(lambda: 1 / 0)
    thread.post(lambda: done.put(2))
    assert done.get(timeout=20) == 2
    assert "pd-test: a call failed" in caplog.text
    thread.close()


def test_work_is_done_after_calls_and_again_after_the_pause_that_it_names() -> None:
    pauses = iter([0.0, 0.01, None])
    done: queue.Queue[str] = queue.Queue()

    def work() -> float | None:
        done.put("work")
        return next(pauses, None)

    thread = CallThread("pd-test", work)
    thread.post(lambda: done.put("call"))
    assert [done.get(timeout=20) for _ in range(4)] == ["call", "work", "work", "work"]
    thread.wake()
    assert done.get(timeout=20) == "work"
    assert thread.close()
    assert done.empty()


def test_the_end_does_not_wait_for_a_call_that_hangs() -> None:
    go, began = threading.Event(), threading.Event()
    stuck: list[threading.Thread] = []

    def hang() -> None:
        stuck.append(threading.current_thread())
        began.set()
        assert go.wait(20)

    thread = CallThread("pd-test")
    thread.post(hang)
    assert began.wait(20)
    assert not thread.close(0.01)
    assert stuck[0].name.startswith(STUCK_PREFIX)
    go.set()
    stuck[0].join(20)
    assert not stuck[0].is_alive()


def test_a_call_may_end_its_thread_and_one_that_never_began_ends_at_once() -> None:
    assert CallThread("pd-test").close()
    closed: queue.Queue[bool] = queue.Queue()
    thread = CallThread("pd-test")
    thread.post(lambda: closed.put(thread.close()))
    assert closed.get(timeout=20) is False
    assert thread.close()


def test_a_thread_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: object) -> None:
        raise RuntimeError("can't start new thread")

    done: queue.Queue[int] = queue.Queue()
    thread = CallThread("pd-test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            thread.post(lambda: done.put(1))
    thread.post(lambda: done.put(2))
    assert [done.get(timeout=20) for _ in range(2)] == [1, 2]
    assert thread.close()
