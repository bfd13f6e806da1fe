"""Drafts with a smaller model, which samples like the model itself.

The idea is speculative sampling (Leviathan et al., 2023; Chen et al., 2023). Both models use the
same noise at a position. They therefore draw the same token, at any temperature, if they give it
about the same probability.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pd.engine.device_copy import to_device
from pd.engine.draft_tree import make_chain
from pd.engine.forward_item import ForwardItem
from pd.engine.page_allocator import PageAllocator, PageState
from pd.engine.sampling_state import Draw
from pd.speculative.draft import Draft, DraftedTokens
from pd.speculative.drafter import Drafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.engine.model_runner import ModelRunner
    from pd.engine.sampler import Sampler
    from pd.engine.sampling_state import SamplingState
    from pd.speculative.drafter import DraftedWork, DraftRequest, TokenSequence

    IntArray = npt.NDArray[np.int32]

# Maximum prompt tokens to compute next to a step with fewer, because running sequences wait.
CATCH_UP_TOKENS = 1024

_NOTHING: IntArray = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class _Memory:
    """KV of one sequence in the draft model's pool.

    Attributes:
        pages: page table, int32.
        num_tokens: number of leading tokens of the sequence with KV.
        guessed: the last draft after these tokens. All its tokens except the last have KV, too. It
            is valid for the accepted ones.
    """

    pages: IntArray = field(default_factory=lambda: _NOTHING)
    num_tokens: int = 0
    guessed: Draft | None = None

    def make_missing(self, ids: IntArray, stop: int, num_logits: int) -> _Missing:
        """Make the item for computing the tokens up to ``stop``. There must be pages for them."""
        start = self.num_tokens
        return _Missing(self, ForwardItem(ids[start:stop], start, self.pages, num_logits))

    def settle_guesses(self, ids: IntArray) -> None:
        """Count the accepted guesses as tokens with KV.

        We do not count the last token, because the next pass computes it for its logits.
        """
        # If the step of a draft failed, the host does not have its tokens.
        if self.guessed is not None and self.guessed.batch.host is not None:
            guessed = self.guessed.tokens[:-1]
            true = ids[self.num_tokens : -1][: len(guessed)]
            wrong = np.flatnonzero(true != guessed[: len(true)])
            self.num_tokens += int(wrong[0]) if len(wrong) else len(true)
        self.guessed = None


class _Missing(NamedTuple):
    """Known tokens of a sequence without KV, and the item for computing them."""

    memory: _Memory
    item: ForwardItem


@dataclass(slots=True)
class _Drafting:
    """A draft in the making.

    Attributes:
        request: index of its request in the step.
        first: index of its first token among all drafted tokens of the step.
        choice: sampling state for its tokens.
    """

    request: int
    limit: int
    memory: _Memory
    choice: SamplingState
    first: int = 0

    def next_item(self, drawn: int) -> ForwardItem:
        """Make the item for computing the last of ``drawn`` tokens, to draw the next one."""
        last = np.array([-1 - (self.first + drawn - 1)], np.int32)
        return ForwardItem(last, self.memory.num_tokens + drawn - 1, self.memory.pages)


class ModelDrafter(Drafter):
    """Drafts with a model of its own, whose KV it keeps in pages of its own.

    Sequences share pages of the node's pool, so these must not depend on a drafter. The draft model
    computes prompts next to the steps of other sequences, while the node waits for its own model's
    KV. A sequence gets no draft until its prompt is computed, or if there are no pages.

    Args:
        runner: model runner of the draft model. Nothing else uses it.
        sampler: the node's sampler, because it counts the penalties of each choice.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._page_size = runner.pool.page_size
        self._context = runner.model.config.context_length
        self._sampler = sampler
        self._allocator = PageAllocator(runner.pool.num_pages)
        self._memories: dict[TokenSequence, _Memory] = {}
        # Sequences that will decode here, in order of arrival.
        self._expected: dict[TokenSequence, None] = {}
        # Calls of other threads: a sequence, and whether it is expected (True) or forgotten.
        self._changes: queue.SimpleQueue[tuple[TokenSequence, bool]] = queue.SimpleQueue()
        # Sequences forgotten by the last changes.
        self._forgotten: set[TokenSequence] = set()

    def expect_sequence(self, sequence: TokenSequence) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        self._changes.put((sequence, True))

    def forget_sequence(self, sequence: TokenSequence) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        self._changes.put((sequence, False))

    def begin_step(self, works: Sequence[DraftedWork]) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        # For every step, because drafting may not pay for a long time.
        self._apply_changes()

    def catch_up(self) -> bool:
        """See :class:`pd.speculative.drafter.Drafter`."""
        self._apply_changes()
        missing = self._plan_catch_up(CATCH_UP_TOKENS)
        if missing:
            self._compute_missing(missing)
        return bool(missing)

    def draft_tokens(
        self, requests: Sequence[DraftRequest], prompt_tokens: int
    ) -> list[Draft | None]:
        """See :class:`pd.speculative.drafter.Drafter`."""
        missing, drafted = self._plan_first_pass(requests, max(CATCH_UP_TOKENS, prompt_tokens))
        drafts = list[Draft | None]([None] * len(requests))
        if not missing:
            return drafts
        logits = self._compute_missing(missing)
        if not drafted:
            return drafts
        batch = DraftedTokens(self._draw_chains(logits, drafted))
        for each in drafted:
            draft = Draft(batch, each.first, make_chain(each.limit))
            each.memory.guessed = drafts[each.request] = draft
        return drafts

    def _draw_chains(self, logits: torch.Tensor, drafted: Sequence[_Drafting]) -> torch.Tensor:
        """Draw the first token of each draft from ``logits``, then compute and draw the others.

        Tokens stay on the device, so no pass waits for the host.

        Returns:
            int64 on the device, one draft after the other.
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
            drawn, _ = self._sampler.choose_tokens(
                logits, self._sampler.prepare_draws(draws, drafts=tokens)
            )
            tokens.index_copy_(0, to, drawn)
        return tokens

    def _plan_first_pass(
        self, requests: Sequence[DraftRequest], budget: int
    ) -> tuple[list[_Missing], list[_Drafting]]:
        """Plan the first forward pass: all known tokens without KV, at most ``budget``.

        Returns:
            The tokens to compute, and the drafts whose first token this pass gives, in the order
            of their items.
        """
        missing: list[_Missing] = []
        drafting: list[_Drafting] = []
        for place, request in enumerate(requests):
            # We would keep the state of a sequence forever if it ended after planning.
            if request.sequence in self._forgotten or budget == 0:
                continue
            self._expected.pop(request.sequence, None)
            memory = self._memories.setdefault(request.sequence, _Memory())
            ids = request.sequence.ids
            memory.settle_guesses(ids)
            stop = min(len(ids), memory.num_tokens + budget)
            is_whole = stop == len(ids)
            if not self._grow_pages(memory, stop + request.limit if is_whole else stop):
                continue
            budget -= stop - memory.num_tokens
            missing.append(memory.make_missing(ids, stop, num_logits=int(is_whole)))
            if is_whole:
                drafting.append(_Drafting(place, request.limit, memory, request.choice))
        return missing + self._plan_catch_up(budget), drafting

    def _compute_missing(self, missing: list[_Missing]) -> torch.Tensor:
        """Compute missing KV and return the logits."""
        logits = self._runner.forward([item for _, item in missing])
        # Only after the pass, because a failed one leaves unreliable KV.
        for memory, item in missing:
            memory.num_tokens = item.start + len(item.token_ids)
        return logits

    def _plan_catch_up(self, budget: int) -> list[_Missing]:
        """Plan the next prompt tokens of expected sequences, at most ``budget`` in all."""
        missing = []
        for sequence in list(self._expected):
            memory = self._memories.setdefault(sequence, _Memory())
            prompt = sequence.request.prompt
            stop = min(len(prompt), memory.num_tokens + budget)
            if stop == len(prompt) or not self._grow_pages(memory, stop):
                del self._expected[sequence]
            if stop > memory.num_tokens and self._grow_pages(memory, stop):
                budget -= stop - memory.num_tokens
                missing.append(memory.make_missing(prompt, stop, num_logits=0))
        return missing

    def _grow_pages(self, memory: _Memory, num_tokens: int) -> bool:
        """Extend the page table to ``num_tokens``.

        Returns:
            False if there are not enough pages, or the draft model's context is too short.
        """
        if num_tokens > self._context:
            return False
        missing = -(-num_tokens // self._page_size) - len(memory.pages)
        if missing > self._allocator.count_pages(PageState.FREE):
            return False
        if missing > 0:
            pages = self._allocator.allocate_pages(missing, PageState.OWNED)
            memory.pages = np.concatenate([memory.pages, pages])
        return True

    def _apply_changes(self) -> None:
        """Note expected sequences, and free the pages of forgotten ones."""
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
                self._allocator.free_pages(memory.pages, PageState.OWNED)
