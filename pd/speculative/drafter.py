"""The interface of drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.core.request import Sequence as TokenSequence
    from pd.engine.sampling_state import SamplingState
    from pd.speculative.draft import Draft


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


class Drafter(Protocol):
    """Guesses how sequences go on. A wrong guess costs time and never changes the output."""

    def draft(self, requests: Sequence[DraftRequest], prompt_tokens: int) -> list[Draft | None]:
        """Draft tokens for each sequence, or none. On a GPU this is only queued. Called by the
        thread that launches steps.

        Args:
            prompt_tokens: tokens of prompts in the step that is about to be computed. As many may
                be computed for expected sequences.

        Returns:
            For each sequence what may follow its tokens, at most ``limit`` tokens, or None.
        """

    def expect(self, sequence: TokenSequence) -> None:
        """Prepare for a sequence that is to decode here. Called before its prompt is computed or
        received, so that work for its first draft can be done meanwhile. Any thread."""

    def catch_up(self) -> bool:
        """Do a part of the work for expected sequences; called when no step is to be computed, by
        the thread that launches steps. Returns False if nothing was left to do."""

    def forget(self, sequence: TokenSequence) -> None:
        """Drop the state of a sequence that has ended or waits for memory. Any thread; the sequence
        may still be in the step that is being launched."""
