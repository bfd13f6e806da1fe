"""A host of a deployment: the connection to its agent, and the processes that run there."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pd.cluster import protocol
from pd.cluster.protocol import ProcessState
from pd.core.brief import shorten
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from pd.cluster.protocol import AnyMessage, AnyRequest, Fetched, StartProcess
    from pd.cluster.reach import Reach

_Value = TypeVar("_Value", bound=msgspec.Struct)

CONNECT_SECONDS = 30.0
# What a login shell may print before the agent speaks.
_MAX_NOISE_LINES = 200
_ANSWERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (protocol.Opened, ProcessState, protocol.Part, protocol.Fetched)
}
_MESSAGE_CHARACTERS = 500
_CLOSE_SECONDS = 5.0


class Host:
    """One host, from :meth:`open` to :meth:`disconnect`.

    A thread reads what the agent sends, another one pings it. ``changed`` is notified whenever a
    process of the host, or the host itself, changes; everything here may be called from any thread.

    Attributes:
        processes: as they are now, by name.
        lost: why the host cannot be talked to any more; empty while it can.
        run_directory: on the host.
        version: of pd on the host.
        has_key: the run had a cluster key there when the host was connected.
    """

    def __init__(
        self, name: str, reach: Reach, python: str, address: str, changed: threading.Condition
    ) -> None:
        self.name, self.address = name, address
        self.processes: dict[str, ProcessState] = {}
        self.lost = ""
        self.run_directory = ""
        self.version = ""
        self.has_key = False
        self._reach, self._python, self._changed = reach, python, changed
        self._hello: Future[protocol.Hello] = Future()
        self._replies: dict[int, Future[protocol.Reply]] = {}
        self._lock = threading.Lock()
        self._number = 0
        self._closing = threading.Event()
        self._agent: subprocess.Popen[bytes] | None = None
        self._errors: list[str] = []
        self._error_reader = threading.Thread(
            target=self._read_errors, name=f"errors {self.name}", daemon=True
        )

    def __str__(self) -> str:
        return f"host {self.name} ({self._reach})"

    # ---- connection

    def open(self, request: protocol.OpenRun) -> None:
        """Connect to the host and take the run there.

        Raises SetupError if the host cannot be reached, or cannot do it.
        """
        command = self._reach.command([self._python, "-m", "pd.cluster.agent"])
        try:
            # In a session of its own, Ctrl-C in a terminal does not reach it.
            self._agent = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise SetupError(f"{self} cannot be reached: {command[0]}: {error.strerror}") from error
        self._error_reader.start()
        threading.Thread(target=self._read, name=f"host {self.name}", daemon=True).start()
        try:
            hello = self._hello.result(CONNECT_SECONDS)
        except FutureTimeoutError:
            self.disconnect()
            raise SetupError(
                f"{self} cannot be reached: no answer within {CONNECT_SECONDS:g} s"
            ) from None
        if hello.protocol != protocol.PROTOCOL:
            self.disconnect()
            raise SetupError(
                f"{self} has another version of pd: its agent speaks protocol {hello.protocol}, "
                f"this command {protocol.PROTOCOL}; install the same version on all hosts"
            )
        opened = self.call(request, protocol.Opened)
        self.version, self.run_directory = opened.version, opened.run_directory
        self.has_key = opened.has_key
        with self._changed:
            # One may have ended since.
            self.processes = {state.name: state for state in opened.processes} | self.processes
        threading.Thread(target=self._ping, name=f"ping {self.name}", daemon=True).start()

    def disconnect(self) -> None:
        """End the connection; the agent stops what it was not told to keep.

        An agent that takes longer for that is left alone: killed, it would leave processes behind.
        """
        self._closing.set()
        if self._agent is None:
            return
        assert self._agent.stdin is not None
        with self._lock, contextlib.suppress(OSError):  # the agent may have ended
            self._agent.stdin.close()
        try:
            self._agent.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            if not self.run_directory:  # it never became an agent
                self._agent.kill()
                self._agent.wait()

    def _read(self) -> None:
        assert self._agent is not None and self._agent.stdout is not None
        noise = 0
        while line := self._agent.stdout.readline(protocol.MAX_LINE_BYTES + 1):
            try:
                self._received(protocol.decode_message(line))
            except msgspec.MsgspecError:
                noise += 1
                if self._hello.done() or noise > _MAX_NOISE_LINES:
                    self._lose(f"it sent what is no message: {shorten(repr(line), 80)}")
                    break
        self._lose(self._how_it_ended())

    def _read_errors(self) -> None:
        """Keep the last lines that the way to the host, or the agent, complains with."""
        assert self._agent is not None and self._agent.stderr is not None
        while line := self._agent.stderr.readline(protocol.MAX_CHUNK_BYTES):
            text = line.decode(errors="replace").strip()
            if text:
                self._errors = [*self._errors[-4:], text]

    def _how_it_ended(self) -> str:
        assert self._agent is not None
        try:
            status = self._agent.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return "its agent closed the connection"
        self._error_reader.join(_CLOSE_SECONDS)
        errors = shorten("; ".join(self._errors), _MESSAGE_CHARACTERS)
        return f"its agent ended with status {status}" + (f": {errors}" if errors else "")

    def _lose(self, why: str) -> None:
        with self._changed:
            self.lost = self.lost or why
            self._changed.notify_all()
        with self._lock:
            waiting, self._replies = list(self._replies.values()), {}
        error = SetupError(f"{self} is lost: {self.lost}")
        for reply in waiting:
            reply.set_exception(error)
        if not self._hello.done():
            self._hello.set_exception(SetupError(f"{self} cannot be reached: {self.lost}"))

    def _ping(self) -> None:
        """Tell the agent that this end lives, and notice when the host does not any more."""
        while not self._closing.wait(protocol.PING_SECONDS) and not self.lost:
            try:
                self._ask(protocol.Ping()).result(protocol.AGENT_LEASE)
            except FutureTimeoutError:
                self._lose(f"no answer for {protocol.AGENT_LEASE:g} s")
            except SetupError:
                return

    def _received(self, message: AnyMessage) -> None:
        if isinstance(message, protocol.Hello):
            if not self._hello.done():
                self._hello.set_result(message)
        elif isinstance(message, protocol.Reply):
            with self._lock:
                waiting = self._replies.pop(message.number, None)
            if waiting is not None:
                waiting.set_result(message)
        else:
            with self._changed:
                self.processes[message.process.name] = message.process
                self._changed.notify_all()

    # ---- requests

    def call(
        self, request: AnyRequest, answer: type[_Value], seconds: float = protocol.AGENT_LEASE
    ) -> _Value:
        """Ask the agent. Raises SetupError if it refuses, or the host is lost."""
        value: _Value = _ANSWERS[answer].decode(self._result(request, seconds))
        return value

    def tell(self, request: AnyRequest, seconds: float = protocol.AGENT_LEASE) -> None:
        """Ask the agent something whose answer has no value. Raises as :meth:`call` does."""
        self._result(request, seconds)

    def _result(self, request: AnyRequest, seconds: float) -> msgspec.Raw:
        try:
            reply = self._ask(request).result(seconds)
        except FutureTimeoutError:
            raise SetupError(f"{self} did not answer within {seconds:g} s") from None
        if reply.error:
            raise SetupError(f"{self}: {reply.error}")
        return reply.value

    def _ask(self, request: AnyRequest) -> Future[protocol.Reply]:
        assert self._agent is not None and self._agent.stdin is not None
        reply: Future[protocol.Reply] = Future()
        with self._lock:
            if self.lost:
                raise SetupError(f"{self} is lost: {self.lost}")
            self._number += 1
            request.number = self._number
            self._replies[request.number] = reply
            try:
                self._agent.stdin.write(protocol.encode(request))
                self._agent.stdin.flush()
            except (OSError, ValueError):
                # The reader finds out why, and says so.
                self._replies.pop(request.number)
                raise SetupError(f"{self} is lost: the connection is closed") from None
        return reply

    # ---- processes and files

    def module_command(self, module: str) -> list[str]:
        """The command line that runs a module of pd there.

        Its standard input and output lead to this machine. The agent does not know the process.
        """
        entered = ["-m", "pd.cluster.enter", self._python, "-m", module]
        return self._reach.command([self._python, *entered])

    def start(self, request: StartProcess) -> ProcessState:
        """Start a process there; its output goes to files of the run directory."""
        state = self.call(request, ProcessState)
        with self._changed:
            # It may have ended already.
            return self.processes.setdefault(state.name, state)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process of the run, if it is still there."""
        self.tell(protocol.Signal(name, number))

    def let_end(self, name: str, *, may_end: bool) -> None:
        """Note whether a process of the run may end without a failure of the deployment."""
        self.tell(protocol.LetEnd(name, may_end))
        with self._changed:
            self.processes[name].may_end = may_end

    def write(self, name: str, content: bytes) -> None:
        """Write a small file of the run directory, which only its user may read."""
        self.tell(protocol.Write(name, content))

    def read(self, name: str, limit: int = 64 << 20) -> bytes:
        """The last ``limit`` bytes of a file of the run directory."""
        first = self.call(protocol.Read(name, -limit), protocol.Part)
        offset, end = max(0, first.size - limit), first.size
        content = bytearray(first.content)
        while offset + len(content) < end:
            part = self.call(protocol.Read(name, offset + len(content)), protocol.Part)
            if not part.content:
                break  # it has been cut short meanwhile
            content += part.content
        return bytes(content)

    def fetch(
        self,
        url: str,
        timeout: float = 5.0,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
        *,
        method: str | None = None,
        verify: bool = True,
        authorities: str = "",
    ) -> Fetched:
        """HTTP request from that host, see :class:`pd.cluster.protocol.FetchUrl`.

        Raises SetupError if there is no answer.
        """
        request = protocol.FetchUrl(url, timeout, headers or {}, body, method, verify, authorities)
        return self.call(request, protocol.Fetched, timeout + protocol.AGENT_LEASE)

    def read_own(self, url: str, timeout: float) -> Fetched:
        """Read a page without secrets of a process on that host, whatever certificate it has: none
        need be valid for the address by which the host knows the process.

        Raises SetupError if there is no answer.
        """
        return self.fetch(url, timeout, verify=False)
