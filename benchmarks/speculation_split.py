"""Compare every drafter with none in a running split of the embedded model: speed of streams.

    python benchmarks/speculation_split.py [--devices cuda:0 cuda:1] --output FILE [-- FLAGS]

Proxy, prefill node and decode node are real processes on the two devices. They answer questions of
the held-out sets over HTTP, greedy, `streams` at a time. All deployments run at the same time, but
are asked one after the other. In each of `--rounds` rounds, another one is first; a round before
them does not count. Drafters are those of `benchmarks/acceptance.py`, with draft lengths chosen by
the nodes.

`tokens_per_s` is the median over answers of the tokens after the first, by the time that they took.
`all_tokens_per_s` counts all answers together. Drafts help some of them much. `first_ms` and
`second_ms` are medians and 95th percentiles of the time to the first token, and from there to the
second. `speedup` and `all_speedup` compare with none at the same number of streams in the same
round. Figures are medians over rounds; `speedup_least` and `speedup_most` are single rounds. Flags
after `--` go to both nodes.
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
from typing import TYPE_CHECKING, Any, NamedTuple

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
    parser.add_argument("--rounds", type=int, default=5, help="that count")
    parser.add_argument("--drafters", nargs="+", default=[*DRAFTERS], choices=[*DRAFTERS])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    found: dict[tuple[str, int], list[Round]] = {}
    names = ["none", *args.drafters]
    # All start at once, since starting takes longer than asking; they are asked in turn.
    with ExitStack() as running, ThreadPoolExecutor(len(names)) as starting:
        started = [deployment(name, "on", args.devices, args.flags) for name in names]
        urls = [url for url, _ in starting.map(running.enter_context, started)]
        asked = [each for of in SETS for each in questions_of(of, args.examples)]
        prompts = [tokenized(urls[0], messages) for messages in asked]
        servers = [(name, Server(url, None)) for name, url in zip(names, urls, strict=True)]
        for number in range(args.rounds + 1):
            first = number % len(servers)
            for streams in args.streams:
                for name, server in servers[first:] + servers[:first]:
                    answers = asyncio.run(ask_all(server, prompts, streams))
                    if number:
                        found.setdefault((name, streams), []).append(Round.of(answers))
            print(f"round {number} of {args.rounds}", flush=True)
    rows = [row(name, streams, found) for name in names for streams in args.streams]
    for each in rows:
        print(json.dumps(each), flush=True)
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
            request = server.make_request(prompt, MAX_TOKENS, ignore_eos=False)
            return await server.send_request(request)

    answers = await asyncio.gather(*map(ask, prompts))
    failed = [answer.error for answer in answers if answer.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(answers)} answers failed: {failed[0]}")
    return answers


class Round(NamedTuple):
    """What the answers of a round were like, times in milliseconds."""

    tokens: int
    tokens_per_s: float
    all_tokens_per_s: float
    first_ms: float
    first_p95_ms: float
    second_ms: float
    second_p95_ms: float

    @classmethod
    def of(cls, answers: Sequence[BenchCompletion]) -> Round:
        first = [(answer.times[0] - answer.sent) * 1e3 for answer in answers]
        several = [answer for answer in answers if len(answer.times) > 1]
        second = [(answer.times[1] - answer.times[0]) * 1e3 for answer in several]
        later = [answer.num_tokens - answer.counts[0] for answer in several]
        seconds = [answer.times[-1] - answer.times[0] for answer in several]
        return cls(
            sum(answer.num_tokens for answer in answers),
            statistics.median(n / taken for n, taken in zip(later, seconds, strict=True)),
            sum(later) / sum(seconds),
            statistics.median(first),
            statistics.quantiles(first, n=20)[-1],
            statistics.median(second),
            statistics.quantiles(second, n=20)[-1],
        )


def row(name: str, streams: int, found: dict[tuple[str, int], list[Round]]) -> dict[str, Any]:
    rounds, plain = found[name, streams], found["none", streams]
    pairs = list(zip(rounds, plain, strict=True))
    speedups = [each.tokens_per_s / none.tokens_per_s for each, none in pairs]
    of_all = [each.all_tokens_per_s / none.all_tokens_per_s for each, none in pairs]
    medians = Round(*(statistics.median(values) for values in zip(*rounds, strict=True)))
    return {
        "drafter": name,
        "streams": streams,
        "rounds": len(rounds),
        **medians._asdict(),
        "speedup": statistics.median(speedups),
        "speedup_least": min(speedups),
        "speedup_most": max(speedups),
        "all_speedup": statistics.median(of_all),
    }


if __name__ == "__main__":
    sys.exit(main())
