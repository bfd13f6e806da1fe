"""Check of JSON schemas: keywords that xgrammar reads over are refused by name.

The keywords that are enforced were found by asking xgrammar 0.2.8 whether it takes instances that
each keyword forbids (``tests/proxy/test_json_schemas.py`` asks again), after schemas were rewritten
for it (:mod:`pd.grammar.json_schemas`).
"""

from __future__ import annotations

import json
from typing import Any

from pd.core.brief import brief
from pd.core.json_schemas import (
    OF_TYPES,
    PATTERN_OF_TAG,
    SCHEMA_OF_TAG,
    Place,
    patterns_of_tags,
    referenced,
    schemas_of_tags,
    subschemas,
)
from pd.proxy.patterns import what_is_not_enforced_of

# Steps from the root to a schema, of which one inside an object's properties takes two.
MAX_STEPS = 128
# References that lead to references, and required properties that may tell objects apart, as far as
# they are looked at.
_MAX_REFERENCES, _MAX_DISCRIMINATORS = 8, 16
# Characters of the way to a schema in messages.
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
# Keywords beside which a schema ``false`` only says that nothing else may come. Those of which some
# may be false are looked at with the schema that has them.
_MAY_BE_FALSE = frozenset(
    ("additionalProperties", "items", "properties", "anyOf", "oneOf", "$defs", "definitions")
)
# What is read of a schema about the names of properties.
_OF_NAMES = ("type", "minLength", "maxLength", "pattern", "enum")
# Larger numbers are not compared exactly.
_MAX_NUMBER = 1 << 53
# With these in a structural tag required properties may be missing, and strings of a length or a
# pattern may have what is excluded.
_LOOSER = ("any_order", "excludes")
# xgrammar reads no other keyword of a schema that has one of these.
_WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
) | {"$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "$dynamicAnchor"}
# OpenAPI's, which pydantic writes beside the 'oneOf' that says it all.
_ANNOTATIONS |= {"discriminator"}
# What must not be empty: then nothing would be left to write.
_NOT_EMPTY = ("type", "enum", "anyOf", "oneOf", "allOf")
_DIALECTS = ("http://json-schema.org/", "https://json-schema.org/")
_PLAIN_TYPES = {
    "string": str,
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}


def what_is_not_enforced(schema: object, where: str = "") -> str | None:
    """Describe what of a schema would not be enforced; None if all of it is.

    Args:
        where: the place of the schema inside something else, for the description.
    """
    for place, part in subschemas(schema):
        if place.depth > MAX_STEPS:
            return f"a schema more than {MAX_STEPS} steps from the root"
        found = _complaint(schema, part, place)
        if found is not None:
            return f"{found} {_at(where, str(place))}"
    return None


def read_over(schema: Any) -> Any:
    """A copy of a schema without what xgrammar would misread: empty lists of types and values,
    patterns that are not enforced, and formats beside patterns that are, which it would put in
    their place.

    Raises TypeError, ValueError, RecursionError for what is no JSON.
    """
    copy = json.loads(json.dumps(schema))
    for _, part in subschemas(copy):
        if not isinstance(part, dict):
            continue
        for keyword in _NOT_EMPTY:
            if part.get(keyword) == []:
                del part[keyword]
        if not isinstance(part.get("pattern"), str):
            continue
        if what_is_not_enforced_of(part["pattern"]) is not None:
            del part["pattern"]
        else:
            part.pop("format", None)
    return copy


def what_of_tags_is_not_enforced(structural_tag: object) -> str | None:
    """Describe what the schemas and regular expressions of a structural tag say that would not be
    enforced; None if all of it is."""
    for place, part in schemas_of_tags(structural_tag):
        if part.get("type") != "json_schema":
            return f"a schema in a format of the type {brief(part.get('type'))} {_at(str(place))}"
        if part.get("style", "json") != "json":
            # Strings would be those of another form, for which schemas are not rewritten.
            return f"the style {brief(part['style'])} of a schema {_at(str(place))}"
        for field in _LOOSER:
            if part.get(field):
                return f"the field {field!r} of a schema {_at(str(place))}"
        found = what_is_not_enforced(part[SCHEMA_OF_TAG], f"{place}/{SCHEMA_OF_TAG}")
        if found is not None:
            return found
    for place, part in patterns_of_tags(structural_tag):
        found = what_is_not_enforced_of(part[PATTERN_OF_TAG], in_json=False)
        if found is not None:
            return f"{found} {_at(str(place))}"
    return None


def _at(*steps: str) -> str:
    return f"(at {'/'.join(filter(None, steps))[:_MAX_PLACE] or 'the root'})"


def _complaint(root: object, part: dict[str, Any] | bool, place: Place) -> str | None:
    """Name the part of one schema that is not enforced; schemas inside it are not looked at."""
    if isinstance(part, bool):
        may_be_false = place.depth > 0 and place.steps[0] in _MAY_BE_FALSE
        return None if part or may_be_false else "the schema 'false', which allows nothing,"
    for keyword in _NOT_ENFORCED:
        # These say that nothing else may come, as is so anyway.
        if keyword in part and not (keyword.startswith("unevaluated") and part[keyword] is False):
            return f"the keyword {keyword!r}"
    if "$id" in part and place.depth:
        return "the keyword '$id' inside a schema"
    if not str(part.get("$schema", _DIALECTS[0])).startswith(_DIALECTS):
        return f"the dialect {brief(part['$schema'])}"
    empty = [keyword for keyword in _NOT_EMPTY if part.get(keyword) == []]
    if empty:
        return f"an empty {empty[0]!r}, which allows nothing,"
    whole = [keyword for keyword in _WHOLE if keyword in part]
    if whole:
        return _complaint_of_whole(root, part, whole[0])
    return (
        _complaint_of_types(part)
        or _complaint_of_strings(part)
        or _complaint_of_numbers(part)
        or _complaint_of_names(part)
        or _complaint_of_objects(part)
    )


def _complaint_of_types(part: dict[str, Any]) -> str | None:
    if "type" not in part:
        # Formats are about strings, and nobody means anything else by one.
        return "the keyword 'format' without the type 'string'" if "format" in part else None
    types = {part["type"]} if isinstance(part["type"], str) else set(part["type"])
    if "integer" in types:
        types.add("number")
    for kind, keywords in OF_TYPES.items():
        beside = [keyword for keyword in keywords if keyword in part]
        if beside and kind not in types:
            return f"the keyword {beside[0]!r} without the type {kind!r}"
    return None


def _complaint_of_strings(part: dict[str, Any]) -> str | None:
    for keyword in ("pattern", "format"):
        if keyword in part and ("minLength" in part or "maxLength" in part):
            return f"the keyword {keyword!r} together with 'minLength' or 'maxLength'"
    if "pattern" in part and "format" in part:
        return "the keyword 'pattern' together with 'format'"
    for pattern in (*part.get("patternProperties", ()), part.get("pattern", "")):
        found = what_is_not_enforced_of(pattern)
        if found is not None:
            return found
    if "format" in part and part["format"] not in _FORMATS:
        return f"the format {brief(part['format'])}"
    return None


def _complaint_of_numbers(part: dict[str, Any]) -> str | None:
    for keyword in OF_TYPES["number"]:
        bound = part.get(keyword, 0)
        if not _is_number(bound) or abs(bound) > _MAX_NUMBER:
            return f"{keyword!r} of {brief(bound)}"
    return None


def _complaint_of_names(part: dict[str, Any]) -> str | None:
    """Name a keyword about names of properties that is not enforced."""
    patterns = part.get("patternProperties")
    beside = [name for name in ("properties", "required") if part.get(name)]
    if patterns:
        if len(patterns) > 1:
            return "the keyword 'patternProperties' with several patterns"
        if beside or part.get("additionalProperties") not in (None, False):
            beside = beside or ["additionalProperties"]
            return f"the keyword 'patternProperties' beside {beside[0]!r}"
    names = part.get("propertyNames")
    if isinstance(names, dict):
        if beside or patterns:
            return f"the keyword 'propertyNames' beside {(*beside, 'patternProperties')[0]!r}"
        rest = [name for name in names if name not in _OF_NAMES and name not in _ANNOTATIONS]
        if rest or names.get("type", "string") != "string":
            return f"the keyword {(*rest, 'type')[0]!r} in 'propertyNames'"
        if not all(isinstance(each, str) for each in names.get("enum", ())):
            return "the keyword 'enum' in 'propertyNames' with values that are no strings"
    return None


def _complaint_of_objects(part: dict[str, Any]) -> str | None:
    properties, others = part.get("properties", {}), part.get("additionalProperties")
    if others is None and part.get("unevaluatedProperties") is False:
        others = False
    for name in part.get("required", ()):
        if properties.get(name, others) is False:
            return f"'required' of {brief(name)}, which is not among the properties"
    # Names that a schema does not give may be written twice.
    is_open = not properties or others not in (None, False)
    least = part.get("minProperties", 0)
    if is_open and (not _is_number(least) or least > max(1, len(part.get("required", ())))):
        return f"'minProperties' of {brief(least)} where names are not given"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _complaint_of_whole(root: object, part: dict[str, Any], keyword: str) -> str | None:
    """Name what is not enforced of a schema of whose keywords only ``keyword`` is read."""
    rest = [name for name in part if name != keyword and name not in _ANNOTATIONS]
    if keyword in ("enum", "const"):
        return _complaint_of_values(part, keyword, rest)
    if rest:
        return f"the keyword {rest[0]!r} beside {keyword!r}"
    if keyword == "$ref":
        target = referenced(root, part["$ref"])
        if target is None:
            return f"the reference {brief(part['$ref'])}, which leads to no schema of this one,"
        return f"the reference {brief(part['$ref'])} to 'false'" if target is False else None
    several = part[keyword]
    if not isinstance(several, list):
        return None  # as compiling it will say
    if several and all(each is False for each in several):
        return f"the keyword {keyword!r} with nothing but 'false', which allows nothing,"
    if keyword == "allOf" and len(several) > 1:
        return "the keyword 'allOf' with several schemas"
    if keyword == "oneOf" and not _differ(root, [each for each in several if each is not False]):
        return (
            "the keyword 'oneOf' with schemas that neither are of different types nor require a "
            "property of which each has constants of its own"
        )
    return None


def _complaint_of_values(part: dict[str, Any], keyword: str, rest: list[str]) -> str | None:
    if rest not in ([], ["type"]):
        return f"the keyword {next(name for name in rest if name != 'type')!r} beside {keyword!r}"
    values = part["enum"] if keyword == "enum" else [part["const"]]
    for value in values if isinstance(values, list) else ():
        if _is_number(value) and isinstance(value, int) and abs(value) > _MAX_NUMBER:
            return f"the value {brief(value)}"
        if rest and not _is_of_type(value, part["type"]):
            return f"the value {brief(value)}, which is not of the type {brief(part['type'])},"
    return None


def _is_of_type(value: object, kind: object) -> bool:
    if kind == "integer":
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return is_whole and _is_number(value)
    if kind == "number":
        return _is_number(value)
    return isinstance(kind, str) and type(value) is _PLAIN_TYPES.get(kind)


def _differ(root: object, schemas: list[Any]) -> bool:
    """Whether no instance can be of two of these schemas, by their types or, if it is an object, by
    a property."""
    if len(schemas) < 2:
        return True
    found = [_resolved(root, each) for each in schemas]
    types = [each.get("type") if isinstance(each, dict) else None for each in found]
    if not all(isinstance(each, str) for each in types):
        return False
    objects = [each for each, kind in zip(found, types, strict=True) if kind == "object"]
    others = [kind for kind in types if kind != "object"]
    if len(set(others)) < len(others) or {"integer", "number"} <= set(others):
        return False
    return len(objects) < 2 or _have_discriminator(root, objects)


def _resolved(root: object, schema: Any) -> Any:
    """The schema, or that to which its reference leads; None if it leads on and on."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = referenced(root, schema["$ref"])
    return None


def _have_discriminator(root: object, objects: list[dict[str, Any]]) -> bool:
    """Whether all of these schemas require one property, and each has values of it that no other
    has."""
    if len({id(schema) for schema in objects}) < len(objects):
        return False
    properties = [_required_texts(root, schema) for schema in objects]
    for name in properties[0]:
        values = [each.get(name, frozenset()) for each in properties]
        if all(values) and len(frozenset().union(*values)) == sum(map(len, values)):
            return True
    return False


def _required_texts(root: object, schema: dict[str, Any]) -> dict[str, frozenset[str]]:
    """Required properties of which a schema names the values, which are texts."""
    required, properties = schema.get("required"), schema.get("properties")
    found: dict[str, frozenset[str]] = {}
    if not isinstance(required, list) or not isinstance(properties, dict):
        return found
    for name in required[:_MAX_DISCRIMINATORS]:
        value = _resolved(root, properties.get(name)) if isinstance(name, str) else None
        if not isinstance(value, dict):
            continue
        texts = [value["const"]] if "const" in value else value.get("enum")
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            found[name] = frozenset(texts)
    return found
