"""Prefill and decode scheduling over one pool, as the step loop of a node drives them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.errors import PDError
from pd.core.messages import FirstToken, Output, Stages
from pd.core.request import RequestState
from pd.scheduling.cost_model import shape_of, with_answers
from pd.scheduling.prompt_share import PromptShare
from pd.scheduling.slices import LATE_SECONDS, PromptSlices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.request import Request, Sequence
    from pd.core.step_cost import StepShape
    from pd.scheduling.core import NodeCore
    from pd.scheduling.decode import DecodeScheduler
    from pd.scheduling.prefill import PrefillScheduler
    from pd.scheduling.step import Work
    from pd.scheduling.transfer_end import PromptReceiver, PromptSender


class CombinedScheduler:
    """Composes a prefill scheduler, a decode scheduler, or both. The caller holds the node's lock.

    A step is the decode batch and, with the tokens of its budget that are left, chunks of prompts.
    A prompt that is complete goes to the peer of its request, or is decoded here.

    Args:
        sending: the end that hands KV to peers; None on a node that keeps all.
        receiving: the end that gets KV of prompts from peers, on a node that computes prompts, too.

    Attributes:
        slices: chooses how many prompt tokens a step computes beside answers, on an elastic node;
            None on others, where that follows from ``--chunked-prefill-size``.
        prompt_share: which part of the recent time prompts took.
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
            pool_tokens = core.memory.num_pages * core.memory.page_size
            most = core.config.chunked_prefill_size
            self.slices = PromptSlices(core.costs, most, pool_tokens)

    # ---- a step

    def plan(self, begins: Callable[[], float] | None = None) -> list[Work]:
        """The works of the next step; empty when there is nothing to compute. ``begins`` predicts
        the seconds until the step before ends, if there is one."""
        if self._sending is not None and self.decode is not None and self.decode.needs_memory:
            self._sending.park(self._core.memory.num_pages)
        batch = [] if self.decode is None else self.decode.plan()
        if self.prefill is None:
            return batch
        config = self._core.config
        running = 0 if self.decode is None else len(self.decode.running)
        if self.slices is None:
            budget = max(config.chunked_prefill_size - len(batch), 1)
        else:
            answers = self._answers(batch, self._receiving, self.slices)
            receiving, start = self._receiving, self.prefill.next_position
            awaits = receiving is not None and receiving.awaits
            joins = self._joins(batch, self.slices)
            budget = self.slices.tokens(
                answers, start, queued=self.prefill.queued_whole(), awaits=awaits, joins=joins
            )
        chunks = self.prefill.plan(budget, config.max_running_requests - running)
        if self._sending is not None:
            if self._is_stuck():
                self._sending.give_back()
            for work in chunks:
                self._sending.open(work.sequence.request)
            self._tell_expected(chunks, batch, self._sending, budget, begins)
        return batch + chunks

    def _is_stuck(self) -> bool:
        """Whether a prompt that will leave waits for memory that is promised to peers, and only
        they can go on, if they do not wait for this node."""
        if self._receiving is None or self.prefill is None or self.decode is None:
            return False
        runs = self.prefill.running or self.decode.running
        return not runs and self._receiving.stalled and self.prefill.owes()

    def _tell_expected(
        self,
        chunks: list[Work],
        batch: list[Work],
        sending: PromptSender,
        budget: int,
        begins: Callable[[], float] | None,
    ) -> None:
        """Tell the peers that will generate the answers when the prompts will be computed: at the
        end of this step, or of more of them."""
        if self._core.costs is None or not chunks:
            return
        cost, beside = self._core.costs.cost, shape_of(batch, planned=True)
        ends = 0.0 if begins is None else begins()
        ends += cost.seconds(shape_of(batch + chunks, planned=True))
        for work in chunks:
            request = work.sequence.request
            left = len(request.prompt) - work.stop
            more = cost.prefill_seconds(work.stop, left, budget, beside)
            sending.tell_expected(request, ends + more)

    def _answers(
        self, batch: list[Work], receiving: PromptReceiver | None, slices: PromptSlices
    ) -> StepShape:
        """Answers that wait for the step that is being planned: those that it continues; those of
        prompts whose last chunk is under way, which it delays by all of its time; and those whose
        prompts other nodes will have computed before a long step is over."""
        shape = shape_of(batch, planned=True)
        assert self.prefill is not None
        ending = [request for request in self.prefill.ending() if request.outgoing is None]
        if receiving is not None:
            ending += receiving.expected(slices.horizon)
        return with_answers(shape, ending)

    def _joins(self, batch: list[Work], slices: PromptSlices) -> bool:
        """Whether an answer from another node continues here for the first time in the step that is
        being planned, or will come while that is under way."""
        receiving = self._receiving
        if receiving is None:
            return False
        if any(receiving.expected(slices.next_step, LATE_SECONDS)):
            return True
        # A work that follows another is the second one of its answer already.
        return any(
            work.sequence.num_output_tokens == 1
            and work.sequence.request.incoming is not None
            and work.follows is None
            for work in batch
        )

    def may_plan_ahead(self, launched: list[Work]) -> bool:
        """Whether :meth:`plan` may be called while a step is launched and not accounted for. It may
        for chunks of prompts, whose results are known when they are launched."""
        if self.decode is None:
            return True
        prefill, batch = self.prefill, self._split(launched)[1]
        beside = prefill is not None and bool(prefill.running or prefill.waiting)
        return self.decode.may_plan_ahead(batch, beside_prompts=beside)

    def on_layers_done(self, works: list[Work]) -> Callable[[int, int], None] | None:
        """A function that the forward pass calls when KV of layers is in the pool, or None."""
        return None if self._sending is None else self._sending.layer_sender(works)

    def process(self, works: list[Work]) -> None:
        """Account for a completed step."""
        # NOTE: works are split first, since accounting makes a complete prompt a running sequence.
        chunks, batch = self._split(works)
        self._core.events.want_pump()
        if self.decode is not None:
            self.decode.process(batch)
        if self.prefill is None:
            return
        completed = self.prefill.process(chunks)
        if self._sending is not None:
            for work in chunks:
                if work not in completed and not work.sequence.request.state.terminal:
                    self._sending.chunk_computed(work)
        for work in completed:
            self._prompt_computed(work)

    def _split(self, works: list[Work]) -> tuple[list[Work], list[Work]]:
        """Chunks of prompts, and the decode batch."""
        if self.prefill is None:
            return [], works
        if self.decode is None:
            return works, []
        chunks = [work for work in works if not work.sequence.decodes]
        return chunks, [work for work in works if work.sequence.decodes]

    def _prompt_computed(self, work: Work) -> None:
        """Deliver token 1 of every choice of a complete prompt, and pass the request on."""
        request = work.sequence.request
        progress = request.progress
        if work.drafter_state is not None:
            progress.drafter_state = work.drafter_state()
        if not progress.first_tokens:
            progress.first_tokens = self._first_tokens(work)
        if request.state.terminal:
            return
        if all(token.finish for token in progress.first_tokens):
            self._core.rooms.finish(request)
        elif request.outgoing is None:
            assert self.decode is not None
            self.decode.add(request, progress.first_tokens, repeat=False)
        else:
            assert self._sending is not None
            self._sending.prompt_computed(request)

    def _first_tokens(self, work: Work) -> list[FirstToken]:
        """Token 1 of each choice, emitted; the request fails if the model gave no number."""
        request, rooms, metrics = work.sequence.request, self._core.rooms, self._core.metrics
        times = request.times
        times.first_token = time.monotonic()
        admitted = times.admitted or times.arrived
        stages = Stages(queue=admitted - times.arrived, prefill=times.first_token - admitted)
        metrics.observe("queue", stages.queue or 0.0)
        metrics.observe("prefill", stages.prefill or 0.0)
        tokens: list[FirstToken] = []
        choices = zip(request.progress.choices, work.sampled, strict=True)
        for index, (state, sampled) in enumerate(choices):
            if sampled.error is not None:
                rooms.fail(request, state.failure(sampled.error))
                return tokens
            try:
                finish = state.observe(sampled.token_id)
            except PDError as error:
                self._core.fail_choice(request, error)
                return tokens
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
            rooms.emit(request, output)
        # Nothing more is drawn with these; rows of penalties would be kept for them.
        request.progress.choices = []
        return tokens

    def observe(self, shape: StepShape, seconds: float) -> float:
        """Correct the predictions of an elastic node by a step that was computed; returns the
        relative error of its prediction."""
        assert self._core.costs is not None
        self.prompt_share.observe(self._core.costs.cost, shape)
        return self._core.costs.observe(shape, seconds)

    # ---- requests

    def remove(self, request: Request) -> None:
        """Take a request that ended out of all queues."""
        if self.prefill is not None:
            self.prefill.remove(request)
        if self.decode is not None:
            self.decode.remove(request)

    def has_not_begun(self, request: Request) -> bool:
        """Whether a request waits for its grammar, or for its prompt to be computed, and none of
        that was ever done."""
        if request.state is RequestState.COMPILING:
            return True
        waits = self.prefill is not None and request in self.prefill.waiting
        return waits and request.times.admitted is None

    def end_choice(self, request: Request, index: int) -> bool:
        """End one choice of a request; False if it is not decoded here (yet)."""
        self._core.events.want_pump()
        return self.decode is not None and self.decode.end_choice(request, index)

    # ---- administration

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return 0 if self.prefill is None else self.prefill.queued_tokens

    def queued(self) -> Iterator[Sequence]:
        """The sequences in all queues, one for each place in one."""
        if self.prefill is not None:
            yield from self.prefill.queued()
        if self.decode is not None:
            yield from self.decode.queued()

    def queues(self) -> dict[str, int]:
        """Requests by queue, as ``/server_info`` shows them. Where both schedulers are, prompts
        that are computed are in a queue of their own."""
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
