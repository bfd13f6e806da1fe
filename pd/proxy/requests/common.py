"""Fields that requests of several endpoints have in common."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, field_validator

from pd.core.config import MAX_STREAM_INTERVAL
from pd.core.grammar import MAX_GRAMMAR_BYTES
from pd.core.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_VALUE,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    SEED_LIMIT,
    sampler_seed,
)
from pd.proxy.fields import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    Bounds,
    Integer,
    Integers,
    LogitBias,
    StopStrings,
    are_all,
    mismatch,
)
from pd.proxy.request_model import RequestModel
from pd.proxy.stop_strings import StopSearch

T = TypeVar("T")

MAX_MODEL_CHARACTERS = 4096
MAX_RID_CHARACTERS = 256
MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1
MAX_TIMEOUT = 1e6
# Begins the namespaces that are no plain salt.
_PAIR_MARK = "\0"
RECOMMENDED = "Unless given, as the model's generation_config.json recommends."

# Fields of neighbouring systems.
UNSUPPORTED_SAMPLING: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "stop_regex": ([], ""),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "token_ids_logprob": ([],),
    "min_tokens_penalty": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "spaces_between_special_tokens": (True,),
    "lora_path": ("", [], [None]),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "return_prompt_text": (False,),
    "return_routed_experts": (False,),
}

GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]


def _check_object_or_text(value: object) -> object:
    if not isinstance(value, (str, dict)):
        raise mismatch("an object or its text", value)
    return value


ObjectOrText = Annotated[
    str | dict[str, object],
    PlainValidator(_check_object_or_text, json_schema_input_type=str | dict[str, object]),
]


def sampled(parameter: str, default: T, description: str) -> T:
    """A field that becomes this parameter of SamplingParams, which checks its range."""
    low, high = RANGES[parameter]
    extra: dict[str, Any] = {"minimum": low, "maximum": high}
    field: T = Field(default, description=description, json_schema_extra=extra)
    return field


class SamplingFields(RequestModel):
    """Sampling parameters that all endpoints name alike."""

    unsupported = UNSUPPORTED_SAMPLING

    temperature: float = sampled(
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
    min_p: float = sampled(
        "min_p",
        0.0,
        "Samples from tokens with at least this fraction of the likeliest token's probability. "
        + RECOMMENDED,
    )
    presence_penalty: float = sampled(
        "presence_penalty", 0.0, "Subtracted from the logits of tokens that the answer has."
    )
    frequency_penalty: float = sampled(
        "frequency_penalty",
        0.0,
        "Subtracted from the logits of tokens for each time that the answer has them.",
    )
    repetition_penalty: float = sampled(
        "repetition_penalty",
        1.0,
        "Divides positive logits of tokens that prompt or answer have, and multiplies negative "
        f"ones. {RECOMMENDED}",
    )
    n: Integer = sampled("n", 1, "Answers to each prompt, which is computed and transferred once.")
    logit_bias: LogitBias = Field(
        {},
        description="Token ids and what is added to their logits, "
        f"-{MAX_LOGIT_BIAS_VALUE:g} to {MAX_LOGIT_BIAS_VALUE:g}.",
        json_schema_extra={"maxProperties": MAX_LOGIT_BIAS},
    )
    stop: StopStrings = Field(
        (),
        description=f"A string that ends an answer, or up to {MAX_STOP_STRINGS} of them with "
        f"{MAX_STOP_CHARACTERS} characters in all; no part of the answer.",
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

    @cached_property
    def stop_search(self) -> StopSearch:
        """The search for ``stop`` in all answers to the request."""
        return StopSearch(self.stop)

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
    extra_key: Annotated[str, Field(max_length=MAX_RID_CHARACTERS)] = Field(
        "",
        description="Prefixes are shared only among requests with the same key, too, if it goes "
        "with the same `cache_salt`.",
    )
    timeout: Annotated[float, Bounds(0.0, MAX_TIMEOUT, above=True)] | None = Field(
        None, description="Seconds until 408; unless given, `--request-timeout` of the proxy."
    )

    @property
    def namespace(self) -> str:
        """Name of the prefixes that the request may share: the salt itself where there is nothing
        else, as :mod:`pd.node.kv_events` publishes it. No two pairs of salt and key have one."""
        salt = self.cache_salt
        if not self.extra_key and not salt.startswith(_PAIR_MARK):
            return salt
        return f"{_PAIR_MARK}{len(salt)}:{salt}{self.extra_key}"
