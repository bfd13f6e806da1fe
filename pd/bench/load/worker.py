"""A load process: ``python -m pd.bench.load.worker``, started by the harness, here or by ssh.

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
import resource
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from pd import __version__
from pd.bench.load.clocks import unix_minus_counter
from pd.bench.load.plan import Plan
from pd.bench.load.runner import Runner
from pd.bench.load.workload import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROGRESS_SECONDS = 1.0


def main() -> int:
    _raise_file_limit()
    _send(version=__version__)
    messages = _messages()
    runner, warm_up = _prepare(messages)
    start = asyncio.run(_measure(runner, warm_up, messages))
    if start is None:
        return 1
    for record in runner.records():
        _send(record=record.to_json())
    _send(load=dataclasses.asdict(runner.load.facts("")))
    return 0


def _messages() -> Iterator[dict[str, Any]]:
    for line in sys.stdin.buffer:
        yield json.loads(line)


def _send(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _raise_file_limit() -> None:
    """Let as many connections be open as the system allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _prepare(messages: Iterator[dict[str, Any]]) -> tuple[Runner, list[Session]]:
    plan: Plan | None = None
    sessions: list[Session] = []
    warm_up: list[Session] = []
    for message in messages:
        if "plan" in message:
            plan = Plan.from_json(message["plan"])
        elif "session" in message:
            sessions.append(Session.from_json(message["session"]))
        elif "warm_up" in message:
            warm_up.append(Session.from_json(message["warm_up"]))
        elif "prepare" in message and plan is not None:
            return Runner(plan, sessions), warm_up
    raise SystemExit("the harness ended before it sent its whole plan")


async def _measure(
    runner: Runner, warm_up: list[Session], messages: Iterator[dict[str, Any]]
) -> float | None:
    """Warm up, agree on the start and run; None if the harness left before."""
    _send(ready=True, warm_up_error=await runner.warm_up(warm_up))
    start = _agreed_start(messages)
    if start is None:
        return None
    loop = asyncio.get_running_loop()
    threading.Thread(target=_wait_for_stop, args=(messages, loop, runner), daemon=True).start()
    reporting = asyncio.create_task(_report(runner))
    await runner.run(start)
    reporting.cancel()
    return start


def _agreed_start(messages: Iterator[dict[str, Any]]) -> float | None:
    """Wait for the agreed start, on ``time.perf_counter``; None if the harness has gone."""
    for message in messages:
        if "clock" in message:
            _send(now=time.time())
        elif "start" in message:
            return float(message["start"]) - unix_minus_counter()
        else:
            break
    return None


def _wait_for_stop(
    messages: Iterator[dict[str, Any]], loop: asyncio.AbstractEventLoop, runner: Runner
) -> None:
    next(messages, None)
    # The loop is closed if the run has ended by itself.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(runner.stop)


async def _report(runner: Runner) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        _send(progress={**vars(runner.progress), "events": runner.events})


if __name__ == "__main__":
    sys.exit(main())
