"""Sampling parameters of the requests of a workload."""

from __future__ import annotations

import json
from typing import Any, Literal

from pd.core.grammar import Grammar
from pd.core.sampling_params import SamplingParams

Sampling = Literal["greedy", "sampled", "filters", "penalties", "schema", "schema-bounded"]

_TOP_K, _TOP_P = 50, 0.95
# Kinds of values, which the properties of the schema have in turn.
_VALUES: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4},
    {"enum": ["small", "medium", "large"]},
    {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
)
_PROPERTIES = 25
# Kinds of values of the schema with bounds.
_BOUNDED_VALUES: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 20},
    {"type": "string", "minLength": 5, "maxLength": 100},
    {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 12},
        "minItems": 1,
        "maxItems": 6,
    },
    {"enum": ["small", "medium", "large"]},
    {"type": "string", "minLength": 10, "maxLength": 50},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}},
        "required": ["name"],
    },
)
_BOUNDED_ITEMS = 40


def schema() -> Grammar:
    """A JSON schema of 25 required properties, so that an output is longer than a measurement."""
    properties = {f"field_{i}": _VALUES[i % len(_VALUES)] for i in range(_PROPERTIES)}
    return Grammar("json_schema", json.dumps(_object(properties)))


def bounded_schema() -> Grammar:
    """A JSON schema of 40 objects whose strings have a minimum or maximum length, so that an output
    is longer than a measurement."""
    item = _object({f"field_{i}": value for i, value in enumerate(_BOUNDED_VALUES)})
    number = {"minItems": _BOUNDED_ITEMS, "maxItems": _BOUNDED_ITEMS}
    return Grammar("json_schema", json.dumps({"type": "array", "items": item, **number}))


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with all of some properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def sampling_params(sampling: Sampling, index: int, max_tokens: int) -> SamplingParams:
    """Parameters of the request at ``index`` of a batch.

    ``greedy`` and ``penalties`` draw nothing at random; only request 0 of ``penalties`` has any.
    The rest is drawn at temperature 1: ``filters`` with top-k and top-p, ``schema`` and
    ``schema-bounded`` from what a JSON schema allows.
    """
    common: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "seed": index}
    if sampling == "greedy":
        return SamplingParams(**common, temperature=0.0)
    if sampling == "penalties":
        some: dict[str, Any] = {}
        if index == 0:
            some = {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
        return SamplingParams(**common, temperature=0.0, **some)
    if sampling == "filters":
        return SamplingParams(**common, top_k=_TOP_K, top_p=_TOP_P)
    if sampling == "schema":
        return SamplingParams(**common, grammar=schema())
    if sampling == "schema-bounded":
        return SamplingParams(**common, grammar=bounded_schema())
    return SamplingParams(**common)
