"""The bodies of requests: for each endpoint its fields with type, bounds, default and meaning.

What depends on the model that is served is checked later: ranges of sampling parameters by
:meth:`pd.core.sampling_params.SamplingParams.validate` (the models describe the same ranges), token
ids and lengths by :mod:`pd.proxy.service`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PlainValidator,
    PrivateAttr,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pd.core.config import MAX_STREAM_INTERVAL
from pd.core.errors import InvalidRequestError
from pd.core.grammar import MAX_GRAMMAR_BYTES, Grammar
from pd.core.node_info import Role
from pd.core.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_VALUE,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    RANGES,
    SEED_LIMIT,
    sampler_seed,
)
from pd.proxy.chat_messages import Messages
from pd.proxy.chat_template import RESERVED_VARIABLES
from pd.proxy.choices import ChoicesMethod
from pd.proxy.fields import (
    MAX_CHOICES,
    MAX_STOP_STRINGS,
    Bounds,
    Choices,
    Integer,
    Integers,
    LogitBias,
    Prompts,
    PromptValue,
    StopStrings,
    Texts,
    TokenIds,
    are_all,
    mismatch,
    problem,
    show,
    split_prompts,
)
from pd.proxy.request_model import RequestModel
from pd.proxy.structured import check_response_format, only_grammar, response_format_grammar
from pd.proxy.tools.definitions import MAX_TOOLS, ToolChoice, ToolChoiceValue, ToolList

T = TypeVar("T")

MAX_MODEL_CHARACTERS = 4096
MAX_RID_CHARACTERS = 256
# Prompts of a batch have an id that ends with their number.
_MAX_PROMPT_RID_CHARACTERS = MAX_RID_CHARACTERS + 16
MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1
MAX_TIMEOUT = 1e6
COMPLETION_TOKENS = 16
GENERATE_TOKENS = 128
_RECOMMENDED = "Unless given, as the model's generation_config.json recommends."

# Fields of neighbouring systems.
_UNSUPPORTED_SAMPLING: dict[str, tuple[object, ...]] = {
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "stop_regex": ([], ""),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "min_tokens_penalty": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "spaces_between_special_tokens": (True,),
    "lora_path": (),
    "custom_params": (),
}
_UNSUPPORTED_OPENAI: dict[str, tuple[object, ...]] = _UNSUPPORTED_SAMPLING | {
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
_UNSUPPORTED_NATIVE: dict[str, tuple[object, ...]] = _UNSUPPORTED_SAMPLING | {
    "image_data": (),
    "audio_data": (),
    "video_data": (),
    "input_embeds": (),
    "session_params": (),
    "token_ids_logprob": (),
    "return_hidden_states": (False,),
    "response_format": (),
    "tools": ([],),
}
_UNSUPPORTED_TOKENIZE: dict[str, tuple[object, ...]] = {
    "chat_template": (),
    "documents": ([],),
    "return_token_strs": (False,),
}
# OpenAI's names of sampling parameters, and SGLang's.
_OPENAI_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


def _sampled(parameter: str, default: T, description: str) -> T:
    """A field that becomes this parameter of SamplingParams, which checks its range."""
    low, high = RANGES[parameter]
    extra: dict[str, Any] = {"minimum": low, "maximum": high}
    field: T = Field(default, description=description, json_schema_extra=extra)
    return field


class SamplingFields(RequestModel):
    """Sampling parameters that all endpoints name alike."""

    unsupported = _UNSUPPORTED_SAMPLING

    temperature: float = _sampled(
        "temperature", 1.0, f"0 is greedy, more is more random. {_RECOMMENDED}"
    )
    top_p: float = Field(
        1.0,
        description="Samples from the smallest set of likeliest tokens with at least this mass. "
        + _RECOMMENDED,
        json_schema_extra={"exclusiveMinimum": 0.0, "maximum": 1.0},
    )
    top_k: Integer = Field(
        0,
        description=f"Samples from the k likeliest tokens; 0 or -1: from all. {_RECOMMENDED}",
        json_schema_extra={"minimum": -1, "maximum": RANGES["top_k"][1]},
    )
    min_p: float = _sampled(
        "min_p",
        0.0,
        "Samples from tokens with at least this fraction of the likeliest token's probability. "
        + _RECOMMENDED,
    )
    presence_penalty: float = _sampled(
        "presence_penalty", 0.0, "Subtracted from the logits of tokens that the answer has."
    )
    frequency_penalty: float = _sampled(
        "frequency_penalty",
        0.0,
        "Subtracted from the logits of tokens for each time that the answer has them.",
    )
    repetition_penalty: float = _sampled(
        "repetition_penalty",
        1.0,
        "Divides positive logits of tokens that prompt or answer have, and multiplies negative "
        f"ones. {_RECOMMENDED}",
    )
    n: Integer = _sampled("n", 1, "Answers to each prompt, which is computed and transferred once.")
    logit_bias: LogitBias = Field(
        {},
        description="Token ids and what is added to their logits, "
        f"-{MAX_LOGIT_BIAS_VALUE:g} to {MAX_LOGIT_BIAS_VALUE:g}.",
        json_schema_extra={"maxProperties": MAX_LOGIT_BIAS},
    )
    stop: StopStrings = Field(
        (),
        description=f"A string that ends an answer, or up to {MAX_STOP_STRINGS} of them; no part "
        "of the answer.",
    )
    stop_token_ids: Integers = Field(
        [],
        description="Tokens that end an answer, besides the model's own.",
        json_schema_extra={"maxItems": MAX_STOP_TOKEN_IDS},
    )
    ignore_eos: bool = Field(
        False, description="Goes on after the model's own end-of-sequence tokens."
    )
    skip_special_tokens: bool = Field(True, description="Leaves special tokens out of the text.")
    stream_interval: Annotated[Integer, Bounds(1, MAX_STREAM_INTERVAL)] | None = Field(
        None,
        description="Tokens that an event of a stream has at least, but for the first and the last "
        "one. Unless given, `--stream-interval` of the proxy.",
    )

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of SamplingParams: those that the client chose."""
        return {name: getattr(self, name) for name in _ARGUMENTS & self.model_fields_set}

    @field_validator("top_k")
    @classmethod
    def _all_of_vllm(cls, value: int) -> int:
        return 0 if value == -1 else value


