"""Splits regular expressions into parts and examines them."""

from __future__ import annotations

import re

# xgrammar keeps only the lowest 32 bits of a number, so it would misread larger ones.
MAX_NUMBER = (1 << 31) - 1
_REPETITION = re.compile(r"\{([0-9]*)(?:,([0-9]*))?\}")
_NO_REPETITION = re.compile(r"\{(?![0-9]+(?:,[0-9]*)?\})")
# A repetition of a repetition. A single ``?`` after a repetition only makes it lazy.
_TWICE = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})(?:[*+{]|\?[*+?{])")

# NOTE: Strangers send patterns, so each alternative ends where it cannot fail: no backtracking.
_PART = re.compile(
    r"\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)"  # a class
    r"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|c.|.|\Z)"  # an escape
    r"|\((?:\?(?:P?<[A-Za-z]\w{0,63}>|<?[=!]|:|))?"  # the beginning of a group
    r"|.",
    re.DOTALL,
)


def split_alternatives(pattern: str) -> list[list[str]]:
    """Split a pattern at each ``|`` outside groups.

    Returns:
        A list per alternative of its classes, escapes, beginnings of groups, and single characters.
    """
    alternatives: list[list[str]] = [[]]
    depth = 0
    for part in _PART.findall(pattern):
        if part == "|" and depth == 0:
            alternatives.append([])
            continue
        depth += part.startswith("(") - (part == ")")
        alternatives[-1].append(part)
    return alternatives


def is_balanced(pattern: str) -> bool:
    """Return whether each opening parenthesis has a closing one, and the reverse."""
    depth = 0
    for part in _PART.findall(pattern):
        depth += part.startswith("(") - (part == ")")
        if depth < 0:
            return False
    return depth == 0


def strip_anchors(parts: list[str]) -> tuple[bool, list[str], bool]:
    """Return whether an alternative begins with ``^``, the parts between, and whether it ends with
    ``$``."""
    begins = parts[:1] == ["^"]
    ends = parts[begins:][-1:] == ["$"]
    return begins, parts[begins : len(parts) - ends], ends


def is_too_large(digits: str) -> bool:
    """Return whether a number exceeds ``MAX_NUMBER``.

    We do not convert a number of many digits, because strangers send it and conversion is slow.
    """
    digits = digits.lstrip("0")
    return len(digits) > len(str(MAX_NUMBER)) or int(digits or "0") > MAX_NUMBER


def list_repetition_counts(pattern: str) -> list[str]:
    """List the numbers in repetitions such as ``{2,5}``."""
    return [
        number for pair in _REPETITION.findall(_blank_classes(pattern)) for number in pair if number
    ]


def repeats_twice(pattern: str) -> bool:
    """Return whether a repetition follows another one, as in ``a{2}{3}``.

    JavaScript has no such patterns, and Python's ``a++`` means a possessive repetition.
    """
    return _TWICE.search(_blank_classes(pattern)) is not None


def has_open_brace(pattern: str) -> bool:
    """Return whether a ``{`` begins no repetition.

    JavaScript matches such a brace literally, Python reads ``a{,3}`` as ``a{0,3}``, and xgrammar
    accepts neither.
    """
    return _NO_REPETITION.search(_blank_classes(pattern)) is not None


def _blank_classes(pattern: str) -> str:
    """Replace classes and escapes by blanks, because braces inside them are no repetitions."""
    return "".join(part if len(part) == 1 else " " for part in _PART.findall(pattern))


# Members of a class: characters or escapes, and ranges of them.
_MEMBER = r"(\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]{1,6}\}|\\.|[^\\])"
_RANGE = re.compile(f"{_MEMBER}(?:-{_MEMBER})?", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
# Letters of escapes that stand for several characters.
SEVERAL = frozenset("dDwWsS")


def list_members(part: str) -> list[tuple[str, str]]:
    """Return the first and last character of each range of a class.

    The last one is empty for a single character. For a part other than a class we return the part.
    """
    if part.startswith("[") and part != "[":
        return _RANGE.findall(part[2 if part[1:2] == "^" else 1 : -1])
    return [(part, "")]


def decode_character(written: str) -> int | None:
    """Return the code of a character of a pattern; None unless it stands for exactly one."""
    if not written.startswith("\\") or len(written) == 1:
        return ord(written) if len(written) == 1 else None
    name = written[1]
    if len(written) > 3:
        return int(written[2:].strip("{}"), 16)
    if name in _ESCAPED:
        return ord(_ESCAPED[name])
    return None if name.isalnum() else ord(name)
