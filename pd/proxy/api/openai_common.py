"""Parts that the two OpenAI endpoints share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.errors import ContextLengthError
from pd.proxy.api import logprobs
from pd.proxy.api.logprobs import TokenNames
from pd.proxy.dispatch.generation import PromptSpec
from pd.proxy.requests.sampling import make_params
from pd.proxy.routing.limits import TOO_LONG

if TYPE_CHECKING:
    import msgspec
    import numpy as np
    import numpy.typing as npt

    from pd.core.sampling_params import SamplingParams
    from pd.proxy.api.prompts import ModelView
    from pd.proxy.dispatch.generation import Choice, Delta, FinishReason, Generation
    from pd.proxy.dispatch.job import Job
    from pd.proxy.requests.openai import OpenAIRequest

    IntArray = npt.NDArray[np.int32]

# Estimated size of a token id in JSON.
TOKEN_ID_BYTES = 7


def make_sampling_params(
    body: OpenAIRequest,
    model: ModelView,
    num_prompt_tokens: int,
    max_tokens: int | None,
    default_max_tokens: int | None,
    **further: Any,
) -> SamplingParams:
    """Make the sampling parameters of one prompt, and check them against the model's limits.

    The client's choices override the model's recommendations.

    Args:
        max_tokens: the client's choice, or None for the default.
        further: arguments of SamplingParams that override the client's.

    Raises InvalidRequestError.
    """
    limits = model.limits
    limits.check_prompt(num_prompt_tokens, max_tokens or 1, explicit=max_tokens is not None)
    if max_tokens is None:
        max_tokens = limits.choose_max_tokens(num_prompt_tokens, default_max_tokens)
    arguments = limits.sampling_defaults.as_arguments() | body.make_arguments() | further
    if body.bad_words:
        arguments["bad_sequences"] = model.encode_bad_words(body.bad_words)
    return make_params(arguments | {"max_tokens": max_tokens}, limits.vocab_size)


def make_spec(
    body: OpenAIRequest,
    rid: str,
    token_ids: IntArray,
    model: ModelView,
    params: SamplingParams,
    **further: Any,
) -> PromptSpec:
    """Make the spec of one prompt. ``further``: more arguments of PromptSpec."""
    return PromptSpec(
        rid=rid,
        model=model.name,
        token_ids=token_ids,
        params=params,
        text_model=model.text,
        stop=body.stop_search,
        namespace=body.namespace,
        priority=body.priority,
        prefix_lease=body.prefix_lease,
        stream_interval=body.stream_interval or model.stream_interval,
        skip_special_tokens=body.skip_special_tokens,
        shows_stop=body.include_stop_str_in_output,
        **further,
    )


def clamp_length(
    model: ModelView, num_prompt_tokens: int, limit: int | None, context: int | None
) -> int:
    """Shorten an answer to what the context holds.

    Args:
        limit: the client's limit on the answer's tokens.
        context: the client's limit on the tokens of prompt and answer together (``num_ctx``).

    Raises ContextLengthError if the prompt leaves no token of ``context``.
    """
    if context is not None:
        room = context - num_prompt_tokens
        if room < 1:
            raise ContextLengthError(
                f"{TOO_LONG}: it has {num_prompt_tokens} tokens, but num_ctx is {context}, of "
                "which the answer needs at least one; raise num_ctx",
                param="num_ctx",
            )
        limit = room if limit is None else min(limit, room)
    return model.limits.choose_max_tokens(num_prompt_tokens, limit)


class AnswerOptions(NamedTuple):
    """The fields of a request that its renderer needs.

    We copy them, because a renderer lives as long as its answer and a request may hold megabytes.
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
        """Whether the chunks of a choice differ only in their texts."""
        return not self.continuous_usage and not self.return_token_ids

    @classmethod
    def from_body(cls, body: OpenAIRequest) -> AnswerOptions:
        return cls(
            body.include_usage,
            body.continuous_usage,
            body.return_token_ids,
            body.shows_prompt_ids,
            body.return_tokens_as_token_ids,
            body.top_tokens,
            body.prompt_logprobs,
        )

    def make_token_names(self, model: ModelView) -> TokenNames:
        """Make the names of tokens in an answer's log probabilities."""
        return TokenNames(model.text, self.top_tokens or 0, self.tokens_as_ids)

    def render_prompt_logprobs(
        self, model: ModelView, generation: Generation
    ) -> msgspec.Raw | None:
        """Render the log probabilities of a prompt in vLLM's shape, if they are wanted."""
        if self.prompt_logprobs is None:
            return None
        names = TokenNames(model.text, self.prompt_logprobs)
        return logprobs.render_prompt_logprobs(names, generation.prompt_logprobs)


