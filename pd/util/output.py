"""Standard output and standard error of pd's processes.

Text from outside must not control the terminal, and an inattentive reader must not block a
server.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import stat
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO, cast

from pd.util.line_writer import LineWriter
from pd.util.printable import escape_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Time that an ending process waits for readers of its output.
END_SECONDS = 2.0
_CHECK_SECONDS = 0.5

_writers: dict[int, LineWriter] = {}


class PrintableStream:
    """Wraps a text stream and escapes all unprintable characters except line ends and tabs.

    Attributes:
        unescaped: the wrapped stream, for programs that move the cursor.
    """

    def __init__(self, unescaped: TextIO) -> None:
        self.unescaped = unescaped

    def write(self, text: str) -> int:
        self.unescaped.write(escape_text(text, keep="\n\t"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Escape unprintable text on standard output and standard error within the block."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal may lack a character
    sys.stdout, sys.stderr = (cast("TextIO", PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unwrap_stream(stream: TextIO) -> TextIO:
    """Return the stream for our own text that controls the terminal."""
    wrapped: TextIO = getattr(stream, "unescaped", stream)
    return wrapped


def write_without_waiting(*names: str) -> None:
    """Make writes to these streams (``stdout``, ``stderr``) never wait for a reader.

    Call this once, early.
    """
    for name in names:
        descriptor = {"stdout": 1, "stderr": 2}[name]
        _open_own_end(descriptor)
        _writers[descriptor] = LineWriter(descriptor)
        setattr(sys, name, _writers[descriptor])
    atexit.register(wait_for_output)


def _open_own_end(descriptor: int) -> None:
    """Reopen a pipe as non-blocking, so that libraries and crash reports do not wait either.

    We open a new end instead of changing the old one, because other programs may share it and rely
    on blocking writes.
    """
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return
    # We cannot open another user's pipe, nor one without a reader.
    with contextlib.suppress(OSError):
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.dup2(own, descriptor)
        os.close(own)


def wait_for_output(seconds: float = END_SECONDS) -> None:
    """Wait until all streams are written, for at most ``seconds`` in total."""
    deadline = time.monotonic() + seconds
    for writer in _writers.values():
        writer.wait_until_written(max(0.0, deadline - time.monotonic()))


def check_output(stream: TextIO) -> None:
    """Raise OSError if the last write to the stream failed. This waits a moment for the write."""
    writer = unwrap_stream(stream)
    if isinstance(writer, LineWriter):
        writer.wait_until_written(_CHECK_SECONDS)
        if writer.error is not None:
            raise writer.error


def lost_lines() -> int:
    """Count the lines this process could not write because nobody read them."""
    return sum(writer.lost for writer in _writers.values())
