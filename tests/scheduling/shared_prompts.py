"""Prompts that share beginnings, and what a prefix cache saves of them in each order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefill_bench import PrefillBench

from pd.scheduling.due_order import DueOrder
from pd.scheduling.waiting_queue import WINDOW, WaitingQueue

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from pd.scheduling.request import Request

KINDS = ("documents", "turns", "tree", "mixed")


def make_workload(rng: random.Random, kind: str, count: int) -> list[list[int]]:
    """Make prompts of 100 to 700 tokens in the order in which they come.

    ``documents``: a few documents, each with many questions. ``turns``: growing conversations.
    ``tree``: thoughts that branch twice, as in a tree of thought. ``mixed``: every prompt continues
    a random part of an earlier one.
    """

    def draw(count: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(count)]

    if kind == "documents":
        documents = [draw(400) for _ in range(12)]
        return [[*rng.choice(documents), *draw(rng.randint(20, 80))] for _ in range(count)]
    if kind == "turns":
        talks, prompts = [draw(100) for _ in range(count // 10)], []
        for _ in range(count):
            talk = rng.choice(talks)
            talk += draw(rng.randint(20, 60))
            prompts.append(list(talk))
        return prompts
    if kind == "tree":
        roots = [draw(150) for _ in range(count // 25)]
        branches = [[*root, *draw(120)] for root in roots for _ in range(4)]
        leaves = [[*branch, *draw(80)] for branch in branches for _ in range(4)]
        return [[*rng.choice(leaves), *draw(20)] for _ in range(count)]
    prompts = [draw(100)]
    while len(prompts) < count:
        trunk = rng.choice(prompts) if rng.random() < 0.8 else []
        prompts.append([*trunk[: rng.randint(0, len(trunk))], *draw(rng.randint(20, 200))][:700])
    return prompts


def count_distinct(prompts: Sequence[Sequence[int]]) -> int:
    """Count the tokens that differ with all tokens before them: the pages of an unlimited cache."""
    return len({tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1)})


def best_hit_rate(prompts: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that an unlimited cache gives in the best order: each beginning is
    computed once, and the last token of a prompt always."""
    known: set[tuple[int, ...]] = set()
    computed = 0
    for prompt in sorted(prompts, key=len):
        beginnings = {tuple(prompt[:n]) for n in range(1, len(prompt) + 1)}
        computed += max(1, len(beginnings - known))
        known |= beginnings
    return 1 - computed / sum(map(len, prompts))


def compute_seconds(request: Request, start: int) -> float:
    """A prompt's time from a token on: a millisecond for each token."""
    return 1e-3 * (len(request.prompt) - start)


def usual(tokens: int) -> float:
    """Seconds until token 1 that count as in time for a prompt of so many tokens."""
    return 4 * (1e-3 * tokens + 0.1)


def serve_cached(
    prompts: Sequence[Sequence[int]],
    policy: str,
    *,
    load: float = 0.0,
    by_due: bool = False,
    max_running: int = 1,
    max_overtakes: int = 64,
    pool_share: float = 0.25,
) -> tuple[float, int]:
    """Compute prompts with a real queue, scheduler and prefix cache, in simulated time.

    Args:
        load: 0 if all come at once. With 1 there is just time to compute every distinct token once.
        by_due: as an elastic node does.
        max_running: prompts that run together.
        pool_share: size of the pool, as a share of the distinct tokens.

    Returns:
        The share of tokens that were cached, and the number of prompts that were late.
    """
    distinct = count_distinct(prompts)
    pool = max(int(pool_share * distinct), max_running * (max(map(len, prompts)) + 1))
    bench = PrefillBench(
        policy,
        pages=pool,
        page_size=1,
        max_running=max_running,
        max_overtakes=max_overtakes,
        budget=512,
    )
    radix, now = bench.memory.radix, [1000.0]
    if by_due:
        order = DueOrder(
            compute_seconds,
            lambda request: min(radix.count_cached(request.prompt), len(request.prompt) - 1),
            lambda request: usual(len(request.prompt)),
            WINDOW,
            lambda: now[0],
        )
        bench.scheduler.waiting = WaitingQueue(policy, radix, max_overtakes, order)
    pause = 1e-3 * distinct / len(prompts) / load if load else 0.0
    arrivals = [1000.0 + pause * number for number in range(len(prompts))]
    sent = late = 0
    while len(bench.computed) < len(prompts):
        while sent < len(prompts) and arrivals[sent] <= now[0]:
            ttft = usual(len(prompts[sent]))
            request = bench.add(prompts[sent], rid=str(sent), ttft=ttft if by_due else 0.0)
            request.due_at = arrivals[sent] + ttft
            sent += 1
        if not len(bench.scheduler.waiting) and not bench.scheduler.running:
            now[0] = arrivals[sent]
            continue
        tokens, ended = bench.computed_tokens, len(bench.computed)
        bench.step()
        now[0] += 1e-3 * (bench.computed_tokens - tokens)
        late += sum(now[0] > request.due_at for request in bench.computed[ended:])
    return 1 - bench.computed_tokens / sum(map(len, prompts)), late
