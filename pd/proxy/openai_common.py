"""Parts that the two OpenAI endpoints share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pd.proxy import logprobs
from pd.proxy.logprobs import TokenNames
from pd.proxy.service import make_params

if TYPE_CHECKING:
    import msgspec
    import numpy as np
    import numpy.typing as npt

    from pd.core.sampling_params import SamplingParams
    from pd.proxy.generation import Choice, Delta, FinishReason, Generation
    from pd.proxy.job import Job
    from pd.proxy.requests.openai import OpenAIRequest
    from pd.proxy.service import ModelView

    IntArray = npt.NDArray[np.int32]

# Approximate size of a token id in JSON.
TOKEN_ID_BYTES = 7


def sampling_params(
    asked: OpenAIRequest,
    model: ModelView,
    num_prompt_tokens: int,
    max_tokens: int | None,
    default_max_tokens: int | None,
    **further: Any,
) -> SamplingParams:
    """Sampling of one prompt, checked against the model's limits; what the client left open is as
    the model recommends.

    Args:
        max_tokens: what the client chose, or None for the default.
        further: arguments of SamplingParams that go before the client's.

    Raises InvalidRequestError.
    """
    limits = model.limits
    limits.check_prompt(num_prompt_tokens, max_tokens or 1, explicit=max_tokens is not None)
    if max_tokens is None:
        max_tokens = limits.default_max_tokens(num_prompt_tokens, default_max_tokens)
    arguments = limits.sampling_defaults.as_arguments() | asked.arguments() | further
    return make_params(arguments | {"max_tokens": max_tokens}, limits.vocab_size)


class AnswerOptions(NamedTuple):
    """The fields of a request that rendering its answer needs.

    Renderers live as long as the answer takes, and a request may hold megabytes.
    """

    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_prompt_ids: bool
    tokens_as_ids: bool
    top_tokens: int | None
    prompt_logprobs: int | None

    @property
    def are_plain(self) -> bool:
        """Whether chunks have nothing that differs from one to the next but what a choice
        gained in text."""
        return not self.continuous_usage and not self.return_token_ids

    @classmethod
    def of(cls, asked: OpenAIRequest) -> AnswerOptions:
        return cls(
            asked.include_usage,
            asked.continuous_usage,
            asked.return_token_ids,
            asked.shows_prompt_ids,
            asked.return_tokens_as_token_ids,
            asked.top_tokens,
            asked.prompt_logprobs,
        )

    def token_names(self, model: ModelView) -> TokenNames:
        """Names of tokens in the log probabilities of an answer."""
        return TokenNames(model.text, self.top_tokens or 0, self.tokens_as_ids)

    def of_prompt(self, model: ModelView, generation: Generation) -> msgspec.Raw | None:
        """The log probabilities of a prompt in vLLM's shape, or None if they are not wanted."""
        if self.prompt_logprobs is None:
            return None
        names = TokenNames(model.text, self.prompt_logprobs)
        return logprobs.of_prompt(names, generation.prompt_logprobs)


class ChunkUsage:
    """The field ``usage`` of the chunks of one answer: none, null before the last chunk, or the
    usage so far. A chunk takes the same time however many prompts there are."""

    def __init__(self, options: AnswerOptions, job: Job) -> None:
        self._options, self._job = options, job
        self._prompts = self._prompt = self._completion = 0
        self._cached: dict[Generation, int] = {}
        self._all_cached = 0
        self._reasoned: dict[Choice, int] = {}
        self._reasoning: int | None = None

    def count(self, choice: Choice, delta: Delta) -> None:
        """A part of a choice is written now."""
        if not self._options.continuous_usage:
            return
        generation, generations = choice.generation, self._job.generations
        more = generations[self._prompts :]
        self._prompts += len(more)
        self._prompt += sum(len(each.spec.token_ids) for each in more)
        self._all_cached += generation.cached_tokens - self._cached.get(generation, 0)
        self._cached[generation] = generation.cached_tokens
        if not generation.spec.discard_output:
            self._completion += len(delta.token_ids)
        if generation.spec.reasoning is not None:
            reasoned = choice.reasoning_tokens(delta.total)
            more_reasoned = reasoned - self._reasoned.get(choice, 0)
            self._reasoning = (self._reasoning or 0) + more_reasoned
            self._reasoned[choice] = reasoned

    def field(self) -> dict[str, Any]:
        """Field of the next chunk with the usage; empty if chunks have none."""
        if not self._options.include_usage:
            return {}
        if not self._options.continuous_usage:
            return {"usage": None}
        found = _usage(self._prompt, self._completion, self._all_cached, self._reasoning)
        return {"usage": found}


def usage(job: Job) -> dict[str, Any]:
    """Tokens of all prompts and choices; a prompt counts once however many choices it has."""
    prompt = sum(len(g.spec.token_ids) for g in job.generations)
    completion = sum(g.completion_tokens for g in job.generations)
    cached = sum(g.cached_tokens for g in job.generations)
    reasoning = [g.reasoning_tokens for g in job.generations if g.spec.reasoning is not None]
    return _usage(prompt, completion, cached, sum(reasoning) if reasoning else None)


def _usage(prompt: int, completion: int, cached: int, reasoning: int | None) -> dict[str, Any]:
    """``usage``, with the tokens of reasoning under OpenAI's name and SGLang's.

    ``reasoning``: None where no parser tells them from others.
    """
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        found["reasoning_tokens"] = reasoning
    return found


def choice_index(choice: Choice) -> int:
    """``prompt index * n + i``."""
    generation = choice.generation
    return generation.number * generation.spec.params.n + choice.index


def ending(choice: Choice, finish: FinishReason | None) -> dict[str, Any]:
    """``finish_reason``, and what ended the choice: ``stop_reason``, as in vLLM, if the client had
    asked for that stop string or token, and ``matched_stop``, as in SGLang, in any case."""
    if finish is None:
        return {"finish_reason": None, "stop_reason": None}
    asked = matched = finish.matched
    if isinstance(matched, int) and matched not in choice.generation.spec.params.stop_token_ids:
        asked = None
    return {"finish_reason": finish.type, "stop_reason": asked, "matched_stop": matched}


def truncated(asked: OpenAIRequest, ids: IntArray, model: ModelView) -> IntArray:
    """A prompt's tokens as far as the request wants them."""
    most = asked.truncate_prompt_tokens
    if most is None:
        return ids
    if most < 0:
        most = max(1, model.limits.context_length - (asked.wanted_tokens or 1))
    return ids[-most:] if asked.truncation_side == "left" else ids[:most]
