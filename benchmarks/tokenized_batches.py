"""Check whether a thread should tokenize waiting texts in batches.

Three ways to tokenize off the event loop take turns, and find the same tokens:

- `before`: each request is a job of a thread pool (`run_in_executor`, two threads), with one call
  per text, and its result wakes the loop.
- `batched`: the proxy's way, `pd/proxy/http/background.py`. A thread takes jobs in batches,
  unfetched results share a wake-up, and short texts of one request share a call.
- `library`: one call for all texts of a round, which the library spreads over threads on all cores.
  No result arrives before the last one.

`64 x 4 KiB` are 64 concurrent requests with a text of 4 KiB each, `256 x 1 KiB in one` is a request
with 256 texts. Each request sends its next texts when it has the tokens of the previous ones. Texts
of 32 bytes, which the proxy tokenizes on the loop, show the cost of the way to a thread and back.
The loop is either `idle`, or `busy`: it then runs half a millisecond of Python code per
millisecond, as if it streamed.

`cpu_us` is the processor time per text, without the loop's work of every millisecond. `switches`
is how often a thread other than the loop's waited per text, for the interpreter or for work.
`wake_ups` counts the loop's wake-ups per text. `tick_p99_ms` is the 99th percentile of the loop's
delay to answer another process that writes to a pipe every millisecond; `nothing` is the same
without texts. `speedup` is the median over the pairs of the rate by that of `before`. The other
numbers are medians of the runs.

    python benchmarks/tokenized_batches.py --output benchmarks/results/tokenized_batches.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from pd.bench.report import Row, add_output, check_output, write_report  # noqa: E402
from pd.embedded import EMBEDDED_MODEL  # noqa: E402
from pd.proxy.http.background import Background  # noqa: E402
from pd.proxy.http.bodies import estimate_text_bytes  # noqa: E402
from pd.proxy.text.tokenizer import TextModel  # noqa: E402
from pd.proxy.workers.loop import run_loop  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import numpy.typing as npt

    Tokens = list[npt.NDArray[np.int32]]

BUSY_SECONDS = 0.0005
_POOL_THREADS = 2
_PARALLELISM = "TOKENIZERS_PARALLELISM"
# Writes the time to a pipe every millisecond: timers of event loops count whole milliseconds.
_TICKS = """
import os, struct, sys, time
at = time.perf_counter()
while True:
    at = max(at + 0.001, time.perf_counter())
    time.sleep(max(0, at - time.perf_counter()))
    os.write(int(sys.argv[1]), struct.pack("d", time.perf_counter()))
