"""Rewrites JSON schemas so that xgrammar writes what they allow, and nothing else.

xgrammar 0.2.8 reads some keywords only beside a type, writes constants without the spaces that it
writes elsewhere, lets strings of bounded length have control characters, and lets properties that
are not named have the names of others with escapes. Schemas that say the same in other keywords
have none of these faults.
"""

from __future__ import annotations

import math
from typing import Any

from pd.core.brief import brief
from pd.core.json_schemas import (
    GRAMMAR_OF_TAG,
    OF_TYPES,
    PATTERN_OF_TAG,
    SCHEMA_OF_TAG,
    Place,
    grammars_of_tags,
    patterns_of_tags,
    referenced,
    schemas_of_tags,
    subschemas,
)
from pd.core.patterns import MAX_NUMBER
from pd.grammar.formats import PATTERNS
from pd.grammar.gbnf import check_numbers
from pd.grammar.patterns import PLAIN_CHARACTER, any_name_but, found_in, matched_by

_ALL_TYPES = ("object", "array", "string", "number", "boolean", "null")
_SEVERAL = ("anyOf", "oneOf", "allOf")
# The whole numbers that a float has exactly.
_MAX_WHOLE = 1 << 53
# Keywords with a number of characters, items or properties.
_LEAST, _MOST = (
    ("minLength", "minItems", "minProperties"),
    ("maxLength", "maxItems", "maxProperties"),
)


class WrongSchemaError(ValueError):
    """One of the schemas or grammars in a structural tag is wrong.

    Args:
        place: of the format that has it.
        field: of the format in which it is.

    Attributes:
        steps: where it stands: keys of objects and numbers in lists.
    """

    def __init__(self, reason: object, place: Place, field: str = SCHEMA_OF_TAG) -> None:
        super().__init__(str(reason))
        self.steps = (*place.all_steps, field)


def prepare(schema: object) -> object:
    """Rewrite a schema for xgrammar. The given one is changed, too.

    Raises:
        ValueError: a keyword has a value of a wrong type, or a reference leads nowhere.
    """
    if not isinstance(schema, dict):
        return schema
    definitions = _gather_references(schema)
    parts = [part for _, part in subschemas(schema) if isinstance(part, dict)]
    for definition in definitions.values():
        parts += [part for _, part in subschemas(definition) if isinstance(part, dict)]
    for part in parts:
        rewritten = _rewritten(part, definitions)
        part.clear()
        part.update(rewritten)
    if definitions:
        schema["$defs"] = definitions
    return schema


def prepare_tags(structural_tag: object) -> object:
    """A structural tag with every schema of text in JSON and every regular expression prepared; the
    tag is changed.

    Raises:
        WrongSchemaError: see :func:`prepare`; or a grammar inside has a number that is too large.
    """
    for place, part in schemas_of_tags(structural_tag):
        try:
            part[SCHEMA_OF_TAG] = prepare(part[SCHEMA_OF_TAG])
        except (TypeError, ValueError, AttributeError) as error:
            raise WrongSchemaError(error, place) from None
    for _, part in patterns_of_tags(structural_tag):
        if isinstance(part[PATTERN_OF_TAG], str):
            part[PATTERN_OF_TAG] = matched_by(part[PATTERN_OF_TAG])
    for place, part in grammars_of_tags(structural_tag):
        try:
            check_numbers(str(part[GRAMMAR_OF_TAG]))
        except ValueError as error:
            raise WrongSchemaError(error, place, GRAMMAR_OF_TAG) from None
    return structural_tag


def _gather_references(root: dict[str, Any]) -> dict[str, Any]:
    """Move what references lead to into definitions of plain names, since rewriting would break
    the ways to them."""
    parts = [part for _, part in subschemas(root) if isinstance(part, dict) and "$ref" in part]
    targets = [referenced(root, part["$ref"]) for part in parts]
    names: dict[int, str] = {id(root): "#"}
    definitions: dict[str, Any] = {}
    for part, target in zip(parts, targets, strict=True):
        if target is None or target is False:
            where = "leads to no schema" if target is None else "allows nothing"
            raise ValueError(f"the reference {brief(part['$ref'])} {where}")
        if target is True:
            del part["$ref"]
            continue
        if id(target) not in names:
            names[id(target)] = f"#/$defs/{len(definitions)}"
            definitions[str(len(definitions))] = target
        part["$ref"] = names[id(target)]
    for name, target in definitions.items():
        definitions[name] = dict(target)
        target.clear()
        target["$ref"] = f"#/$defs/{name}"
    return definitions


