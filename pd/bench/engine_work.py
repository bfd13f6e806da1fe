"""Workloads of ``pd-bench engine`` and their measurement."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pd.bench.engine_client import Ask, Client
from pd.bench.engine_sampling import sampling_params
from pd.bench.engine_steps import StepLog
from pd.core.errors import SetupError, UsageError
from pd.engine.forward_item import ForwardItem
from pd.engine.sampling_state import Draw
from pd.speculative.costs import make_greedy_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.bench.engine_client import RequestTimes
    from pd.bench.engine_sampling import Sampling
    from pd.bench.engine_steps import Interval
    from pd.launch import NodeServer

Kind = Literal["decode", "prefill", "cached", "offline", "spec", "verify", "mixed"]
# Works that decode or prefill with some kind of sampling.
_SAMPLED: dict[str, tuple[Kind, Sampling]] = {
    "decode": ("decode", "greedy"),
    "sampled": ("decode", "sampled"),
    "filters": ("decode", "filters"),
    "penalties": ("decode", "penalties"),
    "schema": ("decode", "schema"),
    "schema-bounded": ("decode", "schema-bounded"),
    "prefill": ("prefill", "greedy"),
    "schema-prefill": ("prefill", "schema"),
    "cached": ("cached", "greedy"),
}
_DECODES = [name for name, (kind, _) in _SAMPLED.items() if kind == "decode"][1:]
_WORK = re.compile(
    rf"({'|'.join(_SAMPLED)}):(\d+(?:,\d+)*)|(offline):\d+x\d+x\d+|(spec|verify):\d+:\d+"
    r"|(mixed):\d+:\d+:\d+"
)
# The first steps of a batch still overlap with its last prompts.
_WARM_STEPS = 4
# Multiples of this number are spread evenly over the unit interval.
_GOLDEN = (5**0.5 - 1) / 2
_IDLE_SECONDS = 10.0
# Steps of ``verify`` and ``mixed`` per timing.
_TIMED_TOGETHER = 20


@dataclass(frozen=True)
class Workload:
    """One thing to measure.

    Attributes:
        count: number of sequences; 1 for ``prefill`` and ``cached``.
        num_in: tokens of each prompt; for ``decode``, ``spec``, ``verify`` and ``mixed`` the mean
            context.
        num_out: ``offline``: tokens of each answer; ``spec``: drafted tokens per sequence and step;
            ``verify``: computed tokens per sequence; ``mixed``: computed tokens of the prompt.
        prior: ``mixed``: tokens of the prompt that are computed already.
        sampling: see :func:`pd.bench.engine_sampling.sampling_params`.
    """

    kind: Kind
    count: int
    num_in: int
    num_out: int = 0
    sampling: Sampling = "greedy"
    prior: int = 0

    def __str__(self) -> str:
        if self.kind == "offline":
            return f"offline:{self.count}x{self.num_in}x{self.num_out}"
        if self.kind in ("spec", "verify"):
            return f"{self.kind}:{self.count}:{self.num_out}"
        if self.kind == "mixed":
            return f"mixed:{self.count}:{self.num_out}:{self.prior}"
        names = {works: name for name, works in _SAMPLED.items()}
        number = self.count if self.kind == "decode" else self.num_in
        return f"{names[self.kind, self.sampling]}:{number}"


def parse_work(texts: list[str], context: int) -> list[Workload]:
    """Parse works such as ``decode:1,8 prefill:1024 offline:512x1024x128 spec:8:3``.

    Raises UsageError for anything else.
    """
    works: list[Workload] = []
    for text in texts:
        match = _WORK.fullmatch(text)
        numbers = [int(part) for part in re.findall(r"\d+", text)]
        # The prompt of a mixed step may start with no computed tokens.
        if match is None or not all(numbers[: 2 if match[5] else None]):
            raise UsageError(
                f"--work {text}: give decode:BATCH (or {', '.join(_DECODES)} instead of decode), "
                "prefill:TOKENS (or schema-prefill), cached:TOKENS, offline:REQUESTSxINxOUT, "
                "spec:BATCH:DRAFTED, verify:BATCH:TOKENS or mixed:BATCH:TOKENS:PRIOR"
            )
        if match[3]:
            works.append(Workload("offline", numbers[0], numbers[1], numbers[2]))
        elif match[4]:
            kind: Kind = "spec" if match[4] == "spec" else "verify"
            works.append(Workload(kind, numbers[0], context, numbers[1]))
        elif match[5]:
            works.append(Workload("mixed", numbers[0], context, numbers[1], prior=numbers[2]))
        else:
            kind, sampling = _SAMPLED[match[1]]
            for number in numbers:
                count, num_in = (number, context) if kind == "decode" else (1, number)
                works.append(Workload(kind, count, num_in, sampling=sampling))
    return works


@dataclass(frozen=True)
class Measured:
    """Measured seconds of a work.

    Attributes:
        num_tokens: tokens computed or generated in each of ``seconds``.
        context: ``decode`` and ``spec``: mean number of tokens attended to.
        cached: tokens of a prompt from the cache.
        acceptance: ``spec``: new tokens of a sequence per step.
    """

    seconds: list[float]
    num_tokens: float
    context: float | None = None
    cached: int = 0
    acceptance: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p90(self) -> float:
        return float(np.percentile(self.seconds, 90))


class Simulated:
    """Accepts drafts as the weights of a trained model might.

    A drafted token counts if all tokens before it do, and then with a fixed probability. The drafts
    of a run alternate evenly between likely and unlikely ones (a Weyl sequence), so a few of them
    already have the right mean.

    Args:
        length: mean acceptance length, including the model's own token.
        drafted: tokens of a draft.

    Raises:
        UsageError: no probability gives that length.
    """

    def __init__(self, length: float, drafted: int, rng: np.random.Generator) -> None:
        if not 1.0 <= length <= drafted + 1:
            raise UsageError(
                f"--simulate-acceptance must be from 1 to {drafted + 1} with {drafted} drafted "
                f"tokens, not {length:g}"
            )
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            if sum(middle**place for place in range(drafted + 1)) < length:
                low = middle
            else:
                high = middle
        self.probability, self._place = high, float(rng.random())

    def __call__(self, drafted: int) -> int:
        self._place = (self._place + _GOLDEN) % 1.0
        chances = self.probability ** np.arange(1, drafted + 1)
        return int((self._place < chances).sum())


class Bench:
    """A unified node in this process and a client in another.

    Args:
        steps: number of intervals between decode steps to measure.
        repeats: timed prompts of one length.
        timeout: time limit of one work, in seconds.
        acceptance: mean acceptance length to simulate for ``spec``, see :class:`Simulated`; None
            counts the model's accepted tokens.
    """

    def __init__(
        self,
        server: NodeServer,
        *,
        steps: int,
        repeats: int,
        timeout: float,
        seed: int,
        acceptance: float | None = None,
    ) -> None:
        self._node = server.node
        self._steps, self._repeats, self._timeout = steps, repeats, timeout
        self._acceptance = acceptance
        self._rng = np.random.default_rng(seed)
        self._vocab = self._node.engine.model_config.vocab_size
        self.log = StepLog(self._node)
        self._client = Client(self._node.endpoint, server.instance_id)

    def close(self) -> None:
        self._client.close()

    @property
    def is_idle(self) -> bool:
        """Whether the node has nothing to do."""
        return self._node.idle

    def measure(self, work: Workload) -> Measured:
        """Measure a work. Raise PDError if requests fail or the node cannot do the work."""
        self.start_afresh()
        with self.limit_drafts(work):
            measured: Measured = getattr(self, f"_measure_{work.kind}")(work)
            return measured

    def start_afresh(self) -> None:
        """Wait until the node is idle, then empty the cache and forget the steps.

        Raises SetupError if the node stays busy.
        """
        deadline = time.monotonic() + _IDLE_SECONDS
        while not self._node.idle:
            if time.monotonic() > deadline:
                raise SetupError(f"the node is still busy: {self._node.count_queues()}")
            time.sleep(0.001)
        self._node.flush_cache()
        self.log.steps.clear()

    def _draw_prompt(self, num_tokens: int) -> bytes:
        """Draw a random prompt, so no two prompts share a page."""
        return self._rng.integers(0, self._vocab, num_tokens).astype("<i4").tobytes()

    def _send_all(self, asks: list[Ask]) -> list[RequestTimes]:
        return self._client.run(asks, self._timeout)

    # ---- decode

    def start_decode(
        self,
        batch: int,
        context: int,
        steps: int,
        growth: float | None = None,
        sampling: Sampling = "greedy",
    ) -> None:
        """Start ``batch`` sequences that decode together for at least ``steps`` steps, with about
        ``context`` tokens in the middle of these steps.

        Args:
            growth: tokens that a sequence gains during the measurement; by default ``steps``.
        """
        chunk = self._node.core.config.chunked_prefill_size
        # The first sequences already decode while the last prompts are computed.
        waits = min(batch, 2 * -(-batch * context // chunk) + 8)
        max_tokens = steps + waits + _WARM_STEPS + 2
        # Until then a sequence decodes between none and about ``waits`` / 2 tokens.
        grown = int(steps if growth is None else growth)
        length = max(1, context - grown // 2 - _WARM_STEPS - waits // 4)
        self._client.start(
            [
                Ask(self._draw_prompt(length), sampling_params(sampling, index, max_tokens))
                for index in range(batch)
            ]
        )

    def wait_results(self) -> None:
        """Wait for the requests of :meth:`start_decode`."""
        self._client.wait_results(self._timeout)

    def _measure_decode(self, work: Workload) -> Measured:
        intervals = self._measure_intervals(work)
        return Measured(
            [interval.seconds for interval in intervals],
            work.count,
            context=statistics.mean(interval.context for interval in intervals),
        )

    def _measure_intervals(
        self, work: Workload, max_growth: int = 1, mean_growth: float | None = None
    ) -> list[Interval]:
        """Measure the steps of a batch. ``max_growth`` and ``mean_growth``: tokens that a sequence
        gains in a step."""
        spare = (_WARM_STEPS + 2) * (max_growth - 1)
        growth = self._steps * (max_growth if mean_growth is None else mean_growth)
        if work.sampling in ("schema", "schema-bounded"):
            # The node compiles the schema once, so we do it before the measurement.
            self._send_all([Ask(self._draw_prompt(1), sampling_params(work.sampling, 0, 1))])
        steps = self._steps * max_growth + spare
        self.start_decode(work.count, work.num_in, steps, growth, work.sampling)
        self.wait_results()
        intervals = self.log.find_intervals(work.count)[_WARM_STEPS:][: self._steps]
        if len(intervals) < self._steps // 2 + 1:
            largest = max((step.batch for step in self.log.steps), default=0)
            raise SetupError(
                f"{len(intervals)} steps decoded {work.count} sequences together (the largest "
                f"batch was {largest}); see --max-running-requests and --kv-cache-tokens"
            )
        return intervals

    # ---- drafts

    @contextlib.contextmanager
    def limit_drafts(self, work: Workload) -> Iterator[None]:
        """Draft as many tokens per sequence and step as ``spec`` asks for; none for other works.

        Raises UsageError if the node drafts fewer.
        """
        tokens = work.num_out if work.kind == "spec" else 0
        scheduler = self._node.scheduler.decode
        assert scheduler is not None
        lengths = self._node.core.draft_lengths
        before = scheduler.draft_tokens
        if tokens > before:
            raise UsageError(
                f"spec:…:{tokens} drafts more than --speculative-num-draft-tokens {before}, or "
                "--speculative-algorithm is missing"
            )
        scheduler.draft_tokens = tokens
        if tokens and self._acceptance is not None:
            lengths.simulate = Simulated(self._acceptance, tokens, self._rng)
        try:
            yield
        finally:
            scheduler.draft_tokens, lengths.simulate = before, None

    def _measure_spec(self, work: Workload) -> Measured:
        intervals = self._measure_intervals(work, work.num_out + 1, self._acceptance)
        tokens = statistics.mean(interval.tokens for interval in intervals)
        return Measured(
            [interval.seconds for interval in intervals],
            tokens,
            context=statistics.mean(interval.context for interval in intervals),
            acceptance=tokens / work.count,
        )

    # ---- steps without the scheduler

    def run_steps(self, work: Workload) -> Callable[[int], float]:
        """Prepare ``verify`` or ``mixed``. The returned function runs so many steps and returns the
        mean seconds of one. It queues them without waiting, so none waits for the host.

        Raises SetupError if the pool has too few pages.
        """
        # Each part has the computed tokens of a sequence, the tokens that a step computes, and the
        # number of logits.
        if work.kind == "verify":
            parts = [(work.num_in, work.num_out, work.num_out)] * work.count
        else:
            parts = [(work.num_in, 1, 1)] * work.count + [(work.prior, work.num_out, 0)]
        engine = self._node.engine
        engine.activate_device()
        page_size, pool = engine.pool.page_size, engine.pool
        sizes = [-(-(start + count) // page_size) for start, count, _ in parts]
        if sum(sizes) > pool.num_pages:
            raise SetupError(f"{work} needs {sum(sizes)} pages; see --kv-cache-tokens")
        # NOTE: the cache is empty and there are no requests, so all pages are free.
        pages = self._rng.permutation(pool.num_pages)[: sum(sizes)].astype(np.int32)
        each = np.split(pages, np.cumsum(sizes)[:-1])
        items = []
        for (start, count, num_logits), table in zip(parts, each, strict=True):
            ids = self._rng.integers(0, self._vocab, count).astype(np.int32)
            tables = pool.repeat_table(table)
            items.append(ForwardItem(ids, start, tables, num_logits))
        draws = [Draw(make_greedy_state(engine))] * sum(num_logits for _, _, num_logits in parts)

        def run(steps: int) -> float:
            began = time.perf_counter()
            for _ in range(steps):
                logits = engine.runner.forward(items)
                samples = engine.sampler.launch_draws(logits, engine.sampler.prepare_draws(draws))
            samples.read_tokens()
            return (time.perf_counter() - began) / steps

        return run

    def _measure_verify(self, work: Workload) -> Measured:
        return self._time_steps(work, work.count * work.num_out)

    def _measure_mixed(self, work: Workload) -> Measured:
        return self._time_steps(work, work.count + work.num_out)

    def _time_steps(self, work: Workload, tokens: int) -> Measured:
        run = self.run_steps(work)
        seconds = [run(_TIMED_TOGETHER) for _ in range(self._repeats + 1)]
        return Measured(seconds[1:], tokens, context=work.num_in)

    # ---- prompts

    def _measure_prefill(self, work: Workload) -> Measured:
        """Time new prompts; the first one warms up."""
        seconds = []
        for _ in range(self._repeats + 1):
            params = sampling_params(work.sampling, 0, 1)
            (answer,) = self._send_all([Ask(self._draw_prompt(work.num_in), params)])
            seconds.append(answer.to_first)
        return Measured(seconds[1:], work.num_in)

    def _measure_cached(self, work: Workload) -> Measured:
        """Time one prompt again and again, after one request that fills the cache and another that
        warms up."""
        ask = Ask(self._draw_prompt(work.num_in), sampling_params("greedy", 0, 1))
        answers = [self._send_all([ask])[0] for _ in range(self._repeats + 2)][2:]
        cached = min(answer.cached_tokens for answer in answers)
        page_size = self._node.core.config.page_size
        if cached < (work.num_in - 1) // page_size * page_size:
            raise SetupError(f"only {cached} of {work.num_in} tokens were cached")
        return Measured([answer.to_first for answer in answers], work.num_in, cached=cached)

    # ---- all at once

    def _measure_offline(self, work: Workload) -> Measured:
        few = min(work.count, 4)
        warm, params = (sampling_params("greedy", 0, n) for n in (4, work.num_out))
        self._send_all([Ask(self._draw_prompt(work.num_in), warm) for _ in range(few)])
        asks = [Ask(self._draw_prompt(work.num_in), params) for _ in range(work.count)]
        self.start_afresh()
        answers = self._send_all(asks)
        seconds = max(a.ended for a in answers) - min(a.sent for a in answers)
        return Measured([seconds], sum(answer.num_tokens for answer in answers))
