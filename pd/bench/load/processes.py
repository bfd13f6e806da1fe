"""Load processes, here and on other hosts: one schedule, one start, one list of records.

Session *i* goes to process *i* mod N. The start is a point in time that lies ahead when it is told;
on another host it is translated by the offset of that host's clock, which is measured as NTP does,
from the answer that came back soonest.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd import __version__
from pd.bench.load.client_load import ProcessLoad
from pd.bench.load.records import Record
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.bench.load.plan import Plan
    from pd.bench.load.workload import Session

START_IN_SECONDS = 0.5
_CLOCK_QUESTIONS = 20
LOCAL_COMMAND = (sys.executable, "-m", "pd.bench.load.worker")


@dataclass
class Run:
    """What the load processes found.

    Attributes:
        start_time: Unix time of the start.
        loads: what each process says about itself.
        clock_errors: by process on another host, how wrong its clock's offset may be, in seconds.
        interrupted: whether the user ended the run.
        warm_up_error: first error that a warm-up request met.
    """

    start_time: float = 0.0
    records: list[Record] = field(default_factory=list)
    loads: list[ProcessLoad] = field(default_factory=list)
    clock_errors: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False
    warm_up_error: str | None = None


class LoadProcess:
    """One load process and the thread that reads what it says."""

    def __init__(self, name: str, command: Sequence[str], inbox: queue.Queue[Any]) -> None:
        self.name = name
        self._inbox = inbox
        try:
            # A session of its own: Ctrl-C in the terminal is for the harness alone.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise SetupError(f"cannot start a load process by {command[0]}: {error}") from None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                message = {"garbage": line[:120].decode(errors="replace")}
            self._inbox.put((self, message))
        self._inbox.put((self, None))

    def send(self, **message: Any) -> None:
        """Raises SetupError if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise SetupError(f"load process {self.name} ended; see its output above") from None

    def close(self) -> None:
        """End the process if it has not ended by itself."""
        self._process.kill()
        self._process.wait()


class LoadProcesses:
    """All load processes of a run; a context that ends them."""

    def __init__(self, processes: int, hosts: Sequence[str], remote_command: str) -> None:
        """``hosts``: where they run, ``processes`` on each; none: on this one.

        ``remote_command`` has ``{host}`` where the host's name goes.
        """
        self._inbox: queue.Queue[Any] = queue.Queue()
        self._all: list[LoadProcess] = []
        self._is_remote = bool(hosts)
        try:
            for host in hosts or ("local",):
                command: Sequence[str] = LOCAL_COMMAND
                if hosts:
                    command = shlex.split(remote_command.replace("{host}", shlex.quote(host)))
                for number in range(processes):
                    self._all.append(LoadProcess(f"{host}/{number}", command, self._inbox))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LoadProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._all:
            process.close()

    def run(
        self,
        plan: Plan,
        sessions: Sequence[Session],
        warm_up: Sequence[Session],
        show: Callable[[dict[str, float]], None],
    ) -> Run:
        """Run all sessions. ``show`` gets the sums of progress about once a second.

        A KeyboardInterrupt ends the run with what there is; a second one is raised.
        """
        run = Run()
        self._prepare(plan, sessions, warm_up, run)
        offsets = {process.name: self._clock_offset(process, run) for process in self._all}
        run.start_time = time.time() + START_IN_SECONDS
        for process in self._all:
            process.send(start=run.start_time + offsets[process.name])
        try:
            self._collect(run, show)
        except KeyboardInterrupt:
            run.interrupted = True
            for process in self._all:
                process.send(stop=True)
            self._collect(run, show)
        run.records.sort(key=lambda record: (record.sent, record.session, record.turn))
        return run

    def _prepare(
        self, plan: Plan, sessions: Sequence[Session], warm_up: Sequence[Session], run: Run
    ) -> None:
        count = len(self._all)
        for process in self._all:
            version = self._next(process).get("version")
            if version != __version__:
                raise SetupError(f"{process.name} has pd {version}, here is {__version__}")
        for number, process in enumerate(self._all):
            limit = _share(plan.max_concurrency, number, count)
            mine = dataclasses.replace(plan, process=process.name, max_concurrency=limit)
            process.send(plan=mine.to_json())
            for kind, some in (("session", sessions), ("warm_up", warm_up)):
                for session in some[number::count]:
                    process.send(**{kind: session.to_json()})
            process.send(prepare=True)
        for process in self._all:
            ready = self._next(process)
            if "ready" not in ready:
                raise SetupError(f"load process {process.name} said {ready}")
            run.warm_up_error = run.warm_up_error or ready.get("warm_up_error")

    def _clock_offset(self, process: LoadProcess, run: Run) -> float:
        """Seconds by which the clock of a process is ahead of ours."""
        if not self._is_remote:
            return 0.0
        best, offset = float("inf"), 0.0
        for _ in range(_CLOCK_QUESTIONS):
            asked = time.time()
            process.send(clock=True)
            there, answered = float(self._next(process)["now"]), time.time()
            if answered - asked < best:
                best, offset = answered - asked, there - (asked + answered) / 2
        run.clock_errors[process.name] = best / 2
        return offset

    def _next(self, process: LoadProcess) -> dict[str, Any]:
        """The next message of a process while no other has anything to say."""
        kept: list[tuple[LoadProcess, dict[str, Any] | None]] = []
        while True:
            sender, message = self._inbox.get()
            if sender is process:
                for each in kept:
                    self._inbox.put(each)
                if message is None or "garbage" in message:
                    raise SetupError(f"load process {process.name} ended: {message}")
                found: dict[str, Any] = message
                return found
            kept.append((sender, message))

    def _collect(self, run: Run, show: Callable[[dict[str, float]], None]) -> None:
        """Take in messages until every process has said how busy it was."""
        progress: dict[str, dict[str, float]] = {}
        while len(run.loads) < len(self._all):
            process, message = self._inbox.get()
            if message is None:
                if process.name not in {load.process for load in run.loads}:
                    raise SetupError(f"load process {process.name} ended before its run")
            elif "progress" in message:
                progress[process.name] = message["progress"]
                show(_sums(progress))
            elif "record" in message:
                run.records.append(Record(**message["record"]))
            elif "load" in message:
                facts = {**message["load"], "process": process.name}
                run.loads.append(ProcessLoad(**facts))


def _share(total: int | None, number: int, count: int) -> int | None:
    """Places of process ``number`` of ``count``; at least 1."""
    return None if total is None else max(1, total // count + (number < total % count))


def _sums(progress: dict[str, dict[str, float]]) -> dict[str, float]:
    names = next(iter(progress.values()))
    return {name: sum(each[name] for each in progress.values()) for name in names}
