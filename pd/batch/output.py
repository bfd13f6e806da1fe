"""The output of a batch: a file that grows by whole lines, and with which a later run goes on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
from typing import TYPE_CHECKING

from pd.batch.requests import id_digest, read_lines
from pd.batch.results import LINE_START, WrittenResult, parse_written
from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# An answer, and what stands around it.
MAX_RESULT_BYTES = 80 << 20


class BatchOutput:
    """A file, a pipe or a device to which results are written.

    Attributes:
        name: for messages.
        is_resumable: a later run can go on with it, which is so for files only.
        done: requests with a final answer of an earlier run, by the digest of their id; whether
            they succeeded.
    """

    def __init__(self, name: str, fd: int, *, is_resumable: bool) -> None:
        self.name = name
        self.is_resumable = is_resumable
        self.done: dict[bytes, bool] = {}
        # NOTE: a file that was replaced stays open, and so locked, for a run that has just opened
        # it by the name that it had.
        self._fds = [fd]

    @property
    def _fd(self) -> int:
        return self._fds[-1]

    def append(self, line: bytes) -> None:
        """Write a line. Raises SetupError if it could not be written as a whole."""
        size = os.fstat(self._fd).st_size
        try:
            _write(self._fd, line)
        except BrokenPipeError:
            raise  # the command line knows what a reader that has left means
        except OSError as error:
            if self.is_resumable:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, size)
            raise SetupError(f"cannot write {self.name}: {error.strerror}") from None

    def close(self) -> None:
        """Close the file, once the disk has what was written."""
        if self.is_resumable:
            with contextlib.suppress(OSError):
                os.fsync(self._fd)
        for fd in self._fds:
            os.close(fd)

    # ---- what earlier runs have left

    def resume(self, path: Path) -> None:
        """Find out which requests are done, and leave out the lines of those that failed.

        A last line that was not written as a whole is cut off. If lines are left out, the file is
        replaced by one without them, which gets its name when it is complete.

        Raises:
            UsageError: the file is no output of a batch; it is left as it is.
            SetupError: it cannot be read or replaced.
        """
        size = num_lines = 0
        ends_with_newline = True
        for line, result in self._written():
            size += len(line)
            ends_with_newline = line.endswith(b"\n")
            if result is not None:
                num_lines += 1
                if result.is_final:
                    self.done.setdefault(id_digest(result.custom_id), result.succeeded)
        try:
            if os.fstat(self._fd).st_size > size:
                os.ftruncate(self._fd, size)
            if not ends_with_newline:
                _write(self._fd, b"\n")
            if len(self.done) < num_lines:
                self._replace(path)
        except OSError as error:
            raise SetupError(f"cannot write {self.name}: {error.strerror}") from None

    def _written(self) -> Iterator[tuple[bytes, WrittenResult | None]]:
        """The lines of the file but a last one that is cut; blank lines with None."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        try:
            with os.fdopen(self._fd, "rb", closefd=False) as file:
                for number, line in read_lines(file, MAX_RESULT_BYTES):
                    result = parse_written(line)
                    if result is None and line.strip():
                        if _is_cut(line):
                            return
                        raise UsageError(f"line {number} is not an answer of a batch")
                    yield line, result
        except UsageError as error:
            raise UsageError(
                f"{self.name} {error.message}; name another file for the answers, or remove it"
            ) from None
        except OSError as error:
            raise SetupError(f"cannot read {self.name}: {error.strerror}") from None

    def _replace(self, path: Path) -> None:
        """Replace the file by one with the first final line of each request."""
        new = path.with_name(f".{path.name}.new")
        left = set(self.done)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for line, result in self._written():
                if result is not None and result.is_final:
                    digest = id_digest(result.custom_id)
                    if digest in left:
                        left.discard(digest)
                        _write(fd, line)
            os.fchmod(fd, stat.S_IMODE(os.fstat(self._fd).st_mode))
            os.fsync(fd)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            os.close(fd)
            raise
        self._fds.append(fd)


def open_output(path: Path | None) -> BatchOutput:
    """Open the output of a batch (None: standard output) and read what earlier runs have left.

    Raises:
        UsageError: the file is no output of a batch.
        SetupError: the file cannot be written, or another run writes it.
    """
    if path is None:
        return BatchOutput("standard output", os.dup(sys.stdout.fileno()), is_resumable=False)
    name = str(path)
    try:
        path = path.resolve()  # a link stays one when the file is replaced
        if path.exists() and not path.is_file() and not path.is_dir():
            return BatchOutput(name, os.open(path, os.O_WRONLY), is_resumable=False)
        fd = _open_locked(path, name)
    except OSError as error:
        raise SetupError(f"cannot write {name}: {error.strerror}") from None
    output = BatchOutput(name, fd, is_resumable=True)
    try:
        output.resume(path)
    except BaseException:
        output.close()
        raise
    return output


def _open_locked(path: Path, name: str) -> int:
    """Open the file which has the name, and lock it for this process."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise SetupError(f"another run writes {name}; wait until it has ended") from None
        except FileNotFoundError:
            pass
        # Another run has replaced the file in between.
        os.close(fd)


def _is_cut(line: bytes) -> bool:
    """Whether a line without meaning is the beginning of one that a run was writing."""
    is_ours = line.startswith(LINE_START) or LINE_START.startswith(line)
    return is_ours and not line.endswith(b"\n")


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
