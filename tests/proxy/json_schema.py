"""Checks JSON values against the part of JSON Schema that descriptions of the API use."""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int, float),
    "null": (type(None),),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}


def problems(
    value: Any, schema: dict[str, Any], document: dict[str, Any], at: str = ""
) -> list[str]:
    """What does not fit; empty when the value is valid. ``document`` resolves references."""
    if "$ref" in schema:
        return problems(value, resolve(schema["$ref"], document), document, at)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            found = [problems(value, one, document, at) for one in schema[several]]
            if all(found):
                return [f"{at or 'the value'} fits none of {several}: {found}"]
    kind = schema.get("type")
    if kind is not None:
        is_bool = isinstance(value, bool) and kind != "boolean"
        # A number without a fraction is an integer, however it is written.
        is_fraction = kind == "integer" and isinstance(value, float) and not value.is_integer()
        if is_bool or is_fraction or not isinstance(value, _TYPES[kind]):
            return [f"{at or 'the value'} must be {kind}, not {value!r}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at} must be one of {schema['enum']}, not {value!r}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{at} must be {schema['const']!r}, not {value!r}")
    if isinstance(value, dict):
        fields = schema.get("properties", {})
        found += [
            f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value
        ]
        for name, item in value.items():
            other = schema.get("additionalProperties", {})
            inner = fields.get(name, other if isinstance(other, dict) else {})
            found += problems(item, inner, document, f"{at}.{name}")
    elif isinstance(value, list):
        items = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        for number, (item, inner) in enumerate(zip(value, items, strict=True)):
            found += problems(item, inner, document, f"{at}[{number}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low, above = schema.get("minimum", value), schema.get("exclusiveMinimum", value - 1)
        if not low <= value <= schema.get("maximum", value) or not above < value:
            found.append(f"{at} is out of range: {value}")
    elif isinstance(value, str):
        low, high = schema.get("minLength", 0), schema.get("maxLength", len(value))
        found += [] if low <= len(value) <= high else [f"{at} has {len(value)} characters"]
    return found


def resolve(reference: str, document: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference names. Raises KeyError where there is none."""
    found: Any = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    assert isinstance(found, dict)
    return found


def references(value: Any) -> list[str]:
    """All references in a document."""
    if isinstance(value, list):
        return [reference for item in value for reference in references(item)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + references(list(value.values()))
