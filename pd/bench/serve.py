"""`pd-bench serve`: how long clients of a server wait, alone and under load.

Any server with `/v1/completions` will do. Prompts are unrelated random token ids. Answers are
streamed, sample greedily and ignore ends of sequence. Times are those at which the last byte of an
event reached this process. It parses events only afterwards, because parsing would delay it.

`--unloaded` sends one prompt at a time and measures the time to the first token, from the first to
the second, and to the last. The first prompt of each length warms up.

`--load` keeps `streams` answers of `out` tokens to prompts of `in` tokens running. A new answer
replaces each finished one. We shorten the first ones by degrees, so the ends are spread out. Once
all run, it also sends a prompt of `long` tokens every `every` seconds, for `seconds`, and asks for
`long_out` tokens, whether or not earlier ones have ended. Inter-token latency (ITL) counts every
interval between two events of a stream that ends in that time. That includes the interval before
the second token, for which a split has to transfer the prompt's KV; one row leaves it out.

`--dataset-name` runs a load of requests, of many kinds and schedules, against any server with
OpenAI's API or `/generate`, and reports how long each waited: see docs/harness.md. The client
proves that it was not the bottleneck; otherwise the run is void (exit status 3).
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pd.bench.load.flags import add_load_arguments
from pd.bench.load.settings import api_key_of
from pd.bench.report import Row, add_output, check_output, format_command, write_report
from pd.bench.serve_client import BenchCompletion, CompletionReception, Server
from pd.core.errors import NodeFailedError, SetupError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable

    from pd.bench.deployments import ServedLayout


T = TypeVar("T")

_COLUMNS = (
    f"{'work':15} {'metric':40} {'count':>7} {'mean':>9} {'p50':>9} {'p95':>9} {'p99':>9} "
    f"{'p99.9':>9} {'max':>9}"
)
EXAMPLES = """\
examples:
  pd-bench serve --url http://127.0.0.1:8000 --unloaded 1024,8192
  pd-bench serve --url http://127.0.0.1:8000 --load streams=48,long=8192 --output serve.json

  20 requests a second (Poisson) of 1024 tokens, judged by objectives; files in out/:
    pd-bench serve --url http://127.0.0.1:8000 --dataset-name random --num-prompts 500 \\
        --request-rate 20 --goodput ttft:1s+40us,tpot:50 --output-dir out
  a closed loop of 32 conversations through the chat API, whose answers go into the next turn:
    pd-bench serve --url http://127.0.0.1:8000 --dataset-name multi-turn --turns 4 \\
        --endpoint /v1/chat/completions --max-concurrency 32 --num-prompts 200
  the same on every layout of a deployment, with load from the hosts in its file:
    pd-bench serve --cluster cluster.yaml --dataset-name random --num-prompts 500 \\
        --request-rate 20 --goodput ttft:1s+40us,tpot:50 --output-dir out
  five minutes of a recorded trace, lengths divided by 32, by four load processes:
    pd-bench serve --url http://127.0.0.1:8000 --dataset-name trace --dataset-path trace.jsonl \\
        --trace-length-scale 1/32 --trace-window 0:300 --processes 4 --output-dir out
