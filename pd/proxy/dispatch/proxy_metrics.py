"""Prometheus metrics of a proxy."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pd.proxy.dispatch.token_metrics import TokenCounter, TokenHistogram
from pd.proxy.workers.metric_families import collect_registry
from pd.util.output import lost_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.dispatch.generation import Generation
    from pd.proxy.dispatch.job import Job
    from pd.proxy.nodes.node_handle import NodeHandle
    from pd.proxy.workers.metric_families import Family

_LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_INTERVALS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_STAGES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 50)


class Metrics:
    """All metrics, in a registry of their own, because one process may hold several proxies."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "pd_proxy_requests", "HTTP requests by outcome", ["endpoint", "outcome"], registry=r
        )
        self.running = Gauge("pd_proxy_running_requests", "requests being served", registry=r)
        self.ttft = Histogram(
            "pd_proxy_ttft_seconds", "time to first token", buckets=_LATENCIES, registry=r
        )
        self.ttft_errors = Histogram(
            "pd_proxy_ttft_prediction_error",
            "relative error of the predicted time to first token",
            buckets=_ERRORS,
            registry=r,
        )
        self.itl = TokenHistogram("pd_proxy_itl_seconds", "time between tokens", _INTERVALS, r)
        self.e2e = Histogram(
            "pd_proxy_e2e_seconds", "request latency", buckets=_LATENCIES, registry=r
        )
        self.stages = Histogram(
            "pd_proxy_stage_seconds",
            "time per stage, as the nodes report it",
            ["stage"],
            buckets=_STAGES,
            registry=r,
        )
        self.prompt_tokens = Counter("pd_proxy_prompt_tokens", "prompt tokens", registry=r)
        self.cached_tokens = Counter(
            "pd_proxy_cached_tokens", "prompt tokens from prefix caches", registry=r
        )
        self.output_tokens = TokenCounter("pd_proxy_output_tokens", "generated tokens", r)
        self.aborts = Counter("pd_proxy_aborts", "generations aborted", ["reason"], registry=r)
        self.routing = Counter(
            "pd_proxy_routing_decisions", "why nodes were chosen", ["role", "reason"], registry=r
        )
        self.prefixes = Counter(
            "pd_proxy_prefix_predictions",
            "expected cached tokens of prompts, compared with the actual ones",
            ["outcome"],
            registry=r,
        )
        self.moves = Counter(
            "pd_proxy_moves",
            "waiting requests we asked a node to give back for another node",
            ["outcome"],
            registry=r,
        )
        self.failovers = Counter(
            "pd_proxy_failovers",
            "failovers of answers, successful or not",
            ["outcome"],
            registry=r,
        )
        self.failover_pause = Histogram(
            "pd_proxy_failover_pause_seconds",
            "time without a token during failovers",
            buckets=_LATENCIES,
            registry=r,
        )
        self.open_batches = Gauge(
            "pd_proxy_open_batches", "batches that have not ended", ["status"], registry=r
        )
        self.ended_batches = Counter(
            "pd_proxy_ended_batches", "batches that ended with this status", ["status"], registry=r
        )
        self.batch_requests = Counter(
            "pd_proxy_batch_requests", "results of batches' requests", ["outcome"], registry=r
        )
        self.worker_up = Gauge(
            "pd_proxy_worker_up", "1 if the node can take requests", ["role", "url"], registry=r
        )
        self.log_lines_dropped = TokenCounter(
            "pd_proxy_log_lines_dropped",
            "lines of output dropped because nobody read them",
            r,
        )

        # Looking up a histogram by its label costs more than observing a value.
        self._get_stage = functools.cache(self.stages.labels)

    def collect_families(self, nodes: Sequence[NodeHandle]) -> list[Family]:
        """Return all metrics with the current state of the nodes."""
        self.log_lines_dropped.value = lost_lines()
        self.worker_up.clear()
        for node in nodes:
            self.worker_up.labels(node.role, node.url).set(node.is_ready)
        return collect_registry(self.registry)

    def count_tokens(
        self, generation: Generation, added: int, now: float, previous: float | None
    ) -> None:
        """Count tokens of a choice received ``now``. ``previous``: time of earlier ones."""
        self.output_tokens.value += added
        if previous is None:
            self.ttft.observe(now - generation.created)
            if generation.predicted_ttft:
                error = (now - generation.created) / generation.predicted_ttft - 1
                self.ttft_errors.observe(abs(error))
        else:
            self.itl.observe(now - previous)

    def _count_prefix(self, generation: Generation) -> None:
        """Compare the expected prefix at the first node with the actual one."""
        if generation.predicted_cached is None:
            return
        error = generation.cached_tokens - generation.predicted_cached
        outcome = "right" if error == 0 else "too_few" if error > 0 else "too_many"
        self.prefixes.labels(outcome).inc()

    def count_generation(self, generation: Generation) -> None:
        self.prompt_tokens.inc(len(generation.spec.token_ids))
        self.cached_tokens.inc(generation.cached_tokens)
        for failover in generation.failovers:
            self.failover_pause.observe(failover.pause)
        if generation.is_finished:
            self._count_prefix(generation)
            for stage, seconds in generation.measure_stages().items():
                self._get_stage(stage).observe(seconds)

    def count_request(self, job: Job, seconds: float) -> None:
        self.requests.labels(job.endpoint, job.outcome).inc()
        self.e2e.observe(seconds)

    def count_refusal(self, endpoint: str, kind: str) -> None:
        """Count a request rejected before it became a job."""
        self.requests.labels(endpoint, kind).inc()
