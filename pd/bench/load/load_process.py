"""One load process, here or on another host, and how it is started."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd.core.brief import shorten
from pd.core.errors import SetupError

if TYPE_CHECKING:
    import queue
    from collections.abc import Sequence
    from pathlib import Path

MODULE = "pd.bench.load.worker"
# The longest message: a record with the times of some million events.
_MAX_LINE_BYTES = 64 << 20
_SHOWN_CHARACTERS = 120
_LOG_BYTES = 4096
# A process that has closed its output is about to end.
_END_SECONDS = 1.0
_LOG_CHARACTERS = 500


@dataclass(frozen=True)
class LoadPlace:
    """The place of a load process, and the way to start it there.

    Attributes:
        name: of the process in the records, such as "local/0".
        command: starts the process; standard input and output lead to it.
        first_line: sent before everything else; it may hold secrets.
        shares_clock: the process reads the clock of this machine.
        log: file here to which the process's standard error is appended, since the processes of
            several runs have the same name; None for ours.
    """

    name: str
    command: tuple[str, ...]
    first_line: bytes = field(default=b"", repr=False)
    shares_clock: bool = True
    log: Path | None = None


def local_places(processes: int) -> list[LoadPlace]:
    """Places on this machine."""
    command = (sys.executable, "-m", MODULE)
    return [LoadPlace(f"local/{number}", command) for number in range(processes)]


def remote_places(processes: int, hosts: Sequence[str], command: str) -> list[LoadPlace]:
    """Places on other hosts; ``command`` has ``{host}`` where the host's name goes."""
    return [
        LoadPlace(
            f"{host}/{number}",
            tuple(shlex.split(command.replace("{host}", shlex.quote(host)))),
            shares_clock=False,
        )
        for host in hosts
        for number in range(processes)
    ]


class LoadProcess:
    """A running load process, and the thread that reads its messages.

    The thread puts a pair of this object and a message into ``inbox``: a line that is no message as
    ``{"garbage": …}``, and None when the process has closed its output.
    """

    def __init__(self, place: LoadPlace, inbox: queue.Queue[Any]) -> None:
        self.place = place
        self.name = place.name
        self._inbox = inbox
        # NOTE: closed here once the process has its own.
        log = None if place.log is None else place.log.open("ab")
        try:
            # A session of its own: Ctrl-C in the terminal is for the harness alone.
            self._process = subprocess.Popen(
                place.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise SetupError(
                f"cannot start load process {self.name} by {place.command[0]}: {error.strerror}"
            ) from error
        finally:
            if log is not None:
                log.close()
        threading.Thread(target=self._read, name=f"load {self.name}", daemon=True).start()
        self._write(place.first_line)

    def _read(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(_MAX_LINE_BYTES):
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                message = {"garbage": line[:_SHOWN_CHARACTERS].decode(errors="replace")}
            self._inbox.put((self, message))
        self._inbox.put((self, None))

    def send(self, **message: Any) -> None:
        """Raises SetupError if the process has ended."""
        self._write(json.dumps(message).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            raise self.ended() from None

    def ended(self) -> SetupError:
        """The error for a process that has ended too early, with the signal that killed it or the
        end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        status = self._process.returncode
        if status is not None and status < 0:
            return SetupError(
                f"load process {self.name} was killed by {signal.Signals(-status).name}"
            )
        if self.place.log is None:
            return SetupError(f"load process {self.name} ended; its messages are above")
        with self.place.log.open("rb") as log:
            log.seek(max(0, self.place.log.stat().st_size - _LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        why = shorten(lines[-1], _LOG_CHARACTERS) if lines else "its log is empty"
        return SetupError(f"load process {self.name} ended: {why}")

    def close(self) -> None:
        """End the process if it has not ended by itself."""
        self._process.kill()
        self._process.wait()
