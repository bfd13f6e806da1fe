"""The directory of a run on one host: logs, the cluster key and what processes were started."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pd.cluster.host_processes import Identity
from pd.cluster.protocol import MAX_CHUNK_BYTES, Part, ReadyLine, StartProcess
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Collection

CLUSTER_KEY_FILE = "cluster.key"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_LOG_LINES = 15
# The end of a log in which its last lines are looked for, and the beginning of an output in which
# the ready line is.
_LOG_BYTES = 16384
_READY_BYTES = 65536


class ProcessRecord(msgspec.Struct):
    """A started process, as later agents find it."""

    identity: Identity
    start: StartProcess


_RECORD, _READY_LINE = msgspec.json.Decoder(ProcessRecord), msgspec.json.Decoder(ReadyLine)


def state_directory() -> Path:
    """Directory of this user's runs on this machine (XDG Base Directory Specification). Raises
    SetupError if the user has none."""
    home = os.environ.get("XDG_STATE_HOME")
    if not home:
        try:
            home = str(Path("~/.local/state").expanduser())
        except RuntimeError:
            raise SetupError("this user has no home directory: set XDG_STATE_HOME") from None
    return Path(home) / "pd" / "clusters"


class RunDirectory:
    """Files of a run, which only this user can read.

    Args:
        again: the run may have been here before. If it has been removed meanwhile, it is empty.

    Raises:
        SetupError: the directory cannot be made.
    """

    def __init__(self, run: str, *, again: bool) -> None:
        parts = run.split("/")
        if not all(_NAME.fullmatch(part) for part in parts):
            raise SetupError(f"{run!r} is no name of a run")
        self.path = state_directory().joinpath(*parts)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=again)
        except OSError as error:
            raise SetupError(f"cannot make {self.path}: {error.strerror}") from error

    def file(self, name: str) -> Path:
        """The path of a file. Raises SetupError if the name would lead elsewhere."""
        if not _NAME.fullmatch(name):
            raise SetupError(f"{name!r} is no name of a file in {self.path}")
        return self.path / name

    def write(self, name: str, content: bytes) -> None:
        """Write a file that nobody else can read, not even for a moment."""
        path = self.file(name)
        part = path.with_name(f"{name}.part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        part.replace(path)

    def read(self, name: str, offset: int) -> Part:
        """A part of a file; see :class:`pd.cluster.protocol.Read`."""
        with self.file(name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size + offset) if offset < 0 else offset)
            return Part(file.read(MAX_CHUNK_BYTES), size)

    def add_record(self, record: ProcessRecord) -> None:
        self.write(f"{record.start.name}.process", msgspec.json.encode(record))

    def records(self, besides: Collection[str] = ()) -> list[ProcessRecord]:
        """Processes that were started here, oldest first, but for those with these names.

        A record that is damaged is left out; what it was about is found by its token when the run
        is closed.
        """
        files = [path for path in self.path.glob("*.process") if path.stem not in besides]
        files.sort(key=lambda path: path.stat().st_mtime_ns)
        found: list[ProcessRecord] = []
        for path in files:
            # Text that is not UTF-8 is no error of msgspec's, but this.
            with contextlib.suppress(ValueError):
                found.append(_RECORD.decode(path.read_bytes()))
        return found

    def let_end(self, name: str, *, may_end: bool) -> None:
        """Record whether a process may end without a failure of the deployment."""
        if may_end:
            self.write(f"{name}.may-end", b"")
        else:
            self.file(f"{name}.may-end").unlink(missing_ok=True)

    def may_end(self, name: str) -> bool:
        return self.file(f"{name}.may-end").exists()

    @property
    def has_key(self) -> bool:
        return self.file(CLUSTER_KEY_FILE).exists()

    def ready_line(self, name: str) -> ReadyLine | None:
        """The announcement that the process has printed, if it has."""
        try:
            with self.file(f"{name}.out").open("rb") as file:
                lines = file.read(_READY_BYTES).splitlines()
        except OSError:
            return None  # the run has been removed
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):
                ready = _READY_LINE.decode(line)
                if ready.event == "ready":
                    return ready
        return None

    def last_lines(self, name: str) -> list[str]:
        """The end of the process's log."""
        try:
            part = self.read(f"{name}.log", -_LOG_BYTES).content
        except OSError:
            return []
        return part.decode(errors="replace").splitlines()[-_LOG_LINES:]

    def remove(self) -> None:
        """Delete the run, and the directories above that held nothing else."""
        shutil.rmtree(self.path, ignore_errors=True)
        for parent in self.path.parents:
            if parent == state_directory():
                return
            try:
                parent.rmdir()
            except OSError:
                return

    def remove_key(self) -> None:
        """Delete the cluster key, which nobody needs any more."""
        self.file(CLUSTER_KEY_FILE).unlink(missing_ok=True)


def new_run_id() -> str:
    """A name for a run: when it began, and what makes it the only one of that second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"
