"""Checks a request before a node accepts it. The proxy checks the same, but a node trusts no
sender."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pd.core.errors import InvalidRequestError
from pd.core.messages import ROOM_BYTES
from pd.scheduling.request import Request

if TYPE_CHECKING:
    from pd.core.messages import Generate


def build_request(message: Generate, proxy: bytes, vocab_size: int) -> Request:
    """Build a request from a proxy's message. Raises InvalidRequestError for invalid fields."""
    if len(message.room) != ROOM_BYTES:
        raise InvalidRequestError(f"a room has {ROOM_BYTES} bytes, not {len(message.room)}")
    if len(message.token_ids) == 0 or len(message.token_ids) % 4:
        raise InvalidRequestError(
            f"token_ids must be a positive multiple of 4 bytes, not {len(message.token_ids)}"
        )
    if message.timeout is not None and not math.isfinite(message.timeout):
        raise InvalidRequestError(f"timeout must be a number of seconds, not {message.timeout}")
    message.params.validate(vocab_size)
    _check_produced(message)
    request = Request.from_message(message, proxy)
    low, high = int(request.prompt.min()), int(request.prompt.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequestError(
            f"token id {bad} is outside the vocabulary of {vocab_size}", param="prompt"
        )
    return request


def _check_produced(message: Generate) -> None:
    """Raise InvalidRequestError if the output so far cannot belong to this request."""
    produced, params = message.produced, message.params
    if not produced:
        return
    length = len(message.token_ids) // 4
    if not produced < min(length, params.max_tokens):
        raise InvalidRequestError(
            f"produced must be below the {length} tokens of prompt and output and below max_tokens "
            f"({params.max_tokens}), not {produced}"
        )
    if params.n > 1 or params.prompt_logprobs_start is not None:
        raise InvalidRequestError(
            "a request with output so far has one choice and no log probabilities of its prompt, "
            f"not n={params.n} and prompt_logprobs_start={params.prompt_logprobs_start}"
        )


def check_length(request: Request, num_tokens: int, context: int, pool: int, role: str) -> None:
    """Raise InvalidRequestError for a request that this node could never compute.

    Args:
        num_tokens: tokens whose KV the node must hold at once for the request.
        context: context length of the model, in tokens.
        pool: capacity of the node's pool, in tokens.
    """
    length = len(request.prompt)
    if length >= context:
        raise InvalidRequestError(
            f"the prompt has {length} tokens; the context of {context} has no room for output",
            param="prompt",
        )
    # We never need the KV of the last generated token.
    if num_tokens >= context:
        raise InvalidRequestError(
            f"prompt ({length} tokens) and max_tokens ({request.params.max_tokens}) exceed the "
            f"context of {context}",
            param="max_tokens",
        )
    if num_tokens > pool:
        raise InvalidRequestError(
            f"the request needs KV for {num_tokens} tokens; the {role} node holds {pool}",
            param="prompt" if length > pool else "max_tokens",
        )
