"""What a run keeps when it is ended, whatever its load processes do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from pd import __version__
from pd.bench.load import measure, processes
from pd.bench.load.client import LoadClient
from pd.bench.load.client_checks import ClientLimits, client_complaints, client_facts
from pd.bench.load.endpoints import Options, Sampling
from pd.bench.load.load_process import LoadPlace
from pd.bench.load.plan import Plan
from pd.bench.load.processes import LoadProcesses, Run
from pd.bench.load.target import EndpointAddress
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.errors import PDError

# Speaks as a worker does until it is stopped or has its failure, and then sends records at
# intervals, or hangs.
WORKER = f"""
import json, sys, time
records, interval, failure = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] or None

def send(**message):
    print(json.dumps(message), flush=True)

send(version={__version__!r})
for line in sys.stdin:
    message = json.loads(line)
    if "prepare" in message:
        send(ready=True, warm_up_error=None)
    if "start" in message:
        send(progress=dict(sent=0))
        if failure:
            break
    if "stop" in message:
        break
for number in range(records):
    time.sleep(interval)
    send(record=dict(session=number))
if not records:
    time.sleep(600)
load = dict(process="", cpu_share=0, waiting_share=0, loop_lag_p99=0, loop_lag_max=0)
send(load=dict(load, failure=failure))
"""


def place(name: str, records: int, failure: str = "") -> LoadPlace:
    return LoadPlace(name, (sys.executable, "-c", WORKER, str(records), "0.4", failure))


def ctrl_c(progress: dict[str, float]) -> None:
    raise KeyboardInterrupt


def run_of(*places: LoadPlace, show: Callable[[dict[str, float]], None] = ctrl_c) -> Run:
    """A run that Ctrl-C ends as soon as there is progress, unless another ``show`` is given."""
    target = EndpointAddress("127.0.0.1", 9, False, "/")
    plan = Plan("", target, "/v1/completions", Sampling(), Options(), None, 5.0, "bench-x")
    with LoadProcesses(LoadClient(places)) as running:
        return running.run(plan, [], [], show)


def test_a_process_that_hangs_costs_its_own_records_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one may take longer for all of its records than for each."""
    monkeypatch.setattr(processes, "_STOP_SECONDS", 2.0)
    run = run_of(place("far/0", 0), place("near/0", 7))
    assert run.interrupted
    assert [record.session for record in run.records] == list(range(7))
    assert (run.silent, [load.process for load in run.loads]) == (["far/0"], ["near/0"])


def test_a_process_that_cannot_go_on_ends_the_run_and_makes_it_void() -> None:
    """The other one would go on for ever."""
    full = place("full/0", 2, "answers cannot be kept in /tmp: No space left on device")
    run = run_of(full, place("near/0", 3), show=lambda _: None)
    assert len(run.records) == 5
    assert {load.process for load in run.loads} == {"full/0", "near/0"}
    assert (run.interrupted, run.silent) == (True, [])
    why = "load process full/0 ended the run: answers cannot be kept in /tmp: No space left on"
    assert run.failure is not None
    assert run.failure.message.startswith(why)
    (complaint,) = client_complaints(client_facts(run), ClientLimits())
    assert complaint.startswith(why)


def test_a_process_that_was_killed_is_named_with_the_signal() -> None:
    with pytest.raises(SetupError, match="load process near/0 was killed by SIGKILL"):
        run_of(LoadPlace("near/0", ("sh", "-c", "kill -9 $$")))


@pytest.mark.parametrize(
    ("run", "status", "message"),
    [
        (Run(interrupted=True), 130, "the run ended before a request was sent"),
        (Run(interrupted=True, silent=["a/0"]), 1, "no records came from load process a/0"),
    ],
)
def test_without_a_record_the_error_says_why(run: Run, status: int, message: str) -> None:
    error: PDError = measure.make_no_records_error(run)
    assert (error.exit_status, error.message) == (status, message)
