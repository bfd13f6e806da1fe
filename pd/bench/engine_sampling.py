"""Sampling parameters for the requests of a workload."""

from __future__ import annotations

import json
from typing import Any, Literal

from pd.core.grammar import Grammar
from pd.core.sampling_params import SamplingParams

Sampling = Literal["greedy", "sampled", "filters", "penalties", "schema", "schema-bounded"]

_TOP_K, _TOP_P = 50, 0.95
# Kinds of values, which the schema's properties use in turn.
_VALUES: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4},
    {"enum": ["small", "medium", "large"]},
    {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
)
_PROPERTIES = 25
# Kinds of values of the schema with bounded lengths.
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


def make_schema() -> Grammar:
    """Make a JSON schema of 25 required properties, so outputs outlast a measurement."""
    properties = {f"field_{i}": _VALUES[i % len(_VALUES)] for i in range(_PROPERTIES)}
    return Grammar("json_schema", json.dumps(_object_schema(properties)))


def make_bounded_schema() -> Grammar:
    """Make a JSON schema of 40 objects with bounded strings, so outputs outlast a measurement."""
    item = _object_schema({f"field_{i}": value for i, value in enumerate(_BOUNDED_VALUES)})
    number = {"minItems": _BOUNDED_ITEMS, "maxItems": _BOUNDED_ITEMS}
    return Grammar("json_schema", json.dumps({"type": "array", "items": item, **number}))


def _object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """Require all of the properties and forbid others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def sampling_params(sampling: Sampling, index: int, max_tokens: int) -> SamplingParams:
    """Return the parameters of request ``index`` of a batch.

    ``greedy`` and ``penalties`` sample greedily; only request 0 of ``penalties`` has penalties. The
    others sample at temperature 1: ``filters`` with top-k and top-p, ``schema`` and
    ``schema-bounded`` under a JSON schema.
    """
    common: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "seed": index}
    if sampling == "greedy":
        return SamplingParams(**common, temperature=0.0)
    if sampling == "penalties":
        has_penalties = index == 0
        some: dict[str, Any] = {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
        return SamplingParams(**common, temperature=0.0, **(some if has_penalties else {}))
    if sampling == "filters":
        return SamplingParams(**common, top_k=_TOP_K, top_p=_TOP_P)
    if sampling == "schema":
        return SamplingParams(**common, grammar=make_schema())
    if sampling == "schema-bounded":
        return SamplingParams(**common, grammar=make_bounded_schema())
    return SamplingParams(**common)
