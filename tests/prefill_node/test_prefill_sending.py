"""A prompt's KV is sent once and only when it is queued, whenever D reserves and steps overlap."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pd.prefill_node.outgoing import PromptCost
from pd.prefill_node.sending import SendingEnd
from pd.scheduling.request import RequestState
from pd.scheduling.step import Work
from pd.util.starvation import Patience

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS = 8
EACH = tuple((layer, layer + 1) for layer in range(LAYERS))
WHOLE = ((0, 8),)


def never(request: Any, error: Exception) -> None:
    """No transfer fails here: what is raised is an assertion of a test."""
    raise error


class Prompt(SimpleNamespace):
    """A request, as far as a hand-off looks at it.

    ``queued``: of each token, how many layers' KV is queued; ``sent``: cells given to the sender.
    It is the sender, too.
    """

    def __init__(self, room: int, rng: random.Random, pace: float) -> None:
        size = rng.randint(1, 60)
        super().__init__(
            room=room,
            peer="decode",
            prompt=np.zeros(size, dtype=np.int32),
            state=RequestState.BOOTSTRAPPING,
            cached=rng.randint(0, size - 1),
            cached_by_d=rng.randint(0, size),
            reserved_at=rng.choice([0, rng.randint(0, 40)]),
            queued=[0] * size,
            sent=set(),
            finished=False,
            flops_per_byte=pace,
        )
        self.sequence = SimpleNamespace(
            request=self, num_computed=0, tables=None, launched_work=None
        )

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        assert not self.finished
        if self.node.is_beside:
            assert token_stop <= self.sequence.num_computed, "not yet known to be complete"
        last = max(map(self.node.find_place, range(layer_start, layer_stop)))
        for token in range(token_start, token_stop):
            assert self.queued[token] > last, f"token {token} is not computed"
            cells = {(token, layer) for layer in range(layer_start, layer_stop)}
            assert not cells & self.sent, f"token {token} is sent twice"
            self.sent |= cells

    def finish(self) -> None:
        assert not self.finished
        self.finished = True

    def check(self) -> None:
        everything = range(self.cached_by_d, len(self.prompt))
        layers = range(LAYERS + self.node.extra)
        assert self.sent == {(token, layer) for token in everything for layer in layers}
        assert self.finished


class Node:
    """The steps of a prefill node around a real hand-off; D reserves between any two of them.

    ``extra``: layers of further planes, queued at the end of each step, and reported if ``told``.
    """

    def __init__(
        self, rng: random.Random, overlap: bool, extra: int = 0, told: bool = True
    ) -> None:
        self.rng, self.overlap = rng, overlap
        self.extra, self.told = extra, told
        self.budget, self.ticks = rng.randint(1, 40), 0
        pace = rng.choice([0, 0.01, 0.1, 0.5, 1, 10])
        flops = rng.choice([1e-3, 1e6])
        self.prompts: list[Any] = [
            Prompt(room, rng, pace * flops) for room in range(rng.randint(1, 4))
        ]
        for prompt in self.prompts:
            prompt.node = self
        self.is_beside = False
        layout = SimpleNamespace(
            num_layers=LAYERS + extra,
            token_bytes=1,
            tp_size=1,
            group_windows=(0,),
        )
        # Layers may be computed in another order than they have in the pool.
        alternating = [layer // 2 + layer % 2 * LAYERS // 2 for layer in range(LAYERS)]
        self.order = rng.choice([list(range(LAYERS)), alternating])
        model = SimpleNamespace(
            num_layers=LAYERS,
            token_flops=flops,
            pair_flops=rng.choice([0.0, 0.1]) * flops,
            windows=(),
            pool_layers=tuple(self.order),
        )
        events = SimpleNamespace(event=threading.RLock, lock=threading.RLock())
        core: Any = SimpleNamespace(
            engine=SimpleNamespace(layout=layout, model_config=model, use_side_stream=self.beside),
            requests=SimpleNamespace(fail_request=never),
            post=None,
            instance_id="prefill",
            events=events,
        )
        transfer: Any = SimpleNamespace(
            sender=lambda _, reservation, *__: reservation.prompt, patience=Patience()
        )
        self.sending = SendingEnd(core, transfer, resume=lambda _: None)
        for prompt in self.prompts:
            self.sending.accept_request(prompt)
        self.waiting = list(self.prompts)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.is_beside = True
        yield
        self.is_beside = False

    def tick(self) -> None:
        self.ticks += 1
        for prompt in self.prompts:
            late = self.ticks >= prompt.reserved_at and self.rng.random() < 0.5
            if late and prompt.outgoing.reservation is None:
                self.reserve(prompt)

    def find_place(self, layer: int) -> int:
        """Return how many layers are computed before a layer of the pool."""
        return self.order.index(layer) if layer < LAYERS else layer

    def reserve(self, prompt: Any) -> None:
        reservation: Any = SimpleNamespace(prompt=prompt, cached=(prompt.cached_by_d,))
        self.sending.take_reservation(prompt.outgoing, reservation)

    def plan(self) -> list[Work]:
        while self.waiting and self.rng.random() < 0.7:
            prompt = self.waiting.pop()
            prompt.state = RequestState.RUNNING
            prompt.sequence.num_computed = prompt.cached
            prompt.queued[: prompt.cached] = [LAYERS + self.extra] * prompt.cached
        works, budget = [], self.budget
        for prompt in self.prompts:
            sequence = prompt.sequence
            launched = sequence.launched_work
            start = sequence.num_computed if launched is None else launched.stop
            stop = min(len(prompt.prompt), start + budget)
            if prompt.state is RequestState.RUNNING and stop > start:
                sequence.launched_work = Work(sequence, start, stop)
                works.append(sequence.launched_work)
                budget -= stop - start
        for work in works:
            self.sending.start_sending(work.sequence.request)
        return works

    def launch(self, works: list[Work]) -> None:
        layers_done = self.sending.make_layer_sender(works)
        assert layers_done is not None
        last = [(LAYERS, LAYERS + self.extra)] if self.extra else []
        for first, stop in [*self.rng.choice([EACH, EACH, WHOLE]), *last]:
            for work in works:
                queued: Any = work.sequence.request
                queued.queued[work.start : work.stop] = [stop] * (work.stop - work.start)
            self.tick()
            if stop <= LAYERS or self.told:
                layers_done(first, stop)
        self.tick()

    def process(self, works: list[Work]) -> None:
        for work in works:
            sequence = work.sequence
            if sequence.launched_work is work:
                sequence.launched_work = None
            sequence.num_computed = work.stop
            if work.stop < len(sequence.request.prompt):
                self.sending.on_chunk_computed(work)
            else:
                self.sending.on_prompt_computed(sequence.request)
        self.tick()

    def run(self) -> None:
        launched: list[Work] = []
        while not all(prompt.state is RequestState.SENDING for prompt in self.prompts):
            works = self.plan()
            if works:
                self.launch(works)
            if launched:
                self.process(launched)
            launched = works
            if not self.overlap:
                self.process(launched)
                launched = []
        for prompt in self.prompts:
            if prompt.outgoing.reservation is None:
                self.reserve(prompt)
            prompt.check()


@pytest.mark.parametrize("overlap", [False, True], ids=["one-by-one", "overlap"])
@pytest.mark.parametrize(
    ("extra", "told", "runs"), [(0, True, 1000), (1, True, 300), (2, False, 300)]
)
def test_every_cell_is_sent_once_when_it_is_queued_and_before_the_end(
    seed: int, overlap: bool, extra: int, told: bool, runs: int
) -> None:
    rng = random.Random(seed)
    for _ in range(runs):
        Node(rng, overlap, extra, told).run()


@pytest.mark.parametrize("overlap", [False, True], ids=["one-by-one", "overlap"])
@pytest.mark.parametrize("reserved_at", [0, 12])
def test_what_the_last_chunk_hides_waits_for_it(seed: int, overlap: bool, reserved_at: int) -> None:
    """Also when a chunk is accounted for, and when D reserves late."""
    node = Node(random.Random(seed), overlap)
    node.rng = SimpleNamespace(random=lambda: 0.0, choice=lambda reports: reports[0])
    (prompt, *_) = node.prompts
    node.prompts, node.waiting, node.budget = [prompt], [prompt], 20
    prompt.prompt, prompt.queued = np.zeros(60, dtype=np.int32), [0] * 60
    prompt.cached = prompt.cached_by_d = 0
    prompt.reserved_at = reserved_at
    prompt.outgoing.cost = PromptCost(LAYERS, 1, 1e9, 0.0, pool_layers=tuple(node.order))
    prompt.flops_per_byte = 1e8
    send, layers_queued = prompt.send, []

    def noted(*block: int) -> None:
        layers_queued.append(prompt.queued[-1])
        send(*block)

    prompt.send = noted
    node.run()
    # What is left after layer 5, two layers of 20 tokens, takes less than to send 52.5.
    assert layers_queued[0] == 4