"""


@dataclass(frozen=True)
class MixedLoad:
    """Settings of ``--load``, see the module's docstring; lengths in tokens, times in seconds."""

    streams: int = 48
    num_in: int = 512
    num_out: int = 900
    long: int = 8192
    every: float = 0.5
    long_out: int = 32
    seconds: float = 12.0

    def __str__(self) -> str:
        """Format the load as :meth:`parse` reads it."""
        shown = {"num_in": "in", "num_out": "out"}
        settings = dataclasses.asdict(self).items()
        return ",".join(f"{shown.get(name, name)}={value:g}" for name, value in settings)

    @classmethod
    def parse(cls, text: str) -> MixedLoad:
        """Parse ``streams=48,in=512,…``; other settings keep their defaults. Raises UsageError."""
        names = {"in": "num_in", "out": "num_out"}
        kinds = {name: type(value) for name, value in dataclasses.asdict(cls()).items()}
        given: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            name = names.get(name, name)
            try:
                given[name] = kinds[name](value)
            except (KeyError, ValueError):
                given[name] = 0
            if not given[name] > 0:
                shown = ", ".join(f"{k}=N" for k in ("streams", "in", "out", *list(kinds)[3:]))
                raise UsageError(f"--load is {shown} with numbers above 0, not {part}")
        return cls(**given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s --url URL [--unloaded N,…] [--load SPEC] [flags]\n"
        "       %(prog)s --url URL --dataset-name NAME [flags]\n"
        "       %(prog)s --cluster FILE --dataset-name NAME [flags]"
    )
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "--url",
        "--base-url",
        help="the proxy or another server, http://HOST:PORT or https://HOST:PORT; for a private "
        "authority set SSL_CERT_FILE to its certificate",
    )
    add("--unloaded", metavar="N,…", help="lengths of prompts to send one at a time")
    add("--outputs", type=int, default=16, metavar="N", help="tokens of their answers")
    add("--repeats", type=int, default=7, metavar="N", help="prompts of each length")
    add("--load", metavar="SPEC", help=f"some of {MixedLoad()}, which are the defaults")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="limit of one measurement")
    add_output(parser)
    add_load_arguments(parser)
    add = parser.add_argument_group("results of a run under load").add_argument
    add("--output-dir", type=Path, metavar="DIR", help="write all result files to DIR")
    add("--save-result", type=Path, metavar="FILE", help="write the keys of vllm bench serve there")
    add("--save-detailed", action="store_true", help="with lists by request in that file")
    add("--import-aiperf", type=Path, metavar="FILE", help="evaluate AIPerf's profile_export.jsonl")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. ``args`` also has the whole ``command_line``."""
    if args.dataset_name is not None or args.import_aiperf is not None:
        return _run_dataset(args)
    if args.cluster:
        raise UsageError("--cluster needs a run under load: give --dataset-name")
    if args.url is None:
        raise UsageError("--url is missing: give the server's, http://HOST:PORT")
    if args.unloaded is None and args.load is None:
        raise UsageError("nothing to measure: give --unloaded, --load or both, or --dataset-name")
    if min(args.outputs, args.repeats, args.vocab_size) < 1:
        raise UsageError("--outputs, --repeats and --vocab-size must be at least 1")
    check_output(args.output)
    texts = [part for part in (args.unloaded or "").split(",") if part]
    lengths = [int(part) if part.isdecimal() else 0 for part in texts]
    if not all(lengths):
        raise UsageError(
            f"--unloaded is lengths of prompts, separated by commas, not {args.unloaded}"
        )
    load = None if args.load is None else MixedLoad.parse(args.load)
    prompts = Prompts(args.vocab_size, args.seed)
    server = Server(args.url, args.model, api_key_of(args))
    _check_lengths(server.context_length(), lengths, args.outputs, load)
    rows: list[Row] = []
    settings: Row = {}
    print(_COLUMNS, flush=True)
    for length in lengths:
        work = measure_unloaded(server, prompts, length, args.outputs, args.repeats)
        rows += show_rows(asyncio.run(_limit_time(work, args.timeout)))
    if load is not None:
        mixed = measure_load(server, prompts, load)
        load_rows, settings = asyncio.run(_limit_time(mixed, args.timeout))
        rows += show_rows(load_rows)
        print(", ".join(f"{name} {value}" for name, value in settings.items()))
    if args.output is not None:
        command = format_command(args.command_line)
        write_report(args.output, command, rows, measured=["pd"], settings=settings)
    return 0


def _run_dataset(args: argparse.Namespace) -> int:
    from pd.bench.load.command import run_load

    if args.unloaded is not None or args.load is not None:
        raise UsageError("--dataset-name is a run of its own, without --unloaded and --load")
    if args.output is not None:
        raise UsageError(
            "--output is of --unloaded and --load; a run under load writes its files to "
            "--output-dir DIR"
        )
    if args.cluster and args.import_aiperf is None:
        return _serve_layouts(args)
    if args.url is None and args.import_aiperf is None:
        raise UsageError("--url is missing: give the server's, http://HOST:PORT, or --cluster FILE")
    return run_load(args)


def _serve_layouts(args: argparse.Namespace) -> int:
    """Run the same load on each layout of ``--cluster``. Returns the exit status.

    The results of a layout go to a directory of its name in ``--output-dir``.
    """
    from pd.bench.deployments import measure_layouts
    from pd.bench.load import command
    from pd.bench.load.settings import load_settings

    command.check_places(args)
    if args.url is not None:
        raise UsageError("--cluster starts what is measured: leave out --url")
    if args.save_result is not None:
        raise UsageError("--save-result is of one server: give --output-dir with --cluster")
    statuses: list[int] = []

    def measure(layout: ServedLayout) -> None:
        print(f"{layout.name}, {layout.url}:", flush=True)
        settings = load_settings(args, layout.url, layout.hosts, layout.gpus)
        directory = None if args.output_dir is None else args.output_dir / layout.name
        statuses.append(command.measure_and_write(args, settings, layout.client, directory))
        if statuses[-1] == command.INTERRUPTED:
            # Ctrl-C ends the whole command, so we measure no other layout.
            raise KeyboardInterrupt

    measure_layouts(args, measure)
    return max(statuses, default=0)


def _check_lengths(
    limit: int | None, lengths: list[int], outputs: int, load: MixedLoad | None
) -> None:
    """Raise UsageError for lengths beyond the context, before we measure anything."""
    sums = [
        (f"--unloaded {length} and --outputs {outputs}", length + outputs) for length in lengths
    ]
    if load is not None:
        sums.append((f"--load in={load.num_in},out={load.num_out}", load.num_in + load.num_out))
        sums.append(
            (f"--load long={load.long},long_out={load.long_out}", load.long + load.long_out)
        )
    for what, tokens in sums:
        if limit is not None and tokens > limit:
            raise UsageError(
                f"{what} make {tokens} tokens; the model's context is {limit}: give less"
            )


async def _limit_time(work: Awaitable[T], seconds: float) -> T:
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise SetupError(f"not measured within --timeout {seconds:g} s") from None


class Prompts:
    """Draws random prompts. Any two of them differ within the first few tokens."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def draw_prompt(self, num_tokens: int) -> list[int]:
        ids: list[int] = self._rng.integers(0, self._vocab_size, num_tokens).tolist()
        return ids


