"""The decode side of a scheduler: continuous batching, retraction, resume (queues "waiting",
"running", "retracted")."""

from __future__ import annotations

import time
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import NodeFailedError
from pd.core.messages import Output, Stages
from pd.core.request import RequestState, Sequence
from pd.core.sampling_params import choice_seed
from pd.engine.sampler import SamplingState
from pd.scheduling.reserve import DecodeReserve
from pd.scheduling.step import Work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.messages import Finish, FirstToken
    from pd.core.request import Request
    from pd.engine.saved_pages import SavedPages
    from pd.node.node import Node

# Tokens of one sequence that are computed again per step when its KV was lost.
RECOMPUTE_CHUNK = 512


class HostKV(NamedTuple):
    """KV of a retracted sequence: its first ``num_tokens`` tokens, whole pages in host memory
    (see :meth:`pd.engine.engine.Engine.save_pages`)."""

    num_tokens: int
    num_pages: int
    pages: SavedPages


class DecodeManager:
    """Runs sequences whose prompt is in the pool. The caller holds the node's lock."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._memory = node.memory
        self._page_bytes = node.engine.pool.page_bytes(node.engine.layout)
        self._model = node.engine.model_config
        self._max_running = node.config.max_running_requests
        self._host_limit = node.config.retraction_host_memory
        self._host_used = 0
        self.reserve = DecodeReserve(node.config.reserved_decode_tokens)
        self.waiting: deque[Sequence] = deque()
        self.retracted: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        # Somebody here waits for pages: what comes free is not for new requests.
        self.lacks_memory = False

    @property
    def growth(self) -> int:
        """Pages that the sequences here are expected to take still."""
        live = [*self.running, *self.waiting, *self.retracted]
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
            self._begin(sequence, token, repeat)
        if not request.sequences:
            request.sequences = [prompt_sequence]
            self._node.finish(request)

    def _begin(self, sequence: Sequence, token: FirstToken, repeat: bool) -> None:
        request = sequence.request
        if request.sequences:
            sequence.sampling = request.sequences[0].sampling.fork(token.index)
        else:
            sequence.sampling = SamplingState(
                request.params,
                request.prompt,
                self._model.eos_token_ids,
                self._model.vocab_size,
                seed=choice_seed(request.params.seed, token.index),
            )
        sequence.sampling.observe(token.token_id)
        sequence.append(token.token_id)
        request.sequences.append(sequence)
        self.waiting.append(sequence)
        if repeat:
            self._emit(sequence, token.token_id, None, token.logprobs)

    # ---- a step

    def plan(self) -> list[Work]:
        """One token of every running sequence, after admitting who fits."""
        self._admit()
        works: dict[Sequence, Work] = {}
        retracted = len(self.retracted)
        for sequence in list(self.running):
            if len(self.retracted) > retracted and sequence not in self.running:
                continue  # retracted for another
            work = self._next(sequence)
            if work is not None and self._secure(sequence, work.stop, works):
                works[sequence] = work
        for sequence, work in works.items():
            sequence.launched = work
        return list(works.values())

    def _next(self, sequence: Sequence) -> Work | None:
        """What to compute of a sequence; None if it may end with what is launched already."""
        launched: Work | None = sequence.launched
        if launched is None:
            stop = min(sequence.num_tokens, sequence.num_computed + RECOMPUTE_CHUNK)
            samples = [sequence.sampling] if stop == sequence.num_tokens else []
            return Work(sequence, sequence.num_computed, stop, samples)
        limit = sequence.request.params.max_tokens
        if sequence.finished or sequence.sampling.num_output_tokens + 1 >= limit:
            return None
        start = launched.stop
        return Work(sequence, start, start + 1, [sequence.sampling], follows=launched)

    def may_plan_ahead(self, launched: list[Work]) -> bool:
        """Whether :meth:`plan` may be called before a launched step is accounted for: each of its
        works brings one token that nothing but the next forward pass needs to know, and nobody has
        to be retracted."""
        if self.retracted or self._memory.available < len(self.running):
            return False
        if not all(work.is_decode for work in launched):
            return False
        return not any(sequence.sampling.has_penalties for sequence in self.running)

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
        host = sequence.host_kv
        if host is not None and host.num_tokens > sequence.num_computed:
            pages = sequence.pages[matched : host.num_pages]
            host.pages.restore(pages, matched)
            sequence.num_computed = host.num_tokens
        self._drop_host_kv(sequence)
        return True

    def _secure(self, sequence: Sequence, num_tokens: int, works: dict[Sequence, Work]) -> bool:
        """Pages for ``num_tokens``, retracting others as needed; False if it has to wait."""
        while not self._memory.grow(sequence, num_tokens):
            if any(other.in_step for other in self.running):
                return False  # once the launched step is accounted for, somebody may be retracted
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
        self.reserve.retracted()
        self._node.metrics.retractions.inc()
        count = self._memory.pages_for(sequence.num_computed)
        size = count * self._page_bytes
        if self._host_used + size <= self._host_limit:
            pages = self._node.engine.save_pages(sequence.pages[:count])
            sequence.host_kv = HostKV(sequence.num_computed, count, pages)
            self._host_used += size
        self._memory.cache(sequence)
        self._memory.release(sequence)

    def _drop_host_kv(self, sequence: Sequence) -> None:
        if sequence.host_kv is not None:
            self._host_used -= sequence.host_kv.num_pages * self._page_bytes
            sequence.host_kv = None

    def process(self, works: list[Work]) -> None:
        """Account for a completed step."""
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
            if work.sampled:
                self._take_token(sequence, work)

    def _take_token(self, sequence: Sequence, work: Work) -> None:
        sampled = work.sampled[0]
        if sampled.error is not None:
            self._node.fail(sequence.request, NodeFailedError(sampled.error))
            return
        sequence.append(sampled.token_id)
        finish = sequence.sampling.observe(sampled.token_id)
        self._emit(sequence, sampled.token_id, finish, sampled.logprobs)
        if finish is not None:
            sequence.finished = True
            if not sequence.in_step:
                self._leave(sequence)

    def _emit(
        self, sequence: Sequence, token: int, finish: Finish | None, logprobs: object
    ) -> None:
        request = sequence.request
        output = Output(
            room=request.room,
            index=sequence.index,
            position=sequence.num_tokens - len(request.prompt) - 1,
            token_ids=[token],
            finish=finish,
            logprobs=None if logprobs is None else [logprobs],
        )
        times = request.times
        if times.reserved is not None and output.position == 0 and times.committed is not None:
            if sequence is request.sequences[0]:  # the choices share one transfer
                output.transferred_bytes = request.hand_off.num_bytes
            output.stages = Stages(
                bootstrap=times.reserved - times.arrived, transfer=times.committed - times.reserved
            )
        if finish is not None and times.committed is not None:
            output.stages = Stages(decode=time.monotonic() - times.committed)
            self._node.metrics.observe("decode", output.stages.decode or 0.0)
        self._node.emit(request, output)

    # ---- out

    def _leave(self, sequence: Sequence) -> None:
        """A choice is complete: its KV stays cached for the next turn."""
        sequence.finished = True
        self.reserve.finished(sequence.num_tokens - len(sequence.request.prompt))
        self._drop(sequence)
        self._memory.cache(sequence)
        self._memory.release(sequence)
        if all(other.finished and not other.in_step for other in sequence.request.sequences):
            self._node.finish(sequence.request)

    def _drop(self, sequence: Sequence) -> None:
        for queue in (self.running, self.waiting, self.retracted):
            if sequence in queue:
                queue.remove(sequence)
        self._drop_host_kv(sequence)

    def end_choice(self, request: Request, index: int) -> bool:
        """The proxy found a stop string in a choice; False if the choice has not begun here."""
        for sequence in request.sequences:
            if sequence.index == index and sequence.sampling is not None:
                if not sequence.finished:
                    sequence.finished = True
                    if not sequence.in_step:
                        self._leave(sequence)
                return True
        return False

    def remove(self, request: Request) -> None:
        """Forget a request that ended; its pages are released by the node."""
        for sequence in request.sequences:
            self._drop(sequence)
