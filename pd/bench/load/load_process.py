"""One load process, here or on another host, and the way to start it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd.core.brief import shorten_text
from pd.core.errors import SetupError

if TYPE_CHECKING:
    import queue
    from pathlib import Path

MODULE = "pd.bench.load.worker"
# The longest message: a record with the times of some million events.
_MAX_LINE_BYTES = 64 << 20
_SHOWN_CHARACTERS = 120
_LOG_BYTES = 4096
# A process that closes its output is about to end.
_END_SECONDS = 1.0
_LOG_CHARACTERS = 500


@dataclass(frozen=True)
class LoadPlace:
    """The place of a load process, and the way to start it there.

    Attributes:
        name: name of the process in records, such as "local/0".
        command: command to start the process and to pass on its standard input and output.
        first_line: line to send before everything else; it may contain secrets.
        shares_clock: whether the process reads this machine's clock.
        log: file on this machine for the standard error of the process; None for our own. We append
            to it, because processes of several runs have the same name.
    """

    name: str
    command: tuple[str, ...]
    first_line: bytes = field(default=b"", repr=False)
    shares_clock: bool = True
    log: Path | None = None


def local_places(processes: int) -> list[LoadPlace]:
    """Make places on this machine."""
    command = (sys.executable, "-m", MODULE)
    return [LoadPlace(f"local/{number}", command) for number in range(processes)]


class LoadProcess:
    """A running load process, and the thread that reads its messages.

    The thread puts pairs of this object and a message into ``inbox``: ``{"garbage": …}`` for a line
    that is not a message, and None when the process has closed its output.
    """

    def __init__(self, place: LoadPlace, inbox: queue.Queue[Any]) -> None:
        self.place = place
        self.name = place.name
        self._inbox = inbox
        # NOTE: we close it here, because the process has its own descriptor.
        log = None if place.log is None else place.log.open("ab")
        try:
            # It gets its own session, because Ctrl-C in the terminal is for the harness alone.
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
        threading.Thread(target=self._read_messages, name=f"load {self.name}", daemon=True).start()
        self._write_bytes(place.first_line)

    def _read_messages(self) -> None:
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

    def send_message(self, **message: Any) -> None:
        """Send a message. Raises SetupError if the process has ended."""
        self._write_bytes(json.dumps(message).encode() + b"\n")

    def _write_bytes(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            raise self.make_end_error() from None

    def make_end_error(self) -> SetupError:
        """Make the error for a process that ended too early, with the signal that killed it or the
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
        why = shorten_text(lines[-1], _LOG_CHARACTERS) if lines else "its log is empty"
        return SetupError(f"load process {self.name} ended: {why}")

    def close(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.wait()
