"""Prefill and decode scheduling over one pool, driven by the step loop of a node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.messages import FirstToken, Output, Stages
from pd.scheduling.cost_model import add_answers, step_shape
from pd.scheduling.prompt_share import PromptShare
from pd.scheduling.request import RequestState
from pd.scheduling.slices import LATE_SECONDS, PromptSlices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.step_cost import StepShape
    from pd.scheduling.core import NodeCore
    from pd.scheduling.decode import DecodeScheduler
    from pd.scheduling.prefill import PrefillScheduler
    from pd.scheduling.request import Request, Sequence
    from pd.scheduling.step import Work
    from pd.scheduling.transfer_end import PromptReceiver, PromptSender


class CombinedScheduler:
    """Composes a prefill scheduler, a decode scheduler, or both. The caller holds the node's lock.

    A step is the decode batch, plus chunks of prompts for the rest of its budget. A complete prompt
    goes to the peer of its request, or this node decodes it.

    Args:
        sending: the end for sending KV to peers; None on a node that keeps all of it.
        receiving: the end for receiving KV from peers; None unless this node also prefills.

    Attributes:
        slices: chooses the prompt tokens of a step on elastic nodes. None on others, which use
            ``--chunked-prefill-size``.
        prompt_share: share of recent time spent on prompts.
    """

    def __init__(
        self,
        core: NodeCore,
        prefill: PrefillScheduler | None,
        decode: DecodeScheduler | None,
        sending: PromptSender | None = None,
        receiving: PromptReceiver | None = None,
    ) -> None:
        assert prefill is not None or decode is not None
        self._core = core
        self.prefill, self.decode, self._sending = prefill, decode, sending
        self._receiving = receiving
        self.slices: PromptSlices | None = None
        self.prompt_share = PromptShare()
        if core.costs is not None:
            pool_tokens = core.memory.num_tokens
            most = core.config.chunked_prefill_size
            self.slices = PromptSlices(core.costs, most, pool_tokens)

    # ---- a step

    def plan_step(self, begins: Callable[[], float] | None = None) -> list[Work]:
        """Plan the works of the next step. The list is empty if there is nothing to compute.

        Args:
            begins: predicts the seconds until the launched step ends; None if there is none.
        """
        if self._sending is not None and self.decode is not None and self.decode.needs_memory:
            self._sending.park_prompts(self._core.memory.num_pages)
        batch = [] if self.decode is None else self.decode.plan_step()
        if self.prefill is None:
            return batch
        config = self._core.config
        running = 0 if self.decode is None else len(self.decode.running)
        if self.slices is None:
            budget = max(config.chunked_prefill_size - len(batch), 1)
        else:
            answers = self._shape_answers(batch, self._receiving, self.slices)
            receiving, start = self._receiving, self.prefill.next_position
            awaits = receiving is not None and receiving.awaits_kv
            joins = self._has_joining_answer(batch, self.slices)
            budget = self.slices.choose_tokens(
                answers, start, queued=self.prefill.count_queued(), awaits=awaits, joins=joins
            )
            self.prefill.waiting.note_pace(budget, answers)
        chunks = self.prefill.plan_step(budget, config.max_running_requests - running)
        if self._sending is not None:
            if self._is_stuck():
                self._sending.return_reservations()
            for work in chunks:
                self._sending.start_sending(work.sequence.request)
            self._tell_expected(chunks, batch, self._sending, budget, begins)
        return batch + chunks

    def _is_stuck(self) -> bool:
        """Return whether a leaving prompt waits for memory promised to peers.

        Nothing runs here then, so only the peers can make progress, unless they wait for us.
        """
        if self._receiving is None or self.prefill is None or self.decode is None:
            return False
        runs = self.prefill.running or self.decode.running
        return not runs and self._receiving.is_stalled and self.prefill.owes_memory()

    def _tell_expected(
        self,
        chunks: list[Work],
        batch: list[Work],
        sending: PromptSender,
        budget: int,
        begins: Callable[[], float] | None,
    ) -> None:
        """Tell the peers when we expect to have prefilled their prompts."""
        if self._core.costs is None or not chunks:
            return
        cost, beside = self._core.costs.cost, step_shape(batch, planned=True)
        ends = 0.0 if begins is None else begins()
        ends += cost.predict_seconds(step_shape(batch + chunks, planned=True))
        for work in chunks:
            request = work.sequence.request
            left = len(request.prompt) - work.stop
            more = cost.prefill_seconds(work.stop, left, budget, beside)
            sending.tell_expected(request, ends + more)

    def _shape_answers(
        self, batch: list[Work], receiving: PromptReceiver | None, slices: PromptSlices
    ) -> StepShape:
        """Return the shape of all answers delayed by the planned step.

        In addition to the batch, these are answers of prompts whose last chunk is launched, and
        answers whose prompts other nodes will have computed before a long step ends.
        """
        shape = step_shape(batch, planned=True)
        assert self.prefill is not None
        ending = [request for request in self.prefill.iter_ending() if request.outgoing is None]
        if receiving is not None:
            ending += receiving.iter_expected(slices.horizon)
        return add_answers(shape, ending)

    def _has_joining_answer(self, batch: list[Work], slices: PromptSlices) -> bool:
        """Return whether an answer from another node starts in the planned step, or during it."""
        receiving = self._receiving
        if receiving is None:
            return False
        if any(receiving.iter_expected(slices.next_step_horizon, LATE_SECONDS)):
            return True
        # A work that follows another one is at least the second of its answer.
        return any(
            work.sequence.num_output_tokens == 1
            and work.sequence.request.incoming is not None
            and work.previous is None
            for work in batch
        )

    def may_plan_ahead(self, launched: list[Work]) -> bool:
        """Whether :meth:`plan_step` may be called before a launched step is accounted for.

        It may for chunks of prompts, because we know their results when we launch them.
        """
        if self.decode is None:
            return True
        prefill, batch = self.prefill, self._split_works(launched)[1]
        beside = prefill is not None and bool(prefill.running or prefill.waiting)
        return self.decode.may_plan_ahead(batch, beside_prompts=beside)

    def make_layer_sender(self, works: list[Work]) -> Callable[[int, int], None] | None:
        """Make the callback of the forward pass for layers whose KV is in the pool, or None."""
        return None if self._sending is None else self._sending.make_layer_sender(works)

    def process_step(self, works: list[Work]) -> None:
        """Account for a completed step."""
        # We split first, because accounting turns a complete prompt into a running sequence.
        chunks, batch = self._split_works(works)
        self._core.events.want_reservations()
        if self.decode is not None:
            self.decode.process_step(batch)
        if self.prefill is None:
            return
        completed = self.prefill.process_step(chunks)
        if self._sending is not None:
            for work in chunks:
                if work not in completed and not work.sequence.request.state.is_terminal:
                    self._sending.on_chunk_computed(work)
        for work in completed:
            self._complete_prompt(work)

    def _split_works(self, works: list[Work]) -> tuple[list[Work], list[Work]]:
        """Split works into chunks of prompts and the decode batch."""
        if self.prefill is None:
            return [], works
        if self.decode is None:
            return works, []
        chunks = [work for work in works if not work.sequence.is_decoding]
        return chunks, [work for work in works if work.sequence.is_decoding]

    def _complete_prompt(self, work: Work) -> None:
        """Emit token 1 of every choice of a complete prompt, and pass the request on."""
        request = work.sequence.request
        progress = request.progress
        if work.drafter_state is not None:
            progress.drafter_state = work.drafter_state()
        if not progress.first_tokens:
            progress.first_tokens = self._emit_first_tokens(work)
        if request.state.is_terminal:
            return
        if all(token.finish for token in progress.first_tokens):
            self._core.requests.finish_request(request)
        elif request.outgoing is None:
            assert self.decode is not None
            self.decode.add_request(request, progress.first_tokens, repeat=False)
        else:
            assert self._sending is not None
            self._sending.on_prompt_computed(request)

    def _emit_first_tokens(self, work: Work) -> list[FirstToken]:
        """Emit and return token 1 of each choice. Fail the request if a token has an error."""
        request, requests, metrics = work.sequence.request, self._core.requests, self._core.metrics
        times = request.times
        times.first_token = time.monotonic()
        admitted = times.admitted or times.arrived
        stages = Stages(queue=admitted - times.arrived, prefill=times.first_token - admitted)
        metrics.observe_stage("queue", stages.queue or 0.0)
        metrics.observe_stage("prefill", stages.prefill or 0.0)
        tokens: list[FirstToken] = []
        choices = zip(request.progress.choices, work.sampled, strict=True)
        for index, (state, sampled) in enumerate(choices):
            if state.rules is not None and state.rules.error is not None:
                self._core.fail_choice(request, state.rules.error)
                return tokens
            if sampled.error is not None:
                requests.fail_request(request, state.make_error(sampled.error))
                return tokens
            finish = state.observe_token(sampled.token_id)
            tokens.append(FirstToken(index, sampled.token_id, sampled.logprobs, finish))
            output = Output(
                room=request.room,
                index=index,
                position=request.num_produced,
                token_ids=[sampled.token_id],
                finish=finish,
                logprobs=None if sampled.logprobs is None else [sampled.logprobs],
                cached_tokens=request.progress.cached_tokens,
                stages=stages,
            )
            if index == 0 and request.params.prompt_logprobs_start is not None:
                output.prompt_logprobs = request.progress.logprobs
            requests.emit_output(request, output)
        # We draw nothing more with these states, and they would keep rows of penalties.
        request.progress.choices = []
        return tokens

    def observe_step(self, shape: StepShape, seconds: float) -> float:
        """Correct the predictions of an elastic node by a computed step.

        Returns:
            The relative error of its prediction.
        """
        assert self._core.costs is not None
        self.prompt_share.observe_step(self._core.costs.cost, shape)
        return self._core.costs.observe_step(shape, seconds)

    # ---- requests

    def remove_request(self, request: Request) -> None:
        """Remove an ended request from all queues."""
        if self.prefill is not None:
            self.prefill.remove_request(request)
        if self.decode is not None:
            self.decode.remove_request(request)

    def has_not_started(self, request: Request) -> bool:
        """Return whether a request still waits for its grammar or for its first chunk."""
        if request.state is RequestState.COMPILING:
            return True
        waits = self.prefill is not None and request in self.prefill.waiting
        return waits and request.times.admitted is None

    def end_choice(self, request: Request, index: int) -> bool:
        """End one choice of a request. Return False if this node does not decode it (yet)."""
        self._core.events.want_reservations()
        return self.decode is not None and self.decode.end_choice(request, index)

    # ---- administration

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens left to compute."""
        return 0 if self.prefill is None else self.prefill.queued_tokens

    def iter_queued(self) -> Iterator[Sequence]:
        """Iterate over one sequence for each place in the queues."""
        if self.prefill is not None:
            yield from self.prefill.iter_queued()
        if self.decode is not None:
            yield from self.decode.iter_queued()

    def count_queues(self) -> dict[str, int]:
        """Count requests by queue for ``/server_info``.

        With both schedulers, running prompts have a queue of their own.
        """
        queues: dict[str, int] = {"waiting": 0}
        if self.decode is not None:
            queues |= {
                "waiting": len(self.decode.waiting),
                "running": len(self.decode.running),
                "retracted": len(self.decode.retracted),
            }
        if self.prefill is not None:
            waiting = sum(r.state is RequestState.WAITING for r in self.prefill.waiting)
            queues["waiting"] += waiting
            queues["running" if self.decode is None else "prefill"] = len(self.prefill.running)
        return queues
