"""Bodies of OpenAI's endpoints: the shared fields, and completions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from pd.core.errors import InvalidRequestError
from pd.core.grammar import Grammar
from pd.core.sampling_params import MAX_TOP_LOGPROBS, RANGES
from pd.proxy.requests.common import (
    GrammarText,
    ObjectOrText,
    RequestFields,
    Rid,
    SamplingFields,
    Seed,
    sampling_field,
)
from pd.proxy.requests.fields import MAX_OPTIONS, Bounds, ChoiceTexts, Integer, Prompts
from pd.proxy.requests.known_fields import CHAT, COMPLETIONS, FieldPlace
from pd.proxy.requests.output_grammar import (
    FieldKind,
    check_response_format,
    make_field_grammar,
    make_response_grammar,
)
from pd.proxy.requests.request_model import RequestModel

COMPLETION_TOKENS = 16
# Fields that constrain the answer in addition to ``response_format``, and their contents.
_GRAMMAR_FIELDS: dict[str, FieldKind] = {
    "regex": "regex",
    "guided_regex": "regex",
    "json_schema": "json_schema",
    "guided_json": "json_schema",
    "ebnf": "ebnf",
    "guided_grammar": "ebnf",
    "guided_choice": "choice",
}
# Maps the fields of ``structured_outputs`` to the model's attributes and contents.
_STRUCTURED_OUTPUTS: dict[str, tuple[str, FieldKind]] = {
    "json": ("json_schema", "json_schema"),
    "regex": ("regex", "regex"),
    "choice": ("choice", "choice"),
    "grammar": ("grammar", "ebnf"),
    "json_object": ("json_object", "json_object"),
    "structural_tag": ("structural_tag", "structural_tag"),
}


class StreamOptions(RequestModel):
    """Options of a stream."""

    place = FieldPlace((COMPLETIONS, CHAT), "stream_options")

    include_usage: bool = Field(
        False, description="Adds an event with the request's `usage` before the end."
    )
    continuous_usage_stats: bool = Field(
        False, description="Adds the `usage` so far to every event. Needs `include_usage`."
    )


class StructuredOutputs(RequestModel):
    """A constraint of the answer in vLLM's form. Only one may be set."""

    place = FieldPlace((COMPLETIONS, CHAT), "structured_outputs")

    # The attribute cannot be called `json`, because pydantic's models have a method of that name.
    json_schema: ObjectOrText | None = Field(None, alias="json", description="A JSON schema.")
    regex: GrammarText | None = Field(None, description="A regular expression.")
    choice: ChoiceTexts | None = Field(None, description="The answer is one of these texts.")
    grammar: GrammarText | None = Field(None, description="A grammar in GBNF.")
    json_object: bool = Field(False, description="Any JSON object.")
    structural_tag: ObjectOrText | None = Field(None, description="In xgrammar's form.")


