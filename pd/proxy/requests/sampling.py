"""Makes validated sampling parameters from a request's arguments."""

from __future__ import annotations

import secrets
from typing import Any

from pd.core.errors import InvalidRequestError
from pd.core.sampling_params import SEED_LIMIT, SamplingParams

# Parameters with other names at `/generate` than in SamplingParams.
_NATIVE_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "top_logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
}


def make_params(arguments: dict[str, Any], vocab_size: int | None) -> SamplingParams:
    """Build and validate sampling parameters, drawing a seed if there is none.

    Raises InvalidRequestError.
    """
    if arguments.get("seed") is None:
        arguments = arguments | {"seed": secrets.randbelow(SEED_LIMIT)}
    params = SamplingParams(**arguments)
    params.validate(vocab_size)
    return params


def make_native_params(arguments: dict[str, Any], vocab_size: int | None) -> SamplingParams:
    """Do the same as :func:`make_params`, but with the names of ``/generate`` in errors."""
    try:
        return make_params(arguments, vocab_size)
    except InvalidRequestError as error:
        param = error.param or ""
        native = _NATIVE_NAMES.get(param, param)
        message = error.message.replace(param, native, 1) if param else error.message
        raise InvalidRequestError(message, param=native or None) from None
