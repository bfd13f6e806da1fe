"""Bodies of OpenAI's endpoints: what they share, and completions."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from pd.core.errors import InvalidRequestError
from pd.core.grammar import Grammar
from pd.core.sampling_params import MAX_TOP_LOGPROBS, RANGES
from pd.proxy.fields import Bounds, Integer, Prompts
from pd.proxy.request_model import RequestModel
from pd.proxy.requests.common import (
    UNSUPPORTED_SAMPLING,
    RequestFields,
    Rid,
    SamplingFields,
    Seed,
    sampled,
)
from pd.proxy.structured import check_response_format, response_format_grammar

COMPLETION_TOKENS = 16
_CHAT_NAMES = {"top_logprobs": "logprobs"}

UNSUPPORTED_OPENAI: dict[str, tuple[object, ...]] = UNSUPPORTED_SAMPLING | {
    "regex": (),
    "json_schema": (),
    "ebnf": (),
    "structural_tag": (),
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


class StreamOptions(RequestModel):
    """Options of a stream: what it reports beside the answer."""

    include_usage: bool = Field(
        False, description="One more event before the end has the request's `usage`."
    )
    continuous_usage_stats: bool = Field(
        False, description="With `include_usage`: every event has the `usage` so far."
    )


class OpenAIRequest(SamplingFields, RequestFields):
    """Fields of both OpenAI endpoints."""

    unsupported = UNSUPPORTED_OPENAI

    rid: Rid | None = Field(
        None,
        description="Name of the request for `/abort_request`, drawn unless given. 400 while "
        "another request of the same key has it.",
    )
    max_tokens: Integer | None = Field(
        None,
        description="Tokens of an answer at most. Unless given: 16 for completions, for chats what "
        "the context leaves.",
        json_schema_extra={"minimum": 0, "maximum": RANGES["max_tokens"][1]},
    )
    max_completion_tokens: Integer | None = Field(
        None,
        description="The same as `max_tokens`, before which it counts.",
        json_schema_extra={"minimum": 0, "maximum": RANGES["max_tokens"][1]},
    )
    min_tokens: Integer = sampled(
        "min_tokens", 0, "No end of sequence, stop token or stop string before so many tokens."
    )
    seed: Seed | None = Field(
        None,
        description="In float32 the same seed gives the same answer on any node and in any batch. "
        "Unless given, one is drawn for each prompt.",
    )
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    response_format: Annotated[dict[str, object], AfterValidator(check_response_format)] | None = (
        Field(
            None,
            description='`{"type": "text"}`, `{"type": "json_object"}`, `{"type": "json_schema", '
            '"json_schema": {"schema": …}}`, or `{"type": "structural_tag", "format": {…}}`. '
            "Keywords of a schema that are not enforced are a 400, unless `strict` is false.",
        )
    )
    return_token_ids: bool = Field(
        False,
        description="Adds `token_ids` to every choice, and `prompt_token_ids` to the first chunk "
        "or the answer.",
    )
    user: str | None = Field(None, description="Of no effect.")
    _grammar: Grammar | None = PrivateAttr(None)

    def arguments(self) -> dict[str, Any]:
        own = {"seed": self.seed, "min_tokens": self.min_tokens, "grammar": self._grammar}
        return super().arguments() | own

    @property
    def wanted_tokens(self) -> int | None:
        """The limit on an answer that the client chose, or None."""
        most = self.max_completion_tokens
        return self.max_tokens if most is None else most

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @model_validator(mode="after")
    def _response_has_a_grammar(self) -> Self:
        self._grammar = response_format_grammar(self.response_format)
        return self

    @model_validator(mode="after")
    def _options_are_for_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only for streams; set stream to true", param="stream_options"
            )
        return self


class CompletionRequest(OpenAIRequest):
    """A request for completions of one or several prompts."""

    unsupported = UNSUPPORTED_OPENAI | {"tools": ([],), "tool_choice": ("none", "auto")}
    renamed = _CHAT_NAMES

    prompt: Prompts = Field(
        description="A string, a list of strings, a list of token ids, or a list of such lists."
    )
    echo: bool = Field(False, description="Puts the prompt before the answer.")
    logprobs: Annotated[Integer, Bounds(0, MAX_TOP_LOGPROBS)] | None = Field(
        None,
        description="Log probabilities of so many of the likeliest tokens beside each token; with "
        "`echo` also for the prompt.",
    )
    add_special_tokens: bool = Field(
        True, description="Puts the tokenizer's special tokens, such as BOS, before a text."
    )

    @model_validator(mode="after")
    def _something_is_generated(self) -> Self:
        if self.wanted_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens must be at least 1 (0 only together with echo), not 0",
                param="max_tokens",
            )
        return self

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        if self.logprobs is not None:
            arguments |= {"logprobs": True, "top_logprobs": self.logprobs}
            if self.echo:
                arguments["prompt_logprobs_start"] = 0
        return arguments
