"""Check of regular expressions, in JSON schemas and by themselves: those that are not enforced are
refused."""

from __future__ import annotations

import re

from pd.core.brief import brief
from pd.core.patterns import (
    SEVERAL,
    alternatives,
    character,
    is_balanced,
    is_too_large,
    members,
    repeats_twice,
    repetitions,
    without_anchors,
)

# Python reads digits behind \0 as a part of the escape, JavaScript and xgrammar do not.
_OCTAL = re.compile(r"(?<!\\)(?:\\\\)*(\\0[0-9])")


def what_is_not_enforced_of(pattern: object, *, in_json: bool = True) -> str | None:
    """Describe what of a pattern would not be enforced, or would break JSON; None if nothing.

    Args:
        in_json: the pattern is about strings inside JSON, where it can break it.
    """
    if not isinstance(pattern, str):
        return f"the pattern {brief(pattern)}"
    octal = _OCTAL.search(pattern)
    if octal is not None:
        return f"the pattern {brief(pattern)}, which has the escape {brief(octal[1])},"
    for number in repetitions(pattern):
        if is_too_large(number):
            return f"the pattern {brief(pattern)}, which repeats something {brief(number)} times,"
    # Inside JSON it becomes a part of another pattern, which might have the missing parenthesis.
    if in_json and not is_balanced(pattern):
        return f"the pattern {brief(pattern)}, which has a parenthesis too many or too few,"
    if repeats_twice(pattern):
        return f"the pattern {brief(pattern)}, which repeats a repetition,"
    for parts in alternatives(pattern):
        _, between, _ = without_anchors(parts)
        for part in between:
            found = _complaint(part, in_json)
            if found is not None:
                return f"the pattern {brief(pattern)}, which {found},"
    return None


def _complaint(part: str, in_json: bool) -> str | None:
    """Describe the error of a part that is neither the first nor the last anchor."""
    if part in ("^", "$"):
        return "has an anchor inside"
    if part.startswith("(?") and not (part.endswith(":") or part[-1] == ">"):
        return "looks around or has flags"
    if part.startswith(("[]", "[^]")):
        return "has a class that begins with ']'"
    if part.startswith("(") or part in "|)*+?{},." or part.isdigit():
        return None
    for first, last in members(part):
        for each in (first, last):
            if each and character(each) is None and each[1:] not in SEVERAL:
                return f"has the escape {brief(each)}"
        # An excluded class only has to be understood.
        if in_json and not part.startswith("[^") and _spans(first, last):
            return "names characters that JSON escapes"
    return None


def _spans(first: str, last: str) -> bool:
    """Whether a range of characters has one that JSON escapes."""
    low, high = character(first), character(last or first)
    if low is None or high is None:
        return False  # classes such as digits
    return low < 0x20 or low <= 0x22 <= high or low <= 0x5C <= high
