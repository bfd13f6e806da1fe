"""Finds keywords of JSON schemas whose values have a wrong type, in all drafts.

A wrong type anywhere makes a schema malformed, whether or not we enforce the keyword.
:mod:`pd.structured.schema_check` finds unenforceable values of the right type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd.core.brief import short_repr, shorten_text
from pd.structured.schema_walk import Place, is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Characters of a schema's place in messages.
_MAX_PLACE = 200
# A schema is an object or a boolean.
_SCHEMA = (dict, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value % 1 == 0


def _is_bound(value: object) -> bool:
    # Draft 4 has booleans here, which make another keyword's bound exclusive.
    return is_number(value) or isinstance(value, bool)


def _are_names(value: object) -> bool:
    # Draft 3 has a boolean in each property instead.
    return _is_list_of_texts(value) or isinstance(value, bool)


def _are_types(value: object) -> bool:
    # Draft 3 allows schemas in this list.
    return isinstance(value, list) and all(isinstance(each, (str, dict)) for each in value)


def _are_named_lists(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_list_of_texts, value.values()))


def _is_step(value: object) -> bool:
    return is_number(value) and value > 0  # type: ignore[operator]


_Shape = tuple[str, "Callable[[Any], bool]"]
_TEXT: _Shape = ("a string", _is_text)
_COUNT: _Shape = ("a whole number of at least 0", _is_count)
_NUMBER: _Shape = ("a number", is_number)
_EXCLUSIVE: _Shape = ("a number", _is_bound)
_STEP: _Shape = ("a number above 0", _is_step)
_TYPES: _Shape = ("a string or a list of strings", lambda each: _is_text(each) or _are_types(each))
_VALUES: dict[str, _Shape] = {
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef", "$id", "$schema"), _TEXT),
    **dict.fromkeys(("$anchor", "$dynamicAnchor", "pattern", "format"), _TEXT),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _EXCLUSIVE),
    **dict.fromkeys(("multipleOf", "divisibleBy"), _STEP),
    "type": _TYPES,
    "disallow": _TYPES,
    "enum": ("a list", lambda each: isinstance(each, list)),
    "uniqueItems": ("a boolean", lambda each: isinstance(each, bool)),
    "required": ("a list of strings", _are_names),
    "dependentRequired": ("an object of lists of strings", _are_named_lists),
}
# Keywords whose values are schemas: one, a list of them, or an object of them by name.
_ONE = frozenset(
    ("additionalProperties", "propertyNames", "not", "contains", "if", "then", "else")
) | {"unevaluatedProperties", "unevaluatedItems", "additionalItems", "contentSchema"}
_LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_ONE_OR_LISTS = frozenset(("items", "extends"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


def check_shapes(schema: object) -> None:
    """Raise ValueError for the first keyword whose value has a wrong type."""
    if not isinstance(schema, _SCHEMA):
        raise ValueError(f"it must be an object, not {short_repr(schema)}")
    stack: list[tuple[Place, object]] = [(Place(None, (), 0), schema)]
    while stack:
        place, part = stack.pop()
        if not isinstance(part, dict):
            continue
        for keyword, value in part.items():
            wanted = _describe_wanted(keyword, value)
            if wanted is not None:
                where = shorten_text(str(place), _MAX_PLACE) or "the root"
                raise ValueError(
                    f"{keyword!r} must be {wanted}, not {short_repr(value)} (at {where})"
                )
            for steps, inside in _list_schemas(keyword, value):
                if isinstance(inside, dict):
                    stack.append((Place(place, steps, place.depth + len(steps)), inside))


def _describe_wanted(keyword: str, value: Any) -> str | None:
    """Describe the shape required of a keyword's value; None if it has this shape."""
    if keyword in _VALUES:
        wanted, fits = _VALUES[keyword]
        return None if fits(value) else wanted
    if keyword in _ONE:
        return None if isinstance(value, _SCHEMA) else "a schema"
    if keyword in _LISTS or (keyword in _ONE_OR_LISTS and isinstance(value, list)):
        is_list = isinstance(value, list) and all(isinstance(each, _SCHEMA) for each in value)
        return None if is_list else "a list of schemas"
    if keyword in _ONE_OR_LISTS:
        return None if isinstance(value, _SCHEMA) else "a schema or a list of schemas"
    if keyword in _NAMED:
        is_named = isinstance(value, dict) and all(
            isinstance(each, _SCHEMA) for each in value.values()
        )
        return None if is_named else "an object of schemas"
    if keyword == "dependencies":
        is_named = isinstance(value, dict) and all(
            isinstance(each, (*_SCHEMA, str)) or _is_list_of_texts(each) for each in value.values()
        )
        return None if is_named else "an object of schemas or lists of strings"
    return None


def _list_schemas(keyword: str, value: Any) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the schemas in a keyword's value, whose shape we have checked, with their steps."""
    if keyword in _NAMED or keyword == "dependencies":
        yield from (((keyword, str(name)), each) for name, each in value.items())
    elif isinstance(value, list) and (keyword in _LISTS or keyword in _ONE_OR_LISTS):
        yield from (((keyword, str(number)), each) for number, each in enumerate(value))
    elif keyword in _ONE or keyword in _ONE_OR_LISTS:
        yield (keyword,), value
