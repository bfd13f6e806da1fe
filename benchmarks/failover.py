"""Kill nodes under load, and measure the pauses of streams.

    python benchmarks/failover.py --output FILE

Two prefill nodes, two decode nodes and a proxy serve a small random model on this machine. Clients
stream answers continuously and compare each token with the answer of one undisturbed node. If a
request gets a 503 before its answer begins, its client repeats it, and it counts as `refused`.

- `kills`: a node is killed (SIGKILL) at intervals, but only while all are ready.
- `many kills`: the same, whether or not all are ready. Killed nodes restart at once.
- `restarts`: every node in turn gets SIGTERM and restarts when it has ended, five times over.
- `cut links` (as root): a prefill and a decode node are on another host, a network namespace, whose
  link is cut for ten seconds, again and again.

`answers` is the time of whole answers. `moved` counts answers that failed over, and `pause` is how
long these had no token, from the proxy's `failovers`. `prefill` is the time to token 1 of uncached
prompts as long as their texts, measured in the same deployment afterwards. The exit status is 1 if
an answer was wrong or failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e"), str(ROOT)]

import netns  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from cluster import Cluster  # noqa: E402
from failover_deployment import Answer  # noqa: E402
from failover_hosts import is_whole, two_hosts  # noqa: E402
from processes import LAUNCH, Deployment, deployment, is_idle, wait_until  # noqa: E402

from pd.bench.report import write_report  # noqa: E402
from pd.core.messages import HEARTBEAT_INTERVAL, LEASE_SECONDS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from processes import Process

CASES = 24
MAX_PROMPT, MIN_TOKENS, MAX_TOKENS = 400, 100, 500
MAX_FAILOVERS = {"kills": 2, "many kills": 20, "restarts": 2, "cut links": 2}
RESTARTS, CUTS, CUT_SECONDS = 5, 6, 10.0


@dataclass
class Case:
    """A request and the tokens that one node gave for it."""

    prompt: list[int]
    length: int
    seed: int
    expected: list[int] = field(default_factory=list)

    @property
    def body(self) -> dict[str, Any]:
        params = {"max_new_tokens": self.length, "ignore_eos": True, "sampling_seed": self.seed}
        return {"input_ids": self.prompt, "sampling_params": params}


def make_cases(model: Path, rng: random.Random) -> list[Case]:
    cases = [
        Case(
            [rng.randrange(256) for _ in range(rng.randrange(10, MAX_PROMPT))],
            rng.randrange(MIN_TOKENS, MAX_TOKENS),
            rng.randrange(1 << 30),
        )
        for _ in range(CASES)
    ]
    with Cluster(model, prefill=0, decode=0, unified=1) as cluster:
        for case in cases:
            params = {"max_tokens": case.length, "temperature": 1.0, "seed": case.seed}
            pending = cluster.client.generate(case.prompt, cluster.unified, **params)
            case.expected = pending.tokens()
    return cases


class Load:
    """Clients that stream one case after the other."""

    def __init__(self, url: str, cases: list[Case], clients: int, rng: random.Random) -> None:
        self._url, self._cases = url, cases
        self._order = itertools.cycle(rng.sample(range(CASES), CASES))
        self._lock, self._over = threading.Lock(), threading.Event()
        self.requests = self.wrong = self.refused = 0
        self.failed: list[str] = []
        self.seconds: list[float] = []
        # Length of text and pause of each failover.
        self.failovers: list[tuple[int, float]] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                case = self._cases[next(self._order)]
            began = time.monotonic()
            answer = Answer(self._url, case.body)
            answer.wait_over()
            self._judge(case, answer, time.monotonic() - began)

    def _judge(self, case: Case, answer: Answer, took: float) -> None:
        output = answer.output_ids.get(0, [])
        error = answer.error
        turned_away = isinstance(error, dict) and error["type"] == "service_unavailable_error"
        if turned_away and not output:
            with self._lock:
                self.refused += 1
            time.sleep(0.2)
            return
        with self._lock:
            self.requests += 1
            self.seconds.append(took)
            self.wrong += output != case.expected[: len(output)]
            if error is not None or not answer.done or len(output) != case.length:
                self.failed.append(f"{len(output)} of {case.length} tokens: {error}")
            for failover in answer.failovers:
                length = len(case.prompt) + failover["position"]
                self.failovers.append((length, failover["pause"]))


def kill(running: Deployment, seconds: float, every: float, rng: random.Random, ready: bool) -> int:
    """Kill a random node every so often; returns how often. ``ready``: only when all are."""
    end, kills = time.monotonic() + seconds, 0
    restarts: list[threading.Thread] = []

    def restart(node: Any) -> None:
        node.restart()

    while time.monotonic() < end:
        time.sleep(every)
        if ready:
            for thread in restarts:
                thread.join()
            running.wait_ready()
        alive = [node for node in running.nodes if node.child.poll() is None and node._ready]
        if not alive:
            continue
        victim = rng.choice(alive)
        victim.kill()
        kills += 1
        restarts.append(threading.Thread(target=restart, args=(victim,)))
        restarts[-1].start()
    for thread in restarts:
        thread.join()
    return kills


def restart_all(running: Deployment) -> int:
    """Have each node end and start again, one after the other."""
    for node in running.nodes * RESTARTS:
        node.child.terminate()
        node.child.wait(60)
        node.restart()
        running.wait_ready()
        time.sleep(1.0)
    return len(running.nodes) * RESTARTS


def cut_links(net: netns.Network, url: str) -> int:
    """Cut a host off from all others, again and again."""
    for _ in range(CUTS):
        net.cut(whole=True)
        time.sleep(CUT_SECONDS)
        net.restore()
        wait_until(lambda: is_whole(url), 60)
        time.sleep(3.0)
    return CUTS


def prefill_seconds(url: str, lengths: list[int], rng: random.Random) -> list[float]:
    """Time to the only token of prompts of these lengths, none of which is cached."""
    times = []
    for length in lengths:
        prompt = [rng.randrange(256) for _ in range(length)]
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        answer = Answer(url, body).join()
        times.append(float(answer.meta[0]["e2e_latency"]))
    return times


def measure(
    phase: str, model: Path, cases: list[Case], args: argparse.Namespace, rng: random.Random
) -> dict[str, object]:
    """Run one phase in its own deployment."""
    flags = ["--policy", "round_robin", "--max-failovers", str(MAX_FAILOVERS[phase])]
    # With many kills no two nodes may be ready for as long as several starts take.
    flags += ["--failover-wait", "300"]
    acts: dict[str, Callable[[Deployment], int]] = {
        "kills": lambda running: kill(running, args.seconds, 5.0, rng, ready=True),
        "many kills": lambda running: kill(running, args.seconds, 2.0, rng, ready=False),
        "restarts": restart_all,
    }
    logs = Path(tempfile.mkdtemp(prefix="pd-failover-"))
    if phase == "cut links":
        cut_off = ["prefill", "decode"]
        with (
            netns.network() as net,
            two_hosts(net, model, logs, cut_off, proxy_flags=flags) as (url, nodes),
            under_load(url, cases, args.clients, rng) as load,
        ):
            acted = cut_links(net, url)
            prefills = settle(url, load, nodes, rng)
    else:
        with (
            # In tests, too, nodes take as long to come back as they do for users.
            deployment(
                model, logs, prefill=2, decode=2, proxy_flags=flags, program=LAUNCH
            ) as running,
            under_load(running.proxy.url, cases, args.clients, rng) as load,
        ):
            acted = acts[phase](running)
            running.wait_ready()
            prefills = settle(running.proxy.url, load, running.nodes, rng)
    for failure in load.failed:
        print(f"{phase}: failed: {failure}", file=sys.stderr)
    pauses = [pause for _, pause in load.failovers]
    return {
        "phase": phase,
        "events": acted,
        "requests": load.requests,
        "failed": len(load.failed),
        "wrong": load.wrong,
        "refused": load.refused,
        **_quantiles("answers", load.seconds),
        "moved": len(pauses),
        **_quantiles("pause", pauses),
        "longest pause s": round(max(pauses, default=0.0), 3),
        **_quantiles("prefill", prefills),
    }


@contextlib.contextmanager
def under_load(url: str, cases: list[Case], clients: int, rng: random.Random) -> Iterator[Load]:
    """Keep clients asking all the time."""
    load = Load(url, cases, clients, rng)
    try:
        time.sleep(2.0)
        yield load
    finally:
        load.stop()


def settle(url: str, load: Load, nodes: list[Process], rng: random.Random) -> list[float]:
    """End the load; no page may be lost. Returns how long the prefill of its texts takes."""
    load.stop()
    for node in nodes:
        wait_until(lambda node=node: is_idle(node.server_info()), 60, node.server_info)
    return prefill_seconds(url, [length for length, _ in load.failovers][:100], rng)


def _quantiles(name: str, values: list[float]) -> dict[str, float | None]:
    return {
        f"{name} p{share} s": round(float(np.percentile(values, share)), 3) if values else None
        for share in (50, 99)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="of each phase with kills")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--phases", nargs="+", default=list(MAX_FAILOVERS), choices=MAX_FAILOVERS)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    model = make_checkpoint("qwen3", Path(tempfile.mkdtemp(prefix="pd-failover-")) / "model")
    cases = make_cases(model, rng)
    rows = [measure(phase, model, cases, args, rng) for phase in args.phases]
    for row in rows:
        print(row)
    settings = {
        "seed": args.seed,
        "clients": args.clients,
        "heartbeat_s": HEARTBEAT_INTERVAL,
        "lease_s": LEASE_SECONDS,
    }
    command = " ".join(["python", "benchmarks/failover.py", *sys.argv[1:]])
    write_report(args.output, command, rows, measured=["pd"], settings=settings)
    return int(any(row["wrong"] or row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
