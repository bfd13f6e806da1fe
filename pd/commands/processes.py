"""Our own processes, started and stopped by another command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from pd.commands.ready import Ready, parse
from pd.core.children import module_command
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import FrameType

START_SECONDS = 300.0
STOP_SECONDS = 15.0
_POLL = 0.05
_LOG_LINES = 15


class LaunchedProcess:
    """One ``pd-launch`` process that prints a ready line; its log goes to a file.

    It has a session of its own, so that Ctrl-C reaches only its parent, which stops it in order. If
    the parent is killed, it gets SIGTERM (:mod:`pd.commands.bound`).
    """

    def __init__(self, name: str, arguments: Sequence[str], directory: Path) -> None:
        self.name = name
        self.ready: Ready | None = None
        self._log = directory / f"{name.replace(' ', '-')}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                module_command("pd.commands.bound", os.getpid(), *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )
        self._started = time.monotonic()
        self.seconds = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            ready = parse(line)
            if ready is not None:
                self.seconds = time.monotonic() - self._started
                self.ready = ready

    @property
    def url(self) -> str:
        assert self.ready is not None
        return self.ready.url

    def check(self) -> None:
        """Raises SetupError with the end of its log if it has ended."""
        status = self.process.poll()
        if status is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            print(*(f"  {line}" for line in lines), sep="\n", file=sys.stderr)
            raise SetupError(
                f"the {self.name} ended with status {status}; its last lines are above"
            )

    def ask_to_stop(self) -> None:
        """SIGTERM, if it runs."""
        if self.process.poll() is None:
            self.process.terminate()

    def wait_stopped(self, seconds: float) -> None:
        """SIGKILL when it has not ended within ``seconds``."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Children:
    """Processes that end together: the last one started (it uses the others) before them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._children: list[LaunchedProcess] = []

    def start(self, name: str, *arguments: object) -> LaunchedProcess:
        child = LaunchedProcess(name, [str(argument) for argument in arguments], self._directory)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raises SetupError if one has ended."""
        for child in self._children:
            child.check()

    def wait_ready(
        self, children: Sequence[LaunchedProcess], progress: Callable[[float], None]
    ) -> None:
        """Wait until all serve; ``progress`` is called with the seconds that passed.

        Raises SetupError if one ends or takes too long.
        """
        began = time.monotonic()
        while not all(child.ready for child in children):
            self.check()
            waited = time.monotonic() - began
            if waited > START_SECONDS:
                late = ", ".join(child.name for child in children if not child.ready)
                raise SetupError(f"not ready after {START_SECONDS:g} s: {late}")
            progress(waited)
            time.sleep(_POLL)

    def stop(self) -> None:
        """Ask each process to stop and wait for it; one that does not end in time is killed."""
        # NOTE: an impatient second Ctrl-C must not leave processes behind.
        with ignored(*ENDING):
            for group in (self._children[-1:], self._children[:-1]):
                for child in group:
                    child.ask_to_stop()
                for child in group:
                    child.wait_stopped(STOP_SECONDS)
            self._children.clear()


# Signals that end a program.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignored(*numbers: signal.Signals) -> AbstractContextManager[None]:
    """Ignore these signals for a while."""
    return handled(signal.SIG_IGN, *numbers)


def interrupted_by(*numbers: signal.Signals) -> AbstractContextManager[None]:
    """Let these signals raise KeyboardInterrupt for a while."""
    return handled(_interrupt, *numbers)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals in another way for a while, as :func:`signal.signal` takes it."""
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
