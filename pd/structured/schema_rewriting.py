"""Rewrites JSON schemas so that xgrammar allows exactly their instances.

xgrammar 0.2.8 ignores some keywords in a schema without a type, and writes constants without the
spaces it writes elsewhere. It allows control characters in strings of bounded length. It also
allows an unnamed property to repeat another's name, written with escapes. Equivalent schemas with
other keywords avoid these faults.
"""

from __future__ import annotations

import math
from typing import Any

from pd.core.brief import short_repr
from pd.structured.gbnf import check_numbers
from pd.structured.pattern_parts import MAX_NUMBER
from pd.structured.pattern_rewriting import (
    PLAIN_CHARACTER,
    match_other_names,
    rewrite_pattern,
    rewrite_search,
)
from pd.structured.schema_walk import (
    GRAMMAR_OF_TAG,
    LOWER_BOUNDS,
    OF_TYPES,
    PATTERN_OF_TAG,
    SCHEMA_OF_TAG,
    Place,
    choose_bound_limit,
    gather_references,
    is_number,
    list_allowed_values,
    walk_schemas,
    walk_tag_grammars,
    walk_tag_patterns,
    walk_tag_schemas,
)
from pd.structured.string_formats import PATTERNS

_ALL_TYPES = ("object", "array", "string", "number", "boolean", "null")
_SEVERAL = ("anyOf", "oneOf", "allOf")
# Largest whole number up to which floats are exact.
_MAX_WHOLE = 1 << 53
# Keywords that limit the number of characters, items or properties.
_LEAST, _MOST = (
    ("minLength", "minItems", "minProperties"),
    ("maxLength", "maxItems", "maxProperties"),
)


class WrongSchemaError(ValueError):
    """A schema or grammar in a structural tag is wrong.

    Args:
        place: position of the format that contains it.
        field: field of the format.

    Attributes:
        steps: path to it, as keys of objects and indices of lists.
    """

    def __init__(self, reason: object, place: Place, field: str = SCHEMA_OF_TAG) -> None:
        super().__init__(str(reason))
        self.steps = (*place.all_steps, field)


def rewrite_schema(schema: object) -> object:
    """Rewrite a schema for xgrammar, in place, and return it.

    Raises:
        ValueError: a keyword has a value of a wrong type, or a reference leads nowhere.
    """
    if not isinstance(schema, dict):
        return schema
    definitions = gather_references(schema)
    parts = [part for _, part in walk_schemas(schema) if isinstance(part, dict)]
    for definition in definitions.values():
        parts += [part for _, part in walk_schemas(definition) if isinstance(part, dict)]
    for part in parts:
        rewritten = _rewrite_part(part, definitions)
        part.clear()
        part.update(rewritten)
    if definitions:
        schema["$defs"] = definitions
    return schema


def rewrite_tag(structural_tag: object) -> object:
    """Rewrite every JSON schema and regular expression in a structural tag, in place.

    Raises:
        WrongSchemaError: see :func:`rewrite_schema`; or a grammar has a number that is too large.
    """
    for place, part in walk_tag_schemas(structural_tag):
        try:
            part[SCHEMA_OF_TAG] = rewrite_schema(part[SCHEMA_OF_TAG])
        except (TypeError, ValueError, AttributeError) as error:
            raise WrongSchemaError(error, place) from None
    for _, part in walk_tag_patterns(structural_tag):
        if isinstance(part[PATTERN_OF_TAG], str):
            part[PATTERN_OF_TAG] = rewrite_pattern(part[PATTERN_OF_TAG])
    for place, part in walk_tag_grammars(structural_tag):
        try:
            check_numbers(str(part[GRAMMAR_OF_TAG]))
        except ValueError as error:
            raise WrongSchemaError(error, place, GRAMMAR_OF_TAG) from None
    return structural_tag


