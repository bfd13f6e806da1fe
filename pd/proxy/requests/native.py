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
from pd.core.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_TOP_LOGPROBS, RANGES
from pd.proxy.requests.common import (
    GrammarText,
    ObjectOrText,
    RequestFields,
    Rids,
    SamplingFields,
    Seed,
    sampling_field,
)
from pd.proxy.requests.fields import (
    MAX_OPTIONS,
    Bounds,
    Choices,
    Integer,
    PromptValue,
    Texts,
    TokenIds,
    TokenLists,
    describe_value,
    make_mismatch,
    split_prompts,
)
from pd.proxy.requests.known_fields import GENERATE, FieldPlace
from pd.proxy.requests.output_grammar import find_only_grammar

T = TypeVar("T")
ChoicesMethod = Literal["token_length_normalized", "greedy_token", "unconditional_likelihood"]

GENERATE_TOKENS = 128


class NativeSampling(SamplingFields):
    """Sampling parameters under SGLang's names."""

    place = FieldPlace((GENERATE,), "sampling_params")

    max_new_tokens: Integer | None = Field(
        None,
        description=f"Maximum number of tokens of an answer. Default: {GENERATE_TOKENS}, or "
        "the rest of the context. With 0, only the prompt is computed.",
        json_schema_extra={"minimum": 0, "maximum": RANGES["max_tokens"][1]},
    )
    min_new_tokens: Integer = sampling_field(
        "min_tokens",
        0,
        "Minimum number of tokens before an end of sequence, stop token or stop string.",
    )
    sampling_seed: Seed | None = Field(
        None,
        description="In float32 the same seed gives the same answer on any node and in any "
        "batch. By default, one is drawn per prompt.",
    )
    seed: Seed | None = Field(None, description="The same as `sampling_seed`.")
    no_stop_trim: bool = Field(
        False, description="Leaves the stop string or stop token that ended an answer in its text."
    )
    regex: GrammarText | None = Field(
        None, description="A regular expression for the whole answer."
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

    def make_arguments(self) -> dict[str, Any]:
        seed = self.seed if self.sampling_seed is None else self.sampling_seed
        own = {"seed": seed, "min_tokens": self.min_new_tokens, "grammar": self._grammar}
        return super().make_arguments() | own

    @model_validator(mode="after")
    def _has_one_seed(self) -> Self:
        if self.sampling_seed is not None and self.seed not in (None, self.sampling_seed):
            raise InvalidRequestError(
                "sampling_seed and seed differ; leave one of them out",
                param="seed",
            )
        return self

    @model_validator(mode="after")
    def _has_one_grammar(self) -> Self:
        self._grammar = find_only_grammar(
            regex=self.regex,
            json_schema=self.json_schema,
            ebnf=self.ebnf,
            structural_tag=self.structural_tag,
        )
        return self


# Tags of union members, hidden in an error's path; see pd.proxy.requests.request_model.
_ONE, _EACH = "<object>", "<list>"
# One value for all prompts or, in a batch, a list with a value per prompt.
_PerPrompt = Annotated[
    Annotated[T, Tag(_ONE)] | Annotated[list[T], Field(fail_fast=True), Tag(_EACH)],
    Discriminator(lambda value: _EACH if isinstance(value, list) else _ONE),
]
# The fields with such values in the order of PromptOptions, and the names of their types in errors.
_PER_PROMPT = {
    "sampling_params": ("an object", "objects"),
    "return_logprob": ("a boolean", "booleans"),
    "logprob_start_len": ("an integer", "integers"),
    "top_logprobs_num": ("an integer", "integers"),
}


class PromptOptions(NamedTuple):
    """Options of one prompt.

    Attributes:
        token_ids: tokens whose log probabilities are shown for each token.
    """

    sampling: NativeSampling
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids: tuple[int, ...]


class GenerateRequest(RequestFields):
    """A request in SGLang's native shape, for one prompt or a batch."""

    place = FieldPlace((GENERATE,))

    text: Texts | None = Field(
        None, description="A prompt, or a list of them. Exactly one of `text` and `input_ids`."
    )
    input_ids: TokenIds | None = Field(
        None, description="Token ids of a prompt, or a list of such lists."
    )
    add_special_tokens: bool = Field(
        True, description="Puts the tokenizer's special tokens, such as BOS, before a text."
    )
    rid: Rids | None = Field(
        None,
        description="Name of the request for `/abort_request`. By default, one is drawn. A "
        "batch may have a list with a name per prompt. The name of a running "
        "request of the same key is a 400.",
    )
    sampling_params: _PerPrompt[NativeSampling] = Field(
        {},
        validate_default=True,
        description="One object, or for a batch a list with one for each prompt.",
    )
    incremental: bool = Field(
        False, description="Events of a stream have only new output instead of all output so far."
    )
    return_logprob: _PerPrompt[bool] = Field(
        False,
        description="Adds log probabilities to `meta_info`. For a batch, this field and the "
        "next two may be lists with a value per prompt.",
    )
    logprob_start_len: _PerPrompt[Annotated[Integer, Bounds(-1, RANGES["max_tokens"][1])]] = Field(
        -1,
        description="First token of the prompt whose log probability is returned; -1 for none, or "
        "for all if `max_new_tokens` is 0. Needs `return_logprob`.",
    )
    top_logprobs_num: _PerPrompt[Annotated[Integer, Bounds(0, MAX_TOP_LOGPROBS)]] = Field(
        0, description="Number of likeliest tokens to show for each token. Needs `return_logprob`."
    )
    token_ids_logprob: TokenLists = Field(
        [],
        description="Token ids whose log probabilities are shown for each token, or for a batch a "
        "list of such lists. Needs `return_logprob`.",
        json_schema_extra={"maxItems": MAX_LOGPROB_TOKEN_IDS},
    )
    choices: Choices | None = Field(
        None,
        description="Options as texts or lists of token ids. The answer is the likeliest "
        "option after the prompt, and `meta_info.choices` has the scores of all "
        "options.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_OPTIONS},
    )
    choices_method: ChoicesMethod = Field(
        "token_length_normalized",
        description="How `choices` are compared. `token_length_normalized`: the mean log "
        "probability of an option's tokens. `greedy_token`: the log probability of "
        "the first token; among options with the same first token, that of the "
        "next, and so on. `unconditional_likelihood`: how much the prompt adds to "
        "the mean log probability.",
    )

    @property
    def source(self) -> Literal["text", "input_ids"]:
        """The name of the field with the prompts."""
        return "input_ids" if self.text is None else "text"

    @property
    def prompts(self) -> PromptValue:
        """The prompt or prompts, as texts or token ids."""
        prompts = self.input_ids if self.text is None else self.text
        assert prompts is not None
        return prompts

    def split_options(self, num_prompts: int) -> list[PromptOptions]:
        """Return the options of each prompt."""
        values = [getattr(self, name) for name in _PER_PROMPT]
        each = [v if isinstance(v, list) else [v] * num_prompts for v in values]
        given = self.token_ids_logprob
        shared = tuple(item for item in given if isinstance(item, int))
        named = [
            tuple(item) if isinstance(item, list) else shared
            for item in (given if given and not shared else [None] * num_prompts)
        ]
        return [PromptOptions(*options) for options in zip(*each, named, strict=True)]

    @field_validator(*_PER_PROMPT, mode="before")
    @classmethod
    def _one_for_each_prompt(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, list):
            return value
        given = info.data.get("text") or info.data.get("input_ids")
        prompts, is_batch = split_prompts(given) if given else ([], False)
        one, several = _PER_PROMPT[info.field_name or ""]
        if not is_batch:
            raise make_mismatch(one, value)
        if len(value) != len(prompts):
            raise make_mismatch(f"{one} or a list of {len(prompts)} {several}", value)
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
                f"{describe_value(self.rid)}",
                param="rid",
            )
        named = self.token_ids_logprob
        if named and isinstance(named[0], list) and not (is_batch and len(named) == len(prompts)):
            raise InvalidRequestError(
                f"token_ids_logprob must be a list of token ids, or for a batch a list of "
                f"{len(prompts)} such lists, not {describe_value(named)}",
                param="token_ids_logprob",
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
                "choices cannot be streamed, because they are scored all at once; set stream "
                "to false",
                param="stream",
            )
        if self.return_logprob:
            raise InvalidRequestError(
                "return_logprob cannot be combined with choices, which always come with log "
                "probabilities; leave it out",
                param="return_logprob",
            )
        sampling = self.sampling_params
        if sampling.n > 1:
            raise InvalidRequestError(
                f"choices have one answer, but n is {sampling.n}; leave it out", param="n"
            )
        if sampling.make_arguments()["grammar"] is not None:
            raise InvalidRequestError(
                "choices and a grammar cannot constrain the same output; leave one of them out",
                param="choices",
            )
        return self
