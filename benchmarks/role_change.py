"""Stream from two elastic nodes while they change roles, again and again.

    python benchmarks/role_change.py --output FILE

Clients ask for turns of conversations, one after the other. Every few seconds both nodes get the
other role (`POST /workers/{id}`). Gaps between tokens, and requests, are `after a change` if they
begin within a second after it, and `otherwise` if not. `failed` requests lack tokens. `cached` is
the share of prompt tokens from a prefix cache. The first part runs without changes. All processes
share the CPU's cores, which causes most of the long gaps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from processes import deployment  # noqa: E402

from pd.bench.report import write_report  # noqa: E402
from pd.embedded import EMBEDDED_MODEL  # noqa: E402

TOKENS = 48
NEAR_SECONDS = 1.0
# A conversation begins anew when its next turn might not fit any more.
LONGEST = 3000


class Turn(NamedTuple):
    """One request, as its client saw it.

    Attributes:
        began: when it was sent, by ``time.monotonic``, as ``times`` of the tokens are, in order.
    """

    began: float
    times: list[float]
    failed: bool
    prompt_tokens: int
    cached_tokens: int


class Client(threading.Thread):
    """A conversation, turn after turn."""

    def __init__(self, url: str, seed: int, turns: list[Turn], until: float) -> None:
        super().__init__()
        self._url, self._rng, self._turns, self._until = url, random.Random(seed), turns, until

    def run(self) -> None:
        history: list[int] = []
        with httpx.Client(timeout=120) as client:
            while time.monotonic() < self._until:
                if len(history) > LONGEST:
                    history = []
                history += [self._rng.randrange(256) for _ in range(self._rng.randrange(20, 300))]
                history += self._turn(client, history)

    def _turn(self, client: httpx.Client, prompt: list[int]) -> list[int]:
        params = {"max_new_tokens": TOKENS, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": params, "stream": True}
        body["incremental"] = True
        output: list[int] = []
        times: list[float] = []
        cached, began = 0, time.monotonic()
        with client.stream("POST", f"{self._url}/generate", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    break
                output += event["output_ids"]
                times.append(time.monotonic())
                cached = event["meta_info"]["cached_tokens"]
        self._turns.append(Turn(began, times, len(output) != TOKENS, len(prompt), cached))
        return output


def row(part: str, gaps: list[float], turns: list[Turn]) -> dict[str, object]:
    """Make one line of the report.

    Args:
        gaps: seconds between tokens.
    """
    if not gaps or not turns:
        raise SystemExit(f"no token came in the part {part!r}: run for longer")
    p50, p99 = np.percentile(gaps, [50, 99]) * 1e3
    return {
        "gaps": part,
        "requests": len(turns),
        "failed": sum(turn.failed for turn in turns),
        "cached": round(
            sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns), 3
        ),
        "count": len(gaps),
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "max_ms": round(1e3 * max(gaps), 1),
    }


def is_near(moments: list[float], start: float, stop: float) -> bool:
    """Return whether this time is that of a change of roles, or starts soon after one."""
    return any(start <= at + NEAR_SECONDS and stop >= at for at in moments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two parts")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between changes")
    parser.add_argument("--note", help="what else ran on the machine")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    flags = ["--elastic", "auto", "--load-format", "auto"]
    with (
        tempfile.TemporaryDirectory() as scratch,
        deployment(EMBEDDED_MODEL, Path(scratch), node_flags=flags) as running,
    ):
        url = running.proxy.url
        instances = [node.ready()["instance_id"] for node in running.nodes]

        def change(roles: tuple[str, str]) -> None:
            for instance, role in zip(instances, roles, strict=True):
                asked = httpx.post(f"{url}/workers/{instance}", json={"role": role}, timeout=30)
                asked.raise_for_status()

        rows = []
        for changes in (False, True):
            turns, moments = list[Turn](), list[float]()
            until = time.monotonic() + args.seconds
            clients = [Client(url, seed, turns, until) for seed in range(args.clients)]
            for client in clients:
                client.start()
            for roles in itertools.cycle((("decode", "prefill"), ("prefill", "decode"))):
                time.sleep(args.every)
                if time.monotonic() > until:
                    break
                if changes:
                    moments.append(time.monotonic())
                    change(roles)
            for client in clients:
                client.join()
            gaps: dict[bool, list[float]] = {True: [], False: []}
            begun: dict[bool, list[Turn]] = {True: [], False: []}
            for turn in turns:
                begun[is_near(moments, turn.began, turn.began)].append(turn)
                for start, stop in itertools.pairwise(turn.times):
                    gaps[is_near(moments, start, stop)].append(stop - start)
            if changes:
                rows.append(row("after a change", gaps[True], begun[True]))
                rows.append(row("otherwise", gaps[False], begun[False]))
            else:
                rows.append(row("without changes", gaps[False], begun[False]))
    for each in rows:
        print(each)
    command = shlex.join(["python", "benchmarks/role_change.py", *sys.argv[1:]])
    write_report(args.output, command, rows, measured=["pd"], note=args.note)
    return int(any(each["failed"] for each in rows))


if __name__ == "__main__":
    sys.exit(main())
