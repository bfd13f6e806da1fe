"""Sampling parameters of ``/generate``, with errors in the names of that endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd.core.errors import InvalidRequestError
from pd.proxy.service import make_params

if TYPE_CHECKING:
    from pd.core.sampling_params import SamplingParams

# What SamplingParams calls differently.
_NATIVE_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "top_logprobs": "top_logprobs_num",
}


def native_params(arguments: dict[str, Any], vocab_size: int | None) -> SamplingParams:
    """The same as :func:`pd.proxy.service.make_params`. Raises InvalidRequestError."""
    try:
        return make_params(arguments, vocab_size)
    except InvalidRequestError as error:
        param = error.param or ""
        native = _NATIVE_NAMES.get(param, param)
        message = error.message.replace(param, native, 1) if param else error.message
        raise InvalidRequestError(message, param=native or None) from None
