"""Bodies of OpenAI's endpoints: what they share, and completions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from pd.core.errors import InvalidRequestError
from pd.core.grammar import Grammar
from pd.core.sampling_params import MAX_TOP_LOGPROBS, RANGES
from pd.proxy.fields import MAX_OPTIONS, Bounds, ChoiceTexts, Integer, Prompts
from pd.proxy.request_model import RequestModel
from pd.proxy.requests.common import (
    UNSUPPORTED_SAMPLING,
    GrammarText,
    ObjectOrText,
    RequestFields,
    Rid,
    SamplingFields,
    Seed,
    sampled,
)
from pd.proxy.structured import (
    FieldKind,
    check_response_format,
    field_grammar,
    response_format_grammar,
)

COMPLETION_TOKENS = 16
_CHAT_NAMES = {"top_logprobs": "logprobs"}
# Fields that constrain the answer beside ``response_format``, and what they hold.
_GRAMMAR_FIELDS: dict[str, FieldKind] = {
    "regex": "regex",
    "guided_regex": "regex",
    "json_schema": "json_schema",
    "guided_json": "json_schema",
    "ebnf": "ebnf",
    "guided_grammar": "ebnf",
    "guided_choice": "choice",
}
# The fields of ``structured_outputs``, and the names under which the model has them.
_STRUCTURED_OUTPUTS: dict[str, tuple[str, FieldKind]] = {
    "json": ("json_schema", "json_schema"),
    "regex": ("regex", "regex"),
    "choice": ("choice", "choice"),
    "grammar": ("grammar", "ebnf"),
    "json_object": ("json_object", "json_object"),
    "structural_tag": ("structural_tag", "structural_tag"),
}

UNSUPPORTED_OPENAI: dict[str, tuple[object, ...]] = UNSUPPORTED_SAMPLING | {
    "structural_tag": (),
    "guided_whitespace_pattern": (),
    "no_stop_trim": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "prompt_embeds": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "return_hidden_states": (False,),
}


class StreamOptions(RequestModel):
    """Options of a stream: what it reports beside the answer."""

    include_usage: bool = Field(
        False, description="One more event before the end has the request's `usage`."
    )
    continuous_usage_stats: bool = Field(
        False, description="With `include_usage`: every event has the `usage` so far."
    )


class StructuredOutputs(RequestModel):
    """A constraint of the answer as vLLM takes it. One of them counts."""

    unsupported = {  # noqa: RUF012
        "whitespace_pattern": (),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
    }

    # Models of pydantic have a method of the field's own name.
    json_schema: ObjectOrText | None = Field(None, alias="json", description="A JSON schema.")
    regex: GrammarText | None = Field(None, description="A regular expression.")
    choice: ChoiceTexts | None = Field(None, description="Texts of which the answer is one.")
    grammar: GrammarText | None = Field(None, description="A grammar in GBNF.")
    json_object: bool = Field(False, description="Any JSON object.")
    structural_tag: ObjectOrText | None = Field(None, description="In xgrammar's form.")


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
    regex: GrammarText | None = Field(
        None, description="A regular expression that the whole answer matches; also `guided_regex`."
    )
    guided_regex: GrammarText | None = Field(None, description="The same as `regex`.")
    json_schema: ObjectOrText | None = Field(
        None,
        description="A JSON schema, as an object or its text, for the answer; also `guided_json`.",
    )
    guided_json: ObjectOrText | None = Field(None, description="The same as `json_schema`.")
    ebnf: GrammarText | None = Field(
        None,
        description="A grammar in GBNF whose rule `root` is the answer; also `guided_grammar`.",
    )
    guided_grammar: GrammarText | None = Field(None, description="The same as `ebnf`.")
    guided_choice: ChoiceTexts | None = Field(
        None,
        description="Texts of which the answer is one.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_OPTIONS},
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="One of the constraints above, in vLLM's form."
    )
    include_stop_str_in_output: bool = Field(
        False, description="Leaves the stop string or stop token that ended an answer in its text."
    )
    truncate_prompt_tokens: Annotated[Integer, Bounds(-1, RANGES["max_tokens"][1])] | None = Field(
        None,
        description="Takes so many tokens of the prompt at most, the last ones; -1: as many as the "
        "context has room for.",
    )
    truncation_side: Literal["left", "right"] = Field(
        "left", description="With `truncate_prompt_tokens`: the side from which tokens are taken."
    )
    prompt_logprobs: Annotated[Integer, Bounds(0, MAX_TOP_LOGPROBS)] | None = Field(
        None,
        description="Log probabilities of the prompt's tokens, with so many of the likeliest ones "
        "beside each. Not for streams.",
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="Names tokens in log probabilities by their ids: `token_id:17`."
    )
    return_token_ids: bool = Field(
        False,
        description="Adds `token_ids` to every choice, and `prompt_token_ids` to the first chunk "
        "or the answer.",
    )
    user: str | None = Field(None, description="Of no effect.")
    _grammar: Grammar | None = PrivateAttr(None)
    _grammar_field: str = PrivateAttr("response_format")

    def arguments(self) -> dict[str, Any]:
        own = {"seed": self.seed, "min_tokens": self.min_tokens, "grammar": self._grammar}
        return super().arguments() | own | self._logprobs()

    def _logprobs(self) -> dict[str, Any]:
        """Arguments about log probabilities; those of the prompt come with those of the answer."""
        shown, prompt = self.top_tokens, self.prompt_logprobs
        if shown is None and prompt is None:
            return {}
        arguments: dict[str, Any] = {"logprobs": True, "top_logprobs": max(shown or 0, prompt or 0)}
        if prompt is not None:
            arguments["prompt_logprobs_start"] = 0
        return arguments

    @property
    @abstractmethod
    def top_tokens(self) -> int | None:
        """Likeliest tokens that are shown beside each token of an answer; None: no log
        probabilities are."""

    @property
    def grammar_field(self) -> str:
        """The field that constrains the answer."""
        return self._grammar_field

    @property
    def wanted_tokens(self) -> int | None:
        """The limit on an answer that the client chose, or None."""
        most = self.max_completion_tokens
        return self.max_tokens if most is None else most

    @property
    def shows_prompt_ids(self) -> bool:
        """Whether the token ids of the prompt are a part of the answer."""
        return self.return_token_ids

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @model_validator(mode="after")
    def _response_has_a_grammar(self) -> Self:
        given: dict[str, Grammar | None] = {
            "response_format": response_format_grammar(self.response_format)
        }
        for field, kind in _GRAMMAR_FIELDS.items():
            given[field] = field_grammar(field, kind, getattr(self, field))
        outputs = self.structured_outputs
        if outputs is not None:
            for field, (attribute, kind) in _STRUCTURED_OUTPUTS.items():
                name = f"structured_outputs.{field}"
                given[name] = field_grammar(name, kind, getattr(outputs, attribute))
        found = {field: grammar for field, grammar in given.items() if grammar is not None}
        if len(found) > 1:
            first, second, *_ = found
            raise InvalidRequestError(
                f"{first} and {second} cannot constrain the same output", param=second
            )
        for field, grammar in found.items():
            self._grammar, self._grammar_field = grammar, field
        return self

    @model_validator(mode="after")
    def _some_of_the_prompt_is_left(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens must be at least 1, or -1 for what fits, not 0",
                param="truncate_prompt_tokens",
            )
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_are_whole(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs come with a whole answer; set stream to false",
                param="prompt_logprobs",
            )
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

    unsupported = UNSUPPORTED_OPENAI | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "return_prompt_token_ids": (False,),
    }
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

    @property
    def top_tokens(self) -> int | None:
        return self.logprobs

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        if self.logprobs is not None and self.echo:
            arguments["prompt_logprobs_start"] = 0
        return arguments