"""


class Work(NamedTuple):
    """What is tokenized in a round: so many requests of so many texts each, ``rounds`` times."""

    name: str
    requests: int
    texts: int
    size: int
    rounds: int

    @property
    def num_texts(self) -> int:
        """Count all texts."""
        return self.requests * self.texts * self.rounds


WORKS = (
    Work("64 x 4 KiB", 64, 1, 4096, 6),
    Work("256 x 1 KiB", 256, 1, 1024, 6),
    Work("256 x 32 bytes", 256, 1, 32, 32),
    Work("256 x 1 KiB in one", 1, 256, 1024, 6),
)


class Way(Protocol):
    """A way to tokenize."""

    async def run(self, work: Work, texts: Iterator[str]) -> Tokens:
        """Return the tokens of all texts, in any order."""

    def close(self) -> None: ...


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Give --note when anything else runs: two threads of pd's and the event loop share "
        "the cores with it.",
    )
    parser.add_argument(
        "--runs", type=int, default=11, metavar="N", help="of each way (default: 11)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=EMBEDDED_MODEL,
        metavar="DIR",
        help="directory with tokenizer.json (default: the embedded model's, of 2,048 tokens)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the texts")
    parser.add_argument("--note", help="what else ran on the machine")
    add_output(parser)
    args = parser.parse_args()
    check_output(args.output)
    rows = run_loop(measure(TextModel(args.tokenizer, need_templates=False), args.runs, args.seed))
    for row in rows:
        print(row)
    if args.output is not None:
        command = shlex.join(["python", "benchmarks/tokenized_batches.py", *sys.argv[1:]])
        measured = ["pd", "benchmarks/tokenized_batches.py"]
        write_report(args.output, command, rows, measured=measured, note=args.note)
    return 0


async def measure(model: TextModel, runs: int, seed: int) -> list[Row]:
    """Measure all rows."""
    rng, source = random.Random(seed), read_source()
    makers: dict[str, Callable[[TextModel], Way]] = {
        "nothing": lambda _: Nothing(),
        "before": Before,
        "batched": Batched,
        "library": Library,
    }
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for number in range(runs + 1):
        print("warm-up" if number == 0 else f"run {number} of {runs}", file=sys.stderr, flush=True)
        for work in WORKS:
            for loop, busy in (("idle", 0.0), ("busy", BUSY_SECONDS)):
                texts = [cut(source, work.size, rng) for _ in range(work.num_texts)]
                names = list(makers)
                rng.shuffle(names)
                tokens = {}
                for name in names:
                    way = makers[name](model)
                    numbers, tokens[name] = await measure_once(way, work, texts, busy)
                    if number:
                        found.setdefault((work.name, loop, name), []).append(numbers)
                assert tokens["before"] == tokens["batched"] == tokens["library"]
    rows: list[Row] = []
    for work, loop, name in product(WORKS, ("idle", "busy"), makers):
        ran, base = found[work.name, loop, name], found[work.name, loop, "before"]
        row: Row = {"way": f"{work.name}, {loop}, {name}"}
        row |= {key: median(numbers[key] for numbers in ran) for key in ran[0]}
        if name not in ("nothing", "before"):
            pairs = zip(ran, base, strict=True)
            row["speedup"] = median(new["texts_per_s"] / old["texts_per_s"] for new, old in pairs)
        rows.append(row)
    return rows


def read_source() -> str:
    """Read prose and tables, from which texts are cut."""
    return "\n".join(file.read_text() for file in sorted((ROOT / "docs").glob("*.md")))


def cut(source: str, size: int, rng: random.Random) -> str:
    start = rng.randrange(len(source) - size)
    return source[start : start + size]


async def measure_once(
    way: Way, work: Work, texts: list[str], busy: float
) -> tuple[dict[str, float], list[bytes]]:
    """Measure one run; returns its numbers, and all tokens in the order of their bytes."""
    loop = asyncio.get_running_loop()
    woken = 0
    wake = loop.call_soon_threadsafe

    def counted(*args: Any, **options: Any) -> asyncio.Handle:
        nonlocal woken
        woken += 1
        return wake(*args, **options)

    ticks = Ticks(busy)
    await ticks.first()
    switches, cpu, began = other_switches(), time.process_time(), time.perf_counter()
    try:
        with patch.object(loop, "call_soon_threadsafe", counted):
            tokens = await way.run(work, iter(texts))
    finally:
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu - ticks.cpu
        switches = other_switches() - switches
        ticks.stop()
        way.close()
    numbers = {"tick_p99_ms": 1e3 * ticks.late(0.99)}
    if tokens:
        assert len(tokens) == work.num_texts
        numbers |= {
            "texts_per_s": work.num_texts / seconds,
            "cpu_us": 1e6 * cpu / work.num_texts,
            "switches": switches / work.num_texts,
            "wake_ups": woken / work.num_texts,
        }
    return numbers, sorted(ids.tobytes() for ids in tokens)


def other_switches() -> int:
    """Count the waits of this process's other threads so far."""
    every = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    return every - resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class Ticks:
    """Measures the loop's delay for an event of every millisecond, and does its other work.

    Attributes:
        cpu: processor time of both, in seconds.
    """

    def __init__(self, busy: float) -> None:
        """Start to measure.

        Args:
            busy: seconds of other work after each tick.
        """
        self.cpu = 0.0
        self._busy = busy
        self._late: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._reader, writer = os.pipe()
        self._began = asyncio.Event()
        command = [sys.executable, "-c", _TICKS, str(writer)]
        self._process = subprocess.Popen(command, pass_fds=[writer], stderr=subprocess.DEVNULL)
        os.close(writer)
        self._loop.add_reader(self._reader, self._read)

    async def first(self) -> None:
        """Wait for the first one. Those until then do not count."""
        await self._began.wait()
        self._late.clear()
        self.cpu = 0.0

    def late(self, share: float) -> float:
        """Return the delay in seconds that this share of the ticks does not exceed."""
        return float(np.quantile(self._late, share))

    def stop(self) -> None:
        self._loop.remove_reader(self._reader)
        self._process.kill()
        self._process.wait()
        os.close(self._reader)

    def _read(self) -> None:
        cpu, now = time.thread_time(), time.perf_counter()
        self._late += (now - np.frombuffer(os.read(self._reader, 1 << 16))).tolist()
        self._began.set()
        while time.perf_counter() - now < self._busy:
            pass
        self.cpu += time.thread_time() - cpu


class Nothing:
    async def run(self, work: Work, texts: Iterator[str]) -> Tokens:
        await asyncio.sleep(0.5)
        return []

    def close(self) -> None:
        pass


async def run_requests(
    work: Work, texts: Iterator[str], tokenize: Callable[[list[str]], Awaitable[Tokens]]
) -> Tokens:
    """Run all requests of a work at the same time."""
    found: Tokens = []

    async def request() -> None:
        for _ in range(work.rounds):
            found.extend(await tokenize([next(texts) for _ in range(work.texts)]))

    await asyncio.gather(*(request() for _ in range(work.requests)))
    return found


class Before:
    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._pool = ThreadPoolExecutor(_POOL_THREADS)

    async def run(self, work: Work, texts: Iterator[str]) -> Tokens:
        loop = asyncio.get_running_loop()
        return await run_requests(
            work, texts, lambda some: loop.run_in_executor(self._pool, self._tokenize, some)
        )

    def close(self) -> None:
        self._pool.shutdown()

    def _tokenize(self, texts: list[str]) -> Tokens:
        return [self._model.encode(text, add_special_tokens=True) for text in texts]


class Batched:
    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._background = Background()

    async def run(self, work: Work, texts: Iterator[str]) -> Tokens:
        def tokenize(some: list[str]) -> Awaitable[Tokens]:
            return self._background.run_on_thread(estimate_text_bytes(some), self._tokenize, some)

        return await run_requests(work, texts, tokenize)

    def close(self) -> None:
        self._background.close()

    def _tokenize(self, texts: list[str]) -> Tokens:
        return list(self._model.encode_texts(texts, add_special_tokens=True))


class Library:
    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._pool = ThreadPoolExecutor(1)
        # The library reads this at each call.
        os.environ[_PARALLELISM] = "true"

    async def run(self, work: Work, texts: Iterator[str]) -> Tokens:
        found: Tokens = []
        for _ in range(work.rounds):
            some = [next(texts) for _ in range(work.requests * work.texts)]
            call = partial(self._tokenize, some)
            found += await asyncio.get_running_loop().run_in_executor(self._pool, call)
        return found

    def close(self) -> None:
        self._pool.shutdown()
        os.environ[_PARALLELISM] = "false"

    def _tokenize(self, texts: list[str]) -> Tokens:
        encodings = self._model._tokenizer.encode_batch_fast(texts, add_special_tokens=True)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


if __name__ == "__main__":
    sys.exit(main())
