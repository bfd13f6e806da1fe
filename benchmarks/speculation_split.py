"""Every drafter against none in a running split of the embedded model: speed of streams.

    python benchmarks/speculation_split.py [--devices cuda:0 cuda:1] --output FILE [-- FLAGS]

Proxy, prefill node and decode node are real processes, on the two devices named. Questions of the
held-out sets are asked over HTTP, greedy, each answered to its end, `streams` at a time; each
deployment is asked once before it counts. Drafters are those of `benchmarks/acceptance.py`, with
the draft lengths that nodes choose. `tokens_per_s` is of a stream: the median over answers of the
tokens after the first by the time that they took. `first_ms` and `second_ms` are medians and 95th
percentiles of the time from the request to the first token, and from there to the second.
`speedup` is by none at the same number of streams. Flags after `--` go to both nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "training"), str(ROOT / "benchmarks")]

from acceptance import DRAFTERS, SETS, deployment, questions_of  # noqa: E402

from pd.bench.report import write_report  # noqa: E402
from pd.bench.serve_client import BenchCompletion, Server  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TOKENS = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"], metavar="DEVICE")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--examples", type=int, default=24, help="of each set")
    parser.add_argument("--drafters", nargs="+", default=[*DRAFTERS], choices=[*DRAFTERS])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    names = ["none", *args.drafters]
    # All start at once, since starting takes longer than asking; they are asked in turn.
    with ExitStack() as running, ThreadPoolExecutor(len(names)) as starting:
        started = [deployment(name, "on", args.devices, args.flags) for name in names]
        urls = [url for url, _ in starting.map(running.enter_context, started)]
        for name, url in zip(names, urls, strict=True):
            asked = [each for of in SETS for each in questions_of(of, args.examples)]
            prompts = [tokenized(url, messages) for messages in asked]
            server = Server(url, None)
            asyncio.run(ask_all(server, prompts, max(args.streams)))
            for streams in args.streams:
                answers = asyncio.run(ask_all(server, prompts, streams))
                rows.append(row(name, streams, answers, rows))
                print(json.dumps(rows[-1]), flush=True)
    command = shlex.join(["python", "benchmarks/speculation_split.py", *sys.argv[1:]])
    measured = ["pd", "benchmarks/speculation_split.py", "benchmarks/acceptance.py"]
    write_report(args.output, command, rows, measured=measured)
    return 0


def tokenized(url: str, messages: list[dict[str, str]]) -> list[int]:
    body = {"messages": messages, "add_generation_prompt": True}
    response = httpx.post(f"{url}/tokenize", json=body)
    response.raise_for_status()
    return list(response.json()["tokens"])


async def ask_all(
    server: Server, prompts: Sequence[list[int]], streams: int
) -> list[BenchCompletion]:
    """Ask for all answers, ``streams`` at a time; ends the program if one fails."""
    limit = asyncio.Semaphore(streams)

    async def ask(prompt: list[int]) -> BenchCompletion:
        async with limit:
            return await server.ask(server.request(prompt, MAX_TOKENS, ignore_eos=False))

    answers = await asyncio.gather(*map(ask, prompts))
    failed = [answer.error for answer in answers if answer.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(answers)} answers failed: {failed[0]}")
    return answers


def row(
    name: str, streams: int, answers: Sequence[BenchCompletion], before: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    first = [(answer.times[0] - answer.sent) * 1e3 for answer in answers]
    several = [answer for answer in answers if len(answer.times) > 1]
    second = [(answer.times[1] - answer.times[0]) * 1e3 for answer in several]
    speeds = [
        (answer.num_tokens - answer.counts[0]) / (answer.times[-1] - answer.times[0])
        for answer in several
    ]
    speed = statistics.median(speeds)
    (none,) = [r["tokens_per_s"] for r in before if r["streams"] == streams][:1] or [speed]
    return {
        "drafter": name,
        "streams": streams,
        "answers": len(answers),
        "tokens": sum(answer.num_tokens for answer in answers),
        "tokens_per_s": speed,
        "speedup": speed / none,
        "first_ms": statistics.median(first),
        "first_p95_ms": statistics.quantiles(first, n=20)[-1],
        "second_ms": statistics.median(second),
        "second_p95_ms": statistics.quantiles(second, n=20)[-1],
    }


if __name__ == "__main__":
    sys.exit(main())
