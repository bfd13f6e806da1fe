"""Sampling parameters as the two APIs name them."""

from __future__ import annotations

import secrets
from typing import Any

from pd.core.errors import InvalidRequestError
from pd.core.sampling_params import SEED_LIMIT, SamplingParams
from pd.proxy.fields import Fields, show

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1
MAX_TIMEOUT = 1e6

# Fields of neighbouring systems that would change the result, with the values that ask for nothing.
UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "regex": (),
    "json_schema": (),
    "ebnf": (),
    "structural_tag": (),
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


def read_common(fields: Fields) -> dict[str, Any]:
    """Keyword arguments of SamplingParams that both APIs name alike; absent ones are left out."""
    fields.refuse(UNSUPPORTED_SAMPLING)
    read: dict[str, Any] = {
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "top_k": fields.integer("top_k"),
        "min_p": fields.number("min_p"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "n": fields.integer("n"),
        "logit_bias": _logit_bias(fields),
        "stop_token_ids": tuple(fields.integers("stop_token_ids")),
        "ignore_eos": fields.boolean("ignore_eos"),
    }
    if read["top_k"] == -1:  # how vLLM and SGLang say "all"
        read["top_k"] = 0
    return {name: value for name, value in read.items() if value is not None}


def read_seed(fields: Fields, name: str) -> int | None:
    """The client's seed; None has :func:`make_params` draw one for each prompt."""
    seed = fields.integer(name)
    if seed is not None and not 0 <= seed < SEED_LIMIT:
        raise fields.wrong(name, "between 0 and 2**63 - 1")
    return seed


def read_stop(fields: Fields) -> tuple[str, ...]:
    """Stop strings: one, or a list of them."""
    stops = fields.strings("stop")
    if len(stops) > MAX_STOP_STRINGS:
        raise fields.wrong("stop", f"at most {MAX_STOP_STRINGS} strings")
    if any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise fields.wrong("stop", f"strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def read_priority(fields: Fields) -> int:
    priority = fields.integer("priority") or 0
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise fields.wrong("priority", f"between {MIN_PRIORITY} and {MAX_PRIORITY}")
    return priority


def read_timeout(fields: Fields) -> float | None:
    """Seconds the client is willing to wait."""
    timeout = fields.number("timeout")
    if timeout is not None and not 0 < timeout <= MAX_TIMEOUT:
        raise fields.wrong("timeout", f"seconds, above 0 and at most {MAX_TIMEOUT:g}")
    return timeout


def make_params(kwargs: dict[str, Any], vocab_size: int | None) -> SamplingParams:
    """Build and validate, with a seed drawn if there is none. Raises InvalidRequestError."""
    if kwargs.get("seed") is None:
        kwargs = kwargs | {"seed": secrets.randbelow(SEED_LIMIT)}
    params = SamplingParams(**kwargs)
    params.validate(vocab_size)
    return params


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    biases = fields.mapping("logit_bias")
    if biases is None:
        return None
    result = {}
    for key in biases.data:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers, but has the key {show(key)}",
                param="logit_bias",
            )
        bias = biases.number(key)
        if bias is None:
            raise biases.wrong(key, "a number")
        result[int(key)] = bias
    return result
