"""Which JSON schemas are enforced: keywords that xgrammar reads over are refused by name.

What is enforced was found out by asking xgrammar 0.2.8 whether it takes instances that each keyword
forbids (``tests/proxy/test_json_schemas.py`` asks again).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd.core.brief import brief

if TYPE_CHECKING:
    from collections.abc import Iterator

# Deeper schemas are refused, also before anything recursive reads them.
MAX_DEPTH = 64
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
)
_FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
) | {"json-pointer"}
# Keywords that are read only beside the type that they are about.
_OF_TYPES = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        "required",
        "minProperties",
        "maxProperties",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
    ),
}
# Of a schema with one of these, the rest is not read.
_WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
) | {"$schema", "$id", "$comment", "$defs", "definitions"}
_PLAIN_TYPES = {
    "string": str,
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}


def what_is_not_enforced(schema: object) -> str | None:
    """Describe what of a schema would not be enforced; None if all of it is."""
    for where, part, depth in _parts(schema):
        if depth > MAX_DEPTH:
            return f"schemas more than {MAX_DEPTH} deep"
        found = _complaint(part)
        if found is not None:
            return f"{found} (at {brief('/'.join(where)) if where else 'the root'})"
    return None


def _parts(schema: object) -> Iterator[tuple[tuple[str, ...], dict[str, Any], int]]:
    """All schemas inside a schema that are objects, with the ways to them."""
    stack: list[tuple[tuple[str, ...], object, int]] = [((), schema, 0)]
    while stack:
        where, part, depth = stack.pop()
        if not isinstance(part, dict):
            continue
        yield where, part, depth
        if depth > MAX_DEPTH:
            return
        for name in ("properties", "$defs", "definitions", "patternProperties"):
            inside = part.get(name)
            if isinstance(inside, dict):
                stack += [
                    ((*where, name, str(key)), each, depth + 1) for key, each in inside.items()
                ]
        for name in ("items", "additionalProperties", "propertyNames"):
            stack.append(((*where, name), part.get(name), depth + 1))
        for name in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
            several = part.get(name)
            if isinstance(several, list):
                stack += [
                    ((*where, name, str(i)), each, depth + 1) for i, each in enumerate(several)
                ]


def _complaint(part: dict[str, Any]) -> str | None:
    """What of one schema is not enforced, without those inside it."""
    for keyword in _NOT_ENFORCED:
        # These say that nothing else may come, as is so anyway.
        if keyword in part and not (keyword.startswith("unevaluated") and part[keyword] is False):
            return f"the keyword {keyword!r}"
    whole = [keyword for keyword in _WHOLE if keyword in part]
    if whole:
        return _complaint_of_whole(part, whole[0])
    types = part.get("type", ())
    types = {types} if isinstance(types, str) else set(types) if isinstance(types, list) else set()
    if "integer" in types:
        types.add("number")
    for kind, keywords in _OF_TYPES.items():
        beside = [keyword for keyword in keywords if keyword in part]
        if beside and kind not in types and not (kind == "object" and "properties" in part):
            return f"the keyword {beside[0]!r} without the type {kind!r}"
    if "pattern" in part and ("minLength" in part or "maxLength" in part):
        return "the keyword 'pattern' together with 'minLength' or 'maxLength'"
    if "format" in part and part["format"] not in _FORMATS:
        return f"the format {brief(part['format'])}"
    properties = part.get("properties", {})
    missing = [name for name in part.get("required", ()) if name not in properties]
    if missing:
        return f"'required' of {brief(missing[0])}, which is not among the properties"
    return None


def _complaint_of_whole(part: dict[str, Any], keyword: str) -> str | None:
    """The same for a schema of whose keywords only this one is read."""
    rest = [name for name in part if name != keyword and name not in _ANNOTATIONS]
    if rest == ["type"] and keyword in ("enum", "const"):
        values = part["enum"] if keyword == "enum" else [part["const"]]
        kind = _PLAIN_TYPES.get(part["type"]) if isinstance(part["type"], str) else None
        numbers = part["type"] in ("integer", "number")
        for value in values if isinstance(values, list) else ():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            right = is_number if numbers else kind is not None and type(value) is kind
            if not right or (part["type"] == "integer" and value != int(value)):
                return f"the value {brief(value)}, which is not of the type {brief(part['type'])},"
    elif rest:
        return f"the keyword {rest[0]!r} beside {keyword!r}"
    if keyword == "$ref":
        target = part["$ref"]
        if not (isinstance(target, str) and (target == "#" or target.startswith("#/"))):
            return f"the reference {brief(target)}, which leads elsewhere,"
    if keyword == "allOf" and isinstance(part["allOf"], list) and len(part["allOf"]) > 1:
        return "the keyword 'allOf' with several schemas"
    if keyword == "oneOf" and isinstance(part["oneOf"], list) and not _differ(part["oneOf"]):
        return "the keyword 'oneOf' with schemas that are not of different types"
    return None


def _differ(schemas: list[Any]) -> bool:
    """Whether no instance can be of two of these schemas, by their types."""
    if len(schemas) < 2:
        return True
    types = [each.get("type") if isinstance(each, dict) else None for each in schemas]
    if not all(isinstance(each, str) for each in types):
        return False
    return len(set(types)) == len(types) and not {"integer", "number"} <= set(types)
