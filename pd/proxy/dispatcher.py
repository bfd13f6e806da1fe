"""Brings requests to nodes and what comes back to their jobs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidRequestError,
    NodeFailedError,
    PDError,
    QueueFullError,
    UnavailableError,
    error_from_kind,
)
from pd.core.messages import (
    Abort,
    AnyMessage,
    Failed,
    Generate,
    GenerateTogether,
    Output,
    StepOutputs,
)
from pd.proxy.generation import Generation, Spec
from pd.proxy.prediction import Asked
from pd.proxy.routing import Prompt, Router

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pd.proxy.generation import Choice
    from pd.proxy.job import Job
    from pd.proxy.ledger import Ledger
    from pd.proxy.metrics import Metrics
    from pd.proxy.routing import Route
    from pd.proxy.worker import Worker

log = logging.getLogger(__name__)

# How long a finished answer waits for what the prefill node said about the prompt.
LINGER_SECONDS = 1.0
ABORTED = "the request was aborted by /abort_request"
INTERNAL = "internal error; the proxy's log has the details"
# Prompt tokens of all requests in the system: 512 MiB here, and as much in messages.
MAX_TOKENS = 1 << 27
# A batch is handed to the nodes in parts, between which the event loop turns.
_START_PROMPTS = 16
_START_TOKENS = 1 << 15
# Nodes are told so much of the hash of a key, enough to tell keys apart.
_OWNER_CHARACTERS = 16


class Dispatcher:
    """Admits, routes, follows and ends generations. Everything runs on the event loop."""

    def __init__(
        self,
        instance_id: str,
        router: Router,
        metrics: Metrics,
        *,
        max_queue: int,
        request_timeout: float | None,
        ledger: Ledger,
        on_released: Callable[[Worker], None],
    ) -> None:
        self.jobs: set[Job] = set()
        self.draining = False
        # When a node last sent output, in time.monotonic().
        self.last_output = 0.0
        self._instance_id = instance_id
        self._router = router
        self._metrics = metrics
        self._max_queue = max_queue
        self._request_timeout = request_timeout
        self._on_released = on_released
        self._rooms: dict[bytes, Generation] = {}
        # Names of requests under way, each with its owner.
        self._rids: set[tuple[str, str]] = set()
        # Jobs with news in the message that is being taken; None between messages.
        self._told: dict[Job, None] | None = None
        # Counts prompts in the system, whether they were handed to nodes already or not.
        self._ledger = ledger
        self._idle = asyncio.Event()
        self._idle.set()

    def check_admission(self, num_choices: int, num_tokens: int = 0) -> None:
        """Refuse before any work is done. Raises QueueFullError, UnavailableError or, for a batch
        that could never be admitted, InvalidRequestError.

        Args:
            num_choices: prompts, times the answers that are wanted of each as far as that is known.
            num_tokens: of the prompts, as far as that is known.
        """
        if self.draining:
            raise UnavailableError("the proxy is shutting down")
        if num_choices > self._max_queue:
            raise InvalidRequestError(
                f"a batch of {num_choices} prompts times `n` exceeds the queue of "
                f"{self._max_queue}; send smaller batches"
            )
        self._check_room(num_choices, num_tokens)

    def _check_room(self, num_choices: int, num_tokens: int) -> None:
        """Raises QueueFullError if so many more would be too many."""
        choices, tokens = self._ledger.prompts, self._ledger.tokens
        if choices + num_choices > self._max_queue:
            raise QueueFullError(
                f"{choices} requests times `n` are in the system, at most {self._max_queue} may "
                "be; try again later"
            )
        if tokens + num_tokens > MAX_TOKENS:
            raise QueueFullError(
                f"prompts of {tokens} tokens are in the system, at most {MAX_TOKENS} may be; try "
                "again later"
            )

    def _count(self, num_choices: int, num_tokens: int) -> None:
        """Count prompts that were admitted. Raises QueueFullError if another process of the proxy
        admitted others at the same moment, and all would be too many."""
        self._ledger.add(num_choices, num_tokens)
        if self._ledger.is_shared:
            try:
                self._check_room(0, 0)
            except QueueFullError:
                self._ledger.add(-num_choices, -num_tokens)
                raise

    @contextmanager
    def run(self, job: Job, specs: list[Spec], timeout: float | None) -> Iterator[Job]:
        """Serve these prompts while the context is open; leaving it aborts what is unfinished.
        :meth:`start` sends them.

        Raises UnavailableError, QueueFullError or InvalidRequestError (a rid that is in use) before
        any node has seen anything.
        """
        num_choices = sum(spec.params.n for spec in specs)
        num_tokens = sum(len(spec.token_ids) for spec in specs)
        self.check_admission(num_choices, num_tokens)
        rids = self._take_rids(job, specs)
        try:
            self._count(num_choices, num_tokens)
        except QueueFullError:
            self._rids -= rids
            raise
        timeouts = [t for t in (timeout, self._request_timeout) if t is not None]
        deadline = min(timeouts) if timeouts else None
        job.num_prompts = len(specs)
        self.jobs.add(job)
        self._idle.clear()
        timer = None
        started = time.monotonic()
        self._metrics.running.inc()
        try:
            if deadline is not None:
                timer = asyncio.get_running_loop().call_later(deadline, self._expire, job, deadline)
                job.timeout = deadline
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
                self._uncount(spec)
            self.jobs.discard(job)
            self._rids -= rids
            if not self.jobs:
                self._idle.set()
            self._metrics.running.dec()
            self._metrics.request_ended(job, time.monotonic() - started)

    def _take_rids(self, job: Job, specs: list[Spec]) -> set[tuple[str, str]]:
        """Every rid stands for one request of its owner at a time. Raises InvalidRequestError."""
        given = Counter(spec.rid for spec in specs)
        rid, count = given.most_common(1)[0]
        if count > 1:
            raise InvalidRequestError(f"the batch has the rid {rid!r} twice", param="rid")
        taken = {(job.owner, rid) for rid in (job.rid, *given)}
        if not taken.isdisjoint(self._rids):
            _, rid = min(taken & self._rids)
            raise InvalidRequestError(
                f"the rid {rid!r} is in use by a request that has not ended", param="rid"
            )
        self._rids |= taken
        return taken

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
        """Wait until no request is served."""
        await self._idle.wait()

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """Fail what depended on a node that died or was restarted."""
        message = f"{worker.role} node {worker.instance_id} at {worker.url} was lost: {reason}"
        for generation in list(worker.active):
            if worker is generation.first and not generation.needs_first:
                worker.active.pop(generation, None)
            elif generation.finished:
                self._settle(generation)
            else:
                self._fail(generation, NodeFailedError(message))

    def receive(self, worker: Worker, message: AnyMessage) -> None:
        """Take a message of a node. What concerns no present request is ignored."""
        if isinstance(message, StepOutputs):
            self.last_output = time.monotonic()
            told: dict[Job, None] = {}
            self._told = told
            try:
                for output in message.outputs:
                    self._output(worker, output)
            finally:
                self._told = None
                for job in told:
                    self._deliver(job)
        elif isinstance(message, Failed):
            self._failed(worker, message)

    def _notify(self, generation: Generation, choice: Choice, added: int) -> None:
        """A choice gained tokens or ended: what one message brings for a job is delivered at
        once."""
        job = generation.job
        job.notify(choice, added)
        if self._told is None:
            self._deliver(job)
        else:
            self._told[job] = None

    def _deliver(self, job: Job) -> None:
        try:
            job.deliver()
        except Exception:  # a fault of ours must not leave this client or others waiting
            log.exception("cannot write the answer of %s", job.rid)
            self.end(job, PDError(INTERNAL), "internal")

    def _failed(self, worker: Worker, message: Failed) -> None:
        generation = self._rooms.get(message.room)
        if generation is None or worker not in generation.nodes:
            return
        if generation.finished:
            # The answer is complete; all that can be lost is what the first node still had to say.
            if worker is generation.first:
                self._settle(generation)
            return
        info = message.error
        self._fail(generation, error_from_kind(info.kind, info.message, info.param))

    def _skip(self, spec: Spec, job: Job, error: PDError) -> None:
        """The job was ended before this prompt of it was sent anywhere."""
        generation = Generation(spec, job, None)
        job.generations.append(generation)
        self._uncount(spec)
        self._fail(generation, error)

    def _uncount(self, spec: Spec) -> None:
        self._ledger.add(-spec.params.n, -len(spec.token_ids))

    def _start(self, spec: Spec, job: Job) -> None:
        prompt = Prompt(spec.token_ids, spec.namespace)
        asked = Asked(prompt, spec.params.n, spec.params.max_tokens)
        sibling = job.generations[0].first if job.together and job.generations else None
        route = self._route(spec.model, asked, sibling)
        assert route.first.info is not None
        generation = Generation(spec, job, route.first.info.vocab_size)
        job.generations.append(generation)
        generation.first, generation.decode = route.first, route.decode
        cached = route.first.tree.match(*prompt) if route.first.tree else 0
        generation.uncached_tokens = len(spec.token_ids) - cached
        generation.predicted_cached = cached
        route.first.pending_tokens += generation.uncached_tokens
        self._rooms[generation.room] = generation
        generation.predicted_ttft = None if route.predicted is None else route.predicted.ttft
        route.sent(asked)
        for worker, reason in route.reasons:
            worker.active[generation] = None
            self._metrics.routing.labels(worker.role, reason).inc()
            self._router.policy.computed(worker, prompt)
        if not job.together:
            self._send(generation, route)

    def _route(self, model: str, asked: Asked, preferred: Worker | None) -> Route:
        """Choose nodes whose connections stand. A node that died a moment ago is found out here,
        before its heartbeats are missed. Raises as :meth:`pd.proxy.routing.Router.route` does."""
        while True:
            route = self._router.route(model, asked, preferred=preferred)
            nodes = [node for node in (route.first, route.decode) if node is not None]
            if all([node.can_be_reached(self._instance_id) for node in nodes]):
                return route

    def _send(self, generation: Generation, route: Route) -> None:
        first, decode = route.first, route.decode
        assert first.info is not None
        message = self._message(generation, first)
        message.peer = decode.instance_id if decode else ""
        node, sent = first, first.send(message)
        if sent and decode is not None:
            node = decode
            message.to, message.peer = decode.instance_id, first.instance_id
            message.peer_bootstrap = first.info.endpoints.bootstrap or ""
            sent = decode.send(message)
        if not sent:
            self._fail(generation, _connection_lost(node))

    def _send_together(self, generations: list[Generation]) -> None:
        """Send each node its prompts of a job. That is one node, unless it began to drain."""
        by_node: dict[Worker, list[Generation]] = {}
        for generation in generations:
            if generation.first is not None and not generation.done:
                assert generation.decode is None
                by_node.setdefault(generation.first, []).append(generation)
        for node, found in by_node.items():
            requests = [self._message(generation, node) for generation in found]
            to, sender = node.instance_id, self._instance_id
            if not node.send(GenerateTogether(to=to, sender=sender, requests=requests)):
                for generation in found:
                    self._fail(generation, _connection_lost(node))

    def _message(self, generation: Generation, node: Worker) -> Generate:
        """The part of a node that needs no other."""
        spec = generation.spec
        return Generate(
            to=node.instance_id,
            sender=self._instance_id,
            rid=spec.rid,
            room=generation.room,
            token_ids=spec.token_ids.astype("<i4", copy=False).tobytes(),
            params=spec.params,
            namespace=spec.namespace,
            owner=generation.job.owner[:_OWNER_CHARACTERS],
            priority=spec.priority,
            timeout=generation.job.timeout,
        )

    def _output(self, worker: Worker, output: Output) -> None:
        generation = self._rooms.get(output.room)
        if generation is None or worker not in generation.nodes:
            return
        if not 0 <= output.index < len(generation.choices):
            log.warning(
                "%s sent choice %d of %d", worker.url, output.index, len(generation.choices)
            )
            return
        choice = generation.choices[output.index]
        previous, ended = choice.last_token_at, choice.finish is not None
        progress, missing = generation.progress, generation.missing_prompt_logprobs
        try:
            added = generation.accept(worker, output)
        except NodeFailedError as error:
            self._fail(generation, error)
            return
        except Exception:  # a fault of ours must not leave the client waiting
            log.exception("cannot take the output of %s", worker.url)
            self._fail(generation, PDError(INTERNAL))
            return
        if added:
            self._metrics.tokens_arrived(generation, added, previous)
        if choice.finish is not None and not ended:
            self._choice_finished(generation, choice)
        elif added and (missing is None or generation.missing_prompt_logprobs is None):
            self._notify(generation, choice, added)
        elif added:
            generation.held[choice] = generation.held.get(choice, 0) + added
        changed = generation.progress != progress or missing is not None
        if (changed or choice.finish is not None) and generation.prompt_computed:
            self._prompt_done(generation)

    def _choice_finished(self, generation: Generation, choice: Choice) -> None:
        assert choice.finish is not None
        if isinstance(choice.finish.matched, str):
            # Only the proxy sees stop strings; for the nodes the choice would go on.
            self._abort_nodes(generation, choice.index, "a stop string was found")
            self._metrics.aborts.labels("stop_string").inc()
        generation.unannounced.append(choice)
        if generation.finished and not generation.prompt_computed:
            # The decode node was faster than what the first node said long before (two connections
            # have no common order), and that is still needed for usage and log probabilities.
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._settle, generation)

    def _prompt_done(self, generation: Generation) -> None:
        """The first node has done its part: its queue is shorter, its death no matter any more."""
        first = generation.first
        assert first is not None
        first.pending_tokens = max(0, first.pending_tokens - generation.uncached_tokens)
        generation.uncached_tokens = 0
        if generation.held and generation.missing_prompt_logprobs is None:
            for choice, added in generation.held.items():
                self._notify(generation, choice, added)
            generation.held.clear()
        if not generation.needs_first:
            first.active.pop(generation, None)
        if generation.finished:
            self._settle(generation)
        else:
            self._announce(generation)

    def _announce(self, generation: Generation) -> None:
        for choice in generation.unannounced:
            self._notify(generation, choice, 0)
        generation.unannounced.clear()

    def _settle(self, generation: Generation) -> None:
        """All choices have ended and the first node has said what it knows, or never will."""
        if generation.done:
            return
        if (missing := generation.missing_prompt_logprobs) is not None:
            self._fail(generation, NodeFailedError(missing))
            return
        self._remember(generation)
        self._close(generation)
        self._announce(generation)

    def _remember(self, generation: Generation) -> None:
        """Tell the policy where the conversation's KV is now."""
        holder = generation.decode or generation.first
        assert holder is not None
        if not holder.alive:
            return
        spec = generation.spec
        for choice in generation.choices:
            # The last token's KV was never computed.
            output = np.array(choice.output_ids[:-1], dtype=np.int32)
            tokens = np.concatenate([spec.token_ids, output])
            self._router.policy.computed(holder, Prompt(tokens, spec.namespace))

    def _fail(self, generation: Generation, error: PDError) -> None:
        """End a generation without success; the first error wins."""
        if generation.done:
            return
        self._abort_nodes(generation, None, error.message)
        self._close(generation)
        self._announce(generation)
        generation.job.fail(generation, error)

    def _close(self, generation: Generation) -> None:
        """Remove a generation from the records; no other method does."""
        generation.done = True
        generation.finished_at = time.monotonic()
        if self._rooms.pop(generation.room, None) is not None:
            self._uncount(generation.spec)
        first = generation.first
        if first is not None:
            first.pending_tokens = max(0, first.pending_tokens - generation.uncached_tokens)
        for worker in generation.nodes:
            worker.active.pop(generation, None)
            self._on_released(worker)
        self._metrics.generation_ended(generation)

    def _abort_nodes(self, generation: Generation, index: int | None, reason: str) -> None:
        for worker in generation.nodes:
            worker.send(
                Abort(
                    to=worker.instance_id,
                    sender=self._instance_id,
                    room=generation.room,
                    index=index,
                    reason=reason,
                )
            )

    def _expire(self, job: Job, timeout: float) -> None:
        message = f"the request did not finish within {timeout:g} s"
        self.end(job, DeadlineExceededError(message), "deadline")


def _connection_lost(node: Worker) -> NodeFailedError:
    return NodeFailedError(f"the connection to {node.role} node {node.instance_id} was lost")
