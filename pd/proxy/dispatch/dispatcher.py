"""The lifecycle of jobs: sends their prompts to nodes, and reacts to events of nodes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import (
    AbortedError,
    DeadlineExceededError,
    NodeFailedError,
    PDError,
    UnavailableError,
)
from pd.core.messages import AnyMessage, Failed, StepFailed, StepOutputs, TakenBack
from pd.core.sampling_params import SamplingParams
from pd.proxy.dispatch.attempt import Attempt
from pd.proxy.dispatch.attempts import Attempts, make_connection_error
from pd.proxy.dispatch.delivery import Delivery
from pd.proxy.dispatch.generation import Generation, PromptSpec
from pd.proxy.dispatch.job import Job
from pd.proxy.dispatch.moves import Moves
from pd.proxy.nodes.events import (
    HeartbeatReceived,
    MessageReceived,
    MessagesRead,
    NodeLost,
    NodesChanged,
)
from pd.proxy.routing.routing import Router, make_probe_route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pd.proxy.dispatch.admission import Admission
    from pd.proxy.dispatch.job import ClientState, EventSink
    from pd.proxy.dispatch.logprob_memory import LogprobMemory
    from pd.proxy.dispatch.proxy_metrics import Metrics
    from pd.proxy.dispatch.request_trace import RequestTrace
    from pd.proxy.nodes.breaker import Breaker
    from pd.proxy.nodes.events import NodeEvent
    from pd.proxy.nodes.node_handle import NodeHandle
    from pd.proxy.nodes.node_refresh import NodeRefresh
    from pd.proxy.routing.routing import Route

logger = logging.getLogger(__name__)

# How long a probe of a node may take before another follows.
PROBE_SECONDS = 20.0
ABORTED = "the request was aborted by /abort_request"
# We send the prompts of a large batch in parts, because the event loop has other work.
_START_PROMPTS = 16
_START_TOKENS = 1 << 15


class Dispatcher:
    """Starts and ends jobs, and handles the events of nodes. Runs on the event loop.

    Attributes:
        jobs: jobs being served.
    """

    def __init__(
        self,
        instance_id: str,
        router: Router,
        metrics: Metrics,
        admission: Admission,
        logprob_memory: LogprobMemory,
        *,
        request_timeout: float | None,
        max_failovers: int,
        failover_wait: float,
        node_refresh: NodeRefresh,
        on_released: Callable[[NodeHandle], None],
        trace: RequestTrace | None = None,
    ) -> None:
        """
        Args:
            node_refresh: checks whether a node became ready, if a request finds none.
            max_failovers, failover_wait: see :class:`pd.proxy.dispatch.failover.Failovers`.
        """
        self.jobs: set[Job] = set()
        self.admission = admission
        self._logprob_memory = logprob_memory
        self._router = router
        self._metrics = metrics
        self._request_timeout = request_timeout
        self._node_refresh = node_refresh
        self._attempts = Attempts(instance_id, router, metrics, on_released)
        self._delivery = Delivery(
            self.jobs,
            self._attempts,
            router.policy,
            metrics,
            admission,
            logprob_memory,
            max_failovers=max_failovers,
            failover_wait=failover_wait,
            trace=trace,
        )
        self._failovers = self._delivery.failovers
        self._moves = Moves(
            instance_id, router, self._attempts, metrics, self._failovers.place_again
        )
        self._probes: dict[Breaker, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def last_output(self) -> float:
        """When a node last sent output, on the monotonic clock; 0 before any did."""
        return self._delivery.last_output

    # ---- jobs

    @contextmanager
    def run_job(
        self,
        job: Job,
        specs: list[PromptSpec],
        timeout: float | None,
        sink: EventSink | None = None,
    ) -> Iterator[Job]:
        """Serve a job while the context is open. Leaving it aborts unfinished prompts.

        :meth:`start_job` sends the prompts. Entering raises as
        :meth:`pd.proxy.dispatch.admission.Admission.admit_job` does, before any node has seen the
        job.

        Args:
            sink: writes the events of a streamed job.
        """
        rids = self.admission.admit_job(job, specs)
        timeouts = [t for t in (timeout, self._request_timeout) if t is not None]
        deadline = min(timeouts) if timeouts else None
        job.num_prompts, job.sink = len(specs), sink
        self.jobs.add(job)
        self._update_idle()
        timer = None
        started = time.monotonic()
        self._metrics.running.inc()
        try:
            if deadline is not None:
                timer = asyncio.get_running_loop().call_later(
                    deadline, self._expire_job, job, deadline
                )
                job.timeout, job.started = deadline, started
            yield job
        except PDError as error:
            job.error = job.error or error
            raise
        finally:
            if timer is not None:
                timer.cancel()
            reason = "sibling_failed" if job.error else "disconnect"
            self.end_job(job, AbortedError("the response ended"), reason)
            for spec in specs[len(job.generations) :]:
                self.admission.count_ended(spec)
            self.jobs.discard(job)
            self.admission.release_job(rids, specs)
            self._logprob_memory.release_job(job)
            self._update_idle()
            self._metrics.running.dec()
            self._metrics.count_request(job, time.monotonic() - started)

    async def start_job(self, job: Job, specs: list[PromptSpec]) -> None:
        """Send the prompts of a job to nodes. Raises UnavailableError without nodes."""
        tokens = 0
        for number, spec in enumerate(specs):
            tokens += len(spec.token_ids)
            if number % _START_PROMPTS == _START_PROMPTS - 1 or tokens > _START_TOKENS:
                tokens = 0
                await asyncio.sleep(0)
            if job.error is not None:
                return
            await self._node_refresh.retry_until_served(
                partial(self._start_unless_ended, spec, job)
            )
        if job.is_batch:
            attempts = [attempt for each in job.generations for attempt in each.attempts]
            placed = [attempt for attempt in attempts if attempt.first_node is not None]
            for attempt, node in self._attempts.send_batch(placed):
                self._failovers.fail_over(attempt, make_connection_error(node), node)

    def _start_unless_ended(self, spec: PromptSpec, job: Job) -> None:
        if job.ended_by is None:
            self._start_prompt(spec, job)
            return
        generation = Generation(spec, job, None)
        job.generations.append(generation)
        self._delivery.fail_generation(generation, job.ended_by)

    def _start_prompt(self, spec: PromptSpec, job: Job, route: Route | None = None) -> None:
        generation = Generation(spec, job, self._router.get_vocab_size(spec.model))
        attempt = Attempt(generation, generation.choices)
        sibling = job.generations[0].holder if job.is_batch and job.generations else None
        if route is None:
            self._attempts.place_attempt(attempt, sibling)
        else:
            self._attempts.place_on_route(attempt, route)
        generation.attempts.append(attempt)
        job.generations.append(generation)
        if not job.is_batch:
            unreached = self._attempts.send_attempt(attempt)
            if unreached is not None:
                self._failovers.fail_over(attempt, make_connection_error(unreached), unreached)

    def end_job(self, job: Job, error: PDError, reason: str) -> None:
        """See :meth:`pd.proxy.dispatch.delivery.Delivery.end_job`."""
        self._delivery.end_job(job, error, reason)

    def drop_client(self, job: Job, state: ClientState) -> None:
        """See :meth:`pd.proxy.dispatch.delivery.Delivery.drop_client`."""
        self._delivery.drop_client(job, state)

    def _expire_job(self, job: Job, timeout: float) -> None:
        message = f"the request did not finish within {timeout:g} s"
        self.end_job(job, DeadlineExceededError(message), "deadline")

    def abort_rid(self, rid: str, owner: str | None) -> int:
        """Abort the prompts with this rid, of one owner or (None) of any, and end their leases.

        Return the number of prompts, finished ones with a lease included.
        """
        jobs = [job for job in self.jobs if owner is None or job.owner == owner]
        whole = [job for job in jobs if job.rid == rid]
        parts = [g for job in jobs if job.rid != rid for g in job.generations if g.spec.rid == rid]
        leases = self._attempts.end_prefix_leases(owner, rid)
        return max(leases, self._abort_jobs(whole) + self._abort_generations(parts))

    def abort_all(self) -> int:
        """Abort everything. Return the number of prompts."""
        self._attempts.end_prefix_leases()
        return self._abort_jobs(self.jobs)

    def _abort_jobs(self, jobs: Iterable[Job]) -> int:
        count = 0
        for job in list(jobs):
            if job.ended_by is None:
                job.ended_by = AbortedError(ABORTED)
                count += job.num_prompts - len(job.generations)
            count += self._abort_generations(job.generations)
        return count

    def _abort_generations(self, generations: Iterable[Generation]) -> int:
        unfinished = [generation for generation in generations if not generation.is_done]
        for generation in unfinished:
            self._metrics.aborts.labels("request").inc()
            self._delivery.fail_generation(generation, AbortedError(ABORTED))
        return len(unfinished)

    def shut_down(self) -> None:
        """Fail all jobs."""
        for job in list(self.jobs):
            self.end_job(job, UnavailableError("the proxy is shutting down"), "shutdown")

    async def wait_idle(self) -> None:
        """Wait until no request of a client is being served."""
        await self._idle.wait()

    def _update_idle(self) -> None:
        if all(job.is_probe for job in self.jobs):
            self._idle.set()
        else:
            self._idle.clear()

    # ---- nodes

    def handle_event(self, event: NodeEvent) -> None:
        """Handle an event of the node pool."""
        match event:
            case MessageReceived(node, message):
                self._handle_message(node, message)
            case MessagesRead():
                self._delivery.flush_jobs()
            case HeartbeatReceived(node):
                self._handle_heartbeat(node)
            case NodeLost(node, reason, died):
                error = f"{node.role} node {node.instance_id} at {node.url} was lost: {reason}"
                self._delivery.settle_attempts(node)
                self._failovers.lose_node(node, NodeFailedError(error), died=died)
            case NodesChanged():
                self._failovers.retry_waiting()

    def _handle_message(self, node: NodeHandle, message: AnyMessage) -> None:
        """Handle a message of a node. We ignore messages about finished requests."""
        if isinstance(message, StepOutputs):
            self._delivery.take_outputs(node, message)
        elif isinstance(message, Failed):
            self._delivery.take_failure(node, message)
        elif isinstance(message, TakenBack):
            self._moves.handle_answer(node, message)
        elif isinstance(message, StepFailed):
            self._delivery.take_step_failure(node, message)

    def _handle_heartbeat(self, node: NodeHandle) -> None:
        if node.is_stuck:
            self._delivery.settle_attempts(node)
        self._failovers.note_heartbeat(node)
        self._moves.check_queue(node)
        if node.breaker.awaits_probe and node.could_serve:
            self._start_probe(node.breaker, self._router.choose_probe_route(node))
        for other, hand_off in node.hand_offs.items():
            if hand_off.awaits_probe and node.is_ready and other.is_ready:
                self._start_probe(hand_off, make_probe_route(node, other))

    def _start_probe(self, breaker: Breaker, route: Route | None) -> None:
        """Ask nodes for two tokens. If they arrive, the breaker enables the nodes again.

        A draining proxy still probes while it has requests, because they may need the nodes.
        """
        if (
            route is None
            or route.first_node.info is None
            or breaker in self._probes
            or (self.admission.is_closed and self._idle.is_set())
        ):
            return
        spec = PromptSpec(
            rid=f"probe-{secrets.token_hex(8)}",
            model=route.first_node.info.model,
            token_ids=np.zeros(1, np.int32),
            params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            text_model=None,
        )
        job = Job(spec.rid, "probe", is_probe=True)
        task = asyncio.create_task(self._run_probe(job, spec, route))
        self._probes[breaker] = task
        task.add_done_callback(lambda _: self._probes.pop(breaker))

    async def _run_probe(self, job: Job, spec: PromptSpec, route: Route) -> None:
        try:
            with self.run_job(job, [spec], PROBE_SECONDS):
                self._start_prompt(spec, job, route)
                await job.wait_done()
        except PDError as error:
            logger.info("a probe failed: %s", error.message)
