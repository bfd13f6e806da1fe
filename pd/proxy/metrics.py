"""Metrics of a proxy for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pd.proxy.metric_families import families_of
from pd.proxy.token_metrics import TokenCounter, TokenHistogram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.generation import Generation
    from pd.proxy.job import Job
    from pd.proxy.metric_families import Family
    from pd.proxy.node_handle import NodeHandle

_LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_INTERVALS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_STAGES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 50)


class Metrics:
    """All metrics in a registry of their own, so that several proxies fit in one process."""

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
            "by what part of itself the predicted time to first token was wrong",
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
            "cached tokens of prompts as they were expected, compared with what the node had",
            ["outcome"],
            registry=r,
        )
        self.moves = Counter(
            "pd_proxy_moves",
            "waiting requests that a node was asked to give back for another",
            ["outcome"],
            registry=r,
        )
        self.failovers = Counter(
            "pd_proxy_failovers",
            "times that an answer went on elsewhere, or could not",
            ["outcome"],
            registry=r,
        )
        self.failover_pause = Histogram(
            "pd_proxy_failover_pause_seconds",
            "time without a token of answers that went on elsewhere",
            buckets=_LATENCIES,
            registry=r,
        )
        self.worker_up = Gauge(
            "pd_proxy_worker_up", "1 if the node can take requests", ["role", "url"], registry=r
        )

    def families(self, nodes: Sequence[NodeHandle]) -> list[Family]:
        """All metrics, with the present state of the nodes."""
        self.worker_up.clear()
        for node in nodes:
            self.worker_up.labels(node.role, node.url).set(node.ready)
        return families_of(self.registry)

    def tokens_arrived(
        self, generation: Generation, added: int, now: float, previous: float | None
    ) -> None:
        """Tokens of a choice came ``now``; ``previous`` is when its last ones did."""
        self.output_tokens.value += added
        if previous is None:
            self.ttft.observe(now - generation.created)
            if generation.predicted_ttft:
                error = (now - generation.created) / generation.predicted_ttft - 1
                self.ttft_errors.observe(abs(error))
        else:
            self.itl.observe(now - previous)

    def _count_prefix(self, generation: Generation) -> None:
        """Compare the prefix that was expected at the first node with the one that it had."""
        if generation.predicted_cached is None:
            return
        error = generation.cached_tokens - generation.predicted_cached
        outcome = "right" if error == 0 else "too_few" if error > 0 else "too_many"
        self.prefixes.labels(outcome).inc()

    def generation_ended(self, generation: Generation) -> None:
        self.prompt_tokens.inc(len(generation.spec.token_ids))
        self.cached_tokens.inc(generation.cached_tokens)
        for failover in generation.failovers:
            self.failover_pause.observe(failover.pause)
        if generation.finished:
            self._count_prefix(generation)
            for stage, seconds in generation.stages().items():
                self.stages.labels(stage).observe(seconds)

    def request_ended(self, job: Job, seconds: float) -> None:
        outcome = job.outcome or (job.error.kind if job.error else "ok")
        self.requests.labels(job.endpoint, outcome).inc()
        self.e2e.observe(seconds)

    def request_refused(self, endpoint: str, kind: str) -> None:
        """A request that no node ever saw."""
        self.requests.labels(endpoint, kind).inc()