# ---- one at a time


async def measure_unloaded(
    server: Server, prompts: Prompts, length: int, outputs: int, repeats: int
) -> list[Row]:
    """Measure prompts of one length. Raises PDError if one gets no answer."""
    answers = [await ask_one(server, prompts, length, outputs) for _ in range(repeats + 1)]
    return unloaded_rows(length, answers[1:])


async def ask_one(server: Server, prompts: Prompts, length: int, outputs: int) -> BenchCompletion:
    """Ask with a new random prompt. Raises PDError if it gets no answer."""
    request = server.make_request(prompts.draw_prompt(length), outputs)
    return _check_answer(await server.send_request(request), outputs)


def unloaded_rows(length: int, answers: list[BenchCompletion]) -> list[Row]:
    """Make rows of answers to prompts of one length, sent one at a time."""
    work = f"unloaded:{length}"
    rows = [timing_row(work, "first token", _to_first(answers))]
    if any(len(answer.times) > 1 for answer in answers):
        rows.append(timing_row(work, "second token after the first", _first_to_second(answers)))
        rows.append(timing_row(work, "last token", [a.times[-1] - a.sent for a in answers]))
    return rows


def _check_answer(answer: BenchCompletion, num_tokens: int) -> BenchCompletion:
    if answer.error is not None:
        raise NodeFailedError(answer.error)
    if answer.num_tokens != num_tokens:
        raise NodeFailedError(f"{answer.num_tokens} tokens came, not {num_tokens}")
    return answer


def _to_first(answers: list[BenchCompletion]) -> list[float]:
    return [answer.times[0] - answer.sent for answer in answers if answer.times]


def _first_to_second(answers: list[BenchCompletion]) -> list[float]:
    return [answer.times[1] - answer.times[0] for answer in answers if len(answer.times) > 1]


# ---- many at once