def _rewrite_part(part: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Rewrite one schema, but not the schemas inside it."""
    if "$ref" in part:
        return {"$ref": part["$ref"]}
    for keyword in ("type", "enum", *_SEVERAL):
        if part.get(keyword) == []:
            raise ValueError(f"{keyword!r} is empty (allows nothing)")
    values = list_allowed_values(part)
    if values is not None:
        if not values:
            raise ValueError("no value of 'enum' or 'const' is of the type of the schema")
        return _allow_values(values)
    for keyword in _SEVERAL:
        if isinstance(part.get(keyword), list):
            several = [each for each in part[keyword] if each is not False]
            # No instance matches two schemas of a 'oneOf', because `schema_check` refuses others.
            return {"allOf" if keyword == "allOf" else "anyOf": several}
    types = part.get("type")
    if types is None and any(name in part for names in OF_TYPES.values() for name in names):
        types = list(_ALL_TYPES)
    if isinstance(types, str):
        return _rewrite_for_type(part, types, definitions)
    if not isinstance(types, list):
        return part
    if "number" in types:
        types = [kind for kind in types if kind != "integer"]
    branches = [_rewrite_for_type(part, kind, definitions) for kind in types]
    return {"anyOf": branches} if len(branches) > 1 else branches[0]


def _allow_values(values: list[Any]) -> dict[str, Any]:
    """Make a schema for these values, with the spaces of other JSON."""
    plain = [
        _write_constant(each) for each in values if not (isinstance(each, (dict, list)) and each)
    ]
    branches = [
        _allow_structure(each) for each in values if isinstance(each, (dict, list)) and each
    ]
    if plain:
        branches.insert(0, {"enum": plain})
    return {"anyOf": branches} if len(branches) > 1 else branches[0]


def _allow_structure(value: dict[str, Any] | list[Any]) -> dict[str, Any]:
    if isinstance(value, dict):
        properties = {name: _allow_values([each]) for name, each in value.items()}
        closed = {"required": list(value), "additionalProperties": False}
        return {"type": "object", "properties": properties, **closed}
    items = [_allow_values([each]) for each in value]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _write_constant(value: Any) -> Any:
    """Write whole numbers without a fraction, as models do."""
    return value if is_number(value) and abs(value) > _MAX_WHOLE else _drop_fraction(value)


def _drop_fraction(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _rewrite_for_type(
    part: dict[str, Any], kind: object, definitions: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of a schema that concerns instances of one type."""
    keywords = OF_TYPES.get("number" if kind == "integer" else str(kind), ())
    said = {name: _drop_fraction(part[name]) for name in keywords if name in part}
    _check_counts(said)
    if kind in ("integer", "number"):
        _clamp_bounds(said, choose_bound_limit(kind))
    if kind == "string":
        _rewrite_string(said)
    elif kind == "integer":
        _rewrite_integer(said)
    elif kind == "array":
        _rewrite_array(said)
    elif kind == "object":
        _rewrite_object(said, definitions)
    return {"type": kind, **said}


def _check_counts(said: dict[str, Any]) -> None:
    """Drop upper limits that no output reaches, because xgrammar would misread their numbers.

    Raises ValueError for a lower limit that no output reaches.
    """
    for keyword in (*_LEAST, *_MOST):
        if isinstance(said.get(keyword), int) and said[keyword] > MAX_NUMBER:
            if keyword in _LEAST:
                raise ValueError(f"{keyword}: {short_repr(said[keyword])} (at most {MAX_NUMBER})")
            del said[keyword]


def _clamp_bounds(said: dict[str, Any], limit: int) -> None:
    """Narrow the range to numbers for exact comparison by xgrammar.

    Raises:
        ValueError: the range has no such number.
    """
    for keyword in OF_TYPES["number"]:
        bound: Any = said.get(keyword)
        if not is_number(bound):
            continue
        if (bound > limit) if keyword in LOWER_BOUNDS else (bound < -limit):
            raise ValueError(f"{keyword!r}: {short_repr(bound)} (limits -{limit} and {limit})")
        said[keyword] = max(-limit, min(limit, bound))


def _rewrite_string(said: dict[str, Any]) -> None:
    """Rewrite length, pattern and format as one pattern. Its strings contain no escapes."""
    if said.get("format") in PATTERNS:
        said["pattern"] = PATTERNS[said.pop("format")]
    if isinstance(said.get("pattern"), str):
        said["pattern"] = rewrite_search(said["pattern"])
    if "pattern" in said or not ("minLength" in said or "maxLength" in said):
        return
    low, high = _pop_count(said, "minLength", 0), _pop_count(said, "maxLength", "")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        raise ValueError(f"minLength {low} exceeds maxLength {high} (allows no string)")
    said["pattern"] = f"^{PLAIN_CHARACTER}{{{low},{high}}}$"


def _pop_count(said: dict[str, Any], keyword: str, default: int | str) -> int | str:
    number: int | str = said.pop(keyword, default)
    if number != default and (not isinstance(number, int) or number is True or number < 0):
        raise ValueError(f"{keyword} must be a number of characters, not {short_repr(number)}")
    return number


def _rewrite_integer(said: dict[str, Any]) -> None:
    """Round bounds to whole numbers."""
    for low in LOWER_BOUNDS:
        if isinstance(said.get(low), float) and math.isfinite(said[low]):
            said["minimum"] = max(math.ceil(said.pop(low)), said.get("minimum", -math.inf))
    for high in ("maximum", "exclusiveMaximum"):
        if isinstance(said.get(high), float) and math.isfinite(said[high]):
            said["maximum"] = min(math.floor(said.pop(high)), said.get("maximum", math.inf))


def _rewrite_array(said: dict[str, Any]) -> None:
    if said.pop("unevaluatedItems", True) is False:
        said.setdefault("items", False)
    said.setdefault("items", True)
    if isinstance(said.get("prefixItems"), list):
        # NOTE: xgrammar 0.2.8 refuses 'true' here, although it claims to support it.
        said["prefixItems"] = [{} if each is True else each for each in said["prefixItems"]]
        if isinstance(said.get("maxItems"), int):
            said["prefixItems"] = said["prefixItems"][: max(0, said["maxItems"])]
    if not said.get("prefixItems"):
        said.pop("prefixItems", None)
    if said["items"] is False and "prefixItems" not in said:
        del said["items"]
        said["maxItems"] = 0


def _rewrite_object(said: dict[str, Any], definitions: dict[str, Any]) -> None:
    if said.pop("unevaluatedProperties", True) is False:
        said.setdefault("additionalProperties", False)
    if not said.get("patternProperties"):
        said.pop("patternProperties", None)
    else:
        patterns = said["patternProperties"].items()
        said["patternProperties"] = {rewrite_search(pattern): each for pattern, each in patterns}
    inside = said.get("propertyNames")
    if inside is True or said.get("additionalProperties") is False:
        said.pop("propertyNames", None)  # with it xgrammar would allow unnamed properties
    if isinstance(inside, dict) and not ("enum" in inside or "const" in inside):
        inside["type"] = "string"
    properties = dict(said.get("properties", {}))
    others = said.get("additionalProperties")
    if isinstance(others, dict):
        definitions[str(len(definitions))] = others
        others = said["additionalProperties"] = {"$ref": f"#/$defs/{len(definitions) - 1}"}
    if others is not False:
        for name in said.get("required", ()):
            properties.setdefault(name, {} if others is None else others)
    if others is None and not {"patternProperties", "propertyNames"} & set(said):
        # Without named properties we allow any, otherwise no others.
        others = said["additionalProperties"] = not properties
    said["properties"] = {name: each for name, each in properties.items() if each is not False}
    if others not in (None, False) and properties:
        pattern = match_other_names(properties)
        said["patternProperties"] = {**said.get("patternProperties", {}), pattern: others}
        said["additionalProperties"] = False