_ARGUMENTS = SamplingFields.model_fields.keys() - {
    "stop",
    "skip_special_tokens",
    "stream_interval",
}


def _check_rids(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or (names and not are_all(str, names)):
        raise mismatch("a string, or for a batch a list of strings", value)
    for rid in names:
        if not 0 < len(rid) <= MAX_RID_CHARACTERS:
            raise mismatch(f"1 to {MAX_RID_CHARACTERS} characters", rid)
    return value


ModelName = Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)]
Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARACTERS)]
Rids = Annotated[
    str | list[str], PlainValidator(_check_rids, json_schema_input_type=Rid | list[Rid])
]
GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]


def _check_object_or_text(value: object) -> object:
    if not isinstance(value, (str, dict)):
        raise mismatch("an object or its text", value)
    return value


ObjectOrText = Annotated[
    str | dict[str, object],
    PlainValidator(_check_object_or_text, json_schema_input_type=str | dict[str, object]),
]
Seed = Annotated[Integer, Bounds(-SEED_LIMIT, SEED_LIMIT - 1), AfterValidator(sampler_seed)]


class RequestFields(RequestModel):
    """Fields of every request that generates."""

    model: ModelName | None = Field(
        None, description="Name of a served model, see `GET /v1/models`. An unknown one is 404."
    )
    stream: bool = Field(
        False, description="Answers with server-sent events that end with `data: [DONE]`."
    )
    request_id: Rid | None = Field(None, description="The same as `rid`, which goes first.")
    priority: Annotated[Integer, Bounds(MIN_PRIORITY, MAX_PRIORITY)] = Field(
        0,
        description="Counts on nodes with `--schedule-policy priority` or "
        "`--eviction-policy priority`.",
    )
    cache_salt: Annotated[str, Field(max_length=MAX_RID_CHARACTERS)] = Field(
        "", description="Prefixes are shared only among requests with the same salt."
    )
    timeout: Annotated[float, Bounds(0.0, MAX_TIMEOUT, above=True)] | None = Field(
        None, description="Seconds until 408; unless given, `--request-timeout` of the proxy."
    )


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

    unsupported = _UNSUPPORTED_OPENAI

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
    min_tokens: Integer = _sampled(
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
            description='`{"type": "text"}`, `{"type": "json_object"}`, or `{"type": '
            '"json_schema", "json_schema": {"schema": …}}`. Keywords of a schema that are not '
            "enforced are a 400, unless `strict` is false.",
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

    unsupported = _UNSUPPORTED_OPENAI | {"tools": ([],), "tool_choice": ("none", "auto")}

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


def _check_variables(value: dict[str, object]) -> dict[str, object]:
    for name in value:
        if name in RESERVED_VARIABLES:
            raise problem(f"may not set {name!r}, which the proxy sets")
    return value


class TemplateFields(RequestModel):
    """How a chat becomes a prompt."""

    add_generation_prompt: bool | None = Field(
        None,
        description="Ends the prompt with the opening of the assistant's turn. Unless given, true "
        "without `continue_final_message`.",
    )
    continue_final_message: bool = Field(
        False, description="Ends the prompt inside the last message, which the answer continues."
    )
    chat_template_kwargs: Annotated[dict[str, object], AfterValidator(_check_variables)] = Field(
        {},
        description="Further variables of the chat template, such as `enable_thinking`; none of "
        "those that the proxy sets.",
    )
    tools: ToolList = Field(
        None,
        description="Functions that the model may call.",
        json_schema_extra={"maxItems": MAX_TOOLS},
    )

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the opening of the assistant's turn."""
        opens = self.add_generation_prompt
        return not self.continue_final_message if opens is None else opens

    @model_validator(mode="after")
    def _turn_opens_or_continues(self) -> Self:
        if self.continue_final_message and self.opens_turn:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
            )
        return self


