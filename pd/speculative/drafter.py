"""The interface of drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from pd.engine.eagle import CarriedState
    from pd.engine.sampling_state import SamplingState
    from pd.engine.step_outcome import StepOutcome
    from pd.speculative.draft import Draft
    from pd.speculative.ngram_cache import NgramCache

    IntArray = npt.NDArray[np.int32]


class RequestView(Protocol):
    """The part of :class:`pd.scheduling.request.Request` read by drafters."""

    @property
    def prompt(self) -> IntArray: ...

    @property
    def namespace(self) -> str: ...

    @property
    def outgoing(self) -> object | None: ...


class TokenSequence(Protocol):
    """The part of :class:`pd.scheduling.request.Sequence` used by drafters. That class describes
    the attributes."""

    num_tokens: int
    pages: IntArray
    next_draft: Draft | None
    carried_state: CarriedState | None

    @property
    def request(self) -> RequestView: ...

    @property
    def tables(self) -> IntArray: ...

    @property
    def ids(self) -> IntArray: ...


class DraftedWork(Protocol):
    """The part of :class:`pd.scheduling.step.Work` used by drafters. That class describes the
    attributes."""

    @property
    def sequence(self) -> TokenSequence: ...

    start: int
    stop: int
    num_unread: int
    samples: list[SamplingState]
    draft: Draft | None
    ahead_limit: int
    ahead_stop: int
    reread: bool
    num_forced: int | None
    row: int
    drafter_state: Callable[[], bytes] | None

    @property
    def max_accepted(self) -> int: ...


class DraftRequest(NamedTuple):
    """One sequence to draft for.

    Attributes:
        sequence: has the prompt and output so far as its ``ids``.
        choice: draws the next token; do not change it.
        limit: maximum tokens of the draft, at least 1.
        work: verifies the draft; None if we only measure drafting.
    """

    sequence: TokenSequence
    choice: SamplingState
    limit: int
    work: DraftedWork | None = None


@dataclass(frozen=True, slots=True)
class StepOnDevice:
    """A step that was just launched, seen from the device.

    Attributes:
        works: the works in the order of the forward pass.
        roots: for each work, the index of its last known token in the pass. Its drafted tokens
            follow.
        sampled: sampled tokens, int64 ``[rows]``; a work's samples start at ``Work.row``.
        drafts: drafted tokens, int64, or None without any.
        first_drafts: for each work, the index of its draft in ``drafts``.
        stops: position of the token after each root, not counting unread guesses.
        most_unread: maximum number of unread guesses of each work.
        followed: for each work with unread guesses, the index of the previous work in ``before``;
            -1 for others.
        before: outcome of the previous step, or None if the host has read it.
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
    """Guesses the next tokens of sequences. A wrong guess costs time but never changes the output.

    Attributes:
        drafts_ahead: whether :meth:`follow_step` drafts for the next step right after a launch. If
            not, we never call it.
        ngram_cache: receives the tokens of all sequences computed by the node, if not None.
    """

    drafts_ahead = False
    ngram_cache: NgramCache | None = None

    @abstractmethod
    def draft_tokens(
        self, requests: Sequence[DraftRequest], prompt_tokens: int
    ) -> list[Draft | None]:
        """Draft tokens for each sequence, or none. On a GPU this only queues the work.

        The thread that launches steps calls this.

        Args:
            prompt_tokens: prompt tokens in the next step. The drafter may compute as many for
                expected sequences.

        Returns:
            For each sequence a draft of at most ``limit`` tokens, or None.
        """

    def rehearse_draft(self, requests: Sequence[DraftRequest]) -> None:
        """Draft for sequences without a request, and wait for the device, so we can measure it.

        Nothing else may draft meanwhile.
        """
        for draft in self.draft_tokens(requests, 0):
            if draft is not None:
                draft.batch.wait()
        for request in requests:
            self.forget_sequence(request.sequence)
        self.begin_step([])

    def begin_step(self, works: Sequence[DraftedWork]) -> None:
        """Prepare the works of the next step, before drafting for it.

        The thread that launches steps calls this for every step.
        """

    def follow_step(self, step: StepOnDevice) -> StepOutcome | None:
        """Draft for the next step right after a launch, and set ``next_draft`` of sequences.

        We draft for works with an ``ahead_limit``. On a GPU this only queues the work. The thread
        that launches steps calls this for every step if :attr:`drafts_ahead`.

        Returns:
            The outcome of the step on the device; None if only the host counts accepted guesses.
        """
        return None

    def expect_sequence(self, sequence: TokenSequence) -> None:
        """Prepare for a sequence that will decode here. Any thread may call this.

        Call it before the prompt is computed or received, so we can work on the first draft
        meanwhile.
        """

    def catch_up(self) -> bool:
        """Do a part of the work for expected sequences while there is no step to compute.

        The thread that launches steps calls this.

        Returns:
            False if nothing was left to do.
        """
        return False

    def forget_sequence(self, sequence: TokenSequence) -> None:
        """Drop the state of a sequence that has ended or waits for memory.

        Any thread may call this, even while a step with the sequence is being launched.
        """
