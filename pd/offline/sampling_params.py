"""Sampling parameters in vLLM's shape. The proxy checks their values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import BaseModel


def refuse_arguments(
    owner: str, given: Mapping[str, object], neutral: Mapping[str, object]
) -> None:
    """Raise UsageError for an argument that asks for something unsupported.

    Args:
        owner: whose arguments they are.
        neutral: for each unsupported argument the value that asks for nothing. None always does.
    """
    for name, value in given.items():
        if value is None or (name in neutral and value == neutral[name]):
            continue
        if name not in neutral:
            raise UsageError(f"{owner}: unsupported argument {name}={value!r}; leave it out")
        raise UsageError(
            f"{owner}: {name}={value!r} is not supported; leave it out or give {neutral[name]!r}"
        )


@dataclass
class StructuredOutputsParams:
    """A constraint of the answer. Exactly one of the first six is given.

    Attributes:
        json: a JSON schema as an object, its text, or a pydantic model.
        regex: a regular expression for the whole answer.
        choice: the answer is one of these texts.
        grammar: a grammar in GBNF whose rule ``root`` is the answer.
        json_object: any JSON object.
        structural_tag: parts of the answer that follow a schema, in xgrammar's form.
    """

    json: str | dict[str, Any] | type[BaseModel] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = vars(self)
        refused = {name: given[name] for name in _UNSUPPORTED_CONSTRAINTS}
        refuse_arguments(type(self).__name__, refused, _UNSUPPORTED_CONSTRAINTS)
        if len(self.to_json()) != 1:
            names = ", ".join(self.to_json()) or "none"
            raise UsageError(
                f"StructuredOutputsParams: {names} given; give exactly one of json, regex, choice, "
                "grammar, json_object and structural_tag"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the field ``structured_outputs`` of a request."""
        schema = self.json
        if isinstance(schema, type):
            schema = schema.model_json_schema()
        fields = {
            "json": schema,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
            "structural_tag": self.structural_tag,
        }
        return {name: value for name, value in fields.items() if value is not None}


_UNSUPPORTED_CONSTRAINTS = {
    "disable_fallback": False,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
}


@dataclass
class SamplingParams:
    """How to sample the answers to a prompt. Names and defaults are vLLM's.

    Arguments that pd does not support are refused by name unless they ask for nothing.

    Attributes:
        n: number of answers per prompt.
        temperature: 0 is greedy.
        max_tokens: limit of an answer; None for the rest of the context.
        stop: a string that ends an answer, or several.
        seed: the same seed gives the same answer in float32. Without one, the LLM's seed decides.
        logprobs: adds log probabilities, with this many likeliest tokens at each position.
        prompt_logprobs: the same for the prompt's tokens.
        bad_words: texts that the answer may not contain.
        allowed_token_ids: only these tokens may be drawn.
        truncate_prompt_tokens: keep so many tokens at the end of a prompt; -1 for as many as fit.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    # Refused unless they ask for nothing.
    best_of: int | None = None
    logits_processors: Sequence[object] | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    extra_args: Mapping[str, object] | None = None
    thinking_token_budget: int | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        given = vars(self)
        refused = {name: given[name] for name in _UNSUPPORTED_SAMPLING}
        refuse_arguments(type(self).__name__, refused, _UNSUPPORTED_SAMPLING)
        structured = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            raise UsageError(
                f"SamplingParams: structured_outputs={structured!r}; give a "
                "StructuredOutputsParams(…)"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if given[name] == -1:
                raise UsageError(
                    f"SamplingParams: {name}=-1 (the whole vocabulary) is not supported; give the "
                    "number of likeliest tokens"
                )

    def clone(self) -> SamplingParams:
        """Return a copy."""
        return dataclasses.replace(self)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a request that both of OpenAI's endpoints share."""
        body = {name: getattr(self, name) for name in _SAME_AT_THE_PROXY}
        if self.stop is not None:
            body["stop"] = self.stop if isinstance(self.stop, str) else list(self.stop)
        for name in ("stop_token_ids", "bad_words", "allowed_token_ids"):
            if getattr(self, name) is not None:
                body[name] = list(getattr(self, name))
        if self.logit_bias is not None:
            body["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if self.structured_outputs is not None:
            body["structured_outputs"] = self.structured_outputs.to_json()
        return {name: value for name, value in body.items() if value is not None}


_SAME_AT_THE_PROXY = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
)
_UNSUPPORTED_SAMPLING = {
    "best_of": 1,
    "logits_processors": [],
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "extra_args": {},
    "thinking_token_budget": None,
    "skip_reading_prefix_cache": False,
}
