"""Delivers the outputs of nodes to waiting jobs, and ends generations."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from pd.core.errors import AbortedError, NodeFailedError, PDError, QueueFullError, error_from_kind
from pd.proxy.dispatch.attempts import list_active
from pd.proxy.dispatch.failover import Failovers, credit_nodes
from pd.proxy.dispatch.job import ClientState
from pd.proxy.dispatch.logprob_memory import estimate_entry_bytes
from pd.proxy.dispatch.positions import DisagreementError
from pd.proxy.routing.demand import Prompt

if TYPE_CHECKING:
    from pd.core.messages import Failed, Output, StepFailed, StepOutputs
    from pd.proxy.dispatch.admission import Admission
    from pd.proxy.dispatch.attempt import Attempt
    from pd.proxy.dispatch.attempts import Attempts
    from pd.proxy.dispatch.generation import Choice, Generation
    from pd.proxy.dispatch.job import Job
    from pd.proxy.dispatch.logprob_memory import LogprobMemory
    from pd.proxy.dispatch.proxy_metrics import Metrics
    from pd.proxy.dispatch.request_trace import RequestTrace
    from pd.proxy.nodes.node_handle import NodeHandle
    from pd.proxy.routing.policies import Policy

logger = logging.getLogger(__name__)

# How long a finished answer waits for the prefill node's report about the prompt.
LINGER_SECONDS = 1.0
INTERNAL = "internal error; the proxy's log has the details"
_GONE_MESSAGES = {
    ClientState.DISCONNECTED: "the client went away",
    ClientState.UNREAD: "the client does not read",
}


class Delivery:
    """Takes tokens from nodes' messages to clients. Runs on the event loop.

    We merge each output into its choice (:meth:`take_outputs`), and its job notes the news. Each
    job writes its news once per :meth:`flush_jobs`, however many messages arrived.

    Args:
        jobs: jobs being served.
        max_failovers, failover_wait: see :class:`pd.proxy.dispatch.failover.Failovers`.
    """

    def __init__(
        self,
        jobs: set[Job],
        attempts: Attempts,
        policy: Policy,
        metrics: Metrics,
        admission: Admission,
        logprob_memory: LogprobMemory,
        *,
        max_failovers: int,
        failover_wait: float,
        trace: RequestTrace | None,
    ) -> None:
        self._jobs = jobs
        self._attempts = attempts
        self._policy = policy
        self._metrics = metrics
        self._admission = admission
        self._logprob_memory = logprob_memory
        self._trace = trace
        self.failovers = Failovers(
            attempts, metrics, max_failovers, failover_wait, self.fail_generation
        )
        # When a node last sent output, on the monotonic clock.
        self.last_output = 0.0
        # Jobs with news since the last flush.
        self._unflushed: dict[Job, None] = {}
        self._is_receiving = False

    # ---- messages of nodes

    def take_outputs(self, node: NodeHandle, message: StepOutputs) -> None:
        """Merge the outputs of a step. The caller flushes the jobs later."""
        self.last_output = time.monotonic()
        self._is_receiving = True
        try:
            for output in message.outputs:
                self._take_output(node, output)
        finally:
            self._is_receiving = False

    def _take_output(self, node: NodeHandle, output: Output) -> None:
        attempt = self._attempts.get_attempt(output.room)
        if attempt is None or (node is not attempt.first_node and node is not attempt.decode_node):
            return
        if not 0 <= output.index < len(attempt.choices):
            logger.warning("%s sent choice %d of %d", node.url, output.index, len(attempt.choices))
            return
        generation, choice = attempt.generation, attempt.choices[output.index]
        previous, had_ended = choice.last_token_at, choice.finish is not None
        progress, lacked = attempt.progress, generation.lacks_prompt_logprobs
        num_known = len(generation.prompt_logprobs)
        decode_had_sent = attempt.decode_has_sent
        try:
            added = attempt.accept_output(node, output)
        except NodeFailedError as error:
            if isinstance(error, DisagreementError) and attempt.repeats_last:
                self.failovers.keep_last_token(attempt, error)
            else:
                self.failovers.report_failure(attempt, node, error)
            return
        except Exception:  # a bug of ours must not leave the client waiting
            logger.exception("cannot take the output of %s", node.url)
            self.fail_generation(generation, PDError(INTERNAL))
            return
        if output.logprobs or lacked:
            self._count_logprobs(generation, added, len(generation.prompt_logprobs) - num_known)
        decode_began = attempt.decode_has_sent and not decode_had_sent
        credit_nodes(attempt, node, output, decode_began=decode_began)
        if attempt.history.deaths:
            self.failovers.note_output(attempt)
        if added:
            assert choice.last_token_at is not None
            self._metrics.count_tokens(generation, added, choice.last_token_at, previous)
        if choice.finish is not None and not had_ended:
            self._end_choice(attempt, choice)
        elif added and not (lacked and generation.lacks_prompt_logprobs):
            self._add_news(generation, choice, added)
        elif added:
            generation.held[choice] = generation.held.get(choice, 0) + added
        has_changed = lacked or attempt.progress != progress
        if has_changed and attempt.has_computed_prompt:
            self._attempts.end_prompt(attempt)
        if (has_changed or choice.finish is not None) and not generation.awaits_first_node:
            self._release_held(generation)
        if not attempt.is_whole and attempt.is_finished and attempt in generation.attempts:
            self._attempts.close_attempt(attempt)

    def _count_logprobs(self, generation: Generation, added: int, from_prompt: int) -> None:
        """Count log probabilities that arrived, and end a job if they take too much memory."""
        job, params = generation.job, generation.spec.params
        entries = from_prompt + (added if params.logprobs and job.keeps_logprobs else 0)
        if not entries or job not in self._jobs:
            return
        num_bytes = entries * estimate_entry_bytes(params.other_logprobs)
        largest = self._logprob_memory.add_bytes(job, num_bytes)
        if largest is not None and not largest.is_done:
            limit = self._logprob_memory.owner_limit >> 20
            error = QueueFullError(
                f"too many log probabilities in unfinished answers: over {limit} MiB of this "
                f"client, or over {2 * limit} MiB in total; stream, or ask for shorter answers or "
                "a smaller top_logprobs"
            )
            # Later, because we may be handling a message of that job.
            asyncio.get_running_loop().call_soon(self.end_job, largest, error, "logprobs")

    def _end_choice(self, attempt: Attempt, choice: Choice) -> None:
        generation = attempt.generation
        assert choice.finish is not None
        if isinstance(choice.finish.matched, str):
            # Only the proxy knows stop strings, so the nodes would continue the choice.
            index = attempt.choices.index(choice)
            self._attempts.abort_attempt(attempt, "a stop string was found", index)
            self._metrics.aborts.labels("stop_string").inc()
        generation.unannounced.append(choice)
        if generation.is_finished and generation.awaits_first_node:
            # The decode node's messages overtook those of the first node on another connection.
            # We still need the latter for usage and log probabilities.
            loop = asyncio.get_running_loop()
            generation.linger = loop.call_later(LINGER_SECONDS, self.settle_generation, generation)

    def take_failure(self, node: NodeHandle, message: Failed) -> None:
        """Fail over an attempt that a node could not compute."""
        attempt = self._attempts.get_attempt(message.room)
        if attempt is None or node not in attempt.nodes:
            return
        if attempt.generation.is_finished:
            # The answer is complete. At most we lose the first node's report about the prompt.
            if node is attempt.first_node:
                self.settle_generation(attempt.generation)
            return
        info = message.error
        error = error_from_kind(info.kind, info.message, info.param)
        if message.fault == "nobody":
            # The node will exit, so we send it nothing before a heartbeat allows it.
            node.is_accepting = False
        if node is attempt.first_node and not attempt.needs_first_node:
            # It ended before it learned that the decode node has everything.
            node.active.pop(attempt, None)
            return
        self.failovers.report_failure(attempt, node, error, message.fault)

    def take_step_failure(self, node: NodeHandle, message: StepFailed) -> None:
        """Fail over all attempts in a failed step of a node."""
        in_rooms = [self._attempts.get_attempt(room) for room in dict.fromkeys(message.rooms)]
        attempts = [
            attempt for attempt in in_rooms if attempt is not None and node in attempt.nodes
        ]
        for attempt in attempts:
            if attempt.generation.is_finished and node is attempt.first_node:
                self.settle_generation(attempt.generation)
        unfinished = [
            attempt
            for attempt in attempts
            if not attempt.generation.is_finished
            and (node is not attempt.first_node or attempt.needs_first_node)
        ]
        if unfinished:
            error = NodeFailedError(message.error.message)
            self.failovers.report_step_failure(unfinished, node, error)

    def settle_attempts(self, node: NodeHandle) -> None:
        """Release attempts from a node they no longer need, and end finished generations."""
        for attempt in list_active(node):
            if node is attempt.first_node and not attempt.needs_first_node:
                node.active.pop(attempt, None)
            elif attempt.generation.is_finished:
                self.settle_generation(attempt.generation)

    # ---- news of jobs

    def flush_jobs(self) -> None:
        """Let each job write its news since the last call."""
        unflushed, self._unflushed = self._unflushed, {}
        for job in unflushed:
            self._flush_job(job)

    def _flush_job(self, job: Job) -> None:
        try:
            job.flush_news()
        except Exception:  # a bug of ours must not leave this client or others waiting
            logger.exception("cannot write the answer of %s", job.rid)
            self.end_job(job, PDError(INTERNAL), "internal")

    def _add_news(self, generation: Generation, choice: Choice, added: int) -> None:
        job = generation.job
        if job.add_news(choice, added):
            self.drop_client(job, ClientState.UNREAD)
        if self._is_receiving:
            self._unflushed[job] = None
        else:
            self._flush_job(job)

    def _release_held(self, generation: Generation) -> None:
        """Deliver output held back for the first node's report, because it came or never will."""
        if generation.held and not generation.lacks_prompt_logprobs:
            for choice, added in generation.held.items():
                self._add_news(generation, choice, added)
            generation.held.clear()
        if generation.is_finished:
            self.settle_generation(generation)
        elif not generation.lacks_prompt_logprobs:
            self._announce_ends(generation)

    def _announce_ends(self, generation: Generation) -> None:
        for choice in generation.unannounced:
            self._add_news(generation, choice, 0)
        generation.unannounced.clear()

    # ---- ends

    def settle_generation(self, generation: Generation) -> None:
        """End a finished generation whose first node will report no more."""
        if generation.is_done or not generation.is_finished:
            return
        if (missing := generation.missing_prompt_logprobs) is not None:
            for attempt in list(generation.attempts):
                self.failovers.fail_over(attempt, NodeFailedError(missing))
            return
        self._note_cached(generation)
        self._close_generation(generation)
        self._announce_ends(generation)

    def _note_cached(self, generation: Generation) -> None:
        """Tell the policy which node now has the KV of the conversation."""
        holder = generation.holder
        if self._policy.ignores_prompts or holder is None or not holder.is_alive:
            return
        prompt = Prompt(generation.spec.token_ids, generation.spec.namespace)
        for choice in generation.choices:
            # Nodes never compute the KV of the last token.
            self._policy.note_computed(holder, prompt.followed_by(choice.output_ids[:-1]))

    def fail_generation(self, generation: Generation, error: PDError) -> None:
        """End a generation without success. The first error wins."""
        if generation.is_done:
            return
        for attempt in generation.attempts:
            self._attempts.abort_attempt(attempt, error.message)
        self._close_generation(generation)
        self._announce_ends(generation)
        generation.job.fail_generation(generation, error)

    def _close_generation(self, generation: Generation) -> None:
        """Remove a generation from all records. No other method does this."""
        generation.is_done = True
        generation.stop_lingering()
        generation.job.count_ended()
        generation.finished_at = time.monotonic()
        self._admission.count_ended(generation.spec)
        for attempt in list(generation.attempts):
            self._attempts.close_attempt(attempt)
        try:
            self._metrics.count_generation(generation)
        except Exception:  # a node's wrong numbers must not keep others from their outputs
            logger.exception("cannot count %s", generation.spec.rid)
        if self._trace is not None and generation.holder and not generation.job.is_probe:
            self._trace.add_prompt(generation)

    def end_job(self, job: Job, error: PDError, reason: str) -> None:
        """End the unfinished generations of a job with an error, and tell the nodes.

        Args:
            reason: label of the metric ``pd_proxy_aborts``.
        """
        job.ended_by = job.ended_by or error
        for generation in job.generations:
            if not generation.is_done:
                self._metrics.aborts.labels(reason).inc()
                self.fail_generation(generation, error)

    def drop_client(self, job: Job, state: ClientState) -> None:
        """End a job because its client is gone or does not read."""
        job.client = state
        self.end_job(job, AbortedError(_GONE_MESSAGES[state]), state.value)
        if state is ClientState.UNREAD and job.sink is not None:
            job.sink.close_client()