class ChunkUsage:
    """Renders ``usage`` of chunks: absent, null before the last chunk, or the usage so far.

    We add up deltas, because a chunk must take the same time for any number of prompts.
    """

    def __init__(self, options: AnswerOptions, job: Job) -> None:
        self._options, self._job = options, job
        self._prompts = self._prompt = self._completion = 0
        self._cached: dict[Generation, int] = {}
        self._all_cached = 0
        self._reasoned: dict[Choice, int] = {}
        self._reasoning: int | None = None

    def add_delta(self, choice: Choice, delta: Delta) -> None:
        """Count a delta that is about to be written."""
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
            reasoned = choice.count_reasoning_tokens(delta.total)
            more_reasoned = reasoned - self._reasoned.get(choice, 0)
            self._reasoning = (self._reasoning or 0) + more_reasoned
            self._reasoned[choice] = reasoned

    def render_field(self) -> dict[str, Any]:
        """Render the field of the next chunk; empty if chunks have none."""
        if not self._options.include_usage:
            return {}
        if not self._options.continuous_usage:
            return {"usage": None}
        return {
            "usage": _render_usage(
                self._prompt, self._completion, self._all_cached, self._reasoning
            )
        }


def count_usage(job: Job) -> dict[str, Any]:
    """Count the tokens of all prompts and choices. A prompt counts once, even with many choices."""
    prompt = sum(len(g.spec.token_ids) for g in job.generations)
    completion = sum(g.completion_tokens for g in job.generations)
    cached = sum(g.cached_tokens for g in job.generations)
    reasoning = [g.reasoning_tokens for g in job.generations if g.spec.reasoning is not None]
    return _render_usage(prompt, completion, cached, sum(reasoning) if reasoning else None)


def _render_usage(
    prompt: int, completion: int, cached: int, reasoning: int | None
) -> dict[str, Any]:
    """Render ``usage``. ``reasoning`` is None if no parser counts the tokens of reasoning."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        # SGLang's, in every answer. OpenAI's has the same number.
        "reasoning_tokens": reasoning or 0,
    }
    if reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage


def number_choice(choice: Choice) -> int:
    """Return the choice's index among those of all prompts: ``prompt index * n + i``."""
    generation = choice.generation
    return generation.number * generation.spec.params.n + choice.index


def render_ending(choice: Choice, finish: FinishReason | None) -> dict[str, Any]:
    """Render ``finish_reason``, vLLM's ``stop_reason`` and SGLang's ``matched_stop``.

    ``stop_reason`` names only stop strings and stop tokens of the client; ``matched_stop`` names
    the model's own tokens, too.
    """
    if finish is None:
        return {"finish_reason": None, "stop_reason": None}
    stop_reason = matched = finish.matched
    if isinstance(matched, int) and matched not in choice.generation.spec.params.stop_token_ids:
        stop_reason = None
    return {"finish_reason": finish.type, "stop_reason": stop_reason, "matched_stop": matched}


def truncate_prompt(body: OpenAIRequest, ids: IntArray, model: ModelView) -> IntArray:
    """Shorten a prompt to the wanted number of tokens."""
    length = body.truncate_prompt_tokens
    if length is None:
        return ids
    if length < 0:
        length = max(1, model.limits.context_length - (body.token_limit or 1))
    return ids[-length:] if body.truncation_side == "left" else ids[:length]
