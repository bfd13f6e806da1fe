"""`pd-bench radix`: how fast the radix cache is on one core, and its hit rate on a real trace.

Each time is the best of several rounds, because other work on the machine can only add to it. The
median is shown next to it. Timed sections include everything except making their inputs.

Bars are limits for the default sizes on an idle processor of the kind named below. On another
machine nothing is judged, so the exit status is 0 whatever we measure.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pd.bench.load.datasets.jsonl import read_rows
from pd.bench.report import (
    add_output,
    check_output,
    describe_machine,
    format_command,
    write_report,
)
from pd.core.errors import UsageError
from pd.radix import EVICTION_POLICIES, IntArray, RadixCache

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

DEFAULT_TRACE = Path("../shared/traces/mooncake_synthetic.jsonl")
TRACE_BLOCK = 512  # tokens per hash id of the trace
TRACE_PAGE_SIZE = 16
TRACE_CAPACITIES = (1_000_000, 5_000_000, None)

# Where the bars hold: lengths in tokens, tokens of the whole trace, and the processor.
BAR_PROMPT_TOKENS = 16384
BAR_LEAVES = 100_000
BAR_TRACE_TOKENS = 61_194_628
BAR_CPU = "AMD EPYC"
# Load average of the last minute; above it other programs run here too.
BAR_LOAD = 0.5
MATCH_BAR_US = 20.0
INSERT_BAR_US = 60.0
EVICT_BAR_US = 10.0
REPLAY_BAR_NS = 27.0


@dataclass
class Measurement:
    """One row of the table. ``bar`` is the longest time that passes; None without a bar."""

    name: str
    page_size: int
    policy: str
    unit: str
    best: float
    median: float
    bar: float | None = None
    hit_rate: float | None = None

    @property
    def missed(self) -> bool:
        return self.bar is not None and self.best > self.bar

    def format_row(self) -> str:
        bar = "" if self.bar is None else f"{self.bar:8.1f}{' MISSED' if self.missed else ''}"
        hits = "" if self.hit_rate is None else f"hit rate {self.hit_rate:6.2%}"
        times = f"{self.best:8.2f} {self.median:8.2f} {self.unit:8}"
        return f"{self.name:43} {self.page_size:4} {self.policy:8} {times} {bar:8} {hits}".rstrip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=7, help="take the best of this many rounds")
    tokens = "length of the prompt to match and to insert"
    add("--prompt-tokens", type=int, default=BAR_PROMPT_TOKENS, help=tokens)
    add("--leaves", type=int, default=BAR_LEAVES, help="leaves in the tree to evict from")
    trace = f"request trace to replay (default: {DEFAULT_TRACE}, if there)"
    add("--trace", type=Path, help=trace)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. Return 1 if a bar was missed.

    ``args`` also has the whole ``command_line``. Raises UsageError for invalid arguments.
    """
    if min(args.rounds, args.prompt_tokens // 512, args.leaves) < 1:
        raise UsageError(
            f"--rounds {args.rounds}, --leaves {args.leaves} and --prompt-tokens "
            f"{args.prompt_tokens} must be at least 1, 1 and 512"
        )
    if args.trace is not None and not args.trace.is_file():
        raise UsageError(f"--trace {args.trace} is not a file")
    check_output(args.output)
    obstacle = find_obstacle()
    if obstacle is not None:
        print(f"no bar is judged: {obstacle}")
    print(f"{'operation':43} {'page':4} {'policy':8} {'best':>8} {'median':>8} {'':8} {'bar':>8}")
    results = []
    for measured in measure_all(args):
        result = measured if obstacle is None else replace(measured, bar=None)
        print(result.format_row(), flush=True)
        results.append(result)
    if args.output is not None:
        write_report(
            args.output,
            format_command(args.command_line),
            [asdict(result) for result in results],
            measured=["pd/bench/radix.py", "pd/radix"],
        )
    return int(any(result.missed for result in results))


def find_obstacle() -> str | None:
    """Return why the bars do not apply to this machine; None if they do."""
    cpu = describe_machine()["cpu"]
    if cpu != BAR_CPU:
        return f"the bars were set on {BAR_CPU}, this is {cpu or 'an unknown processor'}"
    load = os.getloadavg()[0]
    if load > BAR_LOAD:
        return f"other work runs on this machine (load average {load:.2f}, above {BAR_LOAD})"
    return None


def measure_all(args: argparse.Namespace) -> Iterator[Measurement]:
    for page_size in (1, 16):
        yield match_cached(page_size, args.prompt_tokens, 1, args.rounds)
        yield match_cached(page_size, args.prompt_tokens, args.prompt_tokens // 512, args.rounds)
        yield from insert_new(page_size, args.prompt_tokens, args.rounds)
    for page_size in (1, 16):
        for policy in EVICTION_POLICIES:
            yield evict_leaf(page_size, policy, args.leaves, args.rounds)
    trace = args.trace or DEFAULT_TRACE
    if not trace.is_file():
        print(f"trace replay skipped: {trace.resolve()} does not exist; name one with --trace")
        return
    prompts = load_prompts(trace)
    for capacity in TRACE_CAPACITIES:
        for policy in EVICTION_POLICIES:
            yield replay_trace(prompts, capacity, policy, args.rounds)


def match_cached(page_size: int, num_tokens: int, num_nodes: int, rounds: int) -> Measurement:
    """Match a fully cached prompt along a path of ``num_nodes`` nodes.

    The bar is for a prompt that was inserted at once, because branches on the path cost extra.
    """
    num_tokens -= num_tokens % (page_size * num_nodes)
    cache = RadixCache(page_size)
    tokens, pages = make_range(num_tokens), make_range(num_tokens // page_size)
    for end in range(num_tokens // num_nodes, num_tokens + 1, num_tokens // num_nodes):
        cache.insert_prefix(tokens[:end], pages[: end // page_size])

    def match() -> None:
        for _ in range(100):
            cache.match_prefix(tokens)

    assert cache.match_prefix(tokens).num_pages == len(pages)
    bar = MATCH_BAR_US if num_nodes == 1 and num_tokens == BAR_PROMPT_TOKENS else None
    name = f"match {num_tokens} cached tokens, {num_nodes} node{'s' * (num_nodes > 1)}"
    return measure_us(name, page_size, "lru", bar, match, rounds, per=100)


def insert_new(page_size: int, num_tokens: int, rounds: int) -> Iterator[Measurement]:
    """Insert new prompts into a full cache and into a growing one.

    A full cache first evicts as many tokens as it is given, within the timed section. A growing one
    takes new memory from the operating system for its copies of tokens and spends most of its time
    on page faults, so the last row makes the same copies without a cache.
    """
    num_tokens -= num_tokens % page_size
    pages = make_range(num_tokens // page_size)
    prompts = [make_range(num_tokens) + number * num_tokens for number in range(64)]
    bar = INSERT_BAR_US if num_tokens == BAR_PROMPT_TOKENS else None
    full, growing = RadixCache(page_size), [RadixCache(page_size)]
    copies: list[object] = []
    for tokens in prompts[:32]:
        full.insert_prefix(tokens, pages)

    def replace() -> None:
        for tokens in prompts[32:] + prompts[:32]:
            full.evict_pages(len(pages))
            full.insert_prefix(tokens, pages)

    def empty() -> None:
        growing[0] = RadixCache(page_size)
        copies.clear()

    def grow() -> None:
        for tokens in prompts:
            growing[0].insert_prefix(tokens, pages)

    def copy() -> None:
        copies.extend(tokens.tobytes() for tokens in prompts)

    count = len(prompts)
    name = f"insert {num_tokens} new tokens, evict as many"
    yield measure_us(name, page_size, "lru", bar, replace, rounds, per=count)
    name = f"insert {num_tokens} new tokens, memory growing"
    yield measure_us(name, page_size, "lru", bar, grow, rounds, per=count, before=empty)
    name = "  only copying them"
    yield measure_us(name, page_size, "-", None, copy, rounds, per=count, before=empty)


def evict_leaf(page_size: int, policy: str, num_leaves: int, rounds: int) -> Measurement:
    """Evict one leaf per call, from a tree whose leaves were used in random order."""
    rng = random.Random(0)
    cache = RadixCache(page_size, policy=policy)
    keys = [make_range(page_size) + number for number in range(num_leaves)]
    pages = make_range(num_leaves)
    for number, key in enumerate(keys):
        cache.insert_prefix(key, pages[number : number + 1], priority=rng.randrange(10))
    for key in rng.choices(keys, k=num_leaves):
        cache.match_prefix(key)
    calls = min(1000, num_leaves)

    def evict() -> None:
        for _ in range(calls):
            cache.evict_pages(1)

    def refill() -> None:
        for number in [
            number for number in range(num_leaves) if not cache.count_cached(keys[number])
        ]:
            cache.insert_prefix(
                keys[number], pages[number : number + 1], priority=rng.randrange(10)
            )

    name = f"evict one of {num_leaves} leaves"
    bar = EVICT_BAR_US if num_leaves == BAR_LEAVES else None
    return measure_us(name, page_size, policy, bar, evict, rounds, per=calls, before=refill)


def replay_trace(
    prompts: list[IntArray], capacity: int | None, policy: str, rounds: int
) -> Measurement:
    """Replay a whole trace: match, lock, evict if over capacity (in tokens), insert, unlock."""
    num_tokens = sum(map(len, prompts))
    rates = []

    def serve_all() -> None:
        cache = RadixCache(TRACE_PAGE_SIZE, policy=policy)
        serve_prompts(cache, prompts, capacity)
        rates.append(cache.hit_tokens / num_tokens)

    # A round takes as long as everything before it, so three of them are enough and steady.
    best, median = time_rounds(serve_all, min(rounds, 3), per=num_tokens)
    limit = "unlimited" if capacity is None else f"{capacity / 1e6:g}M tokens"
    return Measurement(
        f"trace of {num_tokens / 1e6:.1f}M tokens, {limit}",
        TRACE_PAGE_SIZE,
        policy,
        "ns/token",
        best * 1e9,
        median * 1e9,
        REPLAY_BAR_NS if num_tokens == BAR_TRACE_TOKENS else None,
        rates[-1],
    )


def serve_prompts(cache: RadixCache, prompts: list[IntArray], capacity: int | None) -> None:
    size = cache.page_size
    num_made = 0
    for tokens in prompts:
        match = cache.match_prefix(tokens)
        cache.lock(match.handle)
        num_pages = len(tokens) // size
        num_new = num_pages - match.num_pages
        if capacity is not None:
            cached = cache.evictable_pages + cache.locked_pages
            cache.evict_pages(cached + num_new - capacity // size)
        made = np.arange(num_made, num_made + num_new, dtype=np.int32)
        num_made += num_new
        cache.insert_prefix(tokens[: num_pages * size], np.concatenate([match.pages, made]))
        cache.unlock(match.handle)


def load_prompts(trace: Path) -> list[IntArray]:
    """Load the prompts of a trace as tokens, with a block of 512 per hash id, cut at the end."""
    block = make_range(TRACE_BLOCK)
    prompts = []
    numbers: dict[int, int] = {}  # ids may have 63 bits
    for _, row in read_rows(trace, is_recorded=True):
        ids = [numbers.setdefault(hash_id, len(numbers)) for hash_id in row["hash_ids"]]
        starts = np.array(ids, dtype=np.int32) * TRACE_BLOCK
        prompts.append((starts[:, None] + block).ravel()[: row["input_length"]])
    return prompts


def time_rounds(
    work: Callable[[], None],
    rounds: int,
    *,
    per: int,
    before: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """Return the best and the median seconds of ``work``, divided by ``per``."""
    seconds = []
    for _ in range(rounds):
        if before is not None:
            before()
        gc.collect()  # or a round would pay for the garbage of the previous one
        start = time.perf_counter()
        work()
        seconds.append((time.perf_counter() - start) / per)
    return min(seconds), statistics.median(seconds)


def measure_us(
    name: str,
    page_size: int,
    policy: str,
    bar: float | None,
    work: Callable[[], None],
    rounds: int,
    *,
    per: int,
    before: Callable[[], None] | None = None,
) -> Measurement:
    """Time ``work`` in microseconds, see :func:`time_rounds`."""
    best, median = time_rounds(work, rounds, per=per, before=before)
    return Measurement(name, page_size, policy, "us", best * 1e6, median * 1e6, bar)


def make_range(length: int) -> IntArray:
    return np.arange(length, dtype=np.int32)
