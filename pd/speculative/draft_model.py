"""Drafts by a smaller model that samples as the model itself does.

The idea is speculative sampling (Leviathan et al., 2023; Chen et al., 2023). The noise of a
position is that of the model, so that both draw the same token where they give it about the same
probability, at any temperature.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pd.engine.device_copy import to_device
from pd.engine.draft_tree import chain
from pd.engine.model_runner import ForwardItem
from pd.engine.page_allocator import PageAllocator, PageState
from pd.engine.sampling_state import Draw
from pd.speculative.draft import Draft, DraftedTokens
from pd.speculative.drafter import Drafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.core.request import Sequence as TokenSequence
    from pd.engine.model_runner import ModelRunner
    from pd.engine.sampler import Sampler
    from pd.engine.sampling_state import SamplingState
    from pd.speculative.drafter import DraftedWork, DraftRequest

    IntArray = npt.NDArray[np.int32]

# Tokens of prompts that are computed beside a step that computes fewer: running sequences wait for
# them.
CATCH_UP_TOKENS = 1024

_NOTHING: IntArray = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class _Memory:
    """KV of one sequence in the draft model's pool.

    Attributes:
        pages: page table, int32.
        num_tokens: leading tokens of the sequence whose KV is there.
        guessed: the last draft after these. The KV of all its tokens but the last is there as well,
            and valid for those that were accepted.
    """

    pages: IntArray = field(default_factory=lambda: _NOTHING)
    num_tokens: int = 0
    guessed: Draft | None = None

    def missing(self, ids: IntArray, stop: int, num_logits: int) -> _Missing:
        """Make what computes the tokens up to ``stop``, for which there are pages."""
        start = self.num_tokens
        return _Missing(self, ForwardItem(ids[start:stop], start, self.pages, num_logits))

    def settle(self, ids: IntArray) -> None:
        """Count the guessed tokens that were accepted as tokens with KV.

        The sequence's last token is not counted: the next pass computes it for its logits.
        """
        # NOTE: the host does not have the tokens of a draft whose step failed.
        if self.guessed is not None and self.guessed.batch.host is not None:
            guessed = self.guessed.tokens[:-1]
            true = ids[self.num_tokens : -1][: len(guessed)]
            wrong = np.flatnonzero(true != guessed[: len(true)])
            self.num_tokens += int(wrong[0]) if len(wrong) else len(true)
        self.guessed = None


class _Missing(NamedTuple):
    """Known tokens of a sequence whose KV is missing, and the item that computes it."""

    memory: _Memory
    item: ForwardItem


@dataclass(slots=True)
class _Drafting:
    """A draft while it is made, on the device.

    Attributes:
        request: index of its request among those of the step.
        first: where its tokens lie among those of the step's drafts: one after another.
        choice: sampling state that draws its tokens.
    """

    request: int
    limit: int
    memory: _Memory
    choice: SamplingState
    first: int = 0

    def next_item(self, drawn: int) -> ForwardItem:
        """Make the item that computes the last of ``drawn`` tokens, after which the next one is
        drawn."""
        last = np.array([-1 - (self.first + drawn - 1)], np.int32)
        return ForwardItem(last, self.memory.num_tokens + drawn - 1, self.memory.pages)


class ModelDrafter(Drafter):
    """Keeps KV of all running sequences in pages of its own, so that pages of the node's pool,
    which sequences share, never depend on a drafter.

    The draft model computes a prompt's KV beside the steps of other sequences, while the node waits
    for the KV of its own model. A sequence whose prompt is not computed yet, or for which there is
    no page, gets no draft.

    Args:
        runner: model runner of the draft model, which nothing else uses.
        sampler: the node's, which knows what the penalties of each choice count.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._page_size = runner.pool.page_size
        self._context = runner.model.config.context_length
        self._sampler = sampler
        self._allocator = PageAllocator(runner.pool.num_pages)
        self._memories: dict[TokenSequence, _Memory] = {}
        # Sequences that will decode here, in the order in which they came.
        self._expected: dict[TokenSequence, None] = {}
        # Calls of other threads: a sequence, and whether it is expected (True) or forgotten.
        self._changes: queue.SimpleQueue[tuple[TokenSequence, bool]] = queue.SimpleQueue()
        # Those of the last changes that were forgotten.
        self._forgotten: set[TokenSequence] = set()

    def expect(self, sequence: TokenSequence) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        self._changes.put((sequence, True))

    def forget(self, sequence: TokenSequence) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        self._changes.put((sequence, False))

    def begin(self, works: Sequence[DraftedWork]) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        # NOTE: not only where something is drafted, which may not pay for a long time.
        self._apply_changes()

    def catch_up(self) -> bool:
        """See :class:`pd.speculative.drafter.Drafter`."""
        self._apply_changes()
        missing = self._catch_up_missing(CATCH_UP_TOKENS)
        if missing:
            self._compute(missing)
        return bool(missing)

    def draft(self, requests: Sequence[DraftRequest], prompt_tokens: int) -> list[Draft | None]:
        """See :class:`pd.speculative.drafter.Drafter`."""
        missing, drafted = self._begin(requests, max(CATCH_UP_TOKENS, prompt_tokens))
        drafts = list[Draft | None]([None] * len(requests))
        if not missing:
            return drafts
        logits = self._compute(missing)
        if not drafted:
            return drafts
        batch = DraftedTokens(self._draw_chains(logits, drafted))
        for each in drafted:
            draft = Draft(batch, each.first, chain(each.limit))
            each.memory.guessed = drafts[each.request] = draft
        return drafts

    def _draw_chains(self, logits: torch.Tensor, drafted: Sequence[_Drafting]) -> torch.Tensor:
        """Draw the first token of each draft by its row of ``logits``, and compute and draw the
        others one by one. No pass waits for the tokens of the one before to reach the host.

        Returns:
            int64 on the device, those of one draft after those of another.
        """
        ends = np.cumsum([each.limit for each in drafted]).tolist()
        for each, end in zip(drafted, ends, strict=True):
            each.first = end - each.limit
        device = self._runner.pool.device
        tokens = torch.zeros(ends[-1], dtype=torch.int64, device=device)
        depths = range(max(each.limit for each in drafted))
        passes = [[each for each in drafted if each.limit > depth] for depth in depths]
        places = [each.first + depth for depth in depths for each in passes[depth]]
        places_there = to_device(places, torch.int64, device).split(list(map(len, passes)))
        for depth, drafting, to in zip(depths, passes, places_there, strict=True):
            if depth:
                items = [each.next_item(depth) for each in drafting]
                logits = self._runner.forward(items, previous_tokens=tokens)
            draws = [Draw(each.choice, drawn=depth, first=each.first) for each in drafting]
            drawn, _ = self._sampler.choose(logits, self._sampler.prepare(draws, drafts=tokens))
            tokens.index_copy_(0, to, drawn)
        return tokens

    def _begin(
        self, requests: Sequence[DraftRequest], budget: int
    ) -> tuple[list[_Missing], list[_Drafting]]:
        """Find what the first forward pass computes: all known tokens whose KV is missing,
        ``budget`` at most. Returns them and the drafts whose first token this pass yields, in the
        order of their items."""
        missing: list[_Missing] = []
        drafting: list[_Drafting] = []
        for place, request in enumerate(requests):
            # The state of a sequence that ended after the step was planned would be kept for ever.
            if request.sequence in self._forgotten or budget == 0:
                continue
            self._expected.pop(request.sequence, None)
            memory = self._memories.setdefault(request.sequence, _Memory())
            ids = request.sequence.ids
            memory.settle(ids)
            stop = min(len(ids), memory.num_tokens + budget)
            is_whole = stop == len(ids)
            if not self._grow(memory, stop + request.limit if is_whole else stop):
                continue
            budget -= stop - memory.num_tokens
            missing.append(memory.missing(ids, stop, num_logits=int(is_whole)))
            if is_whole:
                drafting.append(_Drafting(place, request.limit, memory, request.choice))
        return missing + self._catch_up_missing(budget), drafting

    def _compute(self, missing: list[_Missing]) -> torch.Tensor:
        """Compute KV that is missing; returns the logits."""
        logits = self._runner.forward([item for _, item in missing])
        # NOTE: a pass that fails has written nothing that could be relied on.
        for memory, item in missing:
            memory.num_tokens = item.start + len(item.token_ids)
        return logits

    def _catch_up_missing(self, budget: int) -> list[_Missing]:
        """The next tokens of the prompts of expected sequences, ``budget`` in all."""
        missing = []
        for sequence in list(self._expected):
            memory = self._memories.setdefault(sequence, _Memory())
            prompt = sequence.request.prompt
            stop = min(len(prompt), memory.num_tokens + budget)
            if stop == len(prompt) or not self._grow(memory, stop):
                del self._expected[sequence]
            if stop > memory.num_tokens and self._grow(memory, stop):
                budget -= stop - memory.num_tokens
                missing.append(memory.missing(prompt, stop, num_logits=0))
        return missing

    def _grow(self, memory: _Memory, num_tokens: int) -> bool:
        """Make the page table cover so many tokens; False if there are not enough pages, or the
        draft model's context is shorter."""
        if num_tokens > self._context:
            return False
        missing = -(-num_tokens // self._page_size) - len(memory.pages)
        if missing > self._allocator.count(PageState.FREE):
            return False
        if missing > 0:
            pages = self._allocator.allocate(missing, PageState.OWNED)
            memory.pages = np.concatenate([memory.pages, pages])
        return True

    def _apply_changes(self) -> None:
        """Note expected sequences. Free the pages of forgotten ones, with which nothing computes
        any more."""
        self._forgotten.clear()
        while not self._changes.empty():
            sequence, is_expected = self._changes.get()
            if is_expected:
                self._expected[sequence] = None
                continue
            self._forgotten.add(sequence)
            self._expected.pop(sequence, None)
            memory = self._memories.pop(sequence, None)
            if memory is not None:
                self._allocator.free(memory.pages, PageState.OWNED)
