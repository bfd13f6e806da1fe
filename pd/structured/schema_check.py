"""Refuses keywords of JSON schemas that xgrammar ignores, and names them.

We rewrite schemas for xgrammar 0.2.8 (:mod:`pd.structured.schema_rewriting`) and measured which
keywords it then enforces. ``tests/structured/test_json_schemas.py`` measures again: it tries
instances that each keyword forbids. All keywords unknown to this module are annotations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pd.core.brief import short_repr
from pd.structured.pattern_check import find_unenforced_in_pattern
from pd.structured.pattern_parts import MAX_NUMBER
from pd.structured.schema_shapes import check_shapes
from pd.structured.schema_walk import (
    LOWER_BOUNDS,
    OF_TYPES,
    PATTERN_OF_TAG,
    SCHEMA_OF_TAG,
    TYPES,
    Place,
    choose_bound_limit,
    is_number,
    list_allowed_values,
    resolve_reference,
    walk_schemas,
    walk_tag_patterns,
    walk_tag_schemas,
)

# Steps from the root to a schema. A property takes two steps.
MAX_STEPS = 128
# Longest chain of references, and number of required properties examined to distinguish
# objects.
_MAX_REFERENCES, _MAX_DISCRIMINATORS = 8, 16
# Number of schemas examined for null, and longest detected loop of references.
_MAX_NULLABLE, _MAX_LOOP = 16, 8
# Characters of a schema's place in messages.
_MAX_PLACE = 200
_NOT_ENFORCED = (
    "not",
    "if",
    "then",
    "else",
    "multipleOf",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
    "contentSchema",
    # Earlier drafts of JSON Schema have these.
    "additionalItems",
    "divisibleBy",
    "disallow",
    "extends",
)
_FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
) | {"json-pointer"}
# Keywords under which a ``false`` schema only forbids more. If a keyword may have some ``false``
# schemas but not only such, we check that with the schema that has the keyword.
_MAY_BE_FALSE = frozenset(
    ("additionalProperties", "items", "properties", "anyOf", "oneOf", "$defs", "definitions")
)
# Keywords that xgrammar reads in a schema for names of properties.
_OF_NAMES = ("type", "minLength", "maxLength", "pattern", "enum")
# xgrammar does not write larger whole numbers exactly.
_MAX_VALUE = (1 << 63) - 1
# Fields of structural tags that loosen a schema: required properties may be missing, and strings
# with a length or pattern may contain excluded text.
_LOOSER = ("any_order", "excludes")
# If a schema has one of these keywords, xgrammar ignores all its other keywords.
WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_CONSTRAINTS = frozenset(
    ("type", *_NOT_ENFORCED, *WHOLE, *(name for names in OF_TYPES.values() for name in names))
)
_LEAST_COUNTS = ("minLength", "minItems", "minProperties")
# Keywords with a non-empty value, because then nothing would be left to write.
_NOT_EMPTY = ("type", "enum", "anyOf", "oneOf", "allOf")
_DIALECTS = ("http://json-schema.org/", "https://json-schema.org/")


class Fault(NamedTuple):
    """An unenforceable keyword.

    Attributes:
        keyword: remove it, or a part of its value, to remove the fault.
        reason: description for messages.
    """

    keyword: str
    reason: str


def find_unenforced(schema: object, where: str = "") -> str | None:
    """Describe the first unenforceable part of a schema, or return None.

    Args:
        where: place of the schema inside something larger, for the description.

    Raises:
        ValueError: a keyword has a value of a wrong type.
    """
    check_shapes(schema)
    for place, part in walk_schemas(schema):
        if place.depth > MAX_STEPS:
            return f"a schema more than {MAX_STEPS} steps from the root"
        reason = None
        if isinstance(part, dict):
            fault = find_fault(schema, part, place)
            reason = None if fault is None else fault.reason
        elif not part and not _may_be_false(place):
            reason = "the schema 'false' (allows nothing)"
        if reason is not None:
            return f"{reason} {_describe_place(where, str(place))}"
    return None


def find_unenforced_in_tag(structural_tag: object) -> str | None:
    """Describe the first unenforceable part of a structural tag's schemas and regular expressions,
    or return None."""
    for place, part in walk_tag_schemas(structural_tag):
        if part.get("type") != "json_schema":
            where = _describe_place(str(place))
            return f"a schema in a format of the type {short_repr(part.get('type'))} {where}"
        if part.get("style", "json") != "json":
            # Strings would have another syntax, and we rewrite schemas only for JSON's.
            return (
                f"the style {short_repr(part['style'])} of a schema {_describe_place(str(place))}"
            )
        for field in _LOOSER:
            if part.get(field):
                return f"the field {field!r} of a schema {_describe_place(str(place))}"
        reason = find_unenforced(part[SCHEMA_OF_TAG], f"{place}/{SCHEMA_OF_TAG}")
        if reason is not None:
            return reason
    for place, part in walk_tag_patterns(structural_tag):
        reason = find_unenforced_in_pattern(part[PATTERN_OF_TAG], in_json=False)
        if reason is not None:
            return f"{reason} {_describe_place(str(place))}"
    return None


def _describe_place(*steps: str) -> str:
    return f"(at {'/'.join(filter(None, steps))[:_MAX_PLACE] or 'the root'})"


def _may_be_false(place: Place) -> bool:
    """Return whether a ``false`` schema at this place leaves something to write."""
    return place.depth > 0 and place.steps[0] in _MAY_BE_FALSE


def find_fault(root: object, part: dict[str, Any], place: Place) -> Fault | None:
    """Find an unenforceable keyword of one schema, without the schemas inside it."""
    for keyword in _NOT_ENFORCED:
        # `unevaluatedItems: false` and the like forbid others, and we always do.
        if keyword in part and not (keyword.startswith("unevaluated") and part[keyword] is False):
            return Fault(keyword, f"the keyword {keyword!r}")
    if "$id" in part and place.depth:
        return Fault("$id", "the keyword '$id' inside a schema")
    if not str(part.get("$schema", _DIALECTS[0])).startswith(_DIALECTS):
        return Fault("$schema", f"the dialect {short_repr(part['$schema'])}")
    for keyword in _NOT_EMPTY:
        if part.get(keyword) == []:
            return Fault(keyword, f"an empty {keyword!r} (allows nothing)")
    for keyword in WHOLE:
        if keyword in part:
            return _find_fault_of_whole(root, part, keyword)
    return (
        _find_fault_of_types(part)
        or _find_fault_of_numbers(part)
        or _find_fault_of_counts(part)
        or _find_fault_of_names(part)
        or _find_fault_of_objects(part)
        or _find_fault_of_strings(part)  # last, because long patterns take longest
    )


def _find_fault_of_types(part: dict[str, Any]) -> Fault | None:
    if "type" not in part:
        # A format is always about strings, so its schema should have this type.
        if "format" in part:
            return Fault("format", "the keyword 'format' without the type 'string'")
        return None
    kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in TYPES:
            return Fault("type", f"the type {short_repr(kind)}")
    for kind, keywords in OF_TYPES.items():
        present = [keyword for keyword in keywords if keyword in part]
        if present and kind not in kinds and not (kind == "number" and "integer" in kinds):
            return Fault(present[0], f"the keyword {present[0]!r} without the type {kind!r}")
    return None


def _find_fault_of_strings(part: dict[str, Any]) -> Fault | None:
    for keyword in ("patternProperties", "pattern"):
        patterns = part.get(keyword, ())
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            reason = find_unenforced_in_pattern(pattern)
            if reason is not None:
                return Fault(keyword, reason)
    if "format" in part and part["format"] not in _FORMATS:
        return Fault("format", f"the format {short_repr(part['format'])}")
    if "pattern" in part and "format" in part:
        return Fault("format", "the keyword 'pattern' together with 'format'")
    for keyword in ("pattern", "format"):
        for length in ("minLength", "maxLength"):
            if keyword in part and length in part:
                return Fault(length, f"the keyword {keyword!r} together with {length!r}")
    return None


def _find_fault_of_numbers(part: dict[str, Any]) -> Fault | None:
    limit = choose_bound_limit(part.get("type"))
    for keyword in OF_TYPES["number"]:
        bound = part.get(keyword, 0)
        # We narrow bounds beyond the limit on the other side to it.
        if not is_number(bound) or (bound > limit if keyword in LOWER_BOUNDS else bound < -limit):
            return Fault(keyword, f"{keyword!r} of {short_repr(bound)}")
    return None


def _find_fault_of_counts(part: dict[str, Any]) -> Fault | None:
    for keyword in _LEAST_COUNTS:
        if part.get(keyword, 0) > MAX_NUMBER:
            return Fault(keyword, f"{keyword!r} of {short_repr(part[keyword])}")
    return None


def _find_fault_of_names(part: dict[str, Any]) -> Fault | None:
    """Find an unenforceable keyword about names of properties."""
    patterns = part.get("patternProperties")
    others = [name for name in ("properties", "required") if part.get(name)]
    if patterns:
        keyword = "patternProperties"
        if len(patterns) > 1:
            return Fault(keyword, "the keyword 'patternProperties' with several patterns")
        if others or part.get("additionalProperties") not in (None, False):
            others = others or ["additionalProperties"]
            return Fault(keyword, f"the keyword 'patternProperties' next to {others[0]!r}")
    names = part.get("propertyNames")
    if isinstance(names, dict):
        keyword = "propertyNames"
        if others or patterns:
            others = [*others, "patternProperties"]
            return Fault(keyword, f"the keyword 'propertyNames' next to {others[0]!r}")
        rest = [name for name in names if name in _CONSTRAINTS and name not in _OF_NAMES]
        if rest or names.get("type", "string") != "string":
            return Fault(keyword, f"the keyword {(*rest, 'type')[0]!r} in 'propertyNames'")
        if not all(isinstance(each, str) for each in names.get("enum", ())):
            reason = "the keyword 'enum' in 'propertyNames' with values other than strings"
            return Fault(keyword, reason)
    return None


def _find_fault_of_objects(part: dict[str, Any]) -> Fault | None:
    if isinstance(part.get("required", []), bool):
        return Fault("required", f"'required' of {part['required']}")
    for name in part.get("required", ()):
        if is_forbidden_name(part, name):
            return Fault("required", f"'required' of {short_repr(name)} (not among the properties)")
    # A model may write a name twice if the schema does not list it.
    is_open = not part.get("properties") or _schema_of_others(part) not in (None, False)
    least = part.get("minProperties", 0)
    if is_open and least > max(1, len(part.get("required", ()))):
        return Fault(
            "minProperties", f"'minProperties' of {short_repr(least)} without names of properties"
        )
    return None


def is_forbidden_name(part: dict[str, Any], name: str) -> bool:
    """Return whether the schema forbids a property of this name."""
    return part.get("properties", {}).get(name, _schema_of_others(part)) is False


def _schema_of_others(part: dict[str, Any]) -> Any:
    """Return the schema of all properties without their own; None if it is missing."""
    others = part.get("additionalProperties")
    return False if others is None and part.get("unevaluatedProperties") is False else others


def _find_fault_of_whole(root: object, part: dict[str, Any], keyword: str) -> Fault | None:
    """Find a fault of a schema in which xgrammar reads only ``keyword``."""
    is_of_values = keyword in ("enum", "const")
    fault = (
        _find_fault_of_values(part, keyword)
        if is_of_values
        else _find_fault_of_schemas(root, part, keyword)
    )
    if fault is not None:
        return fault
    read = (keyword, "type", "enum", "const") if is_of_values else (keyword,)
    for name in part:
        if name in _CONSTRAINTS and name not in read:
            return Fault(name, f"the keyword {name!r} next to {keyword!r}")
    if part.get("nullable") is True and _adds_null(root, part):
        return Fault("nullable", f"the keyword 'nullable' next to {keyword!r} without null")
    return None


def _find_fault_of_schemas(root: object, part: dict[str, Any], keyword: str) -> Fault | None:
    value = part[keyword]
    if keyword == "$ref":
        target = resolve_reference(root, value)
        if target is None:
            return Fault(keyword, f"the reference {short_repr(value)} (leads to no schema)")
        if target is False:
            return Fault(keyword, f"the reference {short_repr(value)} to 'false'")
        if _leads_back(root, part):
            return Fault(keyword, f"the reference {short_repr(value)} (leads back to itself)")
        return None
    if all(each is False for each in value):
        return Fault(keyword, f"the keyword {keyword!r} with only 'false' (allows nothing)")
    if keyword == "allOf" and len(value) > 1:
        return Fault(keyword, "the keyword 'allOf' with several schemas")
    if keyword == "oneOf" and not _are_distinct(
        root, [each for each in value if each is not False]
    ):
        return Fault(
            keyword,
            "the keyword 'oneOf' with schemas of the same type (allowed: objects that require a "
            "property with different constants)",
        )
    return None


def _find_fault_of_values(part: dict[str, Any], keyword: str) -> Fault | None:
    values = list_allowed_values(part) or []
    for value in values:
        if not is_writable(value):
            return Fault(keyword, f"the value {short_repr(value)}")
    if not values:
        left_by = "'enum' and 'const'" if {"enum", "const"} <= part.keys() else repr(keyword)
        return Fault(
            "type" if "type" in part else "enum",
            f"{left_by} with no value of the type {short_repr(part.get('type'))} (allows nothing)"
            if "type" in part
            else f"{left_by} with no value in common (allows nothing)",
        )
    return None


def is_writable(value: object) -> bool:
    """Return whether xgrammar writes all whole numbers in a value exactly."""
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, dict):
            stack += each.values()
        elif isinstance(each, list):
            stack += each
        elif isinstance(each, int) and abs(each) > _MAX_VALUE:
            return False
    return True


def _adds_null(root: object, part: dict[str, Any]) -> bool:
    """Return whether OpenAPI's ``nullable`` would add null to a schema.

    It adds none if the schema allows null anyway, or if it lists its values without null.
    """
    values = part.get("enum", [part["const"]] if "const" in part else None)
    if values is not None and None not in values:
        return False
    stack: list[Any] = [part]
    for _ in range(_MAX_NULLABLE):
        if not stack:
            break
        schema = stack.pop()
        if not isinstance(schema, dict):
            if schema is True:
                return False
            continue
        if "$ref" in schema:
            stack.append(resolve_reference(root, schema["$ref"]))
            continue
        allowed = list_allowed_values(schema)
        if allowed is not None:
            if None in allowed:
                return False
            continue
        inside = [each for name in ("anyOf", "oneOf", "allOf") for each in schema.get(name, ())]
        if not inside and "null" in schema.get("type", "null"):
            return False
        stack += inside
    return True


def _are_distinct(root: object, schemas: list[Any]) -> bool:
    """Return whether no instance matches two of these schemas.

    We distinguish them by their types, and objects by a property.
    """
    if len(schemas) < 2:
        return True
    targets = [_follow_references(root, each) for each in schemas]
    types = [each.get("type") if isinstance(each, dict) else None for each in targets]
    if not all(isinstance(each, str) for each in types):
        return False
    objects = [each for each, kind in zip(targets, types, strict=True) if kind == "object"]
    others = [kind for kind in types if kind != "object"]
    if len(set(others)) < len(others) or {"integer", "number"} <= set(others):
        return False
    return len(objects) < 2 or _have_discriminator(root, objects)


def _follow_references(root: object, schema: Any) -> Any:
    """Follow a schema's references to a schema without one; None if the chain is too long."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = resolve_reference(root, schema["$ref"])
    return None


