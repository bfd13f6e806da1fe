"""`pd-bench radix`: how fast the radix cache is on one core, and what it hits on a real trace.

Every time is the best of several rounds, since other work on the machine can only add to it; the
median is shown beside it. Nothing is excluded from a timed section but making its inputs.

Bars hold for the sizes that are the defaults, on the processor that they were set on while nothing
else ran there. Elsewhere nothing is judged, and the exit status is 0 whatever was measured.
"""

from __future__ import annotations

import gc
import os
import random
import shlex
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pd.bench.load.datasets.jsonl import read_rows
from pd.bench.report import add_output, check_output, describe_machine, write_report
from pd.core.errors import UsageError
from pd.radix import EVICTION_POLICIES, IntArray, RadixCache

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

DEFAULT_TRACE = Path("../shared/traces/mooncake_synthetic.jsonl")
TRACE_BLOCK = 512  # tokens that one hash id of the trace stands for
TRACE_PAGE_SIZE = 16
TRACE_CAPACITIES = (1_000_000, 5_000_000, None)

# Where the bars hold: lengths in tokens, the tokens of the whole trace, and the processor.
BAR_PROMPT_TOKENS = 16384
BAR_LEAVES = 100_000
BAR_TRACE_TOKENS = 61_194_628
BAR_CPU = "AMD EPYC"
# Load average of the last minute before anything is measured: above it others run here too.
BAR_LOAD = 0.5
MATCH_BAR_US = 20.0
INSERT_BAR_US = 60.0
EVICT_BAR_US = 10.0
REPLAY_BAR_NS = 27.0


