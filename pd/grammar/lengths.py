"""Lengths of strings, counted in a second grammar.

xgrammar creates a state for each character of a string of bounded length. For each state it finds
the allowed tokens of the vocabulary. With 131,072 tokens, a hundred characters take seconds. So we
compile a schema twice. The first grammar knows all tokens but no lengths. The second knows the
lengths but no tokens, so it compiles in milliseconds. We allow a token if it is in the first
grammar's mask and the second grammar accepts its bytes.

:class:`pd.grammar.token_characters.TokenCharacters` finds these tokens without trying all of them.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from pd.structured.pattern_rewriting import PLAIN_CHARACTER
from pd.structured.schema_walk import resolve_reference, walk_schemas

if TYPE_CHECKING:
    from collections.abc import Callable

_ANY_LENGTH = f"^{PLAIN_CHARACTER}*$"
_BOUNDED = re.compile(re.escape(f"^{PLAIN_CHARACTER}") + r"\{(\d+),(\d*)\}\$")
_KINDS = frozenset({"object", "array", "string", "number", "boolean", "null"})
# Characters in one piece of a repetition.
_PIECE = 32
# A character allowed in every string. This many in a row are allowed only in strings and free text.
PROBE, PROBES = "x", 16
# A character allowed in free text, but not unescaped in JSON strings.
CONTROL = "\x01"


def split_lengths(schema: object) -> tuple[object, object] | None:
    """Split a schema into one without lengths of strings and one with them.

    The second one compiles quickly if the grammar knows no tokens.

    Args:
        schema: from :func:`pd.structured.schema_rewriting.rewrite_schema`. We do not change it.

    Returns:
        None if no string has a length. Also None if the output may be in either of two strings,
        because then we cannot count characters.
    """
    if not has_lengths(schema) or not is_clear(schema):
        return None
    return drop_lengths(schema), split_repetitions(schema)


def has_lengths(schema: object) -> bool:
    """Return whether a string of a schema has a length."""
    return any(_BOUNDED.fullmatch(str(part.get("pattern"))) for part in _list_objects(schema))


def is_clear(schema: object) -> bool:
    """Return whether we always know in which string of a schema the output is."""
    return not any(
        "propertyNames" in part or not _has_clear_choices(schema, part)
        for part in _list_objects(schema)
    )


def drop_lengths(schema: object) -> object:
    """Copy a schema without lengths of strings."""
    return _replace_patterns(schema, lambda *_: _ANY_LENGTH)


def split_repetitions(schema: object) -> object:
    """Copy a schema with repetitions split for quick compilation without tokens."""
    return _replace_patterns(schema, _repeat_in_pieces)


def _replace_patterns(schema: object, pattern: Callable[[int, int | None], str]) -> object:
    changed = copy.deepcopy(schema)
    for part in _list_objects(changed):
        match = _BOUNDED.fullmatch(str(part.get("pattern")))
        if match is not None:
            part["pattern"] = pattern(int(match[1]), int(match[2]) if match[2] else None)
    return changed


def _list_objects(schema: object) -> list[dict[str, Any]]:
    return [part for _, part in walk_schemas(schema) if isinstance(part, dict)]


def _repeat_in_pieces(low: int, high: int | None) -> str:
    """Write a pattern for strings of ``low`` to ``high`` characters.

    We repeat pieces, because xgrammar's time grows with the square of a repetition.
    """
    needed = f"({PLAIN_CHARACTER}{{{_PIECE}}}){{{low // _PIECE}}}" if low >= _PIECE else ""
    needed += f"{PLAIN_CHARACTER}{{{low % _PIECE}}}" if low % _PIECE else ""
    if high is None:
        return f"^{needed}{PLAIN_CHARACTER}*$"
    # Whole pieces, plus enough single characters to reach every length.
    pieces = max((high - low + 1) // _PIECE - 1, 0)
    rest = f"{PLAIN_CHARACTER}{{0,{high - low - pieces * _PIECE}}}"
    more = f"({PLAIN_CHARACTER}{{{_PIECE}}}){{0,{pieces}}}" if pieces else ""
    return f"^{needed}{more}{rest}$"


def _has_clear_choices(root: object, part: dict[str, Any]) -> bool:
    """Return whether an instance's first character identifies its alternative."""
    taken: set[str] = set()
    for each in part.get("anyOf", ()):
        kinds = _list_types(root, each)
        if kinds & taken:
            return False
        taken |= kinds
    return True


def _list_types(root: object, schema: object) -> frozenset[str]:
    """Return the possible types of a schema's instances."""
    for _ in range(len(_KINDS)):  # we assume all types after a longer chain of references
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = resolve_reference(root, schema["$ref"])
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
