"""Walks through JSON schemas, their references, and the schemas in structural tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from pd.core.brief import short_repr

if TYPE_CHECKING:
    from collections.abc import Iterator

# Steps from the root to the deepest visited schemas.
_MAX_STEPS = 1024
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_SINGLE = ("items", "additionalProperties", "propertyNames", "not", "contains")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
# Fields of a structural tag's formats: schema, regular expression, and grammar in GBNF.
SCHEMA_OF_TAG = "json_schema"
PATTERN_OF_TAG = "pattern"
GRAMMAR_OF_TAG = "grammar"
# Keywords that concern instances of one type only.
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
LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
# Largest bounds for exact comparison by xgrammar, of whole numbers and of others.
MAX_INTEGER_BOUND, MAX_NUMBER_BOUND = (1 << 63) - 2, 1 << 53
_PLAIN_TYPES = {
    "string": str,
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}
TYPES = frozenset(_PLAIN_TYPES) | {"number", "integer"}


class Place(NamedTuple):
    """Position of a schema inside another.

    Attributes:
        steps: keyword, and the name or index if it has several schemas.
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


def walk_schemas(schema: object) -> Iterator[tuple[Place, Any]]:
    """Yield a schema and all schemas inside it, objects and booleans, with their places.

    We leave out schemas too deep to be compiled.
    """
    stack: list[tuple[Place, object]] = [(Place(None, (), 0), schema)]
    while stack:
        place, part = stack.pop()
        if not isinstance(part, (dict, bool)) or place.depth > _MAX_STEPS:
            continue
        yield place, part
        if isinstance(part, dict):
            for steps, inside in _list_inner(part):
                stack.append((Place(place, steps, place.depth + len(steps)), inside))


def walk_tag_schemas(structural_tag: object) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield the formats with a ``json_schema`` inside a structural tag, in the tag's order.

    The steps of their places are keys of objects and indices of lists.
    """
    return (pair for pair in _walk_tag(structural_tag) if SCHEMA_OF_TAG in pair[1])


def walk_tag_patterns(structural_tag: object) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield the regular expressions (``PATTERN_OF_TAG``) of a structural tag, with their places."""
    for place, part in _walk_tag(structural_tag):
        if part.get("type") == "regex" and PATTERN_OF_TAG in part:
            yield place, part


def walk_tag_grammars(structural_tag: object) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield the GBNF grammars (``GRAMMAR_OF_TAG``) of a structural tag, with their places."""
    for place, part in _walk_tag(structural_tag):
        if part.get("type") == "grammar" and GRAMMAR_OF_TAG in part:
            yield place, part


def _walk_tag(structural_tag: object) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield all objects of a structural tag outside schemas, in the tag's order."""
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


def _list_inner(part: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], object]]:
    for name in _NAMED:
        named = part.get(name)
        if isinstance(named, dict):
            yield from (((name, str(key)), each) for key, each in named.items())
    yield from (((name,), part[name]) for name in _SINGLE if name in part)
    for name in _LISTED:
        several = part.get(name)
        if isinstance(several, list):
            yield from (((name, str(i)), each) for i, each in enumerate(several))


def resolve_reference(root: object, reference: object) -> Any:
    """Return the target of a reference; None unless it is a schema."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    tokens = unquote(reference[1:]).split("/")[1:]
    steps = iter(token.replace("~1", "/").replace("~0", "~") for token in tokens)
    target = root
    for keyword in steps:
        inside = target.get(keyword) if isinstance(target, dict) else None
        if keyword in _NAMED and isinstance(inside, dict):
            target = inside.get(next(steps, None))
        elif keyword in _LISTED and isinstance(inside, list):
            target = _get_item(inside, next(steps, ""))
        else:
            target = inside if keyword in _SINGLE else None
    return target if isinstance(target, (dict, bool)) else None


def _get_item(several: list[Any], number: str) -> object:
    # No list here needs more digits. We check them because int() accepts spaces and underscores.
    if not (number.isascii() and number.isdigit() and len(number) < 10):
        return None
    return several[int(number)] if int(number) < len(several) else None


def gather_references(root: dict[str, Any]) -> dict[str, Any]:
    """Move the targets of references into definitions with plain names.

    We do this because rewriting would break the paths to them. The caller stores the returned
    definitions as the root's ``$defs``.

    Raises:
        ValueError: a reference leads to no schema, or to ``false``.
    """
    parts = [part for _, part in walk_schemas(root) if isinstance(part, dict) and "$ref" in part]
    targets = [resolve_reference(root, part["$ref"]) for part in parts]
    names: dict[int, str] = {id(root): "#"}
    definitions: dict[str, Any] = {}
    for part, target in zip(parts, targets, strict=True):
        if target is None or target is False:
            fault = "leads to no schema" if target is None else "allows nothing"
            raise ValueError(f"the reference {short_repr(part['$ref'])} {fault}")
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


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_of_type(value: object, types: object) -> bool:
    """Return whether a value has a type, or one of a list of types."""
    if isinstance(types, list):
        return any(is_of_type(value, each) for each in types)
    if types == "integer":
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return is_whole and is_number(value)
    if types == "number":
        return is_number(value)
    return isinstance(types, str) and type(value) is _PLAIN_TYPES.get(types)


def are_equal(one: object, other: object) -> bool:
    """Compare two JSON values: ``1`` equals ``1.0``, but not ``true``."""
    pairs: list[tuple[Any, Any]] = [(one, other)]
    while pairs:
        first, second = pairs.pop()
        if is_number(first) and is_number(second):
            if first != second:
                return False
        elif type(first) is not type(second) or (
            isinstance(first, (dict, list)) and len(first) != len(second)
        ):
            return False
        elif isinstance(first, dict):
            if first.keys() != second.keys():
                return False
            pairs += ((value, second[name]) for name, value in first.items())
        elif isinstance(first, list):
            pairs += zip(first, second, strict=True)
        elif first != second:
            return False
    return True


def list_allowed_values(schema: dict[str, Any]) -> list[Any] | None:
    """List the values that ``enum``, ``const`` and ``type`` allow; None without the first two."""
    values = schema.get("enum")
    if "const" in schema:
        const = schema["const"]
        is_listed = not isinstance(values, list) or any(are_equal(const, each) for each in values)
        values = [const] if is_listed else []
    if not isinstance(values, list):
        return None
    if "type" not in schema:
        return values
    return [value for value in values if is_of_type(value, schema["type"])]


def choose_bound_limit(types: object) -> int:
    """Return the largest bound for exact comparison, given a type or a list of types."""
    kinds = types if isinstance(types, list) else [types]
    is_whole = "integer" in kinds and "number" not in kinds
    return MAX_INTEGER_BOUND if is_whole else MAX_NUMBER_BOUND
