"""Sampling state of requests that other nodes began."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import InvalidRequestError
from pd.engine.sampling_state import SamplingState

if TYPE_CHECKING:
    from pd.core.request import Request


def restore_sampling(request: Request, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Give a resumed request the sampling state that it had after its output so far: position of
    the noise, counts of the penalties, minimum length and state of the grammar follow from the
    tokens. Others are left as they are.

    Raises:
        InvalidRequestError: the output so far is complete, or the grammar takes too long for it.
        NodeFailedError: the grammar forbids it.
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
        finish = state.observe(token)
        if finish is not None:
            raise InvalidRequestError(
                f"the output so far has ended ({finish.type}) after {state.num_output_tokens} of "
                f"{request.num_produced} tokens; there is nothing to resume"
            )
    request.resumed = state
