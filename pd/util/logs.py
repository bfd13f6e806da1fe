"""Logging in all processes of pd."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from pd.util.line_writer import LineWriter
from pd.util.output import unwrap_stream
from pd.util.printable import escape_text

if TYPE_CHECKING:
    from types import TracebackType

logger = logging.getLogger(__name__)

# These libraries log every request or step at "info".
_NOISY = ("httpx", "httpcore", "asyncio", "uvicorn")
# Only tracebacks begin with spaces, so no message can pass for one.
_INDENT = "    "


class LineFormatter(logging.Formatter):
    """Formats a record as one line, followed by the indented lines of a traceback.

    Messages may contain text from clients and peers. We escape everything unprintable, because they
    must not forge a line of the log or control the reader's terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        lines = [escape_text(self.formatMessage(record))]
        if record.exc_info and record.exc_info[1] is not None:
            lines += _indent_lines(describe_exception(record.exc_info[1]))
        elif record.exc_text:  # the record comes from another process
            lines += _indent_lines(record.exc_text.split("\n"))
        if record.stack_info:
            lines += _indent_lines(record.stack_info.split("\n"))
        return "\n".join(lines)


def _indent_lines(lines: list[str]) -> list[str]:
    return [_INDENT + escape_text(line) for line in lines]


def describe_exception(error: BaseException) -> list[str]:
    """Format a traceback as lines. The message of each exception takes one line."""
    lines: list[str] = []
    for part in traceback.TracebackException.from_exception(error).format():
        part = part.strip("\n")
        # Lines of source code stay lines. Exception groups put a border before them.
        is_frame = part.lstrip(" |+-").startswith('File "')
        lines += part.split("\n") if is_frame else [part]
    return lines


def configure_logging(level: int, name: str = "") -> None:
    """Log to standard error. ``name`` distinguishes this process from others that log there."""
    root = logging.getLogger()
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if root.handlers:
        return
    where = f"[{name}] " if name else ""
    formatter = LineFormatter(f"%(asctime)s %(levelname)s {where}%(name)s: %(message)s")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
    writer = unwrap_stream(sys.stderr)
    if isinstance(writer, LineWriter):
        text = "%d lines of this log were dropped here, because nobody read it"

        def describe_loss(count: int) -> str:
            level = logging.WARNING
            record = logger.makeRecord(logger.name, level, __file__, 0, text, (count,), None)
            return f"{formatter.format(record)}\n"

        writer.describe_loss = describe_loss
        _log_unhandled_exceptions()


def _log_unhandled_exceptions() -> None:
    """Log exceptions that end the process or a thread, as we log all others."""

    def of_process(
        kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            logger.critical("unexpected error", exc_info=(kind, error, where))

    def of_thread(hook: threading.ExceptHookArgs) -> None:
        if hook.exc_value is not None and not isinstance(hook.exc_value, SystemExit):
            name = "" if hook.thread is None else hook.thread.name
            error = (hook.exc_type, hook.exc_value, hook.exc_traceback)
            logger.critical("unexpected error in thread %s", name, exc_info=error)

    def of_finalizer(hook: sys.UnraisableHookArgs) -> None:
        if hook.exc_value is not None:
            error = (hook.exc_type, hook.exc_value, hook.exc_traceback)
            logger.error("%s %r", hook.err_msg or "exception in", hook.object, exc_info=error)

    sys.excepthook, threading.excepthook, sys.unraisablehook = of_process, of_thread, of_finalizer
