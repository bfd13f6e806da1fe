"""Load processes, here and on other hosts: one schedule, one start, one list of records.

Session *i* goes to process *i* mod N. We choose a start in the near future. For another host we
translate it by the offset of that host's clock. Every question about the time bounds that offset,
and we intersect the bounds of many.
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
# Questions about a clock: at least so many, and more while the error exceeds what we aim at. The
# pause spreads them, because what delays one delays the next, too.
_MIN_CLOCK_QUESTIONS, _MAX_CLOCK_QUESTIONS = 20, 200
_GOOD_CLOCK_ERROR, _CLOCK_PAUSE_SECONDS = 0.001, 0.01
_WATCH_SECONDS = 1.0
# After the end of a run we give up on processes after so long a silence.
_STOP_SECONDS = 30.0
# A login shell may print some lines before a load process does.
_MAX_NOISE_LINES = 200


@dataclass
class Run:
    """Records and facts from the load processes after a run.

    Attributes:
        start_time: Unix time of the start.
        loads: facts of each process about itself.
        clock_errors: possible error of the clock's offset in seconds, by process on another host.
        interrupted: whether the run ended early, because of the user or of a failure.
        failure: error that ended the run: of ``watch``, or of a load process that ended or could
            not go on.
        silent: load processes whose last records are missing.
        warm_up_error: first error of a warm-up request.
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
    """All load processes of a run. As a context manager it ends them."""

    def __init__(self, client: LoadClient) -> None:
        self._inbox: queue.Queue[tuple[LoadProcess, dict[str, Any] | None]] = queue.Queue()
        self._all: list[LoadProcess] = []
        self._watch = client.watch
        # Names of processes that ended too early.
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

        A KeyboardInterrupt ends the run and keeps the records so far; a second one is raised. After
        the start, an error of ``watch`` or of a load process also ends the run; the run notes it.
        """
        run = Run()
        self._send_plans(plan, sessions, warm_up, run)
        offsets = {process.name: self._measure_clock(process, run) for process in self._all}
        run.start_time = time.time() + START_IN_SECONDS
        for process in self._all:
            process.send_message(start=run.start_time + offsets[process.name])
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

    def _send_plans(
        self, plan: Plan, sessions: Sequence[Session], warm_up: Sequence[Session], run: Run
    ) -> None:
        count = len(self._all)
        for process in self._all:
            version = self._read_version(process)
            if version != __version__:
                raise SetupError(
                    f"load process {process.name} has pd {version}, this command {__version__}; "
                    "install the same version on all hosts"
                )
        for number, process in enumerate(self._all):
            limit = plan.max_concurrency
            if limit is not None:
                # Shares differ by one place at most, and each process has one.
                limit = max(1, limit // count + (number < limit % count))
            mine = dataclasses.replace(plan, process=process.name, max_concurrency=limit)
            process.send_message(plan=dataclasses.asdict(mine))
            for kind, some in (("session", sessions), ("warm_up", warm_up)):
                for session in some[number::count]:
                    process.send_message(**{kind: session.to_json()})
            process.send_message(prepare=True)
        for process in self._all:
            ready = self._read_message_of(process)
            if "ready" not in ready:
                raise SetupError(f"load process {process.name} says {ready}")
            run.warm_up_error = run.warm_up_error or ready.get("warm_up_error")

    def _measure_clock(self, process: LoadProcess, run: Run) -> float:
        """Return the seconds by which the clock of a process is ahead of ours.

        A process reads its clock after we ask and before its answer is here. So the fastest way
        there bounds the offset from above, and the fastest way back, perhaps of another question,
        bounds it from below.
        """
        if process.place.shares_clock:
            return 0.0
        least, most = float("-inf"), float("inf")
        for number in range(_MAX_CLOCK_QUESTIONS):
            if number >= _MIN_CLOCK_QUESTIONS:
                if most - least < 2 * _GOOD_CLOCK_ERROR:
                    break
                time.sleep(_CLOCK_PAUSE_SECONDS)
            asked = time.time()
            process.send_message(clock=True)
            there, answered = float(self._read_message_of(process)["now"]), time.time()
            least, most = max(least, there - answered), min(most, there - asked)
        # Below zero if the clocks drifted apart meanwhile, by more than the ways took.
        run.clock_errors[process.name] = abs(most - least) / 2
        return (least + most) / 2

    def _read_version(self, process: LoadProcess) -> str:
        """Read the version of pd, which a process says first."""
        for _ in range(_MAX_NOISE_LINES):
            message = self._read_message_of(process)
            if "garbage" not in message:
                return str(message.get("version"))
        raise SetupError(f"load process {process.name} says {message['garbage']!r}")

    def _read_message_of(self, process: LoadProcess) -> dict[str, Any]:
        """Read the next message of a process; keep messages of others in their order."""
        kept: list[tuple[LoadProcess, dict[str, Any] | None]] = []
        while True:
            sender, message = self._read_message()
            if sender is process:
                for each in kept:
                    self._inbox.put(each)
                if message is None:
                    raise process.make_end_error()
                return message
            kept.append((sender, message))

    def _read_message(self) -> tuple[LoadProcess, dict[str, Any] | None]:
        """Wait for a message. Raises errors of the client's ``watch``."""
        while True:
            try:
                return self._inbox.get(timeout=_WATCH_SECONDS)
            except queue.Empty:
                self._watch()

    def _collect(self, run: Run, show: Callable[[dict[str, float]], None]) -> None:
        """Collect messages until every process has sent its last one, its :class:`ProcessLoad`."""
        progress: dict[str, dict[str, float]] = {}
        while waiting := self._waiting_for(run):
            process, message = self._read_message()
            if message is None:
                if process.name in waiting:
                    self._gone.add(process.name)
                    raise process.make_end_error()
            elif "progress" in message:
                self._watch()
                progress[process.name] = message["progress"]
                names = message["progress"]
                show({name: sum(each[name] for each in progress.values()) for name in names})
            else:
                _keep_message(run, process, message)
                failure = message.get("load", {}).get("failure")
                if failure is not None:
                    raise SetupError(f"load process {process.name} ended the run: {failure}")

    def _collect_rest(self, run: Run) -> None:
        """Stop the live processes, and collect their records."""
        for process in self._all:
            # A dead process closes its output as well, so we learn of it there.
            with contextlib.suppress(SetupError):
                process.send_message(stop=True)
        deadline = time.monotonic() + _STOP_SECONDS
        while waiting := self._waiting_for(run):
            try:
                process, message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                # A host that hangs must not cost us the records of the others.
                run.silent = waiting
                return
            if message is None:
                if process.name in waiting:
                    self._gone.add(process.name)
            else:
                if "record" in message:
                    deadline = time.monotonic() + _STOP_SECONDS
                _keep_message(run, process, message)

    def _waiting_for(self, run: Run) -> list[str]:
        """List the processes that have neither sent everything nor ended."""
        done = self._gone | {load.process for load in run.loads}
        return [process.name for process in self._all if process.name not in done]


def _keep_message(run: Run, process: LoadProcess, message: dict[str, Any]) -> None:
    """Keep a record, or the last message of a process."""
    if "record" in message:
        run.records.append(Record(**message["record"]))
    elif "load" in message:
        run.loads.append(ProcessLoad(**{**message["load"], "process": process.name}))
