"""Sends requests to nodes and passes their outputs to the jobs."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import (
    AbortedError,
    DeadlineExceededError,
    NodeFailedError,
    PDError,
    UnavailableError,
    error_from_kind,
)
from pd.core.messages import AnyMessage, Failed, Output, StepFailed, StepOutputs, TakenBack
from pd.core.sampling_params import SamplingParams
from pd.proxy.attempt import Attempt
from pd.proxy.attempts import Attempts, connection_lost
from pd.proxy.failover import Failovers, credit
from pd.proxy.generation import Generation, Spec
from pd.proxy.job import Job
from pd.proxy.moves import Moves
from pd.proxy.policies import Prompt
from pd.proxy.positions import DisagreementError
from pd.proxy.routing import Router, probe_route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pd.proxy.admission import Admission
    from pd.proxy.breaker import Breaker
    from pd.proxy.generation import Choice
    from pd.proxy.metrics import Metrics
    from pd.proxy.node_handle import NodeHandle
    from pd.proxy.request_trace import RequestTrace
    from pd.proxy.routing import Route

logger = logging.getLogger(__name__)

# How long a finished answer waits for what the prefill node said about the prompt.
LINGER_SECONDS = 1.0
# How long a probe of a node may take before another follows.
PROBE_SECONDS = 20.0
ABORTED = "the request was aborted by /abort_request"
INTERNAL = "internal error; the proxy's log has the details"
# A batch is handed to the nodes in parts, between which the event loop turns.
_START_PROMPTS = 16
_START_TOKENS = 1 << 15


class Dispatcher:
    """Routes, follows and ends generations. Everything runs on the event loop."""

    def __init__(
        self,
        instance_id: str,
        router: Router,
        metrics: Metrics,
        admission: Admission,
        *,
        request_timeout: float | None,
        max_failovers: int,
        failover_wait: float,
        on_released: Callable[[NodeHandle], None],
        trace: RequestTrace | None = None,
    ) -> None:
        """``max_failovers``, ``failover_wait``: see :class:`pd.proxy.failover.Failovers`."""
        self.jobs: set[Job] = set()
        self.admission = admission
        # When a node last sent output, in time.monotonic().
        self.last_output = 0.0
        self._router = router
        self._metrics = metrics
        self._trace = trace
        self._request_timeout = request_timeout
        self._attempts = Attempts(instance_id, router, metrics, on_released)
        self._failovers = Failovers(
            self._attempts, metrics, max_failovers, failover_wait, self._fail
        )
        self._moves = Moves(
            instance_id, router, self._attempts, metrics, self._failovers.place_anew
        )
        self._probes: dict[Breaker, asyncio.Task[None]] = {}
        # Jobs with news in the messages that were received since :meth:`deliver`.
        self._told: dict[Job, None] = {}
        self._is_receiving = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def run(self, job: Job, specs: list[Spec], timeout: float | None) -> Iterator[Job]:
        """Serve these prompts while the context is open; leaving it aborts what is unfinished.
        :meth:`start` sends them.

        Raises before any node has seen anything, as :meth:`pd.proxy.admission.Admission.admit`
        does.
        """
        rids = self.admission.admit(job, specs)
        timeouts = [t for t in (timeout, self._request_timeout) if t is not None]
        deadline = min(timeouts) if timeouts else None
        job.num_prompts = len(specs)
        self.jobs.add(job)
        self._note_idle()
        timer = None
        started = time.monotonic()
        self._metrics.running.inc()
        try:
            if deadline is not None:
                timer = asyncio.get_running_loop().call_later(deadline, self._expire, job, deadline)
                job.timeout, job.started = deadline, started
            yield job
        except PDError as error:
            job.error = job.error or error
            raise
        finally:
            if timer is not None:
                timer.cancel()
            reason = "sibling_failed" if job.error else "disconnect"
            self.end(job, AbortedError("the response ended"), reason)
            for spec in specs[len(job.generations) :]:
                self.admission.ended(spec)
            self.jobs.discard(job)
            self.admission.release(rids, specs)
            self._note_idle()
            self._metrics.running.dec()
            self._metrics.request_ended(job, time.monotonic() - started)

    async def start(self, job: Job, specs: list[Spec]) -> None:
        """Hand the prompts of a job to the nodes. Raises UnavailableError without nodes."""
        tokens = 0
        for number, spec in enumerate(specs):
            tokens += len(spec.token_ids)
            if number % _START_PROMPTS == _START_PROMPTS - 1 or tokens > _START_TOKENS:
                tokens = 0
                await asyncio.sleep(0)
            if job.error is not None:
                return
            if job.ended_by is None:
                self._start(spec, job)
            else:
                self._skip(spec, job, job.ended_by)
        if job.together:
            self._send_together(job.generations)

    def end(self, job: Job, error: PDError, reason: str) -> None:
        """End what is unfinished of a job with an error, and tell the nodes."""
        job.ended_by = job.ended_by or error
        for generation in job.generations:
            if not generation.done:
                self._metrics.aborts.labels(reason).inc()
                self._fail(generation, error)

    def abort(self, rid: str, owner: str | None) -> int:
        """End the prompts that go by a rid, of one owner or (None) whoever's; returns how many."""
        jobs = [job for job in self.jobs if owner is None or job.owner == owner]
        whole = [job for job in jobs if job.rid == rid]
        parts = [g for job in jobs if job.rid != rid for g in job.generations if g.spec.rid == rid]
        return self._abort_jobs(whole) + self._abort(parts)

    def abort_all(self) -> int:
        """End everything; returns how many prompts that were."""
        return self._abort_jobs(self.jobs)

    def _abort_jobs(self, jobs: Iterable[Job]) -> int:
        count = 0
        for job in list(jobs):
            if job.ended_by is None:
                job.ended_by = AbortedError(ABORTED)
                count += job.num_prompts - len(job.generations)
            count += self._abort(job.generations)
        return count

    def _abort(self, generations: Iterable[Generation]) -> int:
        found = [generation for generation in generations if not generation.done]
        for generation in found:
            self._metrics.aborts.labels("request").inc()
            self._fail(generation, AbortedError(ABORTED))
        return len(found)

    def shut_down(self) -> None:
        """Fail whatever is still under way."""
        for job in list(self.jobs):
            self.end(job, UnavailableError("the proxy is shutting down"), "shutdown")

    async def idle(self) -> None:
        """Wait until no request of a client is served."""
        await self._idle.wait()

    def _note_idle(self) -> None:
        if all(job.is_probe for job in self.jobs):
            self._idle.set()
        else:
            self._idle.clear()

    def node_lost(self, node: NodeHandle, reason: str, *, died: bool) -> None:
        """Have others take over what depended on a node that died or was restarted.

        Args:
            died: its process seems to have ended or to hang, and it was not asked to.
        """
        message = f"{node.role} node {node.instance_id} at {node.url} was lost: {reason}"
        self._settle_what_needs_no(node)
        self._failovers.node_lost(node, NodeFailedError(message), died=died)

    def _settle_what_needs_no(self, node: NodeHandle) -> None:
        """End what needs nothing more of a node."""
        for attempt in list(node.active):
            if node is attempt.first and not attempt.needs_first:
                node.active.pop(attempt, None)
            elif attempt.generation.finished:
                self._settle(attempt.generation)

    def heard_from(self, node: NodeHandle) -> None:
        """A node has told its state."""
        if node.stuck:
            self._settle_what_needs_no(node)
        self._failovers.heard_from(node)
        self._moves.look(node)
        if node.breaker.awaits_probe and node.could_serve:
            self._probe(node.breaker, self._router.route_to(node))
        for other, hand_off in node.hand_offs.items():
            if hand_off.awaits_probe and node.ready and other.ready:
                self._probe(hand_off, probe_route(node, other))

    def _probe(self, breaker: Breaker, route: Route | None) -> None:
        """Ask nodes for two tokens, by which a breaker lets in what it took out. A proxy that
        drains needs them as long as it has requests."""
        if (
            route is None
            or route.first.info is None
            or breaker in self._probes
            or (self.admission.is_closed and self._idle.is_set())
        ):
            return
        spec = Spec(
            rid=f"probe-{secrets.token_hex(8)}",
            model=route.first.info.model,
            token_ids=np.zeros(1, np.int32),
            params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            text_model=None,
        )
        job = Job(spec.rid, "probe", is_probe=True)
        task = asyncio.create_task(self._run_probe(job, spec, route))
        self._probes[breaker] = task
        task.add_done_callback(lambda _: self._probes.pop(breaker))

    async def _run_probe(self, job: Job, spec: Spec, route: Route) -> None:
        try:
            with self.run(job, [spec], PROBE_SECONDS):
                self._start(spec, job, route)
                await job.finished()
        except PDError as error:
            logger.info("a probe failed: %s", error.message)

    def nodes_changed(self) -> None:
        """A node became ready, or is no more."""
        self._failovers.nodes_changed()

    def receive(self, node: NodeHandle, message: AnyMessage) -> None:
        """Take a message of a node; :meth:`deliver` follows. What concerns no present request is
        ignored."""
        if isinstance(message, StepOutputs):
            self.last_output = time.monotonic()
            self._is_receiving = True
            try:
                for output in message.outputs:
                    self._output(node, output)
            finally:
                self._is_receiving = False
        elif isinstance(message, Failed):
            self._failed(node, message)
        elif isinstance(message, TakenBack):
            self._moves.answered(node, message)
        elif isinstance(message, StepFailed):
            self._step_failed(node, message)

    def deliver(self) -> None:
        """Write what the messages since the last call brought: for each job once, however many of
        them had news for it."""
        told, self._told = self._told, {}
        for job in told:
            self._deliver(job)

    def _notify(self, generation: Generation, choice: Choice, added: int) -> None:
        """A choice gained tokens or ended."""
        job = generation.job
        job.notify(choice, added)
        if self._is_receiving:
            self._told[job] = None
        else:
            self._deliver(job)

    def _deliver(self, job: Job) -> None:
        try:
            job.deliver()
        except Exception:  # a fault of ours must not leave this client or others waiting
            logger.exception("cannot write the answer of %s", job.rid)
            self.end(job, PDError(INTERNAL), "internal")

    def _failed(self, node: NodeHandle, message: Failed) -> None:
        attempt = self._attempts.get(message.room)
        if attempt is None or node not in attempt.nodes:
            return
        if attempt.generation.finished:
            # The answer is complete; all that can be lost is what the first node still had to say.
            if node is attempt.first:
                self._settle(attempt.generation)
            return
        info = message.error
        error = error_from_kind(info.kind, info.message, info.param)
        if message.fault == "nobody":
            # The node is about to end: it gets nothing more before a heartbeat says otherwise.
            node.accepting = False
        if node is attempt.first and not attempt.needs_first:
            # It ended before it knew that the decode node has all that it needs.
            node.active.pop(attempt, None)
            return
        self._failovers.failed(attempt, node, error, message.fault)

    def _step_failed(self, node: NodeHandle, message: StepFailed) -> None:
        found = [self._attempts.get(room) for room in dict.fromkeys(message.rooms)]
        attempts = [attempt for attempt in found if attempt is not None and node in attempt.nodes]
        for attempt in attempts:
            if attempt.generation.finished and node is attempt.first:
                self._settle(attempt.generation)
        concerned = [
            attempt
            for attempt in attempts
            if not attempt.generation.finished
            and (node is not attempt.first or attempt.needs_first)
        ]
        if concerned:
            error = NodeFailedError(message.error.message)
            self._failovers.step_failed(concerned, node, error)

    def _skip(self, spec: Spec, job: Job, error: PDError) -> None:
        """The job was ended before this prompt of it was sent anywhere."""
        generation = Generation(spec, job, None)
        job.generations.append(generation)
        self._fail(generation, error)

    def _start(self, spec: Spec, job: Job, route: Route | None = None) -> None:
        generation = Generation(spec, job, self._router.vocab_size(spec.model))
        attempt = Attempt(generation, generation.choices)
        sibling = job.generations[0].holder if job.together and job.generations else None
        if route is None:
            self._attempts.open(attempt, sibling)
        else:
            self._attempts.open_on(attempt, route)
        generation.attempts.append(attempt)
        job.generations.append(generation)
        if not job.together:
            unreached = self._attempts.send(attempt)
            if unreached is not None:
                self._failovers.lost(attempt, connection_lost(unreached), unreached)

    def _send_together(self, generations: list[Generation]) -> None:
        found = [a for g in generations for a in g.attempts if a.first is not None]
        for attempt, node in self._attempts.send_together(found):
            self._failovers.lost(attempt, connection_lost(node), node)

    def _output(self, node: NodeHandle, output: Output) -> None:
        attempt = self._attempts.get(output.room)
        if attempt is None or (node is not attempt.first and node is not attempt.decode):
            return
        if not 0 <= output.index < len(attempt.choices):
            logger.warning("%s sent choice %d of %d", node.url, output.index, len(attempt.choices))
            return
        generation, choice = attempt.generation, attempt.choices[output.index]
        previous, ended = choice.last_token_at, choice.finish is not None
        progress, lacking = attempt.progress, generation.lacks_prompt_logprobs
        decode_spoke = attempt.decode_spoke
        try:
            added = attempt.accept(node, output)
        except NodeFailedError as error:
            if isinstance(error, DisagreementError) and attempt.repeats_last:
                self._failovers.keep_last(attempt, error)
            else:
                self._failovers.failed(attempt, node, error)
            return
        except Exception:  # a fault of ours must not leave the client waiting
            logger.exception("cannot take the output of %s", node.url)
            self._fail(generation, PDError(INTERNAL))
            return
        credit(attempt, node, output, decode_began=attempt.decode_spoke and not decode_spoke)
        if attempt.history.deaths:
            self._failovers.got_output(attempt)
        if added:
            assert choice.last_token_at is not None
            self._metrics.tokens_arrived(generation, added, choice.last_token_at, previous)
        if choice.finish is not None and not ended:
            self._choice_finished(attempt, choice)
        elif added and not (lacking and generation.lacks_prompt_logprobs):
            self._notify(generation, choice, added)
        elif added:
            generation.held[choice] = generation.held.get(choice, 0) + added
        changed = lacking or attempt.progress != progress
        if changed and attempt.prompt_computed:
            self._attempts.prompt_done(attempt)
        if (changed or choice.finish is not None) and not generation.awaits_first:
            self._deliver_held(generation)
        if not attempt.is_whole and attempt.finished and attempt in generation.attempts:
            self._attempts.close(attempt)

    def _choice_finished(self, attempt: Attempt, choice: Choice) -> None:
        generation = attempt.generation
        assert choice.finish is not None
        if isinstance(choice.finish.matched, str):
            # Only the proxy sees stop strings; for the nodes the choice would go on.
            index = attempt.choices.index(choice)
            self._attempts.abort(attempt, "a stop string was found", index)
            self._metrics.aborts.labels("stop_string").inc()
        generation.unannounced.append(choice)
        if generation.finished and generation.awaits_first:
            # The decode node was faster than what the first node said long before (two connections
            # have no common order), and that is still needed for usage and log probabilities.
            loop = asyncio.get_running_loop()
            generation.linger = loop.call_later(LINGER_SECONDS, self._settle, generation)

    def _deliver_held(self, generation: Generation) -> None:
        """Pass on the output that waited for the first node's part, which has come or is waited for
        no more."""
        if generation.held and not generation.lacks_prompt_logprobs:
            for choice, added in generation.held.items():
                self._notify(generation, choice, added)
            generation.held.clear()
        if generation.finished:
            self._settle(generation)
        elif not generation.lacks_prompt_logprobs:
            self._announce(generation)

    def _announce(self, generation: Generation) -> None:
        for choice in generation.unannounced:
            self._notify(generation, choice, 0)
        generation.unannounced.clear()

    def _settle(self, generation: Generation) -> None:
        """All choices have ended and the first node has said what it knows, or never will."""
        if generation.done or not generation.finished:
            return
        if (missing := generation.missing_prompt_logprobs) is not None:
            for attempt in list(generation.attempts):
                self._failovers.lost(attempt, NodeFailedError(missing))
            return
        self._remember(generation)
        self._close(generation)
        self._announce(generation)

    def _remember(self, generation: Generation) -> None:
        """Tell the policy where the conversation's KV is now."""
        holder, policy = generation.holder, self._router.policy
        if policy.ignores_prompts or holder is None or not holder.alive:
            return
        prompt = Prompt(generation.spec.token_ids, generation.spec.namespace)
        for choice in generation.choices:
            # The last token's KV was never computed.
            policy.computed(holder, prompt.followed_by(choice.output_ids[:-1]))

    def _fail(self, generation: Generation, error: PDError) -> None:
        """End a generation without success; the first error wins."""
        if generation.done:
            return
        for attempt in generation.attempts:
            self._attempts.abort(attempt, error.message)
        self._close(generation)
        self._announce(generation)
        generation.job.fail(generation, error)

    def _close(self, generation: Generation) -> None:
        """Remove a generation from the records; no other method does."""
        generation.done = True
        generation.stop_lingering()
        generation.job.ended_one()
        generation.finished_at = time.monotonic()
        self.admission.ended(generation.spec)
        for attempt in list(generation.attempts):
            self._attempts.close(attempt)
        try:
            self._metrics.generation_ended(generation)
        except Exception:  # what a node reports wrongly must not keep others from their outputs
            logger.exception("cannot count %s", generation.spec.rid)
        if self._trace is not None and generation.holder and not generation.job.is_probe:
            self._trace.ended(generation)

    def _expire(self, job: Job, timeout: float) -> None:
        message = f"the request did not finish within {timeout:g} s"
        self.end(job, DeadlineExceededError(message), "deadline")
