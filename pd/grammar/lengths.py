"""Lengths of strings, counted beside the grammar.

For every character that a string of bounded length may have, xgrammar makes a state of the grammar
and finds out which tokens of the vocabulary may come in it. With 131,072 tokens a hundred
characters take seconds. So a schema is compiled twice. In the first grammar, which knows all
tokens, strings are as long as they like. In the second, which knows no tokens and is compiled in
milliseconds, they have their lengths. A token may come if it is in the mask of the first grammar
and the second takes its bytes.

:class:`pd.grammar.token_characters.TokenCharacters` finds these tokens without trying all of them.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from pd.core.json_schemas import referenced, subschemas
from pd.grammar.patterns import PLAIN_CHARACTER

if TYPE_CHECKING:
    from collections.abc import Callable

_ANY_LENGTH = f"^{PLAIN_CHARACTER}*$"
_BOUNDED = re.compile(re.escape(f"^{PLAIN_CHARACTER}") + r"\{(\d+),(\d*)\}\$")
_KINDS = frozenset({"object", "array", "string", "number", "boolean", "null"})
# Characters that are repeated together.
_PIECE = 32
# A character that stands in every string. So many of them stand only in strings and in free text.
PROBE, PROBES = "x", 16
# One that no string of JSON has as it is, and free text has.
CONTROL = "\x01"


def split_lengths(schema: object) -> tuple[object, object] | None:
    """A schema without the lengths of its strings, and one with them, written so that a grammar of
    no tokens is compiled quickly.

    Args:
        schema: from :func:`pd.grammar.json_schemas.prepare`. It is not changed.

    Returns:
        None if no string has a length, or if it may be unknown which of several strings is being
        written, since then their characters cannot be counted.
    """
    if not has_lengths(schema) or not is_clear(schema):
        return None
    return without_lengths(schema), with_lengths(schema)


def has_lengths(schema: object) -> bool:
    """Whether a string of a schema has a length."""
    return any(_BOUNDED.fullmatch(str(part.get("pattern"))) for part in _objects(schema))


def is_clear(schema: object) -> bool:
    """Whether it is always known which string of a schema is being written."""
    return not any(
        "propertyNames" in part or not _is_clear(schema, part) for part in _objects(schema)
    )


def without_lengths(schema: object) -> object:
    """A copy in which strings are as long as they like."""
    return _changed(schema, lambda *_: _ANY_LENGTH)


def with_lengths(schema: object) -> object:
    """A copy of which a grammar of no tokens is compiled quickly."""
    return _changed(schema, _in_pieces)


def _changed(schema: object, pattern: Callable[[int, int | None], str]) -> object:
    changed = copy.deepcopy(schema)
    for part in _objects(changed):
        found = _BOUNDED.fullmatch(str(part.get("pattern")))
        if found is not None:
            part["pattern"] = pattern(int(found[1]), int(found[2]) if found[2] else None)
    return changed


def _objects(schema: object) -> list[dict[str, Any]]:
    return [part for _, part in subschemas(schema) if isinstance(part, dict)]


def _in_pieces(low: int, high: int | None) -> str:
    """Strings of so many characters. xgrammar takes time with the square of a repetition."""
    needed = f"({PLAIN_CHARACTER}{{{_PIECE}}}){{{low // _PIECE}}}" if low >= _PIECE else ""
    needed += f"{PLAIN_CHARACTER}{{{low % _PIECE}}}" if low % _PIECE else ""
    if high is None:
        return f"^{needed}{PLAIN_CHARACTER}*$"
    # Whole pieces, and so many characters more that every length up to the last can be written.
    pieces = max((high - low + 1) // _PIECE - 1, 0)
    rest = f"{PLAIN_CHARACTER}{{0,{high - low - pieces * _PIECE}}}"
    more = f"({PLAIN_CHARACTER}{{{_PIECE}}}){{0,{pieces}}}" if pieces else ""
    return f"^{needed}{more}{rest}$"


def _is_clear(root: object, part: dict[str, Any]) -> bool:
    """Whether the first character of an instance tells of which alternative it is."""
    taken: set[str] = set()
    for each in part.get("anyOf", ()):
        kinds = _kinds(root, each)
        if kinds & taken:
            return False
        taken |= kinds
    return True


def _kinds(root: object, schema: object) -> frozenset[str]:
    """The types that instances of a schema may have."""
    for _ in range(len(_KINDS)):  # a longer way of references counts as leading to any
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = referenced(root, schema["$ref"])
    if not isinstance(schema, dict) or "$ref" in schema:
        return _KINDS
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({"number" if kind == "integer" else kind})
    if set(schema) == {"enum"} and all(isinstance(each, str) for each in schema["enum"]):
        return frozenset({"string"})
    if set(schema) == {"enum"} and not any(isinstance(each, str) for each in schema["enum"]):
        return _KINDS - {"string"}
    return _KINDS
