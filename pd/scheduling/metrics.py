"""Prometheus metrics of a node's requests and transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from pd.engine.draft_tree import DraftTree

_BUCKETS = tuple(0.001 * 2**power for power in range(18))
_TRANSFER_BUCKETS = tuple(0.0001 * 2**power for power in range(20))
_ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_RATE_BUCKETS = tuple(0.0625 * 2**power for power in range(14))


class TransferTimes(NamedTuple):
    """Durations of one transfer in seconds.

    Attributes:
        wait: from the request's arrival to the decode node's reservation.
        wire: from the first push to the end of the last byte, seen from the prefill node.
        exposed: from the computed prompt to the commit. The request only waits for this part.
    """

    wait: float
    wire: float
    exposed: float


class TransferMetrics:
    """Sizes and durations of committed transfers by backend. Both ends count the same transfers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["backend"], buckets=buckets, registry=registry)

        self._bytes = Counter(
            "pd_transfer_bytes", "KV bytes of committed transfers", ["backend"], registry=registry
        )
        self._rate = histogram(
            "pd_transfer_gigabytes_per_second", "Bytes by time on the wire", _RATE_BUCKETS
        )
        self._times = {
            "wait": histogram(
                "pd_transfer_reservation_wait_seconds",
                "From a request's arrival to its reservation",
                _TRANSFER_BUCKETS,
            ),
            "wire": histogram(
                "pd_transfer_wire_seconds",
                "From the first push to the end of the last byte",
                _TRANSFER_BUCKETS,
            ),
            "exposed": histogram(
                "pd_transfer_exposed_seconds",
                "From the computed prompt to the commit",
                _TRANSFER_BUCKETS,
            ),
        }

    def observe_transfer(self, backend: str, num_bytes: int, times: TransferTimes) -> None:
        """Count a committed transfer.

        If the decode node had all tokens cached, there were no bytes, and we only count the wait.
        """
        self._times["wait"].labels(backend).observe(times.wait)
        if num_bytes == 0:
            return
        self._bytes.labels(backend).inc(num_bytes)
        self._times["wire"].labels(backend).observe(times.wire)
        self._times["exposed"].labels(backend).observe(times.exposed)
        if times.wire > 0:
            self._rate.labels(backend).observe(num_bytes / times.wire / 1e9)


class VerifiedDrafts:
    """Counts the drafts verified by one step.

    Attributes:
        drafts: number of drafts.
        shapes: number of drafts by shape.
        accepted: number of accepted tokens by their depth in the draft.
    """

    def __init__(self) -> None:
        self.drafts = 0
        self.shapes: dict[DraftTree, int] = {}
        self.accepted: list[int] = []

    @property
    def drafted(self) -> list[int]:
        """Number of drafted tokens by their depth in the draft."""
        counts = [0] * max((shape.depth for shape in self.shapes), default=0)
        for shape, count in self.shapes.items():
            for depth, width in enumerate(shape.widths):
                counts[depth] += count * width
        return counts

    def add_draft(self, shape: DraftTree, accepted: int) -> None:
        """Count a draft with ``accepted`` accepted tokens."""
        self.drafts += 1
        self.shapes[shape] = self.shapes.get(shape, 0) + 1
        while len(self.accepted) < accepted:
            self.accepted.append(0)
        for position in range(accepted):
            self.accepted[position] += 1


# When the mean acceptance length has counted this many drafts, we halve their weight.
_RECENT_DRAFTS = 10_000


