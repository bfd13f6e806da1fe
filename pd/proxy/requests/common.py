"""Fields that several endpoints share."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, field_validator, model_validator

from pd.core.config import MAX_MODEL_CHARACTERS, MAX_STREAM_INTERVAL
from pd.core.errors import InvalidRequestError
from pd.core.grammar import MAX_GRAMMAR_BYTES
from pd.core.messages import MAX_PREFIX_LEASE
from pd.core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_VALUE,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    SEED_LIMIT,
    sampler_seed,
)
from pd.proxy.requests.fields import (
    MAX_BAD_WORDS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    AllowedTokens,
    BadWords,
    Bounds,
    Integer,
    Integers,
    LogitBias,
    StopPatterns,
    StopStrings,
    are_all,
    make_mismatch,
)
from pd.proxy.requests.request_model import RequestModel
from pd.proxy.text.stop_patterns import MAX_PATTERN_CHARACTERS, StopPatternSearch
from pd.proxy.text.stop_strings import StopSearch

T = TypeVar("T")

MAX_RID_CHARACTERS = 256
MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1
MAX_TIMEOUT = 1e6
# Begins a namespace made from a salt and a key. Other namespaces are plain salts.
_PAIR_MARK = "\0"
RECOMMENDED = "By default as the model's generation_config.json recommends."

GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]


def _check_object_or_text(value: object) -> object:
    if not isinstance(value, (str, dict)):
        raise make_mismatch("an object or its text", value)
    return value


ObjectOrText = Annotated[
    str | dict[str, object],
    PlainValidator(_check_object_or_text, json_schema_input_type=str | dict[str, object]),
]


def sampling_field(parameter: str, default: T, description: str) -> T:
    """Make the field of a parameter of SamplingParams, which checks the range."""
    low, high = RANGES[parameter]
    extra: dict[str, Any] = {"minimum": low, "maximum": high}
    field: T = Field(default, description=description, json_schema_extra=extra)
    return field


class SamplingFields(RequestModel):
    """Sampling parameters with the same names at all endpoints."""

    temperature: float = sampling_field(
        "temperature", 1.0, f"0 is greedy, more is more random. {RECOMMENDED}"
    )
    top_p: float = Field(
        1.0,
        description="Samples from the smallest set of likeliest tokens with at least this mass. "
        + RECOMMENDED,
        json_schema_extra={"exclusiveMinimum": 0.0, "maximum": 1.0},
    )
    top_k: Integer = Field(
        0,
        description=f"Samples from the k likeliest tokens; 0 or -1: from all. {RECOMMENDED}",
        json_schema_extra={"minimum": -1, "maximum": RANGES["top_k"][1]},
    )
    min_p: float = sampling_field(
        "min_p",
        0.0,
        "Samples from tokens with at least this fraction of the likeliest token's probability. "
        + RECOMMENDED,
    )
    presence_penalty: float = sampling_field(
        "presence_penalty", 0.0, "Subtracted from the logits of tokens in the answer."
    )
    frequency_penalty: float = sampling_field(
        "frequency_penalty",
        0.0,
        "Subtracted from the logits of tokens for each occurrence in the answer.",
    )
    repetition_penalty: float = sampling_field(
        "repetition_penalty",
        1.0,
        "Divides positive logits of tokens that prompt or answer have, and multiplies negative "
        f"ones. {RECOMMENDED}",
    )
    n: Integer = sampling_field(
        "n", 1, "Number of answers per prompt. The prompt is computed and transferred once."
    )
    logit_bias: LogitBias = Field(
        {},
        description=f"Maps token ids to biases of their logits, from -{MAX_LOGIT_BIAS_VALUE:g} "
        f"to {MAX_LOGIT_BIAS_VALUE:g}.",
        json_schema_extra={"maxProperties": MAX_LOGIT_BIAS},
    )
    allowed_token_ids: AllowedTokens = Field(
        [],
        description="Only these tokens may be drawn. Without the model's end-of-sequence token, "
        "only `max_tokens` ends an answer.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS},
    )
    bad_words: BadWords = Field(
        (),
        description=f"Up to {MAX_BAD_WORDS} texts that the answer may not contain as these tokens, "
        "with or without a space before them.",
        json_schema_extra={"maxItems": MAX_BAD_WORDS},
    )
    stop: StopStrings = Field(
        (),
        description=f"A string that ends an answer, or up to {MAX_STOP_STRINGS} of them with "
        f"{MAX_STOP_CHARACTERS} characters in total. The answer does not include "
        "it.",
    )
    stop_regex: StopPatterns = Field(
        (),
        description="A regular expression that ends an answer as soon as it matches, or a list of "
        f"them with {MAX_PATTERN_CHARACTERS} characters in total. The answer does not include the "
        "match. Lookarounds, back references and anchors are refused, except for a `$` at the end.",
    )
    stop_token_ids: Integers = Field(
        [],
        description="Tokens that end an answer, in addition to the model's own.",
        json_schema_extra={"maxItems": MAX_STOP_TOKEN_IDS},
    )
    ignore_eos: bool = Field(
        False, description="Continues after the model's own end-of-sequence tokens."
    )
    skip_special_tokens: bool = Field(True, description="Leaves special tokens out of the text.")
    stream_interval: Annotated[Integer, Bounds(1, MAX_STREAM_INTERVAL)] | None = Field(
        None,
        description="Minimum number of tokens per event of a stream, except for the first and "
        "the last event. Default: `--stream-interval` of the proxy.",
    )

    def make_arguments(self) -> dict[str, Any]:
        """Return the client's choices as keyword arguments of SamplingParams."""
        return {name: getattr(self, name) for name in _ARGUMENTS & self.model_fields_set}

    @cached_property
    def stop_search(self) -> StopSearch | StopPatternSearch:
        """The search for ``stop`` and ``stop_regex``, shared by all answers to the request.

        Raises InvalidRequestError if a pattern cannot be searched.
        """
        if not self.stop_regex:
            return StopSearch(self.stop)
        return StopPatternSearch(self.stop_regex, self.stop, answers=self.n)

    @field_validator("top_k")
    @classmethod
    def _all_of_vllm(cls, value: int) -> int:
        return 0 if value == -1 else value