class ChatRequest(TemplateFields, OpenAIRequest):
    """A request for the next message of a chat."""

    # The template writes the special tokens itself.
    unsupported = _UNSUPPORTED_OPENAI | {
        "echo": (False,),
        "prompt": (),
        "add_special_tokens": (False,),
    }

    messages: Messages = Field(description="The chat so far.")
    logprobs: bool = Field(False, description="Adds the log probability of each token.")
    top_logprobs: Annotated[Integer, Bounds(0, MAX_TOP_LOGPROBS)] | None = Field(
        None, description="With `logprobs`: so many of the likeliest tokens beside each."
    )

    tool_choice: ToolChoiceValue | None = Field(
        None,
        description="`none`: text; `auto`: text or calls; `required`: calls; an object: one call "
        "of the function that it names. Unless given, `auto` with `tools`.",
    )
    parallel_tool_calls: bool = Field(True, description="With false at most one call is made.")
    separate_reasoning: bool = Field(
        True,
        description="Reasoning comes as `reasoning_content`; with false it stays in `content`, "
        "with its tags.",
    )

    @property
    def response_grammar(self) -> Grammar | None:
        """The grammar of ``response_format``."""
        return self._grammar

    @property
    def choice(self) -> ToolChoice:
        """Whether the model may or has to call functions."""
        if self.tools is None:
            return ToolChoice("none")
        return self.tool_choice or ToolChoice("auto")

    @model_validator(mode="after")
    def _calls_can_be_made(self) -> Self:
        asked, functions = self.tool_choice, self.tools.functions if self.tools else []
        if asked is None or asked.mode != "required":
            return self
        if not functions:
            raise InvalidRequestError(
                "tool_choice needs a list of tools of which one can be called", param="tool_choice"
            )
        if asked.name is not None and all(each.name != asked.name for each in functions):
            raise InvalidRequestError(
                f"tool_choice names the function {show(asked.name)}, which is not among the tools",
                param="tool_choice",
            )
        if self._grammar is not None:
            raise InvalidRequestError(
                "response_format constrains a text, and tool_choice asks for calls instead; leave "
                "one of them out",
                param="response_format",
            )
        return self

    @model_validator(mode="after")
    def _likeliest_tokens_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true", param="top_logprobs"
            )
        return self

    def arguments(self) -> dict[str, Any]:
        likeliest = (self.top_logprobs or 0) if self.logprobs else 0
        return super().arguments() | {"logprobs": self.logprobs, "top_logprobs": likeliest}


class NativeSampling(SamplingFields):
    """Sampling parameters under SGLang's names."""

    renamed = _OPENAI_NAMES

    max_new_tokens: Integer | None = Field(
        None,
        description=f"Tokens of an answer at most. Unless given, {GENERATE_TOKENS} or what the "
        "context leaves; 0 computes the prompt only.",
        json_schema_extra={"minimum": 0, "maximum": RANGES["max_tokens"][1]},
    )
    min_new_tokens: Integer = _sampled(
        "min_tokens", 0, "No end of sequence, stop token or stop string before so many tokens."
    )
    sampling_seed: Seed | None = Field(
        None,
        description="In float32 the same seed gives the same answer on any node and in any batch. "
        "Unless given, one is drawn for each prompt.",
    )
    seed: Seed | None = Field(None, description="The same as `sampling_seed`, which goes first.")
    regex: GrammarText | None = Field(
        None, description="A regular expression that the whole answer matches."
    )
    json_schema: ObjectOrText | None = Field(
        None, description="A JSON schema, as an object or its text, for the answer."
    )
    ebnf: GrammarText | None = Field(
        None, description="A grammar in GBNF whose rule `root` is the answer."
    )
    structural_tag: ObjectOrText | None = Field(
        None, description="Parts of the answer that follow a schema, in xgrammar's form."
    )
    _grammar: Grammar | None = PrivateAttr(None)

    def arguments(self) -> dict[str, Any]:
        seed = self.seed if self.sampling_seed is None else self.sampling_seed
        own = {"seed": seed, "min_tokens": self.min_new_tokens, "grammar": self._grammar}
        return super().arguments() | own

    @model_validator(mode="after")
    def _has_one_grammar(self) -> Self:
        self._grammar = only_grammar(
            regex=self.regex,
            json_schema=self.json_schema,
            ebnf=self.ebnf,
            structural_tag=self.structural_tag,
        )
        return self


