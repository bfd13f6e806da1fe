"""Drafts by a smaller model that samples as the model itself does.

The idea is speculative sampling (Leviathan et al., 2023; Chen et al., 2023). The noise of a
position is that of the model, so that both draw the same token where they give it about the same
probability, at any temperature.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pd.engine.model_runner import ForwardItem
from pd.engine.page_allocator import PageAllocator, PageState
from pd.engine.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from pd.core.request import Sequence as TokenSequence
    from pd.engine.model_runner import ModelRunner
    from pd.engine.sampling_state import SamplingState
    from pd.speculative.drafter import Ask

    IntArray = npt.NDArray[np.int32]

# Tokens of prompts that are computed in one step: running sequences wait for them.
CATCH_UP_TOKENS = 1024

_NOTHING: IntArray = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class _Memory:
    """KV of one sequence in the draft model's pool.

    Attributes:
        pages: page table, int32.
        num_tokens: leading tokens of the sequence whose KV is there.
        guessed: tokens after these, int32, whose KV is there as well, if they came out so.
    """

    pages: IntArray = field(default_factory=lambda: _NOTHING)
    num_tokens: int = 0
    guessed: IntArray = field(default_factory=lambda: _NOTHING)

    def settle(self, ids: IntArray) -> None:
        """Count those guessed tokens that the sequence has now."""
        true = ids[self.num_tokens : self.num_tokens + len(self.guessed)]
        wrong = np.flatnonzero(true != self.guessed[: len(true)])
        self.num_tokens += int(wrong[0]) if len(wrong) else len(true)
        self.guessed = _NOTHING


@dataclass(slots=True)
class _Drafting:
    """A draft while it is made. ``choice`` draws its next token."""

    ask: Ask
    memory: _Memory
    choice: SamplingState
    tokens: list[int] = field(default_factory=list)


class ModelDrafter:
    """Keeps KV of all running sequences in pages of its own, so that pages of the node's pool,
    which sequences share, never depend on a drafter.

    A sequence whose prompt is not computed yet, or for which there is no page, gets no draft.

    Args:
        runner: of the draft model, used by nothing else.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._page_size = runner.pool.page_size
        self._context = runner.model.config.context_length
        self._sampler = Sampler(runner.model.config.vocab_size, runner.pool.buffer.device)
        self._allocator = PageAllocator(runner.pool.num_pages)
        self._memories: dict[TokenSequence, _Memory] = {}
        self._forgotten: queue.SimpleQueue[TokenSequence] = queue.SimpleQueue()

    def forget(self, sequence: TokenSequence) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        self._forgotten.put(sequence)

    def draft(self, asks: Sequence[Ask]) -> list[IntArray]:
        """See :class:`pd.speculative.drafter.Drafter`."""
        forgotten = self._release_forgotten()
        items: list[ForwardItem] = []
        drafting: list[_Drafting] = []
        budget = CATCH_UP_TOKENS
        for ask in asks:
            # One that ended after the step was planned would be kept for ever.
            if ask.sequence in forgotten or budget == 0:
                continue
            memory = self._memories.setdefault(ask.sequence, _Memory())
            ids = ask.sequence.ids
            memory.settle(ids)
            start, stop = memory.num_tokens, min(len(ids), memory.num_tokens + budget)
            is_whole = stop == len(ids)
            needed = stop + ask.limit if is_whole else stop
            if needed > self._context or not self._grow(memory, needed):
                continue
            budget -= stop - start
            items.append(ForwardItem(ids[start:stop], start, memory.pages, int(is_whole)))
            memory.num_tokens = stop
            if is_whole:
                drafting.append(_Drafting(ask, memory, ask.choice))
        drafted = list(drafting)
        while items:
            drafting = self._extend(items, drafting)
            items = [
                ForwardItem(
                    np.array(each.tokens[-1:], np.int32),
                    each.memory.num_tokens + len(each.tokens) - 1,
                    each.memory.pages,
                )
                for each in drafting
            ]
        drafts = dict.fromkeys(range(len(asks)), _NOTHING)
        places = {id(ask): place for place, ask in enumerate(asks)}
        for each in drafted:
            draft = np.array(each.tokens, np.int32)
            # The KV of the last token was not computed.
            each.memory.guessed = draft[:-1]
            drafts[places[id(each.ask)]] = draft
        return list(drafts.values())

    def _extend(self, items: list[ForwardItem], drafting: list[_Drafting]) -> list[_Drafting]:
        """Compute the items and draw a token for each draft; returns those that go on."""
        logits = self._runner.forward(items)
        sampled = self._sampler.sample(logits, [each.choice for each in drafting])
        unfinished = []
        for each, sample in zip(drafting, sampled, strict=True):
            if sample.error is not None:
                continue
            each.tokens.append(sample.token_id)
            if len(each.tokens) < each.ask.limit:
                each.choice = each.choice.after(sample.token_id)
                unfinished.append(each)
        return unfinished

    def _grow(self, memory: _Memory, num_tokens: int) -> bool:
        """Make the page table cover so many tokens; False if there are not enough pages."""
        missing = -(-num_tokens // self._page_size) - len(memory.pages)
        if missing > self._allocator.count(PageState.FREE):
            return False
        if missing > 0:
            pages = self._allocator.allocate(missing, PageState.LOCKED)
            memory.pages = np.concatenate([memory.pages, pages])
        return True

    def _release_forgotten(self) -> set[TokenSequence]:
        """Free the pages of forgotten sequences, which nothing computes with any more."""
        forgotten = set(_drained(self._forgotten))
        for sequence in forgotten:
            memory = self._memories.pop(sequence, None)
            if memory is not None:
                self._allocator.free(memory.pages, PageState.LOCKED)
        return forgotten


def _drained(source: queue.SimpleQueue[TokenSequence]) -> Iterable[TokenSequence]:
    while True:
        try:
            yield source.get_nowait()
        except queue.Empty:
            return
