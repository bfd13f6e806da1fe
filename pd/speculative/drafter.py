"""The interface of drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pd.core.request import Sequence as TokenSequence
    from pd.engine.sampling_state import SamplingState
    from pd.engine.step_outcome import StepOutcome
    from pd.speculative.draft import Draft
    from pd.speculative.ngram_cache import NgramCache


class DraftedWork(Protocol):
    """The part of :class:`pd.scheduling.step.Work` that drafters use; its attributes are described
    there."""

    sequence: TokenSequence
    start: int
    stop: int
    unread: int
    samples: list[SamplingState]
    draft: Draft | None
    ahead_limit: int
    ahead_stop: int
    reread: bool
    forced: int | None
    row: int
    drafter_state: Callable[[], bytes] | None

    @property
    def most_accepted(self) -> int: ...


class DraftRequest(NamedTuple):
    """One sequence to draft for.

    Attributes:
        sequence: prompt and output so far are its ``ids``.
        choice: draws the next token; not to be changed.
        limit: tokens that the draft may have, at least 1.
    """

    sequence: TokenSequence
    choice: SamplingState
    limit: int


@dataclass(frozen=True, slots=True)
class StepOnDevice:
    """A step that was just launched, as the device has it.

    Attributes:
        works: in the order of the forward pass.
        roots: for each work, the index among the pass's tokens of its last known token, after which
            its drafted tokens follow.
        sampled: tokens that the step samples, int64 ``[rows]``; ``Work.row`` says where.
        drafts: the step's drafted tokens, int64, or None without any.
        first_drafts: where the draft of each work begins in ``drafts``.
        stops: position of the token after each root, without unread guesses.
        most_unread: unread guesses of each work, at most.
        followed: for each work the index in ``before`` of the work that it follows with unread
            guesses, or -1.
        before: what came out of the step before, or None if the host has read it.
    """

    works: Sequence[DraftedWork]
    roots: Sequence[int]
    sampled: torch.Tensor
    drafts: torch.Tensor | None
    first_drafts: Sequence[int]
    stops: Sequence[int]
    most_unread: Sequence[int]
    followed: Sequence[int]
    before: StepOutcome | None


class Drafter(ABC):
    """Guesses how sequences go on. A wrong guess costs time and never changes the output.

    Attributes:
        drafts_ahead: whether it drafts behind a step that was launched, for the next one, in
            :meth:`follow`. Otherwise that is not called.
        ngram_cache: is given the tokens of all sequences that the node computes, if not None.
    """

    drafts_ahead = False
    ngram_cache: NgramCache | None = None

    @abstractmethod
    def draft(self, requests: Sequence[DraftRequest], prompt_tokens: int) -> list[Draft | None]:
        """Draft tokens for each sequence, or none. On a GPU this is only queued. Called by the
        thread that launches steps.

        Args:
            prompt_tokens: tokens of prompts in the step that is about to be computed. As many may
                be computed for expected sequences.

        Returns:
            For each sequence what may follow its tokens, at most ``limit`` tokens, or None.
        """

    def rehearse(self, requests: Sequence[DraftRequest]) -> None:
        """Draft for sequences that exist for this alone, and wait for the device, so that the time
        can be measured. Nothing else is drafted meanwhile."""
        for draft in self.draft(requests, 0):
            if draft is not None:
                draft.batch.wait()
        for request in requests:
            self.forget(request.sequence)
        self.begin([])

    def begin(self, works: Sequence[DraftedWork]) -> None:
        """Prepare works for a step that is about to be launched, before anything is drafted for it.
        Called by the thread that launches steps, for every step."""

    def follow(self, step: StepOnDevice) -> StepOutcome | None:
        """Note what a step that was just launched leaves on the device, and set ``ahead`` of the
        sequences whose work has an ``ahead_limit``. On a GPU this is only queued. Called by the
        thread that launches steps, for every step if :attr:`drafts_ahead`.

        Returns:
            What came out of the step; None if only the host finds out.
        """
        return None

    def expect(self, sequence: TokenSequence) -> None:
        """Prepare for a sequence that is to decode here. Called before its prompt is computed or
        received, so that work for its first draft can be done meanwhile. Any thread."""

    def catch_up(self) -> bool:
        """Do a part of the work for expected sequences; called when no step is to be computed, by
        the thread that launches steps. Returns False if nothing was left to do."""
        return False

    def forget(self, sequence: TokenSequence) -> None:
        """Drop the state of a sequence that has ended or waits for memory. Any thread; the sequence
        may still be in the step that is being launched."""
