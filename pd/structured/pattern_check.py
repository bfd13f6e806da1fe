"""Refuses unenforceable regular expressions, inside JSON schemas and by themselves."""

from __future__ import annotations

import re

from pd.core.brief import short_repr
from pd.structured.pattern_parts import (
    SEVERAL,
    decode_character,
    has_open_brace,
    is_balanced,
    is_too_large,
    list_members,
    list_repetition_counts,
    repeats_twice,
    split_alternatives,
    strip_anchors,
)

# Python treats digits after \0 as a part of the escape. JavaScript and xgrammar do not.
_OCTAL = re.compile(r"(?<!\\)(?:\\\\)*(\\0[0-9])")


def find_unenforced_in_pattern(pattern: object, *, in_json: bool = True) -> str | None:
    """Describe the first part of a pattern that is unenforceable or breaks JSON.

    Args:
        in_json: the pattern is about strings inside JSON.

    Returns:
        The description, or None for a good pattern.
    """
    if not isinstance(pattern, str):
        return f"the pattern {short_repr(pattern)}"
    fault = _find_fault(pattern, in_json)
    return None if fault is None else f"the pattern {short_repr(pattern)} ({fault})"


def _find_fault(pattern: str, in_json: bool) -> str | None:
    octal = _OCTAL.search(pattern)
    if octal is not None:
        return f"the escape {short_repr(octal[1])}"
    for number in list_repetition_counts(pattern):
        if is_too_large(number):
            return f"a repetition of {short_repr(number)} times"
    # Inside JSON we put the pattern into another one, which could balance its parentheses.
    if in_json and not is_balanced(pattern):
        return "unbalanced parentheses"
    if repeats_twice(pattern):
        return "a repeated repetition"
    if has_open_brace(pattern):
        return "a brace that begins no repetition"
    for parts in split_alternatives(pattern):
        _, between, _ = strip_anchors(parts)
        for part in between:
            fault = _find_fault_in_part(part, in_json)
            if fault is not None:
                return fault
    return None


def _find_fault_in_part(part: str, in_json: bool) -> str | None:
    """Find a fault of a part other than the anchors at the ends."""
    if part in ("^", "$"):
        return "an anchor inside"
    if part.startswith("(?") and not (part.endswith(":") or part[-1] == ">"):
        return "a lookaround or flags"
    if part.startswith(("[]", "[^]")):
        return "a class that begins with ']'"
    if part.startswith("(") or part in "|)*+?{},." or part.isdigit():
        return None
    for first, last in list_members(part):
        for each in (first, last):
            if each and decode_character(each) is None and each[1:] not in SEVERAL:
                return f"the escape {short_repr(each)}"
        # We only have to parse an excluded class, because rewriting removes these characters.
        if in_json and not part.startswith("[^") and _spans_escaped(first, last):
            return "characters that JSON escapes"
    return None


def _spans_escaped(first: str, last: str) -> bool:
    """Return whether a range of characters contains one escaped by JSON."""
    low, high = decode_character(first), decode_character(last or first)
    if low is None or high is None:
        return False  # classes such as digits
    return low < 0x20 or low <= 0x22 <= high or low <= 0x5C <= high