class OpenAIRequest(SamplingFields, RequestFields):
    """Fields of both OpenAI endpoints."""

    rid: Rid | None = Field(
        None,
        description="Name of the request for `/abort_request`. By default, one is drawn. The "
        "name of a running request of the same key is a 400.",
    )
    max_tokens: Integer | None = Field(
        None,
        description="Maximum number of tokens of an answer. Default: 16 for completions, the "
        "rest of the context for chats.",
        json_schema_extra={"minimum": 0, "maximum": RANGES["max_tokens"][1]},
    )
    max_completion_tokens: Integer | None = Field(
        None,
        description="The same as `max_tokens`. This one counts if both are given.",
        json_schema_extra={"minimum": 0, "maximum": RANGES["max_tokens"][1]},
    )
    min_tokens: Integer = sampling_field(
        "min_tokens",
        0,
        "Minimum number of tokens before an end of sequence, stop token or stop string.",
    )
    seed: Seed | None = Field(
        None,
        description="In float32 the same seed gives the same answer on any node and in any "
        "batch. By default, one is drawn per prompt.",
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
        None, description="A regular expression for the whole answer; also `guided_regex`."
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
        description="The answer is one of these texts.",
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
        description="Maximum number of tokens of the prompt. The first ones are dropped. -1: "
        "as many as fit into the context.",
    )
    truncation_side: Literal["left", "right"] = Field(
        "left", description="The side at which `truncate_prompt_tokens` drops tokens."
    )
    prompt_logprobs: Annotated[Integer, Bounds(0, MAX_TOP_LOGPROBS)] | None = Field(
        None,
        description="Adds log probabilities of the prompt's tokens, and of this many likeliest "
        "tokens for each. Not for streams.",
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="Names tokens in log probabilities by their ids: `token_id:17`."
    )
    return_token_ids: bool = Field(
        False,
        description="Adds `token_ids` to every choice, and `prompt_token_ids` to the first chunk "
        "or the answer.",
    )
    _grammar: Grammar | None = PrivateAttr(None)
    _grammar_field: str = PrivateAttr("response_format")

    def make_arguments(self) -> dict[str, Any]:
        arguments = super().make_arguments()
        arguments |= {"seed": self.seed, "min_tokens": self.min_tokens, "grammar": self._grammar}
        shown, prompt = self.top_tokens, self.prompt_logprobs
        if shown is not None or prompt is not None:
            # Nodes send the prompt's log probabilities with the answer's.
            arguments |= {"logprobs": True, "top_logprobs": max(shown or 0, prompt or 0)}
        if prompt is not None:
            arguments["prompt_logprobs_start"] = 0
        return arguments

    @property
    @abstractmethod
    def top_tokens(self) -> int | None:
        """Number of likeliest tokens to show per token; None if no log probabilities are shown."""

    @property
    def grammar_field(self) -> str:
        """The field that constrains the answer."""
        return self._grammar_field

    @property
    def token_limit(self) -> int | None:
        """The client's limit on the tokens of an answer, or None."""
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit

    @property
    def shows_prompt_ids(self) -> bool:
        """Whether the answer includes the token ids of the prompt."""
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
            "response_format": make_response_grammar(self.response_format)
        }
        for field, kind in _GRAMMAR_FIELDS.items():
            given[field] = make_field_grammar(field, kind, getattr(self, field))
        outputs = self.structured_outputs
        if outputs is not None:
            for field, (attribute, kind) in _STRUCTURED_OUTPUTS.items():
                name = f"structured_outputs.{field}"
                given[name] = make_field_grammar(name, kind, getattr(outputs, attribute))
        grammars = {field: grammar for field, grammar in given.items() if grammar is not None}
        if len(grammars) > 1:
            first, second, *_ = grammars
            raise InvalidRequestError(
                f"{first} and {second} cannot constrain the same output", param=second
            )
        for field, grammar in grammars.items():
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
    """Asks for completions of one or several prompts."""

    place = FieldPlace((COMPLETIONS,))

    prompt: Prompts = Field(
        description="A string, a list of strings, a list of token ids, or a list of such lists."
    )
    echo: bool = Field(False, description="Puts the prompt before the answer.")
    logprobs: Annotated[Integer, Bounds(0, MAX_TOP_LOGPROBS)] | None = Field(
        None,
        description="Adds log probabilities, with this many likeliest tokens for each token. "
        "With `echo`, the prompt has them, too.",
    )
    add_special_tokens: bool = Field(
        True, description="Puts the tokenizer's special tokens, such as BOS, before a text."
    )

    @model_validator(mode="after")
    def _something_is_generated(self) -> Self:
        if self.token_limit == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens must be at least 1 (0 only together with echo), not 0",
                param="max_tokens",
            )
        return self

    @property
    def top_tokens(self) -> int | None:
        return self.logprobs

    def make_arguments(self) -> dict[str, Any]:
        arguments = super().make_arguments()
        if self.logprobs is not None and self.echo:
            arguments["prompt_logprobs_start"] = 0
        return arguments
