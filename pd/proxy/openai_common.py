"""What the two OpenAI endpoints share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd.core.errors import InvalidRequestError
from pd.proxy import sampling
from pd.proxy.fields import Fields, show
from pd.proxy.service import read_names, read_namespace

if TYPE_CHECKING:
    from starlette.requests import Request

    from pd.core.sampling_params import SamplingParams
    from pd.proxy.generation import Choice, FinishReason
    from pd.proxy.job import Job
    from pd.proxy.service import ModelView, Names

# In JSON, about.
TOKEN_ID_BYTES = 7

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest:
    """The fields of a request that do not depend on the endpoint.

    Attributes:
        names: of the request.
        kwargs: of SamplingParams, as far as they are known before the prompt is.
        max_tokens: what the client chose, or None.
    """

    names: Names
    model: str | None
    kwargs: dict[str, Any]
    max_tokens: int | None
    stop: tuple[str, ...]
    namespace: str
    priority: int
    timeout: float | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    skip_special_tokens: bool
    return_token_ids: bool

    def params(
        self, model: ModelView, num_prompt_tokens: int, default_max_tokens: int | None
    ) -> SamplingParams:
        """Sampling of one prompt, checked against the model's limits; what the client left open
        is as the model recommends.

        Raises InvalidRequestError.
        """
        wanted = self.max_tokens
        explicit = wanted is not None
        limits = model.limits
        limits.check_prompt(num_prompt_tokens, wanted or 1, explicit=explicit)
        if wanted is None:
            wanted = limits.default_max_tokens(num_prompt_tokens, default_max_tokens)
        kwargs = limits.sampling_defaults.as_arguments() | self.kwargs | {"max_tokens": wanted}
        return sampling.make_params(kwargs, limits.vocab_size)


def read_request(fields: Fields, request: Request, prefix: str) -> OpenAIRequest:
    """Raises InvalidRequestError for anything wrong or not supported."""
    fields.refuse(UNSUPPORTED)
    _check_response_format(fields)
    stream = fields.boolean("stream")
    options = fields.mapping("stream_options")
    if options is not None and not stream:
        raise InvalidRequestError(
            "stream_options is only for streams; set stream to true", param="stream_options"
        )
    fields.string("user")
    kwargs = sampling.read_common(fields)
    kwargs["seed"] = sampling.read_seed(fields, "seed")
    kwargs["min_tokens"] = fields.integer("min_tokens") or 0
    max_tokens = fields.integer("max_completion_tokens")
    if max_tokens is None:
        max_tokens = fields.integer("max_tokens")
    return OpenAIRequest(
        names=read_names(fields, request, prefix),
        model=fields.string("model"),
        kwargs=kwargs,
        max_tokens=max_tokens,
        stop=sampling.read_stop(fields),
        namespace=read_namespace(fields),
        priority=sampling.read_priority(fields),
        timeout=sampling.read_timeout(fields),
        stream=stream,
        include_usage=options.boolean("include_usage") if options else False,
        continuous_usage=options.boolean("continuous_usage_stats") if options else False,
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        return_token_ids=fields.boolean("return_token_ids"),
    )


def _check_response_format(fields: Fields) -> None:
    response_format = fields.mapping("response_format")
    if response_format is not None and response_format.raw("type") != "text":
        raise InvalidRequestError(
            f"response_format.type must be 'text', not {show(response_format.raw('type'))}: "
            "structured output is not supported yet",
            param="response_format",
        )


def chunk_usage(asked: OpenAIRequest, job: Job) -> dict[str, Any]:
    """What a chunk says of usage: nothing, null before the last, or how much it is so far."""
    if not asked.include_usage:
        return {}
    return {"usage": usage(job) if asked.continuous_usage else None}


def usage(job: Job) -> dict[str, Any]:
    """Tokens of all prompts and choices; a prompt counts once however many choices it has."""
    prompt = sum(len(g.spec.token_ids) for g in job.generations)
    completion = sum(g.completion_tokens for g in job.generations)
    cached = sum(g.cached_tokens for g in job.generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def choice_index(choice: Choice) -> int:
    """``prompt index * n + i``."""
    generation = choice.generation
    return generation.number * generation.spec.params.n + choice.index


def ending(choice: Choice, finish: FinishReason | None) -> dict[str, Any]:
    """``finish_reason``, and the stop string or stop token id that the client had asked for."""
    if finish is None:
        return {"finish_reason": None, "stop_reason": None}
    matched = finish.matched
    if isinstance(matched, int) and matched not in choice.generation.spec.params.stop_token_ids:
        matched = None
    return {"finish_reason": finish.type, "stop_reason": matched}
