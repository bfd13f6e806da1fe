"""Requests at a steady pace; every second one of them is aborted or a node is killed.

:func:`check_churn` is the whole test. :func:`run_churn` only measures (``benchmarks/churn.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import httpx
from cluster import Cluster
from processes import Stream, deployment, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from backends import Backend
    from processes import Deployment, Process

PER_SECOND = 12.0
CLIENTS = 12
EVENTS_PER_KILL = 7
END_WITHIN = 60.0
CASES = 60
# So many that each pair of a prefill and a decode node has served several.
WARM_UP = 16


@dataclass
class Case:
    """A prompt, its parameters, and the tokens that one unified node gave for them."""

    prompt: list[int]
    length: int
    seed: int | None
    expected: list[int] = field(default_factory=list)

    @property
    def body(self) -> dict[str, Any]:
        params: dict[str, Any] = {"max_new_tokens": self.length, "ignore_eos": True}
        drawn = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": self.seed}
        return {"sampling_params": params | ({"temperature": 0} if self.seed is None else drawn)}


def make_cases(model: Path, rng: random.Random) -> list[Case]:
    """Greedy and seeded, short and long, some with a common prefix."""

    def text(low: int, high: int) -> list[int]:
        return [rng.randrange(256) for _ in range(rng.randrange(low, high))]

    shared = [text(20, 200) for _ in range(4)]
    cases = []
    for number in range(CASES):
        prompt = rng.choice(shared) + text(1, 60) if rng.random() < 0.5 else text(1, 900)
        seed = None if number % 2 else rng.randrange(1 << 30)
        cases.append(Case(prompt, rng.randrange(2, 120), seed))
    with Cluster(model, prefill=0, decode=0, unified=1) as cluster:
        asked = []
        for case in cases:
            params: dict[str, Any] = {"max_tokens": case.length}
            if case.seed is not None:
                params |= {"temperature": 0.9, "top_p": 0.95, "seed": case.seed}
            asked.append(cluster.client.generate(case.prompt, cluster.unified, **params))
        for case, request in zip(cases, asked, strict=True):
            case.expected = request.tokens()
    return cases


@dataclass
class Sent:
    """One request of the run."""

    rid: str
    case: Case
    began: float
    stream: Stream
    hung_up: bool = False
    aborted: bool = False


class Churn:
    """``run`` returns when every request has ended; :meth:`faults` judges them."""

    def __init__(
        self,
        running: Deployment,
        cases: list[Case],
        seed: int,
        events_per_kill: int,
        per_second: float,
    ) -> None:
        self._running, self._cases = running, cases
        self._per_second = per_second
        self._events_per_kill = events_per_kill
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._live: dict[str, Sent] = {}
        self._over = threading.Event()
        self._recovery: Future[None] | None = None
        self.sent: list[Sent] = []
        self.events = 0
        # When a node was killed, and when all could serve again.
        self.outages: list[list[float]] = []
        # Of nodes that ended though nobody killed them.
        self.deaths: list[str] = []

    # ---- requests

    def run(self, requests: int) -> None:
        order = [self._rng.choice(self._cases) for _ in range(requests)]
        begin = time.monotonic()
        with ThreadPoolExecutor(2) as self._others:
            upsets = self._others.submit(self._upset_every_second)
            with ThreadPoolExecutor(CLIENTS) as clients:
                for number, case in enumerate(order):
                    clients.submit(self._request, number, case, begin + number / self._per_second)
            self._over.set()
            upsets.result()  # before the pool ends: it may be about to restart a node
        if self._recovery is not None:
            self._recovery.result()

    def _request(self, number: int, case: Case, at: float) -> None:
        time.sleep(max(0.0, at - time.monotonic()))
        rid = f"churn-{number}"
        began = time.monotonic()
        stream = Stream(self._running.proxy.url, case.prompt, case.length, rid=rid, **case.body)
        sent = Sent(rid, case, began, stream)
        with self._lock:
            self.sent.append(sent)
            self._live[rid] = sent
        # One that never ends is found by faults().
        with contextlib.suppress(AssertionError):
            stream.join(END_WITHIN)
        with self._lock:
            del self._live[rid]

    # ---- what happens to them

    def _upset_every_second(self) -> None:
        is_due = False
        for event in itertools.count():
            if event % self._events_per_kill == 0:
                kill_at = event + self._rng.randrange(self._events_per_kill)
            if self._over.wait(1.0):
                return
            self.events += 1
            recovered = self._recovered()
            is_due = is_due or event == kill_at
            if is_due and recovered:
                is_due = False
                self._kill()
            else:
                self._abort()

    def _recovered(self) -> bool:
        """Whether all nodes run. Raises what went wrong when one was started again."""
        if self._recovery is not None:
            if not self._recovery.done():
                return False
            self._recovery.result()
        ended = [node for node in self._running.nodes if node.child.poll() is not None]
        self.deaths += [f"{node.log.stem} ended with {node.child.returncode}" for node in ended]
        return not ended

    def _abort(self) -> None:
        live: list[Sent] = []
        while not live and not self._over.wait(0.01):
            with self._lock:
                live = list(self._live.values())
        if not live:
            return
        sent = self._rng.choice(live)
        way = self._rng.choice(("disconnect", "abort", "both"))
        if way != "disconnect":
            sent.aborted = True
            url = f"{self._running.proxy.url}/abort_request"
            # 404: it ended, or has not reached the proxy yet.
            status = httpx.post(url, json={"rid": sent.rid}, timeout=10).status_code
            assert status in (200, 404), status
        if way != "abort":
            sent.hung_up = True
            sent.stream.hang_up()

    def _kill(self) -> None:
        victim = self._rng.choice(self._running.nodes)
        self.outages.append([time.monotonic(), float("inf")])
        victim.kill()
        self._recovery = self._others.submit(self._recover, victim)

    def _recover(self, victim: Process) -> None:
        victim.restart()
        self._running.wait_ready()
        self.outages[-1][1] = time.monotonic()

    # ---- judgement

    def faults(self) -> list[str]:
        """What went wrong that no abort and no kill explains, one line each."""
        found = [(sent, self._fault(sent)) for sent in self.sent]
        wrong = [(sent, what) for sent, what in found if what]
        lines = [f"{s.rid} ({len(s.case.prompt)} tokens): {what}; {s.stream}" for s, what in wrong]
        return list(dict.fromkeys(self.deaths)) + lines

    def _fault(self, sent: Sent) -> str | None:
        stream, expected = sent.stream, sent.case.expected
        if stream.ended_at is None:
            return f"did not end within {END_WITHIN} s"
        if stream.output != expected[: len(stream.output)]:
            return f"wrong tokens: {stream.output} instead of {expected}"
        if sent.hung_up:
            return None
        if stream.error is not None:
            return self._wrong_error(sent, stream.error)
        if not stream.done:
            return "ended as if it had succeeded"
        if stream.finish == "abort":
            return None if sent.aborted else "was aborted, but by nobody"
        return None if len(stream.output) == len(expected) else "is short"

    def _wrong_error(self, sent: Sent, error: dict[str, Any]) -> str | None:
        assert sent.stream.ended_at is not None
        kinds = {"node_failed_error": 502, "service_unavailable_error": 503}
        kind = error.get("type", "")
        if kind not in kinds or not error.get("message"):
            return "failed without a proper error"
        if sent.stream.status not in (200, kinds[kind]):
            return f"has status {sent.stream.status} for {kind}"
        if any(b <= sent.stream.ended_at and sent.began <= e for b, e in self.outages):
            return None
        return "failed although every node lived"

    def summary(self) -> dict[str, Any]:
        """Requests by outcome, kills, and seconds until all nodes could serve again."""
        outcomes = {"right": 0, "aborted": 0, "failed": 0}
        for sent in self.sent:
            if sent.stream.succeeded_as(sent.case.expected):
                outcomes["right"] += 1
            elif sent.hung_up or sent.aborted:
                outcomes["aborted"] += 1
            else:
                outcomes["failed"] += 1
        outages = [end - begin for begin, end in self.outages] or [0.0]
        happened = {"events": self.events, "kills": len(self.outages)}
        return (
            outcomes
            | happened
            | {"outage_p50_s": round(median(outages), 2), "outage_max_s": round(max(outages), 2)}
        )


@dataclass
class Footprint:
    """What a process holds of the machine's; ``resident`` in bytes."""

    descriptors: int
    threads: int
    resident: int

    @classmethod
    def of(cls, process: Process) -> Footprint:
        proc = Path("/proc", str(process.child.pid))
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        resident = int(status["VmRSS"].split()[0]) * 1024
        return cls(len(os.listdir(proc / "fd")), int(status["Threads"]), resident)

    def has_grown_from(self, before: Footprint, keeps: tuple[int, int]) -> bool:
        """Beyond what other requests, new connections and the library's habits explain."""
        return (
            self.descriptors > before.descriptors + 16 + keeps[0]
            or self.threads > before.threads + 8 + keeps[1]
            or self.resident > before.resident * 1.3 + (64 << 20)
        )


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        summary: see :meth:`Churn.summary`.
        faults: what went wrong that no abort and no kill explains, one line each.
        grown: processes that hold more than before, and what each held.
    """

    summary: dict[str, Any]
    faults: list[str]
    grown: dict[str, tuple[Footprint, Footprint]]


def check_churn(
    model: Path,
    logs: Path,
    cases: list[Case],
    backend: Backend,
    requests: int,
    seed: int,
    *,
    devices: Sequence[str] = ("auto",),
    node_flags: Sequence[str] = (),
    events_per_kill: int = EVENTS_PER_KILL,
    per_second: float = PER_SECOND,
) -> None:
    """2P2D while requests are aborted and nodes killed: no wrong token, and nothing left behind."""
    print(f"PD_TEST_SEED={seed}: {requests} requests over {backend} on {', '.join(devices)}")
    outcome = run_churn(
        *(model, logs, cases, backend, requests, seed),
        devices=devices,
        node_flags=node_flags,
        events_per_kill=events_per_kill,
        per_second=per_second,
    )
    summary = outcome.summary
    print(summary)
    assert not outcome.faults, "\n".join(map(str, [summary, *outcome.faults]))
    assert summary["right"] > requests // 2, summary
    assert summary["kills"] > 0, summary
    assert not outcome.grown


def run_churn(
    model: Path,
    logs: Path,
    cases: list[Case],
    backend: Backend,
    requests: int,
    seed: int,
    *,
    devices: Sequence[str],
    node_flags: Sequence[str],
    events_per_kill: int = EVENTS_PER_KILL,
    per_second: float = PER_SECOND,
) -> Outcome:
    """Run 2P2D, and look at what is left once all requests have ended.

    Args:
        events_per_kill: one of so many events is a kill, or the first after it when all nodes run
            again; the others are aborts.
        per_second: requests that are sent.

    Raises AssertionError if nodes do not serve, or do not come to rest.
    """
    with deployment(
        model,
        logs,
        prefill=2,
        decode=2,
        devices=devices,
        node_flags=["--transfer-backend", backend.flag, *node_flags],
        proxy_flags=["--policy", "round_robin", "--failover", "off"],
        env=backend.env,
    ) as running:
        _calm_round(running, cases)
        before = _footprints(running)
        churn = Churn(running, cases, seed, events_per_kill, per_second)
        churn.run(requests)
        faults = churn.faults()
        # What went wrong says more than the nodes after it.
        if not faults:
            _calm_round(running, cases)
            running.wait_idle(60)
            wait_until(lambda: _proxy_is_idle(running), 10)
        after = _footprints(running)
        grown = {
            name: (before[name], now)
            for name, now in after.items()
            if now.has_grown_from(before[name], backend.keeps)
        }
        return Outcome(churn.summary(), faults, grown)


def _calm_round(running: Deployment, cases: list[Case]) -> None:
    """All succeed, one after the other."""
    for case in cases[:WARM_UP]:
        stream = running.stream(case.prompt, case.length, **case.body).join(60)
        assert stream.succeeded_as(case.expected), (stream, stream.output, case.expected)


def _footprints(running: Deployment) -> dict[str, Footprint]:
    return {p.log.stem: Footprint.of(p) for p in (running.proxy, *running.nodes)}


def _proxy_is_idle(running: Deployment) -> bool:
    """As the proxy sees it, a heartbeat later than the nodes."""
    workers = httpx.get(f"{running.proxy.url}/workers").json()["workers"]
    return all(w["running"] == w["queued_tokens"] == 0 for w in workers)
