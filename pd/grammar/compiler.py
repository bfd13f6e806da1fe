"""Compiles grammars in a child process. A grammar over its limits ends this process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pd.core.brief import shorten_text
from pd.core.errors import CostlyGrammarError, InvalidRequestError, UnavailableError
from pd.grammar.compile_jobs import CompileJob, Result, Vocabulary, read_frame, send_frame
from pd.util.children import hold_signals, module_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.core.grammar import Grammar

logger = logging.getLogger(__name__)

_RESULT = msgspec.msgpack.Decoder(Result)
# A child counts as hung if it sleeps and gets no processor time for this many seconds of wall time.
# The limits end a child that wants to run, even if a starved machine gives it little time.
_HUNG_SECONDS = 120.0
# Interval between two checks of a compiling child.
_CHECK_SECONDS = 0.1
# The kernel's names for states in which a process waits for a processor or for memory.
_BUSY = "RD"
# Length of the name of a part of a grammar, in characters.
_MAX_FIELD = 300
# Time in which an idle child must end.
_END_SECONDS = 0.2
# Signals from a user, or from the kernel when the host runs out of memory.
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# If a killed child used more than this part of its memory limit, we blame its memory, because the
# host may have less to spare than the limit allows.
_MUCH_MEMORY = 0.5


class CompileLimits(NamedTuple):
    """Limits of compiling one grammar.

    Attributes:
        cpu_seconds: processor time.
        memory_bytes: memory of the child in addition to its idle memory.
        max_bytes: size of the serialized result.
    """

    cpu_seconds: float
    memory_bytes: int
    max_bytes: int


def format_field(kind: str, steps: Sequence[str]) -> str:
    """Name a part of a grammar in errors: ``structural_tag.format.elements[0].json_schema``."""
    path = "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in steps)
    return shorten_text(kind + path, _MAX_FIELD)


class GrammarCompiler:
    """A compiling child process, replaced after its end.

    One thread uses the object. Any thread may call :meth:`close`.

    Attributes:
        tokens: bytes of all tokens as xgrammar's JSON, after the first compilation.
    """

    def __init__(self, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        self._vocabulary, self._limits = vocabulary, limits
        self.tokens = b""
        self._child: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        # Memory of the child before its first grammar.
        self._idle_bytes = 0
        # Why the system could not start a child.
        self._lack = ""
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start a child unless there is one, without waiting until it is ready.

        If the system has no room for a process, we try again at the next use.
        """
        with self._lock:
            if self._closed or self._child is not None:
                return
            command = module_command("pd.grammar.child")
            try:
                with hold_signals():
                    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            except OSError as error:
                self._lack = error.strerror or str(error)
                logger.warning("cannot start a process that compiles grammars: %s", self._lack)
                return
            self._child, self._is_ready = child, False
        assert child.stdin is not None
        # If the child has ended, or close() ended it, its next use fails.
        with contextlib.suppress(OSError, ValueError):
            send_frame(child.stdin, msgspec.msgpack.encode(self._vocabulary))

    def compile_grammar(
        self, grammar: Grammar, share: float = 1.0, *, is_tried: bool = True
    ) -> Result:
        """Compile a grammar. The result has no error.

        Args:
            share: part of the limit on processor time.
            is_tried: measure the cost of some outputs, too.

        Raises:
            CostlyGrammarError: the grammar exceeds the limits.
            InvalidRequestError: the grammar is wrong.
            UnavailableError: the node stops, or the child did not start or was killed.
        """
        limits = self._limits._replace(cpu_seconds=share * self._limits.cpu_seconds)
        job = CompileJob(grammar.kind, grammar.text, *limits, is_tried=is_tried)
        child = self._ensure_child()
        assert child.stdin is not None and child.stdout is not None
        watch = _Watch(child)
        watch.start()
        try:
            send_frame(child.stdin, msgspec.msgpack.encode(job))
            result = _RESULT.decode(read_frame(child.stdout))
        except (OSError, EOFError, ValueError):  # ValueError: close() has closed them
            taken = watch.peak_bytes - self._idle_bytes
            raise self._describe_death(child, grammar, taken, limits.cpu_seconds) from None
        finally:
            watch.is_answered.set()
        if result.lacked_memory:
            self._discard_child(child)
            self.start()
        if result.error:
            field = format_field(grammar.kind, result.steps)
            kind = CostlyGrammarError if result.is_costly else InvalidRequestError
            raise kind(f"{field}: {result.error}", param=field)
        return result

    def close(self) -> None:
        """End the child. Any thread may call this."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.kill()  # it may be compiling
            _wait_or_kill(child)

    def _ensure_child(self) -> subprocess.Popen[bytes]:
        self.start()
        with self._lock:
            child, closed = self._child, self._closed
        if child is None:
            raise UnavailableError(
                "the node stops"
                if closed
                else f"cannot start a process that compiles grammars: {self._lack}; try again"
            )
        assert child.stdout is not None
        try:
            if not self._is_ready:
                self.tokens = read_frame(child.stdout)
                self._is_ready = True
                self._idle_bytes = _read_resident_bytes(child.pid)
        except (OSError, EOFError, ValueError):
            self._discard_child(child)
            raise UnavailableError(
                "cannot compile grammars: their process did not start; see the node's log"
            ) from None
        return child

    def _describe_death(
        self,
        child: subprocess.Popen[bytes],
        grammar: Grammar,
        taken: int = 0,
        cpu_seconds: float = 0.0,
    ) -> Exception:
        """Return the error for a grammar whose compilation ended the child.

        Args:
            taken: memory of the child for this grammar, in bytes.
            cpu_seconds: limit on its processor time.
        """
        self._discard_child(child)
        if self._closed:
            return UnavailableError("the node stops")
        self.start()
        memory = f"{self._limits.memory_bytes >> 20} MiB (--grammar-memory)"
        is_large = taken > _MUCH_MEMORY * self._limits.memory_bytes
        if child.returncode == -signal.SIGXCPU:
            limit = f"{cpu_seconds:g} s of processor time (--grammar-cpu-seconds)"
            if cpu_seconds < self._limits.cpu_seconds:
                limit += ", reduced after other refused grammars"
            if is_large:
                limit += f", and it had {taken >> 20} MiB of {memory}"
        elif -child.returncode in _SENT and not is_large:  # no fault of the grammar
            return UnavailableError("the grammar's compiling process was killed; try again")
        else:
            limit = memory
        message = f"{grammar.kind}: compiling it takes more than {limit}"
        return CostlyGrammarError(message, param=grammar.kind)

    def _discard_child(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._child is child:
                self._child = None
        _wait_or_kill(child)


class _Watch(threading.Thread):
    """Checks a child until it has answered, and kills it if it hangs.

    Attributes:
        is_answered: set this when you have the answer.
        peak_bytes: the child's largest memory so far.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        super().__init__(name="grammar-watch", daemon=True)
        self._child = child
        self.is_answered = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        before, since = _read_process_state(self._child.pid), time.monotonic()
        while not self.is_answered.wait(_CHECK_SECONDS):
            self.peak_bytes = max(self.peak_bytes, _read_resident_bytes(self._child.pid))
            now = _read_process_state(self._child.pid)
            if now != before or now[0] in _BUSY:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > _HUNG_SECONDS:
                self._child.kill()
                return


def _read_process_state(pid: int) -> tuple[str, int]:
    """Return a process's state and its processor time in ticks; ``("", 0)`` without a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[11]) + int(fields[12])


def _read_resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it has ended
        return 0


def _wait_or_kill(child: subprocess.Popen[bytes]) -> None:
    """Close a child's input, wait for its end, and kill it if it takes too long."""
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # it ends, so it needs no unsent input
                stream.close()
    try:
        child.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
