"""The agent of a host: ``python -m pd.cluster.agent``, driven over standard input and output.

It starts the processes of a run, tells when they are ready or end, and stops them when the
deployment asks, or when the connection to it is lost (unless it was told to keep them).
"""

from __future__ import annotations

import contextlib
import http.client
import os
import selectors
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import msgspec

from pd import __version__
from pd.cluster import protocol
from pd.cluster.host_processes import (
    TOKEN_VARIABLE,
    ProcessHandle,
    identity_of,
    kill_all_with,
)
from pd.cluster.protocol import ProcessState
from pd.cluster.run_directory import ProcessRecord, RunDirectory
from pd.cluster.times import GRACE_SECONDS
from pd.core.errors import PDError, SetupError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from pd.cluster.protocol import AnyRequest, StartProcess

# How often a process that has not announced itself is looked at, and how often anything is.
_READY_SECONDS = 0.1
_LOOK_SECONDS = 1.0
_KILL_SECONDS = 5.0
_READ_BYTES = 1 << 16


class _Terminated(BaseException):
    """A signal asks the agent to end."""


class AgentProcess:
    """A process of the run: started by this agent or, without ``child``, by an earlier one."""

    def __init__(
        self,
        start: StartProcess,
        pid: int,
        handle: ProcessHandle | None,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.announces = start.announces
        self.handle = handle
        self.child = child
        self.state = ProcessState(
            start.name, pid, start.layout, start.role, start.devices, start.stop_order
        )
        self.state.ended = handle is None

    @classmethod
    def recorded(cls, record: ProcessRecord) -> AgentProcess:
        """A process that another agent has started."""
        return cls(record.start, record.identity.pid, ProcessHandle.of(record.identity))

    def end(self) -> None:
        """Note that the process has ended."""
        if self.child is not None:
            self.state.status = self.child.wait()
        self.state.ended = True
        if self.handle is not None:
            self.handle.close()
            self.handle = None

    def send(self, number: int) -> None:
        if self.handle is not None:
            self.handle.send(number)


class Agent:
    """Serves one connection. All methods run on the main thread, but for HTTP requests."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._writing = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(source, selectors.EVENT_READ)
        self._received = bytearray()
        self._heard = time.monotonic()
        self._run: RunDirectory | None = None
        self._directory: str | None = None
        self._token = ""
        self._keep = True
        self._processes: dict[str, AgentProcess] = {}

    def serve(self) -> None:
        """Serve until the connection ends, then stop what must not stay."""
        try:
            self._send(protocol.Hello(protocol=protocol.PROTOCOL))
            while self._step():
                pass
        except (OSError, _Terminated):
            pass  # nobody listens any more, or this agent has to end
        finally:
            if not self._keep:
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                self._stop_all()

    def _step(self) -> bool:
        """Wait for the next event; False when the connection has ended."""
        starting = [p for p in self._processes.values() if self._is_starting(p)]
        wait = _READY_SECONDS if starting else _LOOK_SECONDS
        for key, _ in self._selector.select(wait):
            if key.data is not None:
                self._ended(key.data)
            elif not self._receive():
                return False
        for process in starting:
            self._look_for_ready_line(process)
        self._look_for_others()
        waited = time.monotonic() - self._heard
        return self._keep or waited < protocol.AGENT_LEASE

    @staticmethod
    def _is_starting(process: AgentProcess) -> bool:
        return process.announces and process.state.ready is None and not process.state.ended

    def _look_for_ready_line(self, process: AgentProcess) -> None:
        if not self._is_starting(process):
            return
        process.state.ready = self._opened.ready_line(process.state.name)
        if process.state.ready is not None:
            self._send(protocol.Changed(process=process.state))

    def _look_for_others(self) -> None:
        """Find what another agent of the run has started since."""
        if self._run is None:
            return
        for record in self._run.records(besides=self._processes):
            self._add(AgentProcess.recorded(record))
            self._send(protocol.Changed(process=self._processes[record.start.name].state))

    def _ended(self, process: AgentProcess) -> None:
        assert process.handle is not None
        self._selector.unregister(process.handle)
        process.end()
        process.state.may_end = self._opened.may_end(process.state.name)
        process.state.log = self._opened.last_lines(process.state.name)
        self._send(protocol.Changed(process=process.state))

    # ---- messages

    def _receive(self) -> bool:
        data = os.read(self._source, _READ_BYTES)
        self._received += data
        if not data or len(self._received) > protocol.MAX_LINE_BYTES:
            return False
        self._heard = time.monotonic()
        if b"\n" in data:
            *lines, rest = self._received.split(b"\n")
            self._received = bytearray(rest)
            for line in lines:
                self._handle(protocol.decode_request(line))
        return True

    def _send(self, message: msgspec.Struct) -> None:
        data = memoryview(protocol.encode(message))
        with self._writing:
            while data:
                data = data[os.write(self._sink, data) :]

    def _handle(self, request: AnyRequest) -> None:
        if isinstance(request, protocol.FetchUrl):
            threading.Thread(target=self._answer_aside, args=(request,), daemon=True).start()
            return
        self._answer(request)

    def _answer_aside(self, request: AnyRequest) -> None:
        """Answer on a thread of its own, because a server may take its time."""
        with contextlib.suppress(OSError):  # the main thread notices that the connection is gone
            self._answer(request)

    def _answer(self, request: AnyRequest) -> None:
        operations: dict[type, Callable[..., msgspec.Struct | None]] = {
            protocol.OpenRun: self._open,
            protocol.StartProcess: self._start,
            protocol.Signal: self._signal,
            protocol.LetEnd: self._let_end,
            protocol.Write: lambda r: self._opened.write(r.name, r.content),
            protocol.Read: lambda r: self._opened.read(r.name, r.offset),
            protocol.FetchUrl: fetch,
            protocol.Ping: lambda r: None,
            protocol.Keep: self._keep_running,
            protocol.Close: self._close,
        }
        reply = protocol.Reply(number=request.number)
        try:
            value = operations[type(request)](request)
            if value is not None:
                reply.value = protocol.encode_value(value)
        except PDError as error:
            reply.error = error.message
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            reply.error = f"{where}{error.strerror or error}"
        self._send(reply)

    # ---- operations

    @property
    def _opened(self) -> RunDirectory:
        if self._run is None:
            raise SetupError("no run has been opened")
        return self._run

    def _open(self, request: protocol.OpenRun) -> protocol.Opened:
        if not sys.platform.startswith("linux"):
            raise SetupError(f"hosts of a cluster run Linux, not {sys.platform}")
        if request.directory:
            self._directory = os.path.expanduser(request.directory)
            if not request.attach and not os.path.isdir(self._directory):
                raise SetupError(f"the directory {request.directory} is not there")
        self._run = RunDirectory(request.run, again=request.attach)
        self._token = request.token
        self._keep = request.attach
        for record in self._run.records():
            self._add(AgentProcess.recorded(record))
        found = [process.state for process in self._processes.values()]
        return protocol.Opened(__version__, str(self._run.path), found, self._run.has_key)

    def _add(self, process: AgentProcess) -> None:
        name = process.state.name
        self._processes[name] = process
        if process.handle is not None:
            self._selector.register(process.handle, selectors.EVENT_READ, process)
        if process.announces:
            process.state.ready = self._opened.ready_line(name)
        process.state.may_end = self._opened.may_end(name)
        if process.state.ended:
            process.state.log = self._opened.last_lines(name)

    def _start(self, request: StartProcess) -> ProcessState:
        run, name = self._opened, request.name
        if name in self._processes:
            raise SetupError(f"{name} has been started before")
        # Before it can end.
        run.let_end(name, may_end=request.may_end)
        child = self._popen(request)
        try:
            # It stays a zombie until its end is noted, so that the pid is its own until then.
            identity = identity_of(child.pid)
            assert identity is not None
            # Environments may hold secrets, and nobody needs them again.
            recorded = msgspec.structs.replace(request, environment={})
            run.add_record(ProcessRecord(identity, recorded))
        except BaseException:
            # Where the disk is full, say: nobody would find it again.
            child.kill()
            child.wait()
            self._remove_output(name)
            raise
        handle = ProcessHandle.of_pid(child.pid)
        assert handle is not None
        process = AgentProcess(request, child.pid, handle, child)
        self._add(process)
        return process.state

    def _output(self, name: str) -> list[Path]:
        """The files of a process's standard output and error."""
        return [self._opened.file(f"{name}.{suffix}") for suffix in ("out", "log")]

    def _remove_output(self, name: str) -> None:
        """Delete what keeps a process of this name from being started again."""
        for file in self._output(name):
            file.unlink()

    def _popen(self, request: StartProcess) -> subprocess.Popen[bytes]:
        environment = os.environ | request.environment | {TOKEN_VARIABLE: self._token}
        files = self._output(request.name)
        with files[0].open("xb") as out, files[1].open("xb") as log:
            try:
                return subprocess.Popen(
                    request.command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    cwd=self._directory,
                    env=environment,
                    start_new_session=True,
                )
            except OSError:
                self._remove_output(request.name)
                raise
            except ValueError as error:  # a character that no command line can have
                self._remove_output(request.name)
                raise SetupError(f"{request.name} cannot be started: {error}") from None

    def _signal(self, request: protocol.Signal) -> None:
        self._process(request.name).send(request.signal)

    def _let_end(self, request: protocol.LetEnd) -> None:
        self._process(request.name).state.may_end = request.may_end
        self._opened.let_end(request.name, may_end=request.may_end)

    def _process(self, name: str) -> AgentProcess:
        if name not in self._processes:
            raise SetupError(f"no process {name} was started here")
        return self._processes[name]

    def _keep_running(self, request: protocol.Keep) -> None:
        self._keep = True

    def _close(self, request: protocol.Close) -> None:
        kill_all_with(self._token)
        self._opened.remove_key()
        if request.remove:
            self._opened.remove()
        self._keep = True

    def _stop_all(self) -> None:
        """Stop everything in order: the connection is gone, so nobody else will."""
        running = [p for p in self._processes.values() if not p.state.ended]
        for order in sorted({p.state.stop_order for p in running}, reverse=True):
            group = [p for p in running if p.state.stop_order == order]
            for process in group:
                process.send(signal.SIGTERM)
            _wait_ended(group, GRACE_SECONDS)
            for process in group:
                process.send(signal.SIGKILL)
            _wait_ended(group, _KILL_SECONDS)
        kill_all_with(self._token)
        if self._run is not None:
            with contextlib.suppress(OSError):
                self._run.remove_key()


def _wait_ended(processes: list[AgentProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        while process.handle is not None and time.monotonic() < deadline:
            if process.handle.ended:
                process.end()
            else:
                time.sleep(0.02)


def fetch(request: protocol.FetchUrl) -> protocol.Fetched:
    """Ask a server that this host reaches. Raises OSError or SetupError if there is no answer."""
    # No proxy from the environment: it has no business between processes of a deployment.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if request.url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=_tls_context(request)))
    opener = urllib.request.build_opener(*handlers)
    headers = {"Content-Type": "application/json"} if request.body is not None else {}
    asked = urllib.request.Request(
        request.url, request.body, headers | request.headers, method=request.method
    )
    try:
        with opener.open(asked, timeout=request.timeout) as answer:
            return protocol.Fetched(answer.status, answer.read(protocol.MAX_BODY_BYTES))
    except urllib.error.HTTPError as error:
        return protocol.Fetched(error.code, error.read(protocol.MAX_BODY_BYTES))
    except urllib.error.URLError as error:
        raise SetupError(f"cannot reach {request.url}: {error.reason}") from error
    except http.client.HTTPException as error:
        raise SetupError(f"{request.url} does not speak HTTP: {error!r}") from error
    except ValueError:
        # Its text has the header's value, which may be a key.
        raise SetupError(
            f"cannot ask {request.url}: a header, such as that with the key, has a line break or "
            "another character that HTTP does not allow"
        ) from None


def _tls_context(request: protocol.FetchUrl) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not request.verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    elif request.authorities:
        context.load_verify_locations(request.authorities)
    else:
        context.load_default_certs()
    return context


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def main() -> None:
    """Serve the deployment at the other end of standard input and output."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGHUP, _terminate)
    Agent(sys.stdin.fileno(), sys.stdout.fileno()).serve()


if __name__ == "__main__":
    main()
