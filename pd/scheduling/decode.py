"""Decode scheduling: continuous batching, retraction, resume (queues "waiting", "running",
"retracted")."""

from __future__ import annotations

import logging
import time
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import NodeFailedError, PDError
from pd.core.messages import Output, Stages
from pd.core.request import RequestState, Sequence
from pd.core.sampling_params import choice_seed
from pd.core.seldom import Seldom
from pd.engine.sampler import SampledToken
from pd.engine.sampling_state import SamplingState
from pd.scheduling.metrics import VerifiedDrafts
from pd.scheduling.reserve import DecodeReserve
from pd.scheduling.step import Work

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pd.core.messages import Finish, FirstToken
    from pd.core.request import Request
    from pd.engine.saved_pages import SavedPages
    from pd.scheduling.core import NodeCore

logger = logging.getLogger(__name__)

# Tokens of one sequence that are computed again per step when its KV was lost.
RECOMPUTE_CHUNK = 512


class HostKV(NamedTuple):
    """KV of a retracted sequence: its first ``num_tokens`` tokens, whole pages in host memory
    (see :meth:`pd.engine.engine.Engine.save_pages`)."""

    num_tokens: int
    num_pages: int
    pages: SavedPages


class DecodeScheduler:
    """Runs sequences whose prompt is in the pool. The caller holds the node's lock.

    Attributes:
        draft_tokens: tokens drafted for a sequence and step, at most.
    """

    def __init__(self, core: NodeCore) -> None:
        self._engine, self._memory, self._rooms = core.engine, core.memory, core.rooms
        self._metrics, self._fail_choice = core.metrics, core.fail_choice
        self._page_bytes = core.engine.pool.page_bytes(core.engine.layout)
        self._model = core.engine.model_config
        self._max_running = core.config.max_running_requests
        self._host_limit = core.config.retraction_host_memory
        self._host_used = 0
        self._no_copies = Seldom(logger)
        self._drafter, self._lengths = core.drafter, core.draft_lengths
        drafts = core.drafter is not None
        self.draft_tokens = core.config.speculative_num_draft_tokens if drafts else 0
        self._drafts_ahead = core.drafter is not None and core.drafter.drafts_ahead
        self.reserve = DecodeReserve(core.config.reserved_decode_tokens)
        self.waiting: deque[Sequence] = deque()
        self.retracted: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._drafts = VerifiedDrafts()
        # Whether a sequence here waits for pages: those that come free are not for new requests.
        self.lacks_memory = False

    @property
    def _queues(self) -> tuple[list[Sequence] | deque[Sequence], ...]:
        return (self.running, self.waiting, self.retracted)

    @property
    def needs_memory(self) -> bool:
        """Whether no new request may be given pages, since a sequence here waits for some."""
        return self.lacks_memory or bool(self.retracted)

    def headroom(self, sequence: Sequence, others: Collection[Sequence]) -> int:
        """Pages that must stay available when a new sequence is given its pages, for all to grow;
        none when no other sequence is here, so that all make progress.

        Args:
            others: sequences that hold pages and will come here.
        """
        if not others and not self.running and not self.waiting:
            return 0
        live = [*others, sequence, *self.running, *self.waiting, *self.retracted]
        return self.reserve.growth(live, self._memory.page_size)

    def queued(self) -> Iterator[Sequence]:
        """The sequences of the three queues."""
        return chain(self.waiting, self.running, self.retracted)

    # ---- in

    def add(self, request: Request, first_tokens: list[FirstToken], *, repeat: bool) -> None:
        """The prompt is in ``request.sequence``'s pages and token 1 is known.

        The first choice that goes on takes these pages. Every other one starts with nothing and
        finds the whole pages of the prompt in the radix tree, which is how they share them.

        Args:
            repeat: deliver token 1 again, in case the prefill node's message was lost.
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
            try:
                self._begin(sequence, token, repeat)
            except PDError as error:
                if prompt_sequence not in request.sequences:
                    request.sequences.append(prompt_sequence)  # for its pages
                self._fail_choice(request, error)
                return
        if not request.sequences:
            request.sequences = [prompt_sequence]
            self._rooms.finish(request)

    def resume(self, request: Request) -> None:
        """Take a resumed request whose KV no peer sends: it is computed here, as that of a
        retracted sequence."""
        sequence = request.sequence
        sequence.sampling = request.resumed
        request.times.committed = time.monotonic()
        self.waiting.append(sequence)

    def _begin(self, sequence: Sequence, token: FirstToken, repeat: bool) -> None:
        request = sequence.request
        if request.resumed is not None:
            sampling = request.resumed
        elif request.sequences:
            sampling = request.sequences[0].choice.fork(token.index)
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
        # The state of a resumed request has drawn the token, if that was here.
        if sampling.num_output_tokens == sequence.num_output_tokens:
            sampling.observe(token.token_id)
        sequence.append(token.token_id)
        request.sequences.append(sequence)
        self.waiting.append(sequence)
        first = [SampledToken(token.token_id, token.logprobs)] if repeat else []
        taken = first + self._jump_forward(sequence)
        if taken:
            self._emit(sequence, taken)

    # ---- a step

    def plan(self) -> list[Work]:
        """Plan one token of every running sequence, after admitting sequences that fit."""
        for sequence in [each for each in self.running if each.finished and not each.in_step]:
            self._leave(sequence)
        self._admit()
        works: dict[Sequence, Work] = {}
        retracted = len(self.retracted)
        for sequence in list(self.running):
            if len(self.retracted) > retracted and sequence not in self.running:
                continue  # retracted for another
            work = self._next(sequence)
            if work is not None and self._secure(sequence, work.most_stop, works):
                works[sequence] = work
        for sequence, work in works.items():
            sequence.launched = work
        if self.draft_tokens:
            self._plan_drafts(list(works.values()))
        return list(works.values())

    def _plan_drafts(self, works: list[Work]) -> None:
        """Decide how many tokens may be drafted for each sequence: for this step if its tokens are
        known, and for the next where the drafter drafts ahead. What it drafted ahead is verified
        in this step."""
        ahead = self._drafts_ahead
        drafting = [work for work in works if work.samples and (ahead or work.follows is None)]
        limits = [self._draft_limit(work) for work in drafting]
        lengths = self._lengths.choose([work.sequence for work in drafting], limits)
        for work, length in zip(drafting, lengths, strict=True):
            if work.draft is None and work.follows is None:
                work.draft_limit = length
            if ahead:
                self._limit_ahead(work, length)

    def _draft_limit(self, work: Work) -> int:
        """Number of tokens that may be drafted for a work, or behind it if it has its draft or
        follows another. Sets the draft that was made ahead."""
        sequence = work.sequence
        # One token more than was drafted comes out of a step.
        most = self._output_left(work) - 1
        ahead, sequence.ahead = sequence.ahead, None
        # Tokens that a grammar forced may have come in between.
        if ahead is not None and not ahead.stale and work.stop - work.start == 1:
            work.draft = ahead.first_tokens(min(most, self._room_for(work, ahead.size)))
        elif work.follows is None:
            return self._room_for(work, max(0, min(self.draft_tokens, most)))
        return max(0, min(self.draft_tokens, most - 1))

    def _limit_ahead(self, work: Work, length: int) -> None:
        """Decide how many tokens, ``length`` at most, may be drafted behind a work."""
        left = self._output_left(work)
        most = min(length, left - 2)
        if most > 0:
            before = 1 + work.most_drafted
            # No token after the last that may be output needs a page.
            wanted = min(before + most, left)
            room = self._room_for(work, wanted)
            work.ahead_limit = most if room >= wanted else max(0, room - before)
            work.ahead_stop = work.most_stop + room

    @staticmethod
    def _output_left(work: Work) -> int:
        """Tokens that a sequence may still output from this work on, at least."""
        choice = work.sequence.choice
        before = 0 if work.follows is None else 1 + work.unread
        return choice.params.max_tokens - choice.num_output_tokens - before

    def _room_for(self, work: Work, wanted: int) -> int:
        """Add pages for ``wanted`` tokens after a work's last one, and return how many of these
        tokens have pages. No draft takes a page that a running sequence may need for its next
        token."""
        memory, sequence, stop = self._memory, work.sequence, work.most_stop
        missing = memory.pages_for(stop + wanted) - len(sequence.pages)
        if missing > 0 and missing + len(self.running) <= memory.available:
            memory.grow(sequence, stop + wanted)
        return min(wanted, len(sequence.pages) * memory.page_size - stop)

    def _next(self, sequence: Sequence) -> Work | None:
        """The next work of a sequence; None if it has ended or may end with the launched one."""
        launched = sequence.launched
        if sequence.finished:
            return None
        start = sequence.num_computed if launched is None else launched.stop
        if start < sequence.num_tokens:
            stop = min(sequence.num_tokens, start + RECOMPUTE_CHUNK)
            samples = [sequence.choice] if stop == sequence.num_tokens else []
            return Work(sequence, start, stop, samples)
        unread = 0 if launched is None else launched.most_accepted
        work = Work(sequence, start, start + 1, [sequence.choice], follows=launched, unread=unread)
        return work if self._output_left(work) > 0 else None

    def may_plan_ahead(self, launched: list[Work], *, beside_prompts: bool) -> bool:
        """Whether :meth:`plan` may be called before a launched step is accounted for: each of its
        works brings tokens that nothing but the next forward pass needs to know, and no sequence
        has to be retracted. A drafter that does not draft ahead needs to know the tokens, unless it
        rests.

        Args:
            beside_prompts: the next step may have prompts. No graph takes these beside works whose
                start only the device knows.
        """
        if self.draft_tokens and not self._drafts_ahead and not self._lengths.rests:
            return False
        if self.retracted or self._memory.available < len(self.running):
            return False
        return all(
            work.is_decode
            and (work.draft is None or (not beside_prompts and self._may_follow(work)))
            for work in launched
        )

    def _may_follow(self, work: Work) -> bool:
        """Whether the next work of a sequence can be launched before the host has read what this
        one, which has a draft, accepts."""
        if work.place < 0 or not self._engine.runner.takes_unread:
            return False
        choice, last = work.sequence.choice, 1 + work.most_accepted + self.draft_tokens
        # The host fills the masks of rules; and masks for minimum lengths, all or none.
        return choice.rules is None and choice.may_stop_within(1, last) is not None

    def _admit(self) -> None:
        """Start sequences that have their pages or get them, retracted ones first.

        Behind the first that lacks memory none gets any, but those that have all their pages may
        run meanwhile: no request is given memory either (:attr:`lacks_memory`), so these end one by
        one, and what they held is what the first one waits for.
        """
        self.lacks_memory = False
        for queue in (self.retracted, self.waiting):
            while queue and len(self.running) < self._max_running:
                if not self._resume(queue[0]):
                    self.lacks_memory = True
                    self._admit_holders()
                    return
                self._start(queue.popleft())

    def _start(self, sequence: Sequence) -> None:
        sequence.request.state = RequestState.RUNNING
        self.running.append(sequence)

    def _admit_holders(self) -> None:
        """Start waiting sequences that hold their pages, as many as leave a page for each that runs
        to grow by, and one in any case: only by running can they give their pages back."""
        for holder in [sequence for sequence in self.waiting if len(sequence.pages)]:
            running = len(self.running)
            if running >= self._max_running or 0 < running >= self._memory.available:
                return
            self.waiting.remove(holder)
            self._start(holder)

    def _resume(self, sequence: Sequence) -> bool:
        """Give a sequence pages for all its tokens, with room for the others to grow; KV comes from
        the tree, from host memory, or is computed again."""
        if len(sequence.pages):
            return True
        memory, length = self._memory, sequence.num_tokens
        if memory.missing(sequence, length, length - 1) + len(self.running) > memory.available:
            return False
        matched = memory.match(sequence, length - 1) // memory.page_size
        missing = memory.pages_for(length) - matched
        short = missing + len(self.running) > memory.available
        if short or not memory.grow(sequence, length):
            memory.release(sequence)
            return False
        self._restore(sequence, matched)
        self._drop_host_kv(sequence)
        return True

    def _secure(self, sequence: Sequence, num_tokens: int, works: dict[Sequence, Work]) -> bool:
        """Pages for ``num_tokens``, retracting others as needed; False if it has to wait."""
        while not self._memory.grow(sequence, num_tokens):
            if any(other.in_step for other in self.running):
                return False  # until the launched step is accounted for, none may be retracted
            victim = min(self.running, key=lambda other: (other.num_computed, -other.num_tokens))
            self._retract(victim)
            works.pop(victim, None)
            if victim is sequence:
                return False
        return True

    def _retract(self, sequence: Sequence) -> None:
        """Take the cheapest to resume out of the pool, its KV to host memory if that may grow."""
        self.running.remove(sequence)
        self.retracted.append(sequence)
        if self._drafter is not None:
            self._drafter.forget(sequence)
        sequence.ahead = None
        self.reserve.retracted()
        self._metrics.retractions.inc()
        count = self._memory.pages_for(sequence.num_computed)
        size = count * self._page_bytes
        if self._host_used + size <= self._host_limit:
            self._save(sequence, count)
        self._memory.cache(sequence)
        self._memory.release(sequence)

    def _save(self, sequence: Sequence, count: int) -> None:
        """Copy a sequence's first ``count`` pages to host memory. If that fails there is no copy,
        and its KV is computed again. Raises NodeFailedError if other ranks are gone."""
        try:
            pages = self._engine.save_pages(sequence.pages[:count])
        except NodeFailedError:
            raise
        except Exception as error:  # noqa: BLE001
            # For example, neither host nor GPU has memory to spare. What is worse shows in the next
            # step.
            self._no_copies.warn(f"KV of a retracted sequence was not saved: {error!r}")
            return
        sequence.host_kv = HostKV(sequence.num_computed, count, pages)
        self._host_used += count * self._page_bytes

    def _restore(self, sequence: Sequence, matched: int) -> None:
        """Write KV in host memory into a sequence's pages, but the first ``matched``. If that fails
        it is computed again. Raises NodeFailedError if other ranks are gone."""
        host = sequence.host_kv
        if host is None or host.num_tokens <= sequence.num_computed:
            return
        try:
            host.pages.restore(sequence.pages[matched : host.num_pages], matched)
        except NodeFailedError:
            raise
        except Exception as error:  # noqa: BLE001
            # As in _save. Every token that may be half written is computed before it is read.
            self._no_copies.warn(f"KV of a retracted sequence was not restored: {error!r}")
            return
        sequence.num_computed = host.num_tokens

    def _drop_host_kv(self, sequence: Sequence) -> None:
        if sequence.host_kv is not None:
            self._host_used -= sequence.host_kv.num_pages * self._page_bytes
            sequence.host_kv = None

    def process(self, works: list[Work]) -> None:
        """Account for a completed step."""
        self._drafts = VerifiedDrafts()
        for work in works:
            sequence = work.sequence
            if sequence.launched is work:
                sequence.launched = None
            if sequence.request.state.terminal:
                continue
            if sequence.finished:  # by the proxy, or by the step before: this token is not wanted
                if not sequence.in_step:
                    self._leave(sequence)
                continue
            sequence.num_computed = work.stop
            # A grammar may have forced tokens since the launch, in the place of the sampled one.
            if work.sampled and work.stop == sequence.num_tokens:
                self._take_tokens(sequence, work)
            else:
                self._not_taken(sequence, work)
            if sequence.launched is not None:
                self._settle(sequence, work, sequence.launched)
        if self._drafts.drafts:
            self._metrics.speculation.observe(self._drafts)

    @staticmethod
    def _not_taken(sequence: Sequence, work: Work) -> None:
        """What a work sampled is not a part of the output, nor what was drafted behind it."""
        if sequence.ahead is not None:
            sequence.ahead.stale = True
        if work.draft is not None:
            sequence.carried = None  # it may be of a token that was foretold and not taken

    @staticmethod
    def _settle(sequence: Sequence, work: Work, following: Work) -> None:
        """Note what a work accepted, behind which another one was launched without knowing it."""
        if following.unread:
            following.settle(len(work.accepted))
            # The device has counted all tokens that came out.
            sequence.choice.counted_ahead = 0
        if sequence.carried is not None:
            sequence.carried.stop = following.stop

    def _take_tokens(self, sequence: Sequence, work: Work) -> None:
        """Append the sampled token; after a draft, the tokens that it foretold and the next one.
        Tokens that a grammar forces come first, and end what was foretold."""
        accepted = work.accepted
        finish, taken = None, [work.sampled[0], *(work.sampled[i + 1] for i in accepted)]
        forced: list[SampledToken] = []
        for count, sampled in enumerate(taken, 1):
            if sampled.error is not None:
                self._rooms.fail(sequence.request, sequence.choice.failure(sampled.error))
                return
            sequence.append(sampled.token_id)
            try:
                finish = sequence.choice.observe(sampled.token_id)
                forced = [] if finish is not None else self._jump_forward(sequence)
            except PDError as error:
                self._fail_choice(sequence.request, error)
                return
            if finish is not None or forced:
                taken = taken[:count]
                break
        # The KV of each token but the last is there: it was computed as a part of the draft.
        sequence.num_computed += len(taken) - 1
        if work.draft is not None:
            self._lengths.observe(sequence, work.draft.tree, accepted)
            self._drafts.add(work.draft.tree, min(len(accepted), len(taken)))
            if sequence.carried is not None:
                sequence.carried.stop = sequence.num_computed
            if forced:
                sequence.carried = None  # it may be of a token that was foretold and not taken
        elif work.draft_limit:
            self._lengths.observe_none(sequence)
        self._emit(sequence, taken + forced, finish)
        if finish is not None:
            sequence.finished = True
            if not sequence.in_step:
                self._leave(sequence)

    def _jump_forward(self, sequence: Sequence) -> list[SampledToken]:
        """Append the tokens that a grammar forces; they were not computed yet."""
        tokens = sequence.choice.forced(sequence.ids)
        if not tokens:
            return []
        for token in tokens:
            sequence.append(token)
            sequence.choice.observe(token)
        self._metrics.forced.inc(len(tokens))
        return [SampledToken(token) for token in tokens]

    def _emit(
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
            self._metrics.observe("decode", output.stages.decode or 0.0)
        self._rooms.emit(request, output)

    # ---- out

    def _leave(self, sequence: Sequence) -> None:
        """A choice is complete: its KV stays cached for the next turn."""
        sequence.finished = True
        sequence.ahead = sequence.carried = None
        self.reserve.finished(sequence.num_output_tokens)
        self._drop(sequence)
        self._memory.cache(sequence)
        self._memory.release(sequence)
        if not any(
            other in queue for other in sequence.request.sequences for queue in self._queues
        ):
            self._rooms.finish(sequence.request)

    def _drop(self, sequence: Sequence) -> None:
        for queue in self._queues:
            if sequence in queue:
                queue.remove(sequence)
        if self._drafter is not None:
            self._drafter.forget(sequence)
            self._lengths.forget(sequence)
        self._drop_host_kv(sequence)

    def end_choice(self, request: Request, index: int) -> bool:
        """The proxy found a stop string in a choice; False if the choice has not begun here."""
        for sequence in request.sequences:
            if sequence.index == index and sequence.decodes:
                if not sequence.finished:
                    sequence.finished = True
                    if not sequence.in_step:
                        self._leave(sequence)
                return True
        return False

    def remove(self, request: Request) -> None:
        """Take a request that ended out of all queues; the node releases its pages."""
        for sequence in request.sequences:
            self._drop(sequence)
