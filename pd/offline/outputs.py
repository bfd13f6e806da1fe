"""Results in vLLM's shape."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Logprob:
    """The log probability of a token at one position.

    Attributes:
        rank: 1 for the likeliest token. None for a token that is not among the likeliest ones that
            were asked for.
        decoded_token: the token as text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# Log probabilities at each position, by token id. The first token of a prompt has none.
SampleLogprobs = list[dict[int, Logprob]]
PromptLogprobs = list[dict[int, Logprob] | None]


@dataclass
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: which of the prompt's ``n`` answers this is.
        token_ids: its tokens, including the one that ended it.
        cumulative_logprob: sum of its tokens' log probabilities; None without ``logprobs``.
        finish_reason: ``stop``, ``length``, or ``tool_calls`` with ``tool_choice``.
        stop_reason: the stop string or stop token of the request that ended it.
        tool_calls: the calls in OpenAI's shape, if the chat was asked with ``tool_choice``.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def finished(self) -> bool:
        """Whether the answer is complete. It always is, because results come whole."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The answers to one prompt.

    Attributes:
        request_id: name of the request at the server.
        prompt: its text; None for a prompt of token ids.
        num_cached_tokens: tokens of the prompt that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0


def read_completion(answer: dict[str, Any], prompt: str | None, top: int) -> RequestOutput:
    """Read an answer of ``/v1/completions`` to one prompt.

    ``top``: number of likeliest tokens that were asked for.
    """
    choices = answer["choices"]
    return RequestOutput(
        answer["id"],
        prompt,
        choices[0]["prompt_token_ids"],
        _read_prompt_logprobs(choices[0]["prompt_logprobs"]),
        [
            _read_choice(choice, choice["text"], _read_named(choice["logprobs"], top))
            for choice in choices
        ],
        num_cached_tokens=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def read_chat(answer: dict[str, Any]) -> RequestOutput:
    """Read an answer of ``/v1/chat/completions``. The prompt has no text yet."""
    outputs = []
    for choice in answer["choices"]:
        message = choice["message"]
        output = _read_choice(choice, message["content"] or "", _read_content(choice["logprobs"]))
        output.tool_calls = message.get("tool_calls", [])
        outputs.append(output)
    return RequestOutput(
        answer["id"],
        None,
        answer["prompt_token_ids"],
        _read_prompt_logprobs(answer["prompt_logprobs"]),
        outputs,
        num_cached_tokens=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def _read_choice(
    choice: dict[str, Any], text: str, logprobs: SampleLogprobs | None
) -> CompletionOutput:
    tokens = choice["token_ids"]
    total = None
    if logprobs is not None:
        total = sum(entries[token].logprob for token, entries in zip(tokens, logprobs, strict=True))
    return CompletionOutput(
        choice["index"],
        text,
        tokens,
        total,
        logprobs,
        choice["finish_reason"],
        choice["stop_reason"],
    )


def _read_named(logprobs: dict[str, Any] | None, top: int) -> SampleLogprobs | None:
    """Read parallel lists in which ``token_id:17`` names a token.

    After the ``top`` likeliest tokens of a position comes the sampled one, unless it is among them.
    """
    if logprobs is None:
        return None
    positions = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    return [
        _rank_tokens(
            _parse_name(own),
            logprob,
            [(_parse_name(name), value) for name, value in itertools.islice(named.items(), top)],
        )
        for own, logprob, named in positions
    ]


def _parse_name(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _read_content(logprobs: dict[str, Any] | None) -> SampleLogprobs | None:
    """Read an object for each token."""
    if logprobs is None:
        return None
    return [
        _rank_tokens(
            entry["token_id"],
            entry["logprob"],
            [(top["token_id"], top["logprob"]) for top in entry["top_logprobs"]],
        )
        for entry in logprobs["content"]
    ]


def _rank_tokens(own: int, logprob: float, top: list[tuple[int, float]]) -> dict[int, Logprob]:
    """Rank the likeliest tokens of a position, and add the sampled token without a rank if it is
    not among them."""
    entries = {token: Logprob(value, rank) for rank, (token, value) in enumerate(top, 1)}
    entries.setdefault(own, Logprob(logprob))
    return entries


def _read_prompt_logprobs(
    positions: list[dict[str, dict[str, Any]] | None] | None,
) -> PromptLogprobs | None:
    if positions is None:
        return None
    return [
        None
        if entries is None
        else {
            int(token): Logprob(entry["logprob"], entry["rank"], entry["decoded_token"])
            for token, entry in entries.items()
        }
        for entries in positions
    ]
