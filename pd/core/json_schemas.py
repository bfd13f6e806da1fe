"""Walks through JSON schemas, references inside them, and structural tags that have some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterator

# Steps from the root to the schemas that are walked through.
_MAX_STEPS = 1024
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_SINGLE = ("items", "additionalProperties", "propertyNames", "not", "contains")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
# Where a format of a structural tag has its schema.
SCHEMA_OF_TAG = "json_schema"
# Where one has its regular expression.
PATTERN_OF_TAG = "pattern"
# Where one has its grammar in GBNF.
GRAMMAR_OF_TAG = "grammar"
# Keywords that say something about instances of one type only.
OF_TYPES = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        "properties",
        "required",
        "minProperties",
        "maxProperties",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "unevaluatedProperties",
    ),
}


class Place(NamedTuple):
    """Position of a schema inside another.

    Attributes:
        steps: keyword, and name or number if it has several schemas.
        depth: number of steps from the root.
    """

    parent: Place | None
    steps: tuple[str, ...]
    depth: int

    @property
    def all_steps(self) -> tuple[str, ...]:
        """Steps from the root to the schema."""
        steps: list[str] = []
        place: Place | None = self
        while place is not None:
            steps += reversed(place.steps)
            place = place.parent
        return tuple(reversed(steps))

    def __str__(self) -> str:
        return "/".join(self.all_steps)


def subschemas(schema: object) -> Iterator[tuple[Place, Any]]:
    """All schemas inside a schema, objects and booleans, itself first; none that is too deep to be
    compiled."""
    stack: list[tuple[Place, object]] = [(Place(None, (), 0), schema)]
    while stack:
        place, part = stack.pop()
        if not isinstance(part, (dict, bool)) or place.depth > _MAX_STEPS:
            continue
        yield place, part
        if isinstance(part, dict):
            for steps, inside in _inside(part):
                stack.append((Place(place, steps, place.depth + len(steps)), inside))


def schemas_of_tags(structural_tag: object) -> Iterator[tuple[Place, dict[str, Any]]]:
    """All formats inside a structural tag of xgrammar that have a ``json_schema``, in the tag's
    order, and where each stands: its steps are keys of objects and numbers in lists."""
    return (found for found in _parts_of_tag(structural_tag) if SCHEMA_OF_TAG in found[1])


def patterns_of_tags(structural_tag: object) -> Iterator[tuple[Place, dict[str, Any]]]:
    """All formats inside a structural tag that are a regular expression, in ``PATTERN_OF_TAG``, and
    where each stands."""
    for place, part in _parts_of_tag(structural_tag):
        if part.get("type") == "regex" and PATTERN_OF_TAG in part:
            yield place, part


def grammars_of_tags(structural_tag: object) -> Iterator[tuple[Place, dict[str, Any]]]:
    """All formats inside a structural tag that are a grammar in GBNF, in ``GRAMMAR_OF_TAG``, and
    where each stands."""
    for place, part in _parts_of_tag(structural_tag):
        if part.get("type") == "grammar" and GRAMMAR_OF_TAG in part:
            yield place, part


def _parts_of_tag(structural_tag: object) -> Iterator[tuple[Place, dict[str, Any]]]:
    """All objects of a structural tag but those inside schemas, in the tag's order."""
    stack: list[tuple[Place, object]] = [(Place(None, (), 0), structural_tag)]
    while stack:
        place, part = stack.pop()
        if isinstance(part, dict):
            yield place, part
        inside: list[tuple[object, object]] = []
        if isinstance(part, dict):
            inside = [(key, each) for key, each in part.items() if key != SCHEMA_OF_TAG]
        elif isinstance(part, list):
            inside = list(enumerate(part))
        for step, each in reversed(inside):
            stack.append((Place(place, (str(step),), place.depth + 1), each))


def _inside(part: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], object]]:
    for name in _NAMED:
        named = part.get(name)
        if isinstance(named, dict):
            yield from (((name, str(key)), each) for key, each in named.items())
    yield from (((name,), part[name]) for name in _SINGLE if name in part)
    for name in _LISTED:
        several = part.get(name)
        if isinstance(several, list):
            yield from (((name, str(i)), each) for i, each in enumerate(several))


def referenced(root: object, reference: object) -> Any:
    """The schema that a reference leads to, an object or a boolean; None if it leads elsewhere, or
    to something that is no schema."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    tokens = unquote(reference[1:]).split("/")[1:]
    steps = iter(token.replace("~1", "/").replace("~0", "~") for token in tokens)
    found = root
    for keyword in steps:
        inside = found.get(keyword) if isinstance(found, dict) else None
        if keyword in _NAMED and isinstance(inside, dict):
            found = inside.get(next(steps, None))
        elif keyword in _LISTED and isinstance(inside, list):
            found = _item(inside, next(steps, ""))
        else:
            found = inside if keyword in _SINGLE else None
    return found if isinstance(found, (dict, bool)) else None


def _item(several: list[Any], number: str) -> object:
    # As many digits as any list here could need; int() would also read spaces and underscores.
    if not (number.isascii() and number.isdigit() and len(number) < 10):
        return None
    return several[int(number)] if int(number) < len(several) else None
