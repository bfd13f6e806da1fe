"""Compiles grammars in a child process, which is ended when one takes too much."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pd.core.brief import shorten
from pd.core.children import module_command, signals_held_back
from pd.core.errors import InvalidRequestError, UnavailableError
from pd.grammar.child import CompileJob, Result, Vocabulary, read_frame, send_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.core.grammar import Grammar

logger = logging.getLogger(__name__)

_RESULT = msgspec.msgpack.Decoder(Result)
# Seconds on the clock after which a child counts as hung. Its limit is processor time, of which a
# starved machine gives it little.
_HUNG_SECONDS = 120.0
# Characters of the name of a part of a grammar.
_MAX_FIELD = 300
# How long an idle child may take to end.
_END_SECONDS = 0.2
# Signals that somebody sends to a child, or the kernel for want of the host's memory.
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class CompileLimits(NamedTuple):
    """Limits of compiling one grammar.

    Attributes:
        cpu_seconds: processor time.
        memory_bytes: memory of the child beyond what it has when it is idle.
        max_bytes: size of the result, serialized.
    """

    cpu_seconds: float
    memory_bytes: int
    max_bytes: int


def field_of(kind: str, steps: Sequence[str]) -> str:
    """A part of a grammar, as errors name it: ``structural_tag.format.elements[0].json_schema``."""
    way = "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in steps)
    return shorten(kind + way, _MAX_FIELD)


class GrammarCompiler:
    """One child, which is replaced when it was ended. One thread uses it, but for :meth:`close`.

    Attributes:
        tokens: bytes of all tokens, as JSON of xgrammar, once something was compiled.
    """

    def __init__(self, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        self._vocabulary, self._limits = vocabulary, limits
        self.tokens = b""
        self._child: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        # Why there is no child, where there was no room for one.
        self._lack = ""
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start a child unless there is one, without waiting until it is ready. If the system has
        no room for a process, the next use of this tries again."""
        with self._lock:
            if self._closed or self._child is not None:
                return
            command = module_command("pd.grammar.child")
            try:
                with signals_held_back():
                    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            except OSError as error:
                self._lack = error.strerror or str(error)
                logger.warning("no process can be started that compiles grammars: %s", self._lack)
                return
            self._child, self._is_ready = child, False
        assert child.stdin is not None
        # A child that has ended, or that close() has, is noticed when it is used.
        with contextlib.suppress(OSError, ValueError):
            send_frame(child.stdin, msgspec.msgpack.encode(self._vocabulary))

    def compile(self, grammar: Grammar) -> Result:
        """Find out what becomes of a grammar; the result has no error.

        Raises:
            InvalidRequestError: it is none, or it takes more than the limits.
            UnavailableError: the node stops, or the child did not start or was killed.
        """
        limits = self._limits
        job = CompileJob(grammar.kind, grammar.text, *limits)
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        timer = threading.Timer(_HUNG_SECONDS, child.kill)
        timer.start()
        try:
            send_frame(child.stdin, msgspec.msgpack.encode(job))
            result = _RESULT.decode(read_frame(child.stdout))
        except (OSError, EOFError, ValueError):  # the last for what close() has closed
            raise self._died(child, grammar) from None
        finally:
            timer.cancel()
        if result.lacked_memory:
            self._forget(child)
            self.start()
        if result.error:
            field = field_of(grammar.kind, result.steps)
            raise InvalidRequestError(f"{field}: {result.error}", param=field)
        return result

    def close(self) -> None:
        """End the child. Any thread."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.kill()  # it may be compiling
            _end(child)

    def _started(self) -> subprocess.Popen[bytes]:
        self.start()
        with self._lock:
            child, closed = self._child, self._closed
        if child is None:
            raise UnavailableError(
                "the node stops"
                if closed
                else f"no process can be started that compiles grammars ({self._lack}); try again"
            )
        assert child.stdout is not None
        try:
            if not self._is_ready:
                self.tokens = read_frame(child.stdout)
                self._is_ready = True
        except (OSError, EOFError, ValueError):
            self._forget(child)
            raise UnavailableError(
                "grammars cannot be compiled here: the process that does it did not start (see "
                "the node's log)"
            ) from None
        return child

    def _died(self, child: subprocess.Popen[bytes], grammar: Grammar) -> Exception:
        """Return the error of the grammar during which a child ended."""
        self._forget(child)
        if self._closed:
            return UnavailableError("the node stops")
        self.start()
        if -child.returncode in _SENT:  # no fault of the grammar
            return UnavailableError("the process that compiled the grammar was killed; try again")
        if child.returncode == -signal.SIGXCPU:
            limit = f"{self._limits.cpu_seconds:g} s of processor time (--grammar-cpu-seconds)"
        else:
            limit = f"{self._limits.memory_bytes >> 20} MiB (--grammar-memory)"
        message = f"{grammar.kind}: compiling it takes more than {limit}"
        return InvalidRequestError(message, param=grammar.kind)

    def _forget(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._child is child:
                self._child = None
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a child that has ended or is told to by the end of its input."""
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # what it was still to be told is of no use
                stream.close()
    try:
        child.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
