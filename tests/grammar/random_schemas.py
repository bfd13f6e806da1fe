"""Random JSON schemas of enforced keywords: nesting, enums, arrays, bounded numbers, optional
fields, references, unions, other scripts. Strings and arrays are bounded, or random outputs would
not end. Times have as many decimals as a model likes, and a trained one may repeat them for ever:
it is asked for none."""

from __future__ import annotations

from datetime import datetime, time
from typing import TYPE_CHECKING, Any

from jsonschema import FormatChecker

if TYPE_CHECKING:
    import random

_NAMES = [
    "a",
    "name",
    "größe",
    "名前",
    "with space",
    'quo"te',
    "back\\slash",
    "x" * 12,
    "🦊",
    "$ref",
]
_VALUES = [None, True, 0, -7, 2.5, "", "red", "ä", 'q"', "日本", "🦊", "new\nline", [], [1, "a"]]
_FORMATS = ["date", "uuid", "ipv4", "ipv6"]
_TIMES = ["time", "date-time"]
_PATTERNS = ["^[a-f]{2,5}$", "^(yes|no)$", "^[0-9]{3}-[0-9]{2}$", "^[äöü]{1,3}$"]
# What jsonschema checks without other packages, and times.
FORMATS = FormatChecker(_FORMATS)


@FORMATS.checks("time", ValueError)
def _is_time(instance: object) -> bool:
    return not isinstance(instance, str) or time.fromisoformat(instance).tzinfo is not None


@FORMATS.checks("date-time", ValueError)
def _is_moment(instance: object) -> bool:
    return not isinstance(instance, str) or datetime.fromisoformat(instance).tzinfo is not None


def random_schema(rng: random.Random, *, times: bool = True) -> dict[str, Any]:
    """Make a schema with references to its own definitions."""
    formats = _FORMATS + _TIMES * times
    definitions = {
        f"d{i}": _object(rng, 1, [], formats) if rng.random() < 0.4 else _leaf(rng, formats)
        for i in range(rng.randrange(3))
    }
    names = [f"#/$defs/{name}" for name in definitions]
    schema = _schema(rng, 3, names, formats)
    return {**schema, "$defs": definitions} if definitions and "$ref" not in schema else schema


def _schema(
    rng: random.Random, depth: int, references: list[str], formats: list[str]
) -> dict[str, Any]:
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return _leaf(rng, formats)
    if kind < 0.65:
        return _object(rng, depth, references, formats)
    if kind < 0.8:
        return _array(rng, depth, references, formats)
    if kind < 0.9 and references:
        # Only inside, where the definitions are found.
        inside = {"type": "object", "properties": {"ref": {"$ref": rng.choice(references)}}}
        return {**inside, "required": ["ref"], "additionalProperties": False}
    several = [_schema(rng, depth - 1, references, formats) for _ in range(rng.randrange(1, 4))]
    return {"anyOf": several, "title": "one of them"}


def _object(
    rng: random.Random, depth: int, references: list[str], formats: list[str]
) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randrange(1, 5))
    properties = {name: _schema(rng, depth - 1, references, formats) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.7:
        schema["additionalProperties"] = False
    return schema


def _array(
    rng: random.Random, depth: int, references: list[str], formats: list[str]
) -> dict[str, Any]:
    low = rng.randrange(3)
    if rng.random() < 0.3:
        first = [_schema(rng, depth - 1, references, formats) for _ in range(rng.randrange(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False}
    items = _schema(rng, depth - 1, references, formats)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(3)}


def _leaf(rng: random.Random, formats: list[str]) -> dict[str, Any]:
    kind = rng.randrange(9)
    if kind == 0:
        return {"enum": rng.sample(_VALUES, rng.randrange(1, 5))}
    if kind == 1:
        return {"const": rng.choice(_VALUES)}
    if kind == 2:
        low = rng.randrange(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(300)}
    if kind == 3:
        return {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": rng.randrange(5, 99)}
    if kind == 4:
        low = rng.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 6)}
    if kind == 5:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind == 6:
        return {"type": "string", "format": rng.choice(formats)}
    if kind == 7:
        least = round(rng.uniform(-99, 99), rng.randrange(4))
        most = round(least + rng.choice([0.01, 1, 150]), rng.randrange(3, 5))
        exclusive = rng.choice(["exclusiveMaximum", "maximum"])
        return {"type": "number", "minimum": least, exclusive: most}
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}
