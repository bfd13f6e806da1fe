"""Runs the programs of a workload on a deployment, and compares the hit rate with the best one."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pd.bench.programs.optimum import replay_best_order, replay_sent_order
from pd.bench.programs.recorder import HintlessBackend, RecordingService, list_requests
from pd.core.errors import SetupError
from pd.lang.endpoint import HttpService
from pd.lang.native import NativeBackend

if TYPE_CHECKING:
    from typing import Any

    from pd.bench.programs.layouts import ProgramLayout, RunningLayout
    from pd.bench.programs.optimum import CacheRequest, Replay
    from pd.bench.programs.workloads import ProgramWorkload

# Room in a small pool next to the longest request, whose last token is in no list of ours.
_SPARE_TOKENS = 64


@dataclass(frozen=True)
class Ablation:
    """What is switched off.

    Attributes:
        radix_cache: nodes keep prefixes.
        schedule_policy: ``--schedule-policy`` of the nodes.
        parallel: a program sends the requests of its branches at the same time.
        hints: a program has the common beginning of branches computed before them, and the
            beginning of all programs before the first one.
    """

    radix_cache: bool = True
    schedule_policy: str = "lpm"
    parallel: bool = True
    hints: bool = True

    def change_settings(self, settings: ProgramLayout) -> ProgramLayout:
        """Return the settings of nodes for this ablation."""
        return replace(settings, radix_cache=self.radix_cache, schedule_policy=self.schedule_policy)


ABLATIONS = {
    "full": Ablation(),
    "no cache": Ablation(radix_cache=False),
    "fcfs": Ablation(schedule_policy="fcfs"),
    "random": Ablation(schedule_policy="random"),
    "no parallelism": Ablation(parallel=False),
    "no hints": Ablation(hints=False),
    "all off": Ablation(False, "fcfs", False, False),
}


@dataclass(frozen=True)
class ProgramsResult:
    """What a workload's programs took, and what the cache gave them.

    Attributes:
        seconds: from the first request until the last program ended.
        latencies: seconds of each program.
        requests: all prompts that nodes got.
        hit_tokens: tokens of these prompts that were cached.
        best: the best that an unlimited cache gives these prompts.
        sent_order_hits: hits that the best eviction gives in a small pool if the requests keep the
            order in which they were sent; None with an ample pool.
        page_loss: share of the best hits that whole pages lose against single tokens.
    """

    seconds: float
    latencies: list[float]
    requests: list[CacheRequest]
    hit_tokens: int
    best: Replay
    sent_order_hits: int | None
    page_loss: float

    @property
    def programs_per_s(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.best.prompt_tokens)

    def to_row(self) -> dict[str, Any]:
        """Return the numbers of a result file."""
        return {
            "programs": len(self.latencies),
            "requests": len(self.requests),
            "prompt_tokens": self.best.prompt_tokens,
            "programs_per_s": round(self.programs_per_s, 4),
            "latency_mean_s": round(statistics.mean(self.latencies), 4),
            "latency_p99_s": round(float(np.percentile(self.latencies, 99)), 4),
            "hit_rate": round(self.hit_rate, 4),
            "best_hit_rate": round(self.best.hit_rate, 4),
            "of_best": round(self.hit_tokens / self.best.hit_tokens, 4)
            if self.best.hit_tokens
            else 1.0,
            "sent_order_hit_rate": None
            if self.sent_order_hits is None
            else round(self.sent_order_hits / max(1, self.best.prompt_tokens), 4),
            "page_loss": round(self.page_loss, 4),
        }

    def choose_pool(self, share: float) -> int:
        """Choose a pool of a share of the distinct tokens, with room for the longest request."""
        longest = max(
            len(request.token_ids) + max(map(len, request.answers), default=0)
            for request in self.requests
        )
        return max(int(share * self.best.distinct_tokens), longest + _SPARE_TOKENS)


def run_workload(
    layout: RunningLayout,
    workload: ProgramWorkload,
    ablation: Ablation,
    settings: ProgramLayout,
    concurrency: int,
) -> ProgramsResult:
    """Run all programs with an empty cache, ``concurrency`` at a time, after one to warm up.

    Raises:
        ProgramError: a program failed.
        SetupError: the recorded requests are not those that the proxy counted, or more tokens were
            cached than the best order gives, so the definition of the best order is wrong.
    """
    service = RecordingService(HttpService(layout.url, None, None))
    backend = (NativeBackend if ablation.hints else HintlessBackend)(service)

    def run_program(arguments: dict[str, Any]) -> float:
        started = time.monotonic()
        state = workload.function.run(
            backend=backend, use_thread=ablation.parallel, temperature=0, **arguments
        )
        if (error := state.error()) is not None:
            raise error
        return time.monotonic() - started

    before = layout.read_tokens()
    run_program(workload.arguments[0])
    warming = list_requests(service.take_calls(), layout.tokenize)
    layout.wait_tokens(before, sum(len(request.token_ids) for request in warming))
    backend.flush_cache()
    before = layout.read_tokens()
    began = time.monotonic()
    workload.function.cache(backend)
    with ThreadPoolExecutor(concurrency, "program") as threads:
        latencies = list(threads.map(run_program, workload.arguments))
    seconds = time.monotonic() - began
    requests = list_requests(service.take_calls(), layout.tokenize)
    best = replay_best_order(requests, settings.page_size, answers_stay=settings.answers_stay)
    hit_tokens = layout.wait_tokens(before, best.prompt_tokens)
    if hit_tokens > best.hit_tokens:
        raise SetupError(
            f"{workload.name}: {hit_tokens} prompt tokens were cached, but the best order gives "
            f"{best.hit_tokens}; the definition in pd/bench/programs/optimum.py is wrong"
        )
    sent_order_hits = None
    if settings.kv_cache_tokens is not None:
        num_pages = settings.kv_cache_tokens // settings.page_size
        sent_order_hits = replay_sent_order(
            requests, settings.page_size, num_pages, answers_stay=settings.answers_stay
        )
    single = replay_best_order(requests, 1, answers_stay=settings.answers_stay)
    loss = 1 - best.hit_tokens / single.hit_tokens if single.hit_tokens else 0.0
    return ProgramsResult(seconds, latencies, requests, hit_tokens, best, sent_order_hits, loss)
