"""The output of a batch: a file that grows by whole lines, so a later run can continue it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from typing import TYPE_CHECKING

from pd.batch.requests import id_digest, read_lines
from pd.batch.results import LINE_START, WrittenResult, parse_written
from pd.core.errors import SetupError, UsageError
from pd.util.printable import escape_text
from pd.util.replaced_files import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Limit of a line: an answer and the fields around it.
MAX_RESULT_BYTES = 80 << 20


class OutputInUseError(SetupError):
    """Another run writes the file."""


class BatchOutput:
    """A file, a pipe or a device for results.

    Attributes:
        name: name for messages.
        is_resumable: whether a later run can continue it; only files are resumable.
        done: requests that an earlier run has done, by the digest of their id, and whether they
            succeeded.
    """

    def __init__(
        self, name: str, fd: int, *, is_resumable: bool, keeps_failures: bool = False
    ) -> None:
        """``keeps_failures``: later runs do not repeat requests that failed."""
        self.name = name
        self.is_resumable = is_resumable
        self._keeps_failures = keeps_failures
        self.done: dict[bytes, bool] = {}
        # NOTE: we keep a replaced file open, and so locked, because another run may just have
        # opened it by its old name.
        self._fds = [fd]
        self._is_terminal = os.isatty(fd)

    @property
    def _fd(self) -> int:
        return self._fds[-1]

    def append_line(self, line: bytes) -> None:
        """Write a line. If that fails, remove the written part and raise SetupError."""
        size = os.fstat(self._fd).st_size
        if self._is_terminal:
            line = _printable_json(line)
        try:
            _write_all(self._fd, line)
        except BrokenPipeError:
            raise  # the command line handles readers that have left
        except OSError as error:
            if self.is_resumable:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, size)
            raise SetupError(f"cannot write {self.name}: {error.strerror}") from None

    @property
    def size(self) -> int:
        """Bytes of the file so far."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close the file after its content has reached the disk."""
        if self.is_resumable:
            with contextlib.suppress(OSError):
                os.fsync(self._fd)
        for fd in self._fds:
            os.close(fd)

    # ---- results of earlier runs

    def resume(self, path: Path) -> None:
        """Find out which requests are done, and drop the lines of failed ones.

        Cut off an incomplete last line. If lines are dropped, replace the file by a new one, which
        gets its name when it is complete.

        Raises:
            UsageError: the file is not the output of a batch; it stays as it is.
            SetupError: the file cannot be read or replaced.
        """
        size = num_lines = 0
        ends_with_newline = True
        for line, result in self._read_results():
            size += len(line)
            ends_with_newline = line.endswith(b"\n")
            if result is not None:
                num_lines += 1
                if self._is_kept(result):
                    self.done.setdefault(id_digest(result.custom_id), result.has_succeeded)
        try:
            if os.fstat(self._fd).st_size > size:
                os.ftruncate(self._fd, size)
            if not ends_with_newline:
                _write_all(self._fd, b"\n")
            if len(self.done) < num_lines:
                self._replace_file(path)
        except OSError as error:
            raise SetupError(f"cannot write {self.name}: {error.strerror}") from None

    def _read_results(self) -> Iterator[tuple[bytes, WrittenResult | None]]:
        """Yield the lines of the file except an incomplete last one; blank lines with None."""
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

    def _is_kept(self, result: WrittenResult) -> bool:
        return self._keeps_failures or result.is_final

    def _replace_file(self, path: Path) -> None:
        """Replace the file by one with the first kept line of each request."""
        left = set(self.done)
        with replace_file(path) as fd:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for line, result in self._read_results():
                if result is not None and self._is_kept(result):
                    digest = id_digest(result.custom_id)
                    if digest in left:
                        left.discard(digest)
                        _write_all(fd, line)
        self._fds.append(fd)


def open_output(path: Path | None, *, keeps_failures: bool = False) -> BatchOutput:
    """Open the output of a batch (None: standard output) and read the results of earlier runs.

    ``keeps_failures``: see :class:`BatchOutput`.

    Raises:
        UsageError: the file is not the output of a batch.
        SetupError: the file cannot be written.
        OutputInUseError: another run writes it.
    """
    if path is None:
        return BatchOutput("standard output", os.dup(sys.stdout.fileno()), is_resumable=False)
    name = str(path)
    try:
        path = path.resolve()  # replacing the file must not replace a link to it
        if path.exists() and not path.is_file() and not path.is_dir():
            return BatchOutput(name, os.open(path, os.O_WRONLY), is_resumable=False)
        fd = _open_locked(path, name)
    except OSError as error:
        raise SetupError(f"cannot write {name}: {error.strerror}") from None
    output = BatchOutput(name, fd, is_resumable=True, keeps_failures=keeps_failures)
    try:
        output.resume(path)
    except BaseException:
        output.close()
        raise
    return output


def _open_locked(path: Path, name: str) -> int:
    """Open the file with this name, and lock it for this process."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise OutputInUseError(f"another run writes {name}; wait until it has ended") from None
        except FileNotFoundError:
            pass
        # Another run replaced the file after we opened it.
        os.close(fd)


def _printable_json(line: bytes) -> bytes:
    """Escape control characters; the values stay the same."""
    text = line.decode(errors="replace")
    shown = (c if escape_text(c, keep="\n\t") == c else json.dumps(c)[1:-1] for c in text)
    return "".join(shown).encode()


def _is_cut(line: bytes) -> bool:
    """Whether an invalid line is the beginning of an unfinished one."""
    is_ours = line.startswith(LINE_START) or LINE_START.startswith(line)
    return is_ours and not line.endswith(b"\n")


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