# Tags are no part of a field's name, see pd.proxy.request_model.
_ONE, _EACH = "<object>", "<list>"
# A value for all prompts or, in a batch, a list with one for each.
_PerPrompt = Annotated[
    Annotated[T, Tag(_ONE)] | Annotated[list[T], Field(fail_fast=True), Tag(_EACH)],
    Discriminator(lambda value: _EACH if isinstance(value, list) else _ONE),
]
# Its fields, in the order of PromptOptions, and what their values are called in messages.
_PER_PROMPT = {
    "sampling_params": ("an object", "objects"),
    "return_logprob": ("a boolean", "booleans"),
    "logprob_start_len": ("an integer", "integers"),
    "top_logprobs_num": ("an integer", "integers"),
}


class PromptOptions(NamedTuple):
    """Options of one prompt of a request in the native shape."""

    sampling: NativeSampling
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int


class GenerateRequest(RequestFields):
    """A request in SGLang's native shape: one prompt or a batch of them."""

    unsupported = _UNSUPPORTED_NATIVE

    text: Texts | None = Field(
        None, description="A prompt, or a list of them. Exactly one of `text` and `input_ids`."
    )
    input_ids: TokenIds | None = Field(
        None, description="Token ids of a prompt, or a list of such lists."
    )
    rid: Rids | None = Field(
        None,
        description="Name of the request for `/abort_request`, drawn unless given; for a batch "
        "also a list with one for each prompt. 400 while another request of the same key has it.",
    )
    sampling_params: _PerPrompt[NativeSampling] = Field(
        {},
        validate_default=True,
        description="One object, or for a batch a list with one for each prompt.",
    )
    incremental: bool = Field(
        False, description="Every event of a stream has only what is new instead of all so far."
    )
    return_logprob: _PerPrompt[bool] = Field(
        False,
        description="Adds log probabilities to `meta_info`. It and the two fields that go with it "
        "may be lists for a batch, with a value for each prompt.",
    )
    logprob_start_len: _PerPrompt[Annotated[Integer, Bounds(-1, RANGES["max_tokens"][1])]] = Field(
        -1,
        description="With `return_logprob`: the first token of the prompt whose log probability "
        "is given; -1 gives none of the prompt.",
    )
    top_logprobs_num: _PerPrompt[Annotated[Integer, Bounds(0, MAX_TOP_LOGPROBS)]] = Field(
        0, description="With `return_logprob`: so many of the likeliest tokens beside each."
    )
    choices: Choices | None = Field(
        None,
        description="Options, texts or lists of token ids: the answer is the likeliest one after "
        "the prompt instead of a generated text, and `meta_info.choices` scores all of them.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_CHOICES},
    )
    choices_method: ChoicesMethod = Field(
        "token_length_normalized",
        description="With `choices`: what is compared. `token_length_normalized`: the mean log "
        "probability of an option's tokens. `greedy_token`: the log probability of the first "
        "token, among options with the same one that of the next, and so on. "
        "`unconditional_likelihood`: how much the prompt adds to the mean log probability.",
    )

    @property
    def source(self) -> Literal["text", "input_ids"]:
        """The field with the prompts."""
        return "input_ids" if self.text is None else "text"

    @property
    def prompts(self) -> PromptValue:
        """The prompt or prompts, texts or token ids."""
        prompts = self.input_ids if self.text is None else self.text
        assert prompts is not None
        return prompts

    def options(self, num_prompts: int) -> list[PromptOptions]:
        """The options of each prompt."""
        values = [getattr(self, name) for name in _PER_PROMPT]
        each = [v if isinstance(v, list) else [v] * num_prompts for v in values]
        return [PromptOptions(*options) for options in zip(*each, strict=True)]

    @field_validator(*_PER_PROMPT, mode="before")
    @classmethod
    def _one_for_each_prompt(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, list):
            return value
        given = info.data.get("text") or info.data.get("input_ids")
        prompts, is_batch = split_prompts(given) if given else ([], False)
        one, several = _PER_PROMPT[info.field_name or ""]
        if not is_batch:
            raise mismatch(one, value)
        if len(value) != len(prompts):
            raise mismatch(f"{one} or a list of {len(prompts)} {several}", value)
        return value

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            have = "neither is there" if self.text is None else "both are there"
            raise InvalidRequestError(f"exactly one of text and input_ids is needed; {have}")
        prompts, is_batch = split_prompts(self.prompts)
        if isinstance(self.rid, list) and not (is_batch and len(self.rid) == len(prompts)):
            raise InvalidRequestError(
                f"rid must be a string, or for a batch a list of {len(prompts)} strings, not "
                f"{show(self.rid)}",
                param="rid",
            )
        params = self.sampling_params
        if len({sampling.n for sampling in (params if isinstance(params, list) else [params])}) > 1:
            raise InvalidRequestError("n must be the same for all prompts of a batch", param="n")
        return self

    @model_validator(mode="after")
    def _choices_stand_alone(self) -> Self:
        if self.choices is None:
            if "choices_method" in self.model_fields_set:
                raise InvalidRequestError(
                    "choices_method is only for choices; leave it out or give choices",
                    param="choices_method",
                )
            return self
        prompts, is_batch = split_prompts(self.prompts)
        if is_batch or isinstance(self.sampling_params, list):
            raise InvalidRequestError(
                f"choices need one prompt, but {self.source} is a batch of {len(prompts)}; send a "
                "request for each",
                param=self.source,
            )
        if self.stream:
            raise InvalidRequestError(
                "choices are scored all at once, so that nothing can be streamed; set stream to "
                "false",
                param="stream",
            )
        if self.return_logprob:
            raise InvalidRequestError(
                "return_logprob does not go with choices, which always come with their log "
                "probabilities; leave it out",
                param="return_logprob",
            )
        sampling = self.sampling_params
        if sampling.n > 1:
            raise InvalidRequestError(
                f"choices have one answer, but n is {sampling.n}; leave it out", param="n"
            )
        if sampling.arguments()["grammar"] is not None:
            raise InvalidRequestError(
                "choices and a grammar cannot constrain the same output; leave one of them out",
                param="choices",
            )
        return self


