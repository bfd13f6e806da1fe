"""Which JSON schemas are enforced: keywords that xgrammar reads over are refused by name.

What is enforced was found out by asking xgrammar 0.2.8 whether it takes instances that each keyword
forbids (``tests/proxy/test_json_schemas.py`` asks again).
"""

from __future__ import annotations

import re
from typing import Any

from pd.core.brief import brief
from pd.core.json_schemas import subschemas

# Steps from the root to a schema, of which one inside an object's properties takes two.
MAX_STEPS = 128
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
# xgrammar reads no other keyword of a schema that has one of these.
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
    for where, part in subschemas(schema):
        if len(where) > MAX_STEPS:
            return f"a schema more than {MAX_STEPS} steps from the root"
        found = _complaint(part)
        if found is not None:
            return f"{found} (at {'/'.join(where)[:_MAX_PLACE] or 'the root'})"
    return None


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
    for keyword in ("pattern", "format"):
        if keyword in part and ("minLength" in part or "maxLength" in part):
            return f"the keyword {keyword!r} together with 'minLength' or 'maxLength'"
    if "pattern" in part and _breaks_strings(part["pattern"]):
        return f"the pattern {brief(part['pattern'])}, which names characters that JSON escapes,"
    if "format" in part and part["format"] not in _FORMATS:
        return f"the format {brief(part['format'])}"
    properties = part.get("properties", {})
    missing = [name for name in part.get("required", ()) if name not in properties]
    if missing:
        return f"'required' of {brief(missing[0])}, which is not among the properties"
    return None


# Members of a class of characters, one or a range of them, and their escapes.
_MEMBER = r"(\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^\\])"
_RANGE = re.compile(f"{_MEMBER}(?:-{_MEMBER})?", re.DOTALL)
_CLASS = re.compile(r"\[(\^?)((?:\\.|[^\]\\])*)\]", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


def _breaks_strings(pattern: object) -> bool:
    """Whether a pattern names quotes, backslashes or control characters, in classes or alone:
    xgrammar writes them into a string as they are."""
    if not isinstance(pattern, str):
        return True
    for negated, members in _CLASS.findall(pattern):
        if not negated and any(_spans(*found) for found in _RANGE.findall(members)):
            return True
    outside = _CLASS.sub("", pattern)
    return any(_spans(found[0], "") for found in _RANGE.findall(outside) if found[0] != "\\")


def _spans(first: str, last: str) -> bool:
    """Whether a range of characters has one that JSON escapes."""
    low, high = _character(first), _character(last or first)
    if low is None or high is None:
        return False  # classes such as digits
    return low < 0x20 or low <= 0x22 <= high or low <= 0x5C <= high


def _character(written: str) -> int | None:
    """The code of a character of a pattern; None for an escape that means several."""
    if not written.startswith("\\") or len(written) == 1:
        return ord(written)
    name = written[1]
    if len(written) > 2:
        return int(written[2:], 16)
    if name in _ESCAPED:
        return ord(_ESCAPED[name])
    return None if name.isalnum() else ord(name)


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
