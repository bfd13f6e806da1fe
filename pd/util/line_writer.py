"""Writes to a descriptor without waiting for its reader."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Limit on bytes waiting to be written.
MAX_WAITING_BYTES = 1 << 20
# Memory of a text in addition to its own bytes.
_OVERHEAD_BYTES = 64
_WRITE_BYTES = 64 << 10


class LineWriter:
    """A text stream that never makes its writer wait, because its own thread writes.

    Texts wait for the thread up to a limit. After that we drop and count lines until the waiting
    ones are written, and then write how many were dropped. Any thread and signal handlers may
    write. After a fork, the child starts with an empty queue and a new thread.

    Args:
        descriptor: target of the output. It stays open.

    Attributes:
        describe_loss: formats the line about dropped lines from their number.
        error: why the last text could not be written, or None.
    """

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.describe_loss: Callable[[int], str] = lambda count: (
            f"{count} lines were dropped here, because nobody read this output\n"
        )
        # Lines dropped by us or refused by the descriptor.
        self._lost = 0
        self._reset_state()
        reset = weakref.WeakMethod(self._reset_state)

        def reset_in_child() -> None:
            if (own := reset()) is not None:
                own()

        os.register_at_fork(after_in_child=reset_in_child)

    def _reset_state(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        # Beginning of an incomplete line.
        self._partial = ""
        # Lines dropped since we last reported the number.
        self._dropped = 0
        self._is_writing = False
        self._thread: threading.Thread | None = None
        self.error: OSError | None = None

    @property
    def lost(self) -> int:
        """Number of lines dropped by us or refused by the descriptor."""
        return self._lost

    # ---- a text stream

    def write(self, text: str) -> int:
        """Queue the text's complete lines for the thread, and keep the rest."""
        with self._changed:
            lines, newline, self._partial = (self._partial + text).rpartition("\n")
            if newline:
                self._append_text(lines + newline)
            if len(self._partial) > _WRITE_BYTES:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Queue an incomplete line. This does not wait for the thread."""
        with self._changed:
            if self._partial:
                self._append_text(self._partial)
                self._partial = ""

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    # ---- the queue

    def wait_until_written(self, seconds: float) -> bool:
        """Wait until everything is written. Return whether it took at most ``seconds``."""
        with self._changed:
            self.flush()
            return self._changed.wait_for(
                lambda: not (self._waiting or self._is_writing or self._dropped), seconds
            )

    def _append_text(self, text: str) -> None:
        data = text.encode(self.encoding, self.errors)
        size = len(data) + _OVERHEAD_BYTES
        is_full = bool(self._waiting) and self._waiting_bytes + size > MAX_WAITING_BYTES
        if self._dropped or is_full:
            count = max(1, text.count("\n"))
            self._dropped += count
            self._lost += count
            return
        self._waiting.append(data)
        self._waiting_bytes += size
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_forever, name="log", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the process may have no more threads, or it ends
                self._thread = None
                self._write_next()
        self._changed.notify_all()

    def _write_forever(self) -> None:
        while True:
            self._write_next()

    def _write_next(self) -> None:
        data = self._take_texts()
        error = None
        rest = memoryview(data)
        try:
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    poll.poll()
        except OSError as raised:  # the reader has left, or the disk is full
            error = raised
        with self._changed:
            self.error = error
            if error is not None:
                self._lost += max(1, data.count(b"\n"))
            self._is_writing = False
            self._changed.notify_all()

    def _take_texts(self) -> bytes:
        """Wait for texts and take enough of them for one write."""
        with self._changed:
            while not self._waiting and not self._dropped:
                self._changed.wait()
            self._is_writing = True
            if not self._waiting:
                count, self._dropped = self._dropped, 0
                return self.describe_loss(count).encode(self.encoding, self.errors)
            taken = bytearray()
            while self._waiting and len(taken) < _WRITE_BYTES:
                text = self._waiting.popleft()
                self._waiting_bytes -= len(text) + _OVERHEAD_BYTES
                taken += text
            return bytes(taken)
