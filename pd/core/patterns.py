"""The parts of regular expressions."""

from __future__ import annotations

import re

# xgrammar takes larger numbers for others: it keeps the lowest 32 bits.
MAX_NUMBER = (1 << 31) - 1
_REPETITION = re.compile(r"\{([0-9]*)(?:,([0-9]*))?\}")
# A repetition behind another one; a ``?`` there only says which match is preferred.
_TWICE = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})(?:[*+{]|\?[*+?{])")

# NOTE: strangers write patterns, so none is matched twice: each choice ends where it cannot fail.
_PART = re.compile(
    r"\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)"  # a class
    r"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|c.|.|\Z)"  # an escape
    r"|\((?:\?(?:P?<[A-Za-z]\w{0,63}>|<?[=!]|:|))?"  # how a group begins
    r"|.",
    re.DOTALL,
)


def alternatives(pattern: str) -> list[list[str]]:
    """Split a pattern at the ``|`` outside of groups. Each alternative is a list of classes,
    escapes, beginnings of groups, and single characters."""
    found: list[list[str]] = [[]]
    depth = 0
    for part in _PART.findall(pattern):
        if part == "|" and depth == 0:
            found.append([])
            continue
        depth += part.startswith("(") - (part == ")")
        found[-1].append(part)
    return found


def is_balanced(pattern: str) -> bool:
    """Whether each group that begins ends, and none ends that did not begin."""
    depth = 0
    for part in _PART.findall(pattern):
        depth += part.startswith("(") - (part == ")")
        if depth < 0:
            return False
    return depth == 0


def without_anchors(parts: list[str]) -> tuple[bool, list[str], bool]:
    """Whether an alternative begins with ``^``, what is between, and whether it ends with ``$``."""
    begins = parts[:1] == ["^"]
    ends = parts[begins:][-1:] == ["$"]
    return begins, parts[begins : len(parts) - ends], ends


def is_too_large(digits: str) -> bool:
    """Whether a number that a stranger wrote is above ``MAX_NUMBER``. One of many digits is not
    converted, since that takes long."""
    digits = digits.lstrip("0")
    return len(digits) > len(str(MAX_NUMBER)) or int(digits or "0") > MAX_NUMBER


def repetitions(pattern: str) -> list[str]:
    """The numbers in ``{2,5}`` and the like."""
    return [each for found in _REPETITION.findall(_plain(pattern)) for each in found if each]


def repeats_twice(pattern: str) -> bool:
    """Whether a repetition follows another one, as in ``a{2}{3}``. JavaScript has no such patterns,
    and in Python ``a++`` gives back nothing of what it has matched."""
    return _TWICE.search(_plain(pattern)) is not None


def _plain(pattern: str) -> str:
    """The pattern with blanks for classes and escapes, which are no repetitions, whatever they
    have."""
    return "".join(part if len(part) == 1 else " " for part in _PART.findall(pattern))


# Members of a class, one or a range of them, and their escapes.
_MEMBER = r"(\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]{1,6}\}|\\.|[^\\])"
_RANGE = re.compile(f"{_MEMBER}(?:-{_MEMBER})?", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
# Letters of escapes that mean several characters.
SEVERAL = frozenset("dDwWsS")


def members(part: str) -> list[tuple[str, str]]:
    """Return the first and last character of each range of a class; the last is empty for a single
    character. A part that is no class stands for itself."""
    if part.startswith("[") and part != "[":
        return _RANGE.findall(part[2 if part[1:2] == "^" else 1 : -1])
    return [(part, "")]


def character(written: str) -> int | None:
    """The code of a character of a pattern; None for an escape that means several, or nothing."""
    if not written.startswith("\\") or len(written) == 1:
        return ord(written) if len(written) == 1 else None
    name = written[1]
    if len(written) > 3:
        return int(written[2:].strip("{}"), 16)
    if name in _ESCAPED:
        return ord(_ESCAPED[name])
    return None if name.isalnum() else ord(name)