def _leads_back(root: object, part: dict[str, Any]) -> bool:
    """Return whether a schema's references only lead back to it."""
    seen = {id(part)}
    schema: Any = part
    for _ in range(_MAX_LOOP):
        schema = resolve_reference(root, schema["$ref"])
        if not isinstance(schema, dict) or "$ref" not in schema:
            return False
        if id(schema) in seen:
            return True
        seen.add(id(schema))
    return False


def _have_discriminator(root: object, objects: list[dict[str, Any]]) -> bool:
    """Return whether all schemas require a common property, each with values of its own."""
    if len({id(schema) for schema in objects}) < len(objects):
        return False
    properties = [_list_required_texts(root, schema) for schema in objects]
    for name in properties[0]:
        values = [each.get(name, frozenset()) for each in properties]
        if all(values) and len(frozenset().union(*values)) == sum(map(len, values)):
            return True
    return False


def _list_required_texts(root: object, schema: dict[str, Any]) -> dict[str, frozenset[str]]:
    """Return the allowed texts of required properties whose values are all listed texts."""
    required, properties = schema.get("required"), schema.get("properties")
    texts_of: dict[str, frozenset[str]] = {}
    if not isinstance(required, list) or not isinstance(properties, dict):
        return texts_of
    for name in required[:_MAX_DISCRIMINATORS]:
        value = _follow_references(root, properties.get(name)) if isinstance(name, str) else None
        if not isinstance(value, dict):
            continue
        texts = list_allowed_values(value)
        if texts is not None and all(isinstance(text, str) for text in texts):
            texts_of[name] = frozenset(texts)
    return texts_of
