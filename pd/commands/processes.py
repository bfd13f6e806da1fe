"""Starts and stops our own processes for another command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from pd.commands.ready import Ready, parse_ready
from pd.core.errors import SetupError
from pd.util.children import module_command

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
    """One ``pd-launch`` process with a ready line and a log file.

    It has its own session, so Ctrl-C reaches only its parent, which stops it in order. If the
    parent is killed, it gets SIGTERM (:mod:`pd.commands.bound`).
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
        threading.Thread(target=self._read_output, daemon=True).start()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            ready = parse_ready(line)
            if ready is not None:
                self.seconds = time.monotonic() - self._started
                self.ready = ready

    @property
    def url(self) -> str:
        assert self.ready is not None
        return self.ready.url

    def check_alive(self) -> None:
        """Raise SetupError and show the end of its log if it has ended."""
        status = self.process.poll()
        if status is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            print(*(f"  {line}" for line in lines), sep="\n", file=sys.stderr)
            raise SetupError(
                f"the {self.name} ended with status {status}; its last lines are above"
            )

    def ask_to_stop(self) -> None:
        """Send SIGTERM if it runs."""
        if self.process.poll() is None:
            self.process.terminate()

    def wait_stopped(self, seconds: float) -> None:
        """Wait, and send SIGKILL if it has not ended within ``seconds``."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Children:
    """Processes that end together, the last one first, because it uses the others."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._children: list[LaunchedProcess] = []

    def start(self, name: str, *arguments: object) -> LaunchedProcess:
        child = LaunchedProcess(name, [str(argument) for argument in arguments], self._directory)
        self._children.append(child)
        return child

    def check_alive(self) -> None:
        """Raise SetupError if a process has ended."""
        for child in self._children:
            child.check_alive()

    def wait_ready(
        self, children: Sequence[LaunchedProcess], progress: Callable[[float], None]
    ) -> None:
        """Wait until all serve, and call ``progress`` with the seconds so far.

        Raises SetupError if one ends or takes too long.
        """
        began = time.monotonic()
        while not all(child.ready for child in children):
            self.check_alive()
            waited = time.monotonic() - began
            if waited > START_SECONDS:
                late = ", ".join(child.name for child in children if not child.ready)
                raise SetupError(f"not ready after {START_SECONDS:g} s: {late}")
            progress(waited)
            time.sleep(_POLL)

    def stop(self) -> None:
        """Stop each process and wait for it; kill it if it does not end in time."""
        # NOTE: an impatient second Ctrl-C must not leave processes running.
        with ignore_signals(*ENDING):
            for group in (self._children[-1:], self._children[:-1]):
                for child in group:
                    child.ask_to_stop()
                for child in group:
                    child.wait_stopped(STOP_SECONDS)
            self._children.clear()


# Signals to end a program.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_signals(*numbers: signal.Signals) -> AbstractContextManager[None]:
    """Ignore these signals for a while."""
    return handle_signals(signal.SIG_IGN, *numbers)


def interrupt_on(*numbers: signal.Signals) -> AbstractContextManager[None]:
    """Let these signals raise KeyboardInterrupt for a while."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return handle_signals(interrupt, *numbers)


@contextlib.contextmanager
def handle_signals(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals differently for a while; ``handler`` is as for :func:`signal.signal`."""
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
