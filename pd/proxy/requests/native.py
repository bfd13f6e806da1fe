"""Bodies in SGLang's native shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pd.core.errors import InvalidRequestError
from pd.core.grammar import Grammar
from pd.core.sampling_params import MAX_TOP_LOGPROBS, RANGES
from pd.proxy.choices import ChoicesMethod
from pd.proxy.fields import (
    MAX_OPTIONS,
    Bounds,
    Choices,
    Integer,
    PromptValue,
    Texts,
    TokenIds,
    mismatch,
    show,
    split_prompts,
)
from pd.proxy.requests.common import (
    UNSUPPORTED_SAMPLING,
    GrammarText,
    ObjectOrText,
    RequestFields,
    Rids,
    SamplingFields,
    Seed,
    sampled,
)
from pd.proxy.structured import only_grammar

T = TypeVar("T")

GENERATE_TOKENS = 128

_UNSUPPORTED_NATIVE: dict[str, tuple[object, ...]] = UNSUPPORTED_SAMPLING | {
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "return_prompt_token_ids": (False,),
    "image_data": ("", [], [None]),
    "audio_data": ("", [], [None]),
    "video_data": ("", [], [None]),
    "input_embeds": (),
    "session_params": (),
    "return_hidden_states": (False,),
    "response_format": (),
    "tools": ([],),
}
# OpenAI's names of sampling parameters, and SGLang's.
_OPENAI_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


class NativeSampling(SamplingFields):
    """Sampling parameters under SGLang's names."""

    renamed = _OPENAI_NAMES

    max_new_tokens: Integer | None = Field(
        None,
        description=f"Tokens of an answer at most. Unless given, {GENERATE_TOKENS} or what the "
        "context leaves; 0 computes the prompt only.",
        json_schema_extra={"minimum": 0, "maximum": RANGES["max_tokens"][1]},
    )
    min_new_tokens: Integer = sampled(
        "min_tokens", 0, "No end of sequence, stop token or stop string before so many tokens."
    )
    sampling_seed: Seed | None = Field(
        None,
        description="In float32 the same seed gives the same answer on any node and in any batch. "
        "Unless given, one is drawn for each prompt.",
    )
    seed: Seed | None = Field(None, description="The same as `sampling_seed`, which goes first.")
    no_stop_trim: bool = Field(
        False, description="Leaves the stop string or stop token that ended an answer in its text."
    )
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
        json_schema_extra={"minItems": 1, "maxItems": MAX_OPTIONS},
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
