"""Drops keywords of a JSON schema that :mod:`pd.structured.schema_check` refuses.

Clients ask for this with ``strict: false``.
"""

from __future__ import annotations

import json
from typing import Any

from pd.structured.schema_check import (
    MAX_STEPS,
    WHOLE,
    Fault,
    find_fault,
    is_forbidden_name,
    is_writable,
)
from pd.structured.schema_shapes import check_shapes
from pd.structured.schema_walk import (
    OF_TYPES,
    choose_bound_limit,
    gather_references,
    is_number,
    resolve_reference,
    walk_schemas,
)


def drop_unenforced(schema: Any) -> Any:
    """Copy a schema without refused keywords.

    Raises:
        ValueError: a keyword has a value of a wrong type.
        RecursionError: the schema is nested too deeply.
    """
    check_shapes(schema)
    copy = json.loads(json.dumps(schema))
    if not isinstance(copy, dict):
        return True
    _move_targets(copy)
    for place, part in walk_schemas(copy):
        if not isinstance(part, dict):
            continue
        if place.depth > MAX_STEPS - 2:  # schemas inside it are up to two steps deeper
            part.clear()
        _drop_far_bounds(part)
        _drop_false(part)
        while (fault := find_fault(copy, part, place)) is not None:
            _repair_fault(part, fault)
    return copy


def _move_targets(root: dict[str, Any]) -> None:
    """Drop references without a usable target. Move the other targets to ``$defs``, where we drop
    nothing."""
    for _, part in walk_schemas(root):
        if isinstance(part, dict) and "$ref" in part:
            target = resolve_reference(root, part["$ref"])
            if target is None or target is False:
                del part["$ref"]
    definitions = gather_references(root)
    for keyword in ("$defs", "definitions"):
        root.pop(keyword, None)
    if definitions:
        root["$defs"] = definitions


def _drop_far_bounds(part: dict[str, Any]) -> None:
    """Drop bounds too large for xgrammar's exact comparison.

    We do not narrow them as in a strict schema, because that would forbid unsigned 64-bit numbers.
    """
    limit = choose_bound_limit(part.get("type"))
    for keyword in OF_TYPES["number"]:
        if is_number(part.get(keyword)) and abs(part[keyword]) > limit:
            del part[keyword]


def _drop_false(part: dict[str, Any]) -> None:
    """Drop ``false`` schemas that leave nothing to write."""
    if part.get("propertyNames") is False:
        del part["propertyNames"]
    if False in part.get("patternProperties", {}).values():
        _drop_patterns(part)
    if "prefixItems" in part:
        part["prefixItems"] = [True if each is False else each for each in part["prefixItems"]]


def _drop_patterns(part: dict[str, Any]) -> None:
    """Drop patterns of names, and the ``false`` that would then forbid all names."""
    del part["patternProperties"]
    if not part.get("properties") and part.get("additionalProperties") is False:
        del part["additionalProperties"]


def _repair_fault(part: dict[str, Any], fault: Fault) -> None:
    """Remove a fault from a schema and keep as much as possible."""
    keyword = fault.keyword
    value = part[keyword]
    kept: Any = None
    if keyword == "required" and isinstance(value, list):
        kept = [name for name in value if not is_forbidden_name(part, name)]
    elif keyword == "enum":
        kept = [each for each in value if is_writable(each)]
    if kept and len(kept) < len(value):
        part[keyword] = kept
    elif keyword == "patternProperties":
        _drop_patterns(part)
    elif _are_alternatives(part, keyword):
        part["anyOf"] = part.pop("oneOf")
    else:
        del part[keyword]


def _are_alternatives(part: dict[str, Any], keyword: str) -> bool:
    """Return whether the faulty keyword is a ``oneOf`` with a schema other than ``false``."""
    first = next((name for name in WHOLE if name in part), None)
    return keyword == first == "oneOf" and any(each is not False for each in part["oneOf"])