def _rewritten(part: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """One schema, without those inside it."""
    if "$ref" in part:
        return {"$ref": part["$ref"]}
    for keyword in ("type", "enum", *_SEVERAL):
        if part.get(keyword) == []:
            raise ValueError(f"{keyword!r} is empty, which allows nothing")
    for keyword in ("const", "enum"):
        if keyword in part:
            values = [part["const"]] if keyword == "const" else part["enum"]
            return _one_of(values) if isinstance(values, list) else part
    for keyword in _SEVERAL:
        if isinstance(part.get(keyword), list):
            several = [each for each in part[keyword] if each is not False]
            # No instance is of two schemas of a 'oneOf' that is enforced.
            return {"allOf" if keyword == "allOf" else "anyOf": several}
    types = part.get("type")
    if types is None and any(name in part for names in OF_TYPES.values() for name in names):
        types = list(_ALL_TYPES)
    if isinstance(types, str):
        return _of_type(part, types, definitions)
    if not isinstance(types, list):
        return part
    if "number" in types:
        types = [kind for kind in types if kind != "integer"]
    branches = [_of_type(part, kind, definitions) for kind in types]
    return {"anyOf": branches} if len(branches) > 1 else branches[0]


def _one_of(values: list[Any]) -> dict[str, Any]:
    """A schema of these values, which are written as other JSON is."""
    plain = [
        _constant(value) for value in values if not (isinstance(value, (dict, list)) and value)
    ]
    branches = [_structure(value) for value in values if isinstance(value, (dict, list)) and value]
    if plain:
        branches.insert(0, {"enum": plain})
    return {"anyOf": branches} if len(branches) > 1 else branches[0]


def _structure(value: dict[str, Any] | list[Any]) -> dict[str, Any]:
    if isinstance(value, dict):
        properties = {name: _one_of([each]) for name, each in value.items()}
        closed = {"required": list(value), "additionalProperties": False}
        return {"type": "object", "properties": properties, **closed}
    items = [_one_of([each]) for each in value]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _constant(value: Any) -> Any:
    """A whole number without a fraction, as models write it."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_WHOLE:
        return int(value)
    return value


def _of_type(part: dict[str, Any], kind: object, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a schema that is about instances of one type."""
    keywords = OF_TYPES.get("number" if kind == "integer" else str(kind), ())
    said = {name: _constant(part[name]) for name in keywords if name in part}
    _check_counts(said)
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
    """Leave out limits that no output reaches and whose numbers xgrammar would misread.

    Raises ValueError for what no output reaches although it has to.
    """
    for keyword in (*_LEAST, *_MOST):
        if isinstance(said.get(keyword), int) and said[keyword] > MAX_NUMBER:
            if keyword in _LEAST:
                raise ValueError(
                    f"{keyword} is {brief(said[keyword])}; at most {MAX_NUMBER} can be enforced"
                )
            del said[keyword]


def _rewrite_string(said: dict[str, Any]) -> None:
    """Strings of bounded length have no escapes, nor have those that a pattern is searched in, or
    that are of a format which is one here."""
    if said.get("format") in PATTERNS:
        said["pattern"] = PATTERNS[said.pop("format")]
    if isinstance(said.get("pattern"), str):
        said["pattern"] = found_in(said["pattern"])
    if "pattern" in said or not ("minLength" in said or "maxLength" in said):
        return
    low, high = _count(said, "minLength", 0), _count(said, "maxLength", "")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        raise ValueError(f"minLength {low} is more than maxLength {high}, which allows no string")
    said["pattern"] = f"^{PLAIN_CHARACTER}{{{low},{high}}}$"


def _count(said: dict[str, Any], keyword: str, default: int | str) -> int | str:
    number: int | str = said.pop(keyword, default)
    if number != default and (not isinstance(number, int) or number is True or number < 0):
        raise ValueError(f"{keyword} must be a number of characters, not {brief(number)}")
    return number


def _rewrite_integer(said: dict[str, Any]) -> None:
    """Bounds are whole numbers."""
    for low in ("minimum", "exclusiveMinimum"):
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
        # NOTE: xgrammar 0.2.8 takes no 'true' here, though it says so.
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
        said["patternProperties"] = {found_in(pattern): each for pattern, each in patterns}
    inside = said.get("propertyNames")
    if inside is True or said.get("additionalProperties") is False:
        said.pop("propertyNames", None)  # xgrammar would let any come that has such a name
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
        # No others beside properties; else any.
        others = said["additionalProperties"] = not properties
    said["properties"] = {name: each for name, each in properties.items() if each is not False}
    if others not in (None, False) and properties:
        pattern = any_name_but(properties)
        said["patternProperties"] = {**said.get("patternProperties", {}), pattern: others}
        said["additionalProperties"] = False