@dataclass
class Measurement:
    """One row of the table. ``bar`` is the time that must not be exceeded, None where none is."""

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

    def row(self) -> str:
        bar = "" if self.bar is None else f"{self.bar:8.1f}{' MISSED' if self.missed else ''}"
        hits = "" if self.hit_rate is None else f"hit rate {self.hit_rate:6.2%}"
        times = f"{self.best:8.2f} {self.median:8.2f} {self.unit:8}"
        return f"{self.name:43} {self.page_size:4} {self.policy:8} {times} {bar:8} {hits}".rstrip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="take the best of this many rounds")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=BAR_PROMPT_TOKENS,
        help="length of the matched and inserted prompt",
    )
    parser.add_argument(
        "--leaves", type=int, default=BAR_LEAVES, help="leaves in the tree that is evicted from"
    )
    parser.add_argument(
        "--trace", type=Path, help=f"request trace to replay (default: {DEFAULT_TRACE}, if there)"
    )
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. Returns 1 if a bar was missed.

    ``args`` has also the whole ``command_line``, as it was typed. Raises UsageError for arguments
    that cannot be used.
    """
    if min(args.rounds, args.prompt_tokens // 512, args.leaves) < 1:
        raise UsageError(
            f"--rounds {args.rounds}, --leaves {args.leaves} and --prompt-tokens "
            f"{args.prompt_tokens} must be at least 1, 1 and 512"
        )
    if args.trace is not None and not args.trace.is_file():
        raise UsageError(f"--trace {args.trace} is not a file")
    check_output(args.output)
    obstacle = no_verdict()
    if obstacle is not None:
        print(f"no bar is judged: {obstacle}")
    print(f"{'operation':43} {'page':4} {'policy':8} {'best':>8} {'median':>8} {'':8} {'bar':>8}")
    results = []
    for measured in measure(args):
        result = measured if obstacle is None else replace(measured, bar=None)
        print(result.row(), flush=True)
        results.append(result)
    if args.output is not None:
        write_report(
            args.output,
            shlex.join(["pd-bench", *args.command_line]),
            [asdict(result) for result in results],
            measured=["pd/bench/radix.py", "pd/radix"],
        )
    return int(any(result.missed for result in results))


def no_verdict() -> str | None:
    """Return why nothing measured here can be judged by the bars; None where it can."""
    cpu = describe_machine()["cpu"]
    if cpu != BAR_CPU:
        return f"the bars were set on {BAR_CPU}, this is {cpu or 'an unknown processor'}"
    load = os.getloadavg()[0]
    if load > BAR_LOAD:
        return f"other work runs on this machine (load average {load:.2f}, above {BAR_LOAD})"
    return None


def measure(args: argparse.Namespace) -> Iterator[Measurement]:
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
    prompts = expand(trace)
    for capacity in TRACE_CAPACITIES:
        for policy in EVICTION_POLICIES:
            yield replay(prompts, capacity, policy, args.rounds)


def match_cached(page_size: int, num_tokens: int, num_nodes: int, rounds: int) -> Measurement:
    """A prompt that is wholly cached, along a path of ``num_nodes`` nodes.

    The bar is for a prompt that was inserted at once; branches along the way cost extra.
    """
    num_tokens -= num_tokens % (page_size * num_nodes)
    cache = RadixCache(page_size)
    tokens, pages = arange(num_tokens), arange(num_tokens // page_size)
    for end in range(num_tokens // num_nodes, num_tokens + 1, num_tokens // num_nodes):
        cache.insert(tokens[:end], pages[: end // page_size])

    def match() -> None:
        for _ in range(100):
            cache.match(tokens)

    assert cache.match(tokens).num_pages == len(pages)
    bar = MATCH_BAR_US if num_nodes == 1 and num_tokens == BAR_PROMPT_TOKENS else None
    name = f"match {num_tokens} cached tokens, {num_nodes} node{'s' * (num_nodes > 1)}"
    best, median = timed(match, rounds, per=100)
    return Measurement(name, page_size, "lru", "us", best * 1e6, median * 1e6, bar)


def insert_new(page_size: int, num_tokens: int, rounds: int) -> Iterator[Measurement]:
    """Prompts that share nothing with what is cached: in a full cache, and in one that grows.

    A full cache first evicts as many tokens as it is given, within the timed section. A growing
    one takes new memory from the operating system for its copies of tokens, and spends most of
    its time on the page faults: the last row makes the same copies without a cache.
    """
    num_tokens -= num_tokens % page_size
    pages = arange(num_tokens // page_size)
    prompts = [arange(num_tokens) + number * num_tokens for number in range(64)]
    bar = INSERT_BAR_US if num_tokens == BAR_PROMPT_TOKENS else None
    full, growing = RadixCache(page_size), [RadixCache(page_size)]
    copies: list[object] = []
    for tokens in prompts[:32]:
        full.insert(tokens, pages)

    def replace() -> None:
        for tokens in prompts[32:] + prompts[:32]:
            full.evict(len(pages))
            full.insert(tokens, pages)

    def empty() -> None:
        growing[0] = RadixCache(page_size)
        copies.clear()

    def grow() -> None:
        for tokens in prompts:
            growing[0].insert(tokens, pages)

    def copy() -> None:
        copies.extend(tokens.tobytes() for tokens in prompts)

    best, median = timed(replace, rounds, per=len(prompts))
    name = f"insert {num_tokens} new tokens, evict as many"
    yield Measurement(name, page_size, "lru", "us", best * 1e6, median * 1e6, bar)
    best, median = timed(grow, rounds, per=len(prompts), before=empty)
    name = f"insert {num_tokens} new tokens, memory growing"
    yield Measurement(name, page_size, "lru", "us", best * 1e6, median * 1e6, bar)
    best, median = timed(copy, rounds, per=len(prompts), before=empty)
    yield Measurement("  only copying them", page_size, "-", "us", best * 1e6, median * 1e6)


def evict_leaf(page_size: int, policy: str, num_leaves: int, rounds: int) -> Measurement:
    """One call that evicts one leaf, in a tree whose leaves were used in random order."""
    rng = random.Random(0)
    cache = RadixCache(page_size, policy=policy)
    keys = [arange(page_size) + number for number in range(num_leaves)]
    pages = arange(num_leaves)
    for number, key in enumerate(keys):
        cache.insert(key, pages[number : number + 1], priority=rng.randrange(10))
    for key in rng.choices(keys, k=num_leaves):
        cache.match(key)
    calls = min(1000, num_leaves)

    def evict() -> None:
        for _ in range(calls):
            cache.evict(1)

    def refill() -> None:
        for number in [number for number in range(num_leaves) if not cache.peek(keys[number])]:
            cache.insert(keys[number], pages[number : number + 1], priority=rng.randrange(10))

    best, median = timed(evict, rounds, per=calls, before=refill)
    name = f"evict one of {num_leaves} leaves"
    bar = EVICT_BAR_US if num_leaves == BAR_LEAVES else None
    return Measurement(name, page_size, policy, "us", best * 1e6, median * 1e6, bar)


def replay(prompts: list[IntArray], capacity: int | None, policy: str, rounds: int) -> Measurement:
    """A whole trace: match, lock, evict if over capacity (in tokens), insert, unlock."""
    num_tokens = sum(map(len, prompts))
    rates = []

    def serve_all() -> None:
        cache = RadixCache(TRACE_PAGE_SIZE, policy=policy)
        serve(cache, prompts, capacity)
        rates.append(cache.hit_tokens / num_tokens)

    # Each round takes as long as all of the above, and lasts long enough to be steady.
    best, median = timed(serve_all, min(rounds, 3), per=num_tokens)
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


def serve(cache: RadixCache, prompts: list[IntArray], capacity: int | None) -> None:
    size = cache.page_size
    num_made = 0
    for tokens in prompts:
        found = cache.match(tokens)
        cache.lock(found.handle)
        num_pages = len(tokens) // size
        num_new = num_pages - found.num_pages
        if capacity is not None:
            cached = cache.evictable_pages + cache.locked_pages
            cache.evict(cached + num_new - capacity // size)
        made = np.arange(num_made, num_made + num_new, dtype=np.int32)
        num_made += num_new
        cache.insert(tokens[: num_pages * size], np.concatenate([found.pages, made]))
        cache.unlock(found.handle)


def expand(trace: Path) -> list[IntArray]:
    """The prompts of a trace as tokens: a distinct block of 512 for each hash id, the last cut."""
    block = arange(TRACE_BLOCK)
    prompts = []
    numbers: dict[int, int] = {}  # ids may have 63 bits
    for _, row in read_rows(trace, is_recorded=True):
        ids = [numbers.setdefault(hash_id, len(numbers)) for hash_id in row["hash_ids"]]
        starts = np.array(ids, dtype=np.int32) * TRACE_BLOCK
        prompts.append((starts[:, None] + block).ravel()[: row["input_length"]])
    return prompts


def timed(
    work: Callable[[], None],
    rounds: int,
    *,
    per: int,
    before: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """Best and median seconds of ``work``, divided by ``per``."""
    seconds = []
    for _ in range(rounds):
        if before is not None:
            before()
        gc.collect()  # or a round pays for the garbage of the one before
        start = time.perf_counter()
        work()
        seconds.append((time.perf_counter() - start) / per)
    return min(seconds), statistics.median(seconds)


def arange(length: int) -> IntArray:
    return np.arange(length, dtype=np.int32)
