"""Decode scheduling: continuous batching, retraction and resumption."""

from __future__ import annotations

import logging
import time
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from pd.core.errors import NodeFailedError
from pd.core.messages import Output, Stages
from pd.core.sampling_params import choice_seed
from pd.engine.sampler import SampledToken
from pd.engine.sampling_state import SamplingState
from pd.scheduling.metrics import VerifiedDrafts
from pd.scheduling.request import HostKV, RequestState, Sequence
from pd.scheduling.reserve import DecodeReserve
from pd.scheduling.step import Work
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import numpy as np
    import numpy.typing as npt

    from pd.core.messages import Finish, FirstToken
    from pd.scheduling.core import NodeCore
    from pd.scheduling.request import LaunchedWork, Request

    IntArray = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

# Number of tokens of one sequence per step when we compute lost KV again.
RECOMPUTE_CHUNK = 512


class DecodeScheduler:
    """Runs sequences whose prompt is in the pool. The caller holds the node's lock.

    Its queues are "waiting", "running" and "retracted".

    Attributes:
        draft_tokens: maximum tokens to draft for one sequence in one step.
    """

    def __init__(self, core: NodeCore) -> None:
        self._engine, self._memory, self._requests = core.engine, core.memory, core.requests
        self._metrics, self._fail_choice = core.metrics, core.fail_choice
        self._page_bytes = core.engine.pool.count_page_bytes(core.engine.layout)
        self._model = core.engine.model_config
        self._max_running = core.config.max_running_requests
        self._host_limit = core.config.retraction_host_memory
        self._host_used = 0
        self._copy_warnings = WarningLimit(logger)
        self._drafter, self._lengths = core.drafter, core.draft_lengths
        drafts = core.drafter is not None
        self.draft_tokens = core.config.speculative_num_draft_tokens if drafts else 0
        self._drafts_ahead = core.drafter is not None and core.drafter.drafts_ahead
        self.reserve = DecodeReserve(core.config.reserved_decode_tokens)
        self.waiting: deque[Sequence] = deque()
        self.retracted: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._drafts = VerifiedDrafts()
        # Whether a sequence here waits for pages, so new requests must not take any.
        self.lacks_memory = False

    @property
    def _queues(self) -> tuple[list[Sequence] | deque[Sequence], ...]:
        return (self.running, self.waiting, self.retracted)

    @property
    def _one_page_each(self) -> int:
        """Number of pages that running sequences need for another page of tokens each."""
        return len(self.running) * self._memory.num_tables

    @property
    def needs_memory(self) -> bool:
        """Whether new requests must not take pages, because a sequence here waits for some."""
        return self.lacks_memory or bool(self.retracted)

    def count_headroom(self, sequence: Sequence, others: Collection[Sequence]) -> int:
        """Count the pages a new sequence must leave available, so all sequences can grow.

        A lone sequence leaves none, because otherwise it might never start.

        Args:
            others: sequences with pages that will come here.
        """
        if not others and not self.running and not self.waiting:
            return 0
        live = [*others, sequence, *self.running, *self.waiting, *self.retracted]
        windows = () if self._memory.windows is None else self._memory.windows.windows
        return self.reserve.count_growth(live, self._memory.page_size, windows)

    def iter_queued(self) -> Iterator[Sequence]:
        """Iterate over the sequences of the three queues."""
        return chain(self.waiting, self.running, self.retracted)

    # ---- in

    def add_request(
        self, request: Request, first_tokens: list[FirstToken], *, repeat: bool
    ) -> None:
        """Accept a request whose prompt is in the pages of ``request.sequence``.

        The first choice to continue keeps these pages. The others start without pages and share the
        prompt's whole pages, because they find them in the radix tree.

        Args:
            first_tokens: token 1 of each choice.
            repeat: whether to emit token 1 again, in case the prefill node's message was lost.
        """
        request.state = RequestState.WAITING
        request.times.committed = time.monotonic()
        prompt_sequence = request.sequence
        request.sequences = []
        for token in first_tokens:
            if token.finish is not None or token.index in request.ended_choices:
                continue
            sequence = prompt_sequence
            if request.sequences:
                sequence = Sequence(request, token.index, request.prompt, len(request.prompt))
            sequence.index = token.index
            self._start_sequence(sequence, token, repeat)
        if not request.sequences:
            request.sequences = [prompt_sequence]
            self._requests.finish_request(request)

    def add_resumed(self, request: Request) -> None:
        """Accept a resumed request without KV. We compute it like that of a retracted sequence."""
        sequence = request.sequence
        sequence.sampling = request.resumed_state
        request.times.committed = time.monotonic()
        self.waiting.append(sequence)

    def _start_sequence(self, sequence: Sequence, token: FirstToken, repeat: bool) -> None:
        request = sequence.request
        if request.resumed_state is not None:
            sampling = request.resumed_state
        elif request.sequences:
            sampling = request.sequences[0].choice.fork_state(token.index)
        else:
            sampling = SamplingState(
                request.params,
                request.prompt,
                self._model.eos_token_ids,
                self._model.vocab_size,
                seed=choice_seed(request.params.seed, token.index),
                make_rules=request.make_rules,
            )
        sequence.sampling = sampling
        # If this node drew the token, the state of a resumed request has observed it already.
        if sampling.num_output_tokens == sequence.num_output_tokens:
            sampling.observe_token(token.token_id)
        sequence.append_token(token.token_id)
        request.sequences.append(sequence)
        self.waiting.append(sequence)
        if repeat:
            self._emit_tokens(sequence, [SampledToken(token.token_id, token.logprobs)])

    # ---- a step

    def plan_step(self) -> list[Work]:
        """Admit sequences for which there is room, and plan the next work of every running
        sequence."""
        for sequence in [each for each in self.running if each.is_finished and not each.is_in_step]:
            self._finish_sequence(sequence)
        for sequence in list(self.running):
            if not sequence.request.state.is_terminal and sequence.choice.rules is not None:
                self._apply_rules(sequence)
        self._admit_sequences()
        works: dict[Sequence, Work] = {}
        retracted = len(self.retracted)
        for sequence in list(self.running):
            if len(self.retracted) > retracted and sequence not in self.running:
                continue  # retracted for the sake of another
            work = self._make_work(sequence)
            if work is not None and self._secure_pages(sequence, work.max_stop, works):
                works[sequence] = work
        for sequence, work in works.items():
            sequence.launched_work = work
        if self.draft_tokens:
            self._plan_drafts(list(works.values()))
        return list(works.values())

    def _apply_rules(self, sequence: Sequence) -> None:
        """Fail the request if its rules found an error, and append the tokens they force."""
        choice, launched = sequence.choice, sequence.launched_work
        rules = choice.rules
        assert rules is not None
        if rules.is_busy or sequence.is_finished or (launched is not None and launched.is_late):
            return
        if rules.error is not None:
            self._fail_choice(sequence.request, rules.error)
            return
        forced = choice.take_forced()
        for token in forced:
            sequence.append_token(token)
            choice.observe_token(token)
        if forced:
            rules.has_jumped = True
            self._metrics.forced.inc(len(forced))
            self._emit_tokens(sequence, [SampledToken(token) for token in forced])

    def _may_draw(self, sequence: Sequence) -> bool:
        """Return whether we can plan a sequence without waiting for its rules.

        We submit slow rules once the tokens are known. The same holds for rules that may force
        tokens, because the model would compute others in vain.
        """
        rules, launched = sequence.choice.rules, sequence.launched_work
        if rules is None:
            return True
        if rules.is_busy or rules.error is not None or rules.forced:
            return False  # the next plan applies the rules first
        if launched is not None and launched.is_late:
            return False
        if launched is not None:
            return not rules.is_slow
        if rules.mask is None and (rules.is_slow or rules.may_jump):
            self._engine.sampler.rule_lanes.submit_slow(rules)
            return False
        return True

    def _plan_drafts(self, works: list[Work]) -> None:
        """Choose the draft length of each work, and attach drafts made ahead.

        A draft for this step needs known tokens. A drafter that drafts ahead also gets a limit for
        the next step.
        """
        ahead = self._drafts_ahead
        drafting = [work for work in works if work.samples and (ahead or work.previous is None)]
        limits = [self._find_draft_limit(work) for work in drafting]
        lengths = self._lengths.choose_lengths([work.sequence for work in drafting], limits)
        for work, length in zip(drafting, lengths, strict=True):
            if work.draft is None and work.previous is None:
                work.draft_limit = length
            if ahead:
                self._set_ahead_limit(work, length)

    def _find_draft_limit(self, work: Work) -> int:
        """Attach the draft made ahead, and return how many tokens may be drafted.

        The limit counts tokens for this work. It counts tokens after this work if the work has its
        draft already, or follows another one.
        """
        sequence = work.sequence
        # A step outputs one token more than were drafted.
        most = self._count_output_left(work) - 1
        ahead, sequence.next_draft = sequence.next_draft, None
        rules = sequence.choice.rules
        if rules is not None and (rules.mask is not None or rules.rules.jumps_forward):
            return 0  # we know no later masks, or forced tokens may have to come in between
        # The grammar may have forced tokens since the draft was made.
        if ahead is not None and not ahead.is_stale and work.stop - work.start == 1:
            work.draft = ahead.take_first(min(most, self._add_draft_pages(work, ahead.size)))
        elif work.previous is None:
            return self._add_draft_pages(work, max(0, min(self.draft_tokens, most)))
        return max(0, min(self.draft_tokens, most - 1))

    def _set_ahead_limit(self, work: Work, length: int) -> None:
        """Set how many tokens, at most ``length``, may be drafted after a work."""
        left = self._count_output_left(work)
        most = min(length, left - 2)
        if most > 0:
            before = 1 + work.max_drafted
            # Tokens beyond the end of the output need no pages.
            wanted = min(before + most, left)
            room = self._add_draft_pages(work, wanted)
            work.ahead_limit = most if room >= wanted else max(0, room - before)
            work.ahead_stop = work.max_stop + room

    @staticmethod
    def _count_output_left(work: Work) -> int:
        """Return the minimum number of tokens that a sequence may output from this work on."""
        choice = work.sequence.choice
        before = 0 if work.previous is None else 1 + work.num_unread
        return choice.params.max_tokens - choice.num_output_tokens - before

    def _add_draft_pages(self, work: Work, wanted: int) -> int:
        """Add pages for ``wanted`` tokens after a work.

        Drafts leave one page for each running sequence, because it may need it for its next token.

        Returns:
            How many of these tokens have pages.
        """
        memory, sequence, stop = self._memory, work.sequence, work.max_stop
        missing = memory.count_growth(sequence, stop + wanted)
        if missing > 0 and missing + self._one_page_each <= memory.num_available:
            memory.grow_pages(sequence, stop + wanted)
        return min(wanted, len(sequence.pages) * memory.page_size - stop)

    def _make_work(self, sequence: Sequence) -> Work | None:
        """Make the next work of a sequence. Return None if the launched one may be its last."""
        launched = sequence.launched_work
        if sequence.is_finished or not self._may_draw(sequence):
            return None
        start = sequence.num_computed if launched is None else launched.stop
        if start < sequence.num_tokens:
            stop = min(sequence.num_tokens, start + RECOMPUTE_CHUNK)
            samples = [sequence.choice] if stop == sequence.num_tokens else []
            return Work(sequence, start, stop, samples)
        unread = 0 if launched is None else launched.max_accepted
        work = Work(
            sequence, start, start + 1, [sequence.choice], previous=launched, num_unread=unread
        )
        return work if self._count_output_left(work) > 0 else None

    def may_plan_ahead(self, launched: list[Work], *, beside_prompts: bool) -> bool:
        """Whether :meth:`plan_step` may be called before a launched step is accounted for.

        It may if only the next forward pass needs the tokens of the step, and no sequence has to be
        retracted. A drafter that does not draft ahead needs the tokens, too, unless it rests.

        Args:
            beside_prompts: whether the next step may have prompts. No graph takes prompts together
                with works whose start only the device knows.
        """
        if self.draft_tokens and not self._drafts_ahead and not self._lengths.is_resting:
            return False
        if self.retracted or self._memory.num_available < self._one_page_each:
            return False
        return all(
            work.is_decode
            and (work.draft is None or (not beside_prompts and self._may_follow(work)))
            for work in launched
        )

    def _may_follow(self, work: Work) -> bool:
        """Return whether we can launch the next work before we know what this draft accepts."""
        if work.place < 0 or not self._engine.runner.takes_unread:
            return False
        choice, last = work.sequence.choice, 1 + work.max_accepted + self.draft_tokens
        # The host must fill masks for rules. Masks for minimum lengths apply to all tokens or none.
        return choice.rules is None and choice.may_stop_within(1, last) is not None

    def _admit_sequences(self) -> None:
        """Run sequences with pages, or with enough available ones, retracted ones first.

        After the first sequence that lacks memory, no sequence or request gets any
        (:attr:`lacks_memory`). Sequences with pages may run. They end one by one and free the pages
        for which the first one waits.
        """
        self.lacks_memory = False
        for queue in (self.retracted, self.waiting):
            while queue and len(self.running) < self._max_running:
                if not self._give_pages(queue[0]):
                    self.lacks_memory = True
                    self._admit_holders()
                    return
                self._run_sequence(queue.popleft())

    def _run_sequence(self, sequence: Sequence) -> None:
        sequence.request.state = RequestState.RUNNING
        self.running.append(sequence)

    def _admit_holders(self) -> None:
        """Run waiting sequences with pages, as long as each running one can grow by a page.

        We always run at least one, because only running sequences free their pages.
        """
        for holder in [sequence for sequence in self.waiting if len(sequence.pages)]:
            running = len(self.running)
            if running >= self._max_running:
                return
            if 0 < self._one_page_each >= self._memory.num_available:
                return
            self.waiting.remove(holder)
            self._run_sequence(holder)

    def _give_pages(self, sequence: Sequence) -> bool:
        """Give a sequence pages for all its tokens, and leave the others room to grow.

        Its KV comes from the radix tree or from host memory, or we compute it again.

        Returns:
            Whether there were enough pages.
        """
        if len(sequence.pages):
            return True
        memory, length = self._memory, sequence.num_tokens
        if (
            memory.count_missing(sequence, length, length - 1) + self._one_page_each
            > memory.num_available
        ):
            return False
        matched = memory.match_prefix(sequence, length - 1) // memory.page_size
        missing = memory.count_growth(sequence, length)
        short = missing + self._one_page_each > memory.num_available
        if short or not memory.grow_pages(sequence, length):
            memory.release_pages(sequence)
            return False
        self._restore_kv(sequence, matched)
        self._drop_host_kv(sequence)
        return True

    def _secure_pages(
        self, sequence: Sequence, num_tokens: int, works: dict[Sequence, Work]
    ) -> bool:
        """Get pages for ``num_tokens``, and retract others as needed.

        Returns:
            False if the sequence must wait or was retracted itself.
        """
        while not self._memory.grow_pages(sequence, num_tokens):
            if any(other.is_in_step for other in self.running):
                return False  # we may only retract once the launched step is accounted for
            victim = min(self.running, key=lambda other: (other.num_computed, -other.num_tokens))
            self._retract_sequence(victim)
            works.pop(victim, None)
            if victim is sequence:
                return False
        return True

    def _retract_sequence(self, sequence: Sequence) -> None:
        """Take a sequence out of the pool, and save its KV in host memory if there is room."""
        self.running.remove(sequence)
        self.retracted.append(sequence)
        if self._drafter is not None:
            self._drafter.forget_sequence(sequence)
        sequence.next_draft = None
        self.reserve.note_retracted()
        self._metrics.retractions.inc()
        count = self._memory.pages_for(sequence.num_computed)
        tables = sequence.tables[..., :count]
        size = count * self._page_bytes
        if tables.ndim > 1:
            size = self._engine.pool.count_held_bytes(self._engine.layout, tables)
        if self._host_used + size <= self._host_limit:
            self._save_kv(sequence, tables, size)
        self._memory.cache_tokens(sequence)
        self._memory.release_pages(sequence)

    def _save_kv(self, sequence: Sequence, tables: IntArray, size: int) -> None:
        """Copy pages of a sequence, of this size, to host memory.

        If this fails, we compute the KV again later.

        Raises:
            NodeFailedError: other ranks are gone.
        """
        try:
            pages = self._engine.save_pages(tables)
        except NodeFailedError:
            raise
        except Exception as error:  # noqa: BLE001
            # Host or GPU may lack memory. A worse fault shows in the next step.
            self._copy_warnings.log_warning(
                f"cannot save the KV of a retracted sequence: {error!r}"
            )
            return
        sequence.host_kv = HostKV(sequence.num_computed, tables.shape[-1], size, pages)
        self._host_used += size

    def _restore_kv(self, sequence: Sequence, matched: int) -> None:
        """Write KV from host memory into a sequence's pages, except the first ``matched``.

        If this fails, we compute the KV again.

        Raises:
            NodeFailedError: other ranks are gone.
        """
        host = sequence.host_kv
        if host is None or host.num_tokens <= sequence.num_computed:
            return
        try:
            host.pages.restore_pages(sequence.tables[..., matched : host.num_pages])
        except NodeFailedError:
            raise
        except Exception as error:  # noqa: BLE001
            # As in _save_kv. We compute every possibly half-written token before we read it.
            self._copy_warnings.log_warning(
                f"cannot restore the KV of a retracted sequence: {error!r}"
            )
            return
        sequence.num_computed = host.num_tokens
        self._memory.drop_passed(sequence)

    def _drop_host_kv(self, sequence: Sequence) -> None:
        if sequence.host_kv is not None:
            self._host_used -= sequence.host_kv.num_bytes
            sequence.host_kv = None

    def process_step(self, works: list[Work]) -> None:
        """Account for a completed step."""
        self._drafts = VerifiedDrafts()
        for work in works:
            sequence = work.sequence
            if sequence.launched_work is work:
                sequence.launched_work = None
            if sequence.request.state.is_terminal:
                continue
            if sequence.is_finished:
                # The proxy or the step before ended it, so we drop this token.
                if not sequence.is_in_step:
                    self._finish_sequence(sequence)
                continue
            if work.is_late:
                self._discard_sample(sequence, work)
                continue
            sequence.num_computed = work.stop
            if work.sampled:
                self._take_tokens(sequence, work)
            else:
                self._discard_drafts(sequence, work)
            if sequence.launched_work is not None:
                self._settle_next(sequence, work, sequence.launched_work)
            self._memory.drop_passed(sequence)
        if self._drafts.drafts:
            self._metrics.speculation.observe_drafts(self._drafts)

    def _discard_sample(self, sequence: Sequence, work: Work) -> None:
        """Drop the sample of a work whose mask came too late. We compute its last token again."""
        sequence.num_computed = work.stop - 1
        self._discard_drafts(sequence, work)
        sequence.carried_state = None
        if self._drafter is not None:
            self._drafter.forget_sequence(sequence)

    @staticmethod
    def _discard_drafts(sequence: Sequence, work: Work) -> None:
        """Drop drafts based on a discarded sample."""
        if sequence.next_draft is not None:
            sequence.next_draft.is_stale = True
        if work.draft is not None:
            sequence.carried_state = None  # it may belong to a guess we do not take

    @staticmethod
    def _settle_next(sequence: Sequence, work: Work, following: LaunchedWork) -> None:
        """Tell the following work, launched without knowing it, how many guesses we accepted."""
        if following.num_unread:
            following.settle_unread(len(work.accepted))
            # The device has counted all output tokens.
            sequence.choice.counted_ahead = 0
        if sequence.carried_state is not None:
            sequence.carried_state.stop = following.stop

    def _take_tokens(self, sequence: Sequence, work: Work) -> None:
        """Append the accepted guesses of a draft, if there is one, and the sampled token."""
        accepted = work.accepted
        finish, taken = None, [work.sampled[0], *(work.sampled[i + 1] for i in accepted)]
        for count, sampled in enumerate(taken, 1):
            if sampled.error is not None:
                self._requests.fail_request(
                    sequence.request, sequence.choice.make_error(sampled.error)
                )
                return
            sequence.append_token(sampled.token_id)
            finish = sequence.choice.observe_token(sampled.token_id)
            if finish is not None:
                taken = taken[:count]
                break
        # The draft has computed the KV of each token but the last.
        sequence.num_computed += len(taken) - 1
        if work.draft is not None:
            self._lengths.observe_draft(sequence, work.draft.tree, accepted)
            self._drafts.add_draft(work.draft.tree, min(len(accepted), len(taken)))
            if sequence.carried_state is not None:
                sequence.carried_state.stop = sequence.num_computed
        elif work.draft_limit:
            self._lengths.observe_no_draft(sequence)
        self._emit_tokens(sequence, taken, finish)
        if finish is not None:
            sequence.is_finished = True
            if not sequence.is_in_step:
                self._finish_sequence(sequence)

    def _emit_tokens(
        self, sequence: Sequence, taken: list[SampledToken], finish: Finish | None = None
    ) -> None:
        """Deliver the last tokens of a sequence."""
        request = sequence.request
        logprobs = [sampled.logprobs for sampled in taken if sampled.logprobs is not None]
        output = Output(
            room=request.room,
            index=sequence.index,
            position=sequence.num_output_tokens - len(taken),
            token_ids=[sampled.token_id for sampled in taken],
            finish=finish,
            logprobs=logprobs or None,
        )
        times = request.times
        is_first = output.position == request.num_produced
        if times.reserved is not None and is_first and times.committed is not None:
            if sequence is request.sequences[0] and request.incoming is not None:
                # The choices share one transfer.
                output.transferred_bytes = request.incoming.num_bytes
            output.stages = Stages(
                bootstrap=times.reserved - times.arrived, transfer=times.committed - times.reserved
            )
        if finish is not None and times.committed is not None:
            output.stages = Stages(decode=time.monotonic() - times.committed)
            self._metrics.observe_stage("decode", output.stages.decode or 0.0)
        self._requests.emit_output(request, output)

    # ---- out

    def _finish_sequence(self, sequence: Sequence) -> None:
        """End a complete choice. Its KV stays cached for the next turn."""
        sequence.is_finished = True
        sequence.next_draft = sequence.carried_state = None
        self.reserve.note_finished(sequence.num_output_tokens)
        self._drop_sequence(sequence)
        self._memory.cache_tokens(sequence)
        self._memory.release_pages(sequence)
        if not any(
            other in queue for other in sequence.request.sequences for queue in self._queues
        ):
            self._requests.finish_request(sequence.request)

    def _drop_sequence(self, sequence: Sequence) -> None:
        for queue in self._queues:
            if sequence in queue:
                queue.remove(sequence)
        if self._drafter is not None:
            self._drafter.forget_sequence(sequence)
            self._lengths.forget_sequence(sequence)
        self._drop_host_kv(sequence)

    def end_choice(self, request: Request, index: int) -> bool:
        """End a choice because the proxy found a stop string.

        Returns:
            False if the choice has not started on this node.
        """
        for sequence in request.sequences:
            if sequence.index == index and sequence.is_decoding:
                if not sequence.is_finished:
                    sequence.is_finished = True
                    if not sequence.is_in_step:
                        self._finish_sequence(sequence)
                return True
        return False

    def remove_request(self, request: Request) -> None:
        """Remove an ended request from all queues. The node releases its pages."""
        for sequence in request.sequences:
            self._drop_sequence(sequence)
