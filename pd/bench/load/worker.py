"""A load process: ``python -m pd.bench.load.worker``, started by the harness, here or as an actor
of a deployment.

It speaks JSON lines over standard input and output:

======================  =========================================================
harness to worker       worker to harness
======================  =========================================================
``{"plan": …}``         ``{"version": …}`` at the start
``{"session": …}`` …
``{"warm_up": …}`` …
``{"prepare": true}``   ``{"ready": true, "warm_up_error": …}``
``{"clock": true}`` …   ``{"now": …}`` (Unix time)
``{"start": …}``        ``{"progress": …}`` once a second
``{"stop": true}``      ``{"record": …}`` …, then ``{"load": …}``
======================  =========================================================

The end of standard input stops the run as ``stop`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from pd import __version__
from pd.bench.load.plan import Plan
from pd.bench.load.runner import Runner
from pd.bench.load.stamped import unix_minus_counter
from pd.bench.load.workload import Session
from pd.util.descriptors import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROGRESS_SECONDS = 1.0
_PLANS = msgspec.json.Decoder(Plan)


def main() -> int:
    raise_file_limit()
    _send_message(version=__version__)
    messages = (json.loads(line) for line in sys.stdin.buffer)
    runner, warm_up = _read_plan(messages)
    if not asyncio.run(_run_schedule(runner, warm_up, messages)):
        return 1
    for record in runner.make_records():
        _send_message(record=record.to_json())
    _send_message(load=dataclasses.asdict(runner.load.describe_process("")))
    return 0


def _send_message(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _read_plan(messages: Iterator[dict[str, Any]]) -> tuple[Runner, list[Session]]:
    plan: Plan | None = None
    sessions: list[Session] = []
    warm_up: list[Session] = []
    for message in messages:
        if "plan" in message:
            plan = _PLANS.decode(json.dumps(message["plan"]))
        elif "session" in message:
            sessions.append(Session.from_json(message["session"]))
        elif "warm_up" in message:
            warm_up.append(Session.from_json(message["warm_up"]))
        elif "prepare" in message and plan is not None:
            return Runner(plan, sessions), warm_up
    raise SystemExit("the harness ended before it sent its whole plan")


async def _run_schedule(
    runner: Runner, warm_up: list[Session], messages: Iterator[dict[str, Any]]
) -> bool:
    """Warm up, agree on the start and run; return False if the harness left before."""
    _send_message(ready=True, warm_up_error=await runner.warm_up(warm_up))
    message: dict[str, Any] = {}
    for message in messages:
        if "clock" not in message:
            break
        _send_message(now=time.time())
    if "start" not in message:
        return False
    start = float(message["start"]) - unix_minus_counter()
    loop = asyncio.get_running_loop()

    def wait_for_stop() -> None:
        next(messages, None)
        # The loop is closed if the run has ended on its own.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(runner.stop)

    async def report_progress() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            _send_message(progress={**vars(runner.progress), "events": runner.events})

    threading.Thread(target=wait_for_stop, daemon=True).start()
    reporting = asyncio.create_task(report_progress())
    await runner.run(start)
    reporting.cancel()
    return True


if __name__ == "__main__":
    sys.exit(main())
