"""Programs that fail in unusual ways do so alone: a batch gives all states."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import pytest
from scripted_backend import ScriptedBackend

import pd.lang as pl
from pd.core.errors import AbortedError, UnavailableError

PREFIX = "A text that is long enough to be worth a request before the batch, by far. "


@pl.function
def ask(s: Any, item: Any) -> None:
    s += PREFIX + item["question"] + pl.gen("a")


@pytest.mark.parametrize("program", [ask, ask.compile()], ids=["interpreted", "compiled"])
@pytest.mark.parametrize("wrong", [{}, {"question": 5}, None])
def test_arguments_that_do_not_fit_fail_one_program_of_a_batch(program: Any, wrong: Any) -> None:
    backend = ScriptedBackend()
    batch = [{"item": wrong}, {"item": {"question": "Why?"}}]
    failed, good = program.run_batch(batch, backend=backend, num_threads=1)
    assert failed.error().function == "ask"
    assert (good.error(), good["a"]) == (None, "answer")
    assert backend.list_texts("cache") == [PREFIX]


def test_a_body_that_exits_fails_one_program_of_a_batch() -> None:
    @pl.function
    def program(s: Any, word: str) -> None:
        if word == "exit":
            raise SystemExit(3)
        s += word + pl.gen("a")

    batch = [["exit"], ["good"]]
    failed, good = program.run_batch(batch, backend=ScriptedBackend(), num_threads=1)
    assert isinstance(failed.error().__cause__, SystemExit)
    assert good["a"] == "answer"


class LostBackend(ScriptedBackend):
    """Waits for an abort, which cannot be sent."""

    def __init__(self) -> None:
        super().__init__(self.wait)
        self.began, self._may_end = threading.Event(), threading.Event()

    def wait(self, text: str, settings: object) -> str:
        if text == "lost":
            self.began.set()
            assert self._may_end.wait(5)
        return "answer"

    def abort(self, rid: str) -> None:
        super().abort(rid)
        self._may_end.set()
        raise UnavailableError("lost the connection")


def test_an_abort_that_fails_does_not_stop_a_batch() -> None:
    @pl.function
    def program(s: Any, word: str) -> None:
        s += word + pl.gen("a")
        if word == "lost":
            assert backend.began.wait(5)
            raise ValueError("wrong")

    backend = LostBackend()
    batch = [["lost"], ["good"]]
    failed, good = program.run_batch(batch, backend=backend, num_threads=1)
    assert isinstance(failed.error().__cause__, ValueError)
    assert good["a"] == "answer"


def test_the_requests_of_called_functions_end_with_the_program_that_calls_them() -> None:
    @pl.function
    def inner(s: Any) -> None:
        s += "lost" + pl.gen("a")

    @pl.function
    def program(s: Any) -> None:
        called.append(inner.run())
        assert backend.began.wait(5)
        raise ValueError("wrong")

    called: list[Any] = []
    backend = LostBackend()
    with pytest.raises(ValueError, match="wrong"):
        program.run(backend=backend)
    assert isinstance(called[0].error().__cause__, AbortedError)
    assert len(backend.list_texts("abort")) == 1


def test_a_body_that_tries_again_after_any_error_ends_in_a_batch() -> None:
    @pl.function
    def program(s: Any, word: str) -> None:
        while True:
            try:
                s += word + pl.gen("a")
                return
            except Exception:  # noqa: BLE001 (the program's own way)
                continue

    states: Any = program.run_batch([["x"], ["y"]], backend=ScriptedBackend())
    assert [state["a"] for state in states] == ["answer"] * 2


@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_program_fails_if_the_process_has_no_more_threads(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "x" + pl.gen("a")
        forks = s.fork(4)
        forks += pl.gen("b")
        forks.join()

    started = []

    class LimitedThread(threading.Thread):
        def start(self) -> None:
            if self.name == "program-program":
                if len(started) == left:
                    raise RuntimeError("can't start new thread")
                started.append(self)
            super().start()

    monkeypatch.setattr(threading, "Thread", LimitedThread)
    (state,) = program.run_batch([[]], backend=ScriptedBackend())
    assert "can't start new thread; use fewer forks" in str(state.error())


def test_an_error_without_a_message_is_named_by_its_type() -> None:
    def fail(text: str, settings: object) -> NoReturn:
        raise ZeroDivisionError

    state = ask.run({"question": "Why?"}, backend=ScriptedBackend(fail))
    assert str(state.error()) == "ask: 'a': ZeroDivisionError"