class _ByPosition:
    """A counter with the label ``position``. We keep its children, because lookups are slow."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._at: list[Counter] = []

    def add_counts(self, counts: list[int]) -> None:
        """Add one count per position, starting at 0."""
        for position, count in enumerate(counts):
            if position == len(self._at):
                self._at.append(self._counter.labels(position))
            self._at[position].inc(count)


class SpeculationMetrics:
    """Counts drafted and accepted tokens, and the time of steps with drafts.

    The acceptance length is ``1 + accepted / drafts``: the mean tokens per verified draft with the
    model's own. Its gauge is the mean since the start, until older drafts weigh less after 10,000
    drafts.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._drafts = Counter("pd_speculative_drafts", "Drafts verified", registry=registry)
        self._drafted = _ByPosition(
            Counter(
                "pd_speculative_drafted",
                "Tokens drafted, by their place in the draft",
                ["position"],
                registry=registry,
            )
        )
        self._accepted = _ByPosition(
            Counter(
                "pd_speculative_accepted",
                "Drafted tokens accepted, by their place in the draft",
                ["position"],
                registry=registry,
            )
        )
        # Weighted drafts and accepted tokens, in one tuple because another thread reads both.
        self._recent = (0.0, 0.0)
        Gauge(
            "pd_speculative_acceptance_length",
            "Mean tokens per verified draft, the model's own among them, over the last 10,000 "
            "drafts or so; 0 before the first",
            registry=registry,
        ).set_function(self._mean_acceptance)
        self._steps = Counter("pd_speculative_steps", "Steps with drafts", registry=registry)
        self._seconds = Counter(
            "pd_speculative_step_seconds",
            "Time of steps with drafts: draft, verify, and total, which is their sum",
            ["part"],
            registry=registry,
        )

    def observe_step(self, draft_seconds: float, verify_seconds: float) -> None:
        """Count a complete step with drafts."""
        self._steps.inc()
        self._seconds.labels("draft").inc(draft_seconds)
        self._seconds.labels("verify").inc(verify_seconds)
        self._seconds.labels("total").inc(draft_seconds + verify_seconds)

    def observe_drafts(self, verified: VerifiedDrafts) -> None:
        """Count the verified drafts of a step."""
        self._drafts.inc(verified.drafts)
        self._drafted.add_counts(verified.drafted)
        self._accepted.add_counts(verified.accepted)
        drafts, accepted = self._recent
        drafts, accepted = drafts + verified.drafts, accepted + sum(verified.accepted)
        weight = 0.5 if drafts >= _RECENT_DRAFTS else 1.0
        self._recent = (weight * drafts, weight * accepted)

    def _mean_acceptance(self) -> float:
        drafts, accepted = self._recent
        return 1 + accepted / drafts if drafts else 0.0


class RequestMetrics:
    """Counters and histograms of a node's requests, and their registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("pd_requests", "Requests accepted", registry=self.registry)
        self.failed = Counter(
            "pd_requests_failed", "Requests ended by an error", ["kind"], registry=self.registry
        )
        self.tokens = Counter("pd_output_tokens", "Tokens delivered", registry=self.registry)
        self.steps = Counter("pd_steps", "Forward passes", registry=self.registry)
        self.forced = Counter(
            "pd_grammar_forced_tokens",
            "Output tokens that a grammar forced and that were not sampled",
            registry=self.registry,
        )
        self.retractions = Counter(
            "pd_retractions", "Sequences taken out of the pool", registry=self.registry
        )
        self.transferred_bytes = Counter(
            "pd_transferred_bytes", "KV bytes of committed transfers", registry=self.registry
        )
        self.step_errors = Histogram(
            "pd_step_prediction_error",
            "By what part of itself the predicted time of a step was wrong",
            buckets=_ERROR_BUCKETS,
            registry=self.registry,
        )
        self.transfers = TransferMetrics(self.registry)
        self.speculation = SpeculationMetrics(self.registry)
        self._stages = Histogram(
            "pd_stage_seconds",
            "Time of requests in each stage",
            ["stage"],
            buckets=_BUCKETS,
            registry=self.registry,
        )

    def observe_stage(self, stage: str, seconds: float) -> None:
        """Count the time of a request in a stage."""
        self._stages.labels(stage).observe(seconds)

    def render_text(self) -> bytes:
        """Render the registry's metrics in the Prometheus text format."""
        return generate_latest(self.registry)