_ARGUMENTS = SamplingFields.model_fields.keys() - {
    "bad_words",
    "stop",
    "stop_regex",
    "skip_special_tokens",
    "stream_interval",
}


def _check_rids(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or (names and not are_all(str, names)):
        raise make_mismatch("a string, or for a batch a list of strings", value)
    for rid in names:
        if not 0 < len(rid) <= MAX_RID_CHARACTERS:
            raise make_mismatch(f"1 to {MAX_RID_CHARACTERS} characters", rid)
    return value


ModelName = Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)]
_WITHOUT_EFFECT = "for the client's own use, without effect"
_LABEL = f"A label {_WITHOUT_EFFECT}"
Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARACTERS)]
Rids = Annotated[
    str | list[str], PlainValidator(_check_rids, json_schema_input_type=Rid | list[Rid])
]
Seed = Annotated[Integer, Bounds(-SEED_LIMIT, SEED_LIMIT - 1), AfterValidator(sampler_seed)]


class RequestFields(RequestModel):
    """Fields of all requests that generate."""

    model: ModelName | None = Field(
        None, description="Name of a served model, see `GET /v1/models`. An unknown name is a 404."
    )
    stream: bool = Field(
        False, description="Answers with server-sent events that end with `data: [DONE]`."
    )
    request_id: Rid | None = Field(None, description="The same as `rid`.")
    priority: Annotated[Integer, Bounds(MIN_PRIORITY, MAX_PRIORITY)] = Field(
        0,
        description="Takes effect on nodes with `--schedule-policy priority` or "
        "`--eviction-policy priority`.",
    )
    cache_salt: Annotated[str, Field(max_length=MAX_RID_CHARACTERS)] = Field(
        "", description="Prefixes are shared only among requests with the same salt."
    )
    extra_key: Annotated[str, Field(max_length=MAX_RID_CHARACTERS)] = Field(
        "",
        description="Prefixes are shared only among requests with the same key and the same "
        "`cache_salt`.",
    )
    prefix_lease: Annotated[float, Bounds(0.0, MAX_PREFIX_LEASE)] = Field(
        0.0,
        description="Seconds for which the prompt should stay in the prefix cache, for a program "
        "that will soon send a prompt that begins like it. A hint: it is dropped under pressure, "
        "beyond a key's share of the cache, and when the request is aborted.",
    )
    timeout: Annotated[float, Bounds(0.0, MAX_TIMEOUT, above=True)] | None = Field(
        None,
        description="Seconds until the request fails with 408. Default: "
        "`--request-timeout` of the proxy.",
    )

    user: str | None = Field(None, description=f"{_LABEL}: the user.")
    safety_identifier: str | None = Field(None, description=f"{_LABEL}: the user.")
    store: bool | None = Field(None, description=f"{_LABEL}: answers are never stored.")
    session_id: str | None = Field(None, description=f"{_LABEL}: the chat or agent.")
    prompt_cache_key: str | None = Field(
        None, description=f"{_LABEL}: shared prefixes are found without it."
    )
    metadata: dict[str, object] | None = Field(None, description=f"Labels {_WITHOUT_EFFECT}.")

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        rid = getattr(self, "rid", None)
        if rid is not None and self.request_id not in (None, rid):
            raise InvalidRequestError(
                "rid and request_id differ; send only one of them",
                param="request_id",
            )
        return self

    @property
    def namespace(self) -> str:
        """Scope in which the request shares prefixes. It is unique for each pair of salt and key.

        Without a key it is the plain salt, because :mod:`pd.node.kv_events` publishes it.
        """
        salt = self.cache_salt
        if not self.extra_key and not salt.startswith(_PAIR_MARK):
            return salt
        return f"{_PAIR_MARK}{len(salt)}:{salt}{self.extra_key}"