class TokenizeRequest(TemplateFields):
    """A text, or a chat, to make tokens of."""

    unsupported = _UNSUPPORTED_TOKENIZE

    model: ModelName | None = Field(None, description="Name of a served model.")
    prompt: str | None = Field(None, description="The text. It or `messages` is needed.")
    text: str | None = Field(None, description="The same as `prompt`, which goes first.")
    messages: Messages | None = Field(None, description="A chat, which goes before a text.")
    add_special_tokens: bool | None = Field(
        None,
        description="Puts the tokenizer's special tokens, such as BOS, before the text. Unless "
        "given, true for a text and false for a chat.",
    )

    @model_validator(mode="after")
    def _something_is_given(self) -> Self:
        if self.messages is None and self.given is None:
            raise InvalidRequestError("prompt (a string) or messages is needed", param="prompt")
        return self

    @property
    def given(self) -> str | None:
        """The text, if there is one."""
        return self.text if self.prompt is None else self.prompt


class DetokenizeRequest(RequestModel):
    """Tokens to make text of."""

    model: ModelName | None = Field(None, description="Name of a served model.")
    tokens: Integers = Field(description="Token ids.")
    skip_special_tokens: bool = Field(True, description="Leaves special tokens out of the text.")


class AbortRequest(RequestModel):
    """A request to end others."""

    administrative = True

    rid: Annotated[str, Field(max_length=_MAX_PROMPT_RID_CHARACTERS)] | None = Field(
        None, description="The request that is ended. Exactly one of `rid` and `abort_all`."
    )
    abort_all: bool = Field(False, description="Ends all requests; for administrators.")

    @model_validator(mode="after")
    def _one_or_all(self) -> Self:
        if self.abort_all == bool(self.rid):
            raise InvalidRequestError('either {"rid": "…"} or {"abort_all": true} is needed')
        return self


class RoleRequest(RequestModel):
    """A role for a node that can have each."""

    administrative = True

    role: Role = Field(description="What the node does where nothing speaks against it.")


class WorkerRequest(RequestModel):
    """A node that joins."""

    administrative = True

    role: Role = Field(description="What the node does.")
    url: str = Field(description="`http://host:port` and nothing more.")
