"""Load processes, here and on other hosts: one schedule, one start, one list of records.

Session *i* goes to process *i* mod N. The start is a point in time that lies ahead when it is told;
on another host it is translated by the offset of that host's clock, which is measured as NTP does,
from the answer that came back soonest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd import __version__
from pd.bench.load.client_load import ProcessLoad
from pd.bench.load.load_process import LoadProcess
from pd.bench.load.records import Record
from pd.core.errors import PDError, SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.bench.load.client import LoadClient
    from pd.bench.load.plan import Plan
    from pd.bench.load.workload import Session

START_IN_SECONDS = 0.5
_CLOCK_QUESTIONS = 20
_WATCH_SECONDS = 1.0
# After the end of a run, processes that send no record for so long are left out.
_STOP_SECONDS = 30.0
# What a login shell may print before a load process speaks.
_MAX_NOISE_LINES = 200


@dataclass
class Run:
    """Records and facts that the load processes sent after a run.

    Attributes:
        start_time: Unix time of the start.
        loads: what each process says about itself.
        clock_errors: by process on another host, how wrong its clock's offset may be, in seconds.
        interrupted: whether the run was ended before its time: by the user, or by a failure.
        failure: error of ``watch``, or of a load process that ended or could not go on, which ended
            the run.
        silent: load processes that did not send all their records after the end of the run.
        warm_up_error: first error that a warm-up request met.
    """

    start_time: float = 0.0
    records: list[Record] = field(default_factory=list)
    loads: list[ProcessLoad] = field(default_factory=list)
    clock_errors: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False
    failure: PDError | None = None
    silent: list[str] = field(default_factory=list)
    warm_up_error: str | None = None


class LoadProcesses:
    """All load processes of a run; a context that ends them."""

    def __init__(self, client: LoadClient) -> None:
        self._inbox: queue.Queue[tuple[LoadProcess, dict[str, Any] | None]] = queue.Queue()
        self._all: list[LoadProcess] = []
        self._watch = client.watch
        # Names of processes that ended before they had sent everything.
        self._gone: set[str] = set()
        try:
            for place in client.places:
                self._all.append(LoadProcess(place, self._inbox))
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

        A KeyboardInterrupt ends the run with what there is; a second one is raised. So does an
        error of ``watch`` after the start, or a load process that ends or cannot go on: it is noted
        in the run.
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
            self._collect_rest(run)
        except PDError as error:
            run.interrupted, run.failure = True, error
            self._collect_rest(run)
        run.records.sort(key=lambda record: (record.sent, record.session, record.turn))
        return run

    def _prepare(
        self, plan: Plan, sessions: Sequence[Session], warm_up: Sequence[Session], run: Run
    ) -> None:
        count = len(self._all)
        for process in self._all:
            version = self._version(process)
            if version != __version__:
                raise SetupError(
                    f"load process {process.name} has pd {version}, this command {__version__}; "
                    "install the same version on all hosts"
                )
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
                raise SetupError(f"load process {process.name} says {ready}")
            run.warm_up_error = run.warm_up_error or ready.get("warm_up_error")

    def _clock_offset(self, process: LoadProcess, run: Run) -> float:
        """Seconds by which the clock of a process is ahead of ours."""
        if process.place.shares_clock:
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

    def _version(self, process: LoadProcess) -> str:
        """The version of pd that a process says first."""
        for _ in range(_MAX_NOISE_LINES):
            message = self._next(process)
            if "garbage" not in message:
                return str(message.get("version"))
        raise SetupError(f"load process {process.name} says {message['garbage']!r}")

    def _next(self, process: LoadProcess) -> dict[str, Any]:
        """The next message of a process; those of others stay in their order."""
        kept: list[tuple[LoadProcess, dict[str, Any] | None]] = []
        while True:
            sender, message = self._receive()
            if sender is process:
                for each in kept:
                    self._inbox.put(each)
                if message is None:
                    raise process.ended()
                return message
            kept.append((sender, message))

    def _receive(self) -> tuple[LoadProcess, dict[str, Any] | None]:
        """Wait for a message. Raises what ``watch`` of the client does."""
        while True:
            try:
                return self._inbox.get(timeout=_WATCH_SECONDS)
            except queue.Empty:
                self._watch()

    def _collect(self, run: Run, show: Callable[[dict[str, float]], None]) -> None:
        """Take in messages until every process has sent its last one, its :class:`ProcessLoad`."""
        progress: dict[str, dict[str, float]] = {}
        while waiting := self._waiting_for(run):
            process, message = self._receive()
            if message is None:
                if process.name in waiting:
                    self._gone.add(process.name)
                    raise process.ended()
            elif "progress" in message:
                self._watch()
                progress[process.name] = message["progress"]
                show(_sums(progress))
            else:
                _keep(run, process, message)
                failure = message.get("load", {}).get("failure")
                if failure is not None:
                    raise SetupError(f"load process {process.name} ended the run: {failure}")

    def _collect_rest(self, run: Run) -> None:
        """Stop the processes that are still there, and take in what they have."""
        for process in self._all:
            # One that has ended closes its output as well.
            with contextlib.suppress(SetupError):
                process.send(stop=True)
        deadline = time.monotonic() + _STOP_SECONDS
        while waiting := self._waiting_for(run):
            try:
                process, message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                # A host that hangs must not keep what the others have.
                run.silent = waiting
                return
            if message is None:
                if process.name in waiting:
                    self._gone.add(process.name)
            else:
                if "record" in message:
                    deadline = time.monotonic() + _STOP_SECONDS
                _keep(run, process, message)

    def _waiting_for(self, run: Run) -> list[str]:
        """Processes that have neither sent everything nor ended."""
        done = self._gone | {load.process for load in run.loads}
        return [process.name for process in self._all if process.name not in done]


def _keep(run: Run, process: LoadProcess, message: dict[str, Any]) -> None:
    """Keep a record, or the last message of a process."""
    if "record" in message:
        run.records.append(Record(**message["record"]))
    elif "load" in message:
        run.loads.append(ProcessLoad(**{**message["load"], "process": process.name}))


def _share(total: int | None, number: int, count: int) -> int | None:
    """Places of process ``number`` of ``count``; at least 1."""
    return None if total is None else max(1, total // count + (number < total % count))


def _sums(progress: dict[str, dict[str, float]]) -> dict[str, float]:
    names = next(iter(progress.values()))
    return {name: sum(each[name] for each in progress.values()) for name in names}