class _Streams:
    """Keeps a number of streams running: a new one replaces each finished one."""

    def __init__(self, server: Server, prompts: Prompts, load: MixedLoad) -> None:
        self._server, self._prompts, self._load = server, prompts, load
        self._running: dict[int, CompletionReception] = {}
        self._over = False
        self.all: list[CompletionReception] = []
        self.tasks = [asyncio.create_task(self._fill_place(n)) for n in range(load.streams)]

    async def _fill_place(self, place: int) -> None:
        load = self._load
        num_out = max(2, load.num_out * (place + 1) // load.streams)
        while not self._over:
            request = self._server.make_request(self._prompts.draw_prompt(load.num_in), num_out)
            reception = await self._server.start_request(request)
            self._running[place] = reception
            self.all.append(reception)
            if self._over:
                reception.cut()
            await reception.ended
            # NOTE: without this check we would ask a broken server forever.
            if reception.events < 2 and not self._over:
                raise NodeFailedError(f"a stream failed: {reception.completion().error}")
            num_out = load.num_out

    async def wait_running(self) -> None:
        """Wait until each place has a running stream. Raises the error of a failed one."""
        while sum(each.events > 2 for each in self._running.values()) < self._load.streams:
            for task in self.tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Close all streams. Raises the error of a failed one."""
        self._over = True
        for reception in self._running.values():
            if not reception.ended.done():
                reception.cut()
        await asyncio.gather(*self.tasks)


async def measure_load(server: Server, prompts: Prompts, load: MixedLoad) -> tuple[list[Row], Row]:
    """Measure ``--load``. Returns rows and further facts. Raises PDError if a request fails."""
    count = max(1, round(load.seconds / load.every))
    requests = [
        server.make_request(prompts.draw_prompt(load.long), load.long_out) for _ in range(count)
    ]
    gc.collect()
    gc.disable()  # a collection would delay the reading of answers
    try:
        streams = _Streams(server, prompts, load)
        await streams.wait_running()
        begin, cpu = time.perf_counter(), time.process_time()
        asked = []
        for number, request in enumerate(requests):
            await asyncio.sleep(begin + number * load.every - time.perf_counter())
            asked.append(asyncio.create_task(server.send_request(request)))
        await asyncio.sleep(begin + load.seconds - time.perf_counter())
        end, cpu = time.perf_counter(), time.process_time() - cpu
        answers = [_check_answer(answer, load.long_out) for answer in await asyncio.gather(*asked)]
        await streams.stop()
    finally:
        gc.enable()
    completions = [reception.completion() for reception in streams.all]
    for stream in completions:
        if stream.error is not None:
            raise NodeFailedError(f"a stream failed: {stream.error}")
    counts = [
        count
        for stream in completions
        for at, count in zip(stream.times, stream.counts, strict=True)
        if begin < at <= end
    ]
    facts: Row = {
        "client_cpu_share": round(cpu / (end - begin), 3),
        "tokens_per_s": round(sum(counts) / (end - begin), 1),
        # Several tokens per event mean a slow server or client.
        "tokens_per_event": round(sum(counts) / max(len(counts), 1), 3),
    }
    return _load_rows(completions, answers, begin, end), facts


def _load_rows(
    streams: list[BenchCompletion], answers: list[BenchCompletion], begin: float, end: float
) -> list[Row]:
    every = [pair for s in streams for pair in pairwise(s.times) if begin < pair[1] <= end]
    later = [pair for s in streams for pair in pairwise(s.times[1:]) if begin < pair[1] <= end]
    started = [s for s in streams if s.times and begin < s.times[0] <= end]
    return [
        timing_row("load", "ITL of the streams", [b - a for a, b in every]),
        timing_row("load", "ITL of the streams from token 2 on", [b - a for a, b in later]),
        timing_row("load", "first token of long prompts", _to_first(answers)),
        timing_row("load", "second token of long prompts after it", _first_to_second(answers)),
        timing_row("load", "first token of new streams", _to_first(started)),
        timing_row("load", "second token of new streams after it", _first_to_second(started)),
    ]


# ---- results


def timing_row(work: str, metric: str, seconds: list[float]) -> Row:
    """Make a row with mean, percentiles and maximum in milliseconds; null without any value."""
    row: Row = {"work": work, "metric": metric, "count": len(seconds)}
    values = np.array(seconds or [np.nan]) * 1e3
    statistics = {"mean_ms": values.mean(), "max_ms": values.max()}
    for name, percent in (("p50", 50), ("p95", 95), ("p99", 99), ("p99.9", 99.9)):
        statistics[f"{name}_ms"] = np.percentile(values, percent)
    order = ("mean_ms", "p50_ms", "p95_ms", "p99_ms", "p99.9_ms", "max_ms")
    return row | {name: round(float(statistics[name]), 3) if seconds else None for name in order}


def show_rows(rows: list[Row]) -> list[Row]:
    """Print rows and return them."""
    for row in rows:
        numbers = [value for name, value in row.items() if name.endswith("_ms")]
        cells = " ".join(f"{'' if n is None else format(n, '.2f'):>9}" for n in numbers)
        print(f"{row['work']:15} {row['metric']:40} {row['count']:7} {cells}", flush=True)
    return rows
