"""A prefill scheduler with a pool but without a model: steps take no time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from requests_for_tests import make_request

from pd.core.config import NodeConfig
from pd.radix import RadixCache
from pd.scheduling.admission_policy import AdmissionPolicy
from pd.scheduling.memory import Memory
from pd.scheduling.prefill import PrefillScheduler
from pd.scheduling.request import RequestState
from pd.scheduling.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd.scheduling.request import Request
    from pd.scheduling.step import Work


class PrefillBench:
    """Plans and accounts for steps; computed requests leave at once unless ``keep``.

    Attributes:
        admitted: requests in the order of their admission.
        computed_tokens: in all steps.
    """

    def __init__(
        self,
        policy: str = "fcfs",
        *,
        max_overtakes: int = 64,
        pages: int = 256,
        page_size: int = 4,
        budget: int = 8192,
        max_running: int = 256,
        will_leave: Callable[[Request], bool] | None = None,
        keep: bool = False,
        radix_cache: str = "on",
    ) -> None:
        config = NodeConfig(
            role="prefill",
            model=Path("."),
            page_size=page_size,
            schedule_policy=policy,
            max_overtakes=max_overtakes,
            radix_cache=radix_cache,
        )
        model = SimpleNamespace(eos_token_ids=(), vocab_size=1 << 30)
        radix = RadixCache(page_size)
        self.memory = Memory(pages, page_size, radix, caches_prefixes=radix_cache == "on")
        engine: Any = SimpleNamespace(model_config=model)
        waiting = WaitingQueue.from_config(config, self.memory.radix)
        self.sending: Any = SimpleNamespace(will_leave=will_leave, park_prompts=lambda pages: None)
        sending = None if will_leave is None else self.sending
        admission = AdmissionPolicy(self.memory, sending=sending)
        self.scheduler = PrefillScheduler(engine, self.memory, waiting, admission)
        self.budget, self.max_running, self.keep = budget, max_running, keep
        self.admitted: list[Request] = []
        self.computed: list[Request] = []
        self.computed_tokens = 0

    def add(self, tokens: Iterable[int], **fields: Any) -> Request:
        request = make_request(list(tokens), **fields)
        request.state = RequestState.WAITING
        self.scheduler.waiting.add_request(request)
        return request

    def cache(self, tokens: Iterable[int]) -> None:
        """As if a request with these tokens had been here."""
        tokens = list(tokens)
        sequence = make_request(tokens).sequence
        assert self.memory.grow_pages(sequence, len(tokens))
        sequence.num_computed = len(tokens)
        self.memory.cache_tokens(sequence)
        self.memory.release_pages(sequence)

    def step(self) -> list[Work]:
        """Plan a step, as if it had been computed at once."""
        before = list(self.scheduler.running)
        works = self.scheduler.plan_step(self.budget, self.max_running)
        self.admitted += [r for r in self.scheduler.running if r not in before]
        self.computed_tokens += sum(work.stop - work.start for work in works)
        for work in self.scheduler.process_step(works):
            request = work.sequence.request
            self.computed.append(request)
            if not self.keep:
                self.memory.release_pages(request.sequence)
        self.memory.check_owners(self._sequences(), [])
        return works

    def run(self, steps: int = 1000) -> list[Request]:
        """Step until nobody waits or runs; returns the order of admission."""
        for _ in range(steps):
            self.step()
            if not self.scheduler.running and not len(self.scheduler.waiting):
                return self.admitted
        raise AssertionError(f"{len(self.scheduler.waiting)} still wait after {steps} steps")

    def _sequences(self) -> list[Any]:
        return [r.sequence for r in (*self.scheduler.running, *self.computed)]
