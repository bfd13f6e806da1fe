"""A decode scheduler with a pool but without a model: steps take no time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from requests_for_tests import make_request

from pd.core.messages import FirstToken
from pd.engine.page_allocator import PageState
from pd.radix import RadixCache
from pd.scheduling.decode import DecodeScheduler
from pd.scheduling.memory import Memory
from pd.scheduling.metrics import RequestMetrics
from pd.scheduling.request import RequestState

if TYPE_CHECKING:
    from pd.scheduling.request import Request, Sequence

TOKEN = 7


class DecodeBench:
    """Plans and accounts for steps; each sequence ends after its ``max_tokens``.

    Attributes:
        batches: sequences in each step so far.
        ended: requests in the order in which they did.
        restored: sequences that came back from host memory.
    """

    def __init__(self, *, pages: int, page_size: int = 4, max_running: int = 8) -> None:
        self.memory = Memory(pages, page_size, RadixCache(page_size))
        self.requests: list[Request] = []
        self.ended: list[Request] = []
        self.batches: list[int] = []
        self._names = itertools.count(100)
        pool = SimpleNamespace(count_page_bytes=lambda layout: 1)
        model = SimpleNamespace(eos_token_ids=(), vocab_size=1 << 20)
        saved = SimpleNamespace(restore_pages=lambda pages, first: None)
        core: Any = SimpleNamespace(
            memory=self.memory,
            engine=SimpleNamespace(
                pool=pool, layout=None, model_config=model, save_pages=lambda pages: saved
            ),
            config=SimpleNamespace(
                max_running_requests=max_running,
                retraction_host_memory=1 << 20,
                reserved_decode_tokens=1,
                speculative_num_draft_tokens=4,
            ),
            metrics=RequestMetrics(),
            requests=SimpleNamespace(emit_output=lambda *_: None, finish_request=self._finish),
            fail_choice=None,
            drafter=None,
            draft_lengths=None,
        )
        self.scheduler = DecodeScheduler(core)

    def _finish(self, request: Request) -> None:
        request.state = RequestState.DONE
        self.ended.append(request)

    def add(self, prompt_len: int, max_tokens: int) -> Sequence:
        """A prompt that was committed, with its pages, and token 1 of it."""
        params = {"max_tokens": max_tokens}
        request = make_request([next(self._names)] * prompt_len, params=params)
        sequence = request.sequence
        assert self.memory.grow_pages(sequence, prompt_len, PageState.RESERVED)
        self.memory.own_reserved(sequence)
        sequence.num_computed = prompt_len
        self.memory.cache_tokens(sequence)
        self.scheduler.add_request(request, [FirstToken(0, TOKEN)], repeat=False)
        self.requests.append(request)
        return sequence

    def step(self) -> int:
        """Plan a step, as if it had been computed at once; returns the size of the batch."""
        works = self.scheduler.plan_step()
        for work in works:
            token = SimpleNamespace(error=None, token_id=TOKEN, logprobs=None)
            work.sampled = [token for _ in work.samples]
        self.scheduler.process_step(works)
        self.memory.check_owners([s for r in self.requests for s in r.sequences], [])
        self.batches.append(len(works))
        return len(works)

    def run(self, steps: int = 5000) -> None:
        """Step until everybody has ended."""
        for _ in range(steps):
            if len(self.ended) == len(self.requests):
                return
            self.step()
        raise AssertionError(f"{len(self.requests) - len(self.ended)} did not end")
