"""Restores the sampling state of requests started by other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import InvalidRequestError
from pd.engine.sampling_state import SamplingState

if TYPE_CHECKING:
    from pd.scheduling.request import Request


def restore_sampling(request: Request, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Restore the sampling state of a resumed request after its output so far.

    Position of the noise, counts of penalties, minimum length and the state of the grammar all
    follow from the tokens. Requests without output stay as they are.

    Raises:
        InvalidRequestError: the output so far is complete.
        NodeFailedError: the grammar forbids the output so far.
        UnavailableError: the grammar takes too long for the output so far.
    """
    if not request.num_produced:
        return
    state = SamplingState(
        request.params,
        request.client_prompt,
        eos_token_ids,
        vocab_size,
        make_rules=request.make_rules,
    )
    for token in request.prompt[-request.num_produced :].tolist():
        finish = state.observe_token(token)
        if finish is not None:
            raise InvalidRequestError(
                f"the output so far has ended ({finish.type}) after {state.num_output_tokens} of "
                f"{request.num_produced} tokens; there is nothing to resume"
            )
    state.follow_rules()
    request.resumed_state = state
