"""Rewrites regular expressions for xgrammar, by themselves and for JSON strings without escapes.

xgrammar 0.2.8 has two parsers for patterns about JSON strings. In one of them ``.`` and negated
classes include quotes and control characters, so we write every class with the characters it
allows. The other, faster parser needs characters beyond ASCII as escapes, so we write those.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pd.structured.pattern_parts import (
    decode_character,
    list_members,
    split_alternatives,
    strip_anchors,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

Ranges = list[tuple[int, int]]

# Characters that JSON strings need not escape. We leave one out between characters of different
# lengths in UTF-8, because xgrammar turns a range across them into bytes that are not UTF-8.
_PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0x7FE), (0x800, 0xD7FF)]
_PLAIN += [(0xE000, 0xFFFE), (0x10000, 0x10FFFF)]
_SPACES: Ranges = [(0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)]
_SPACES += [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
_SPACES += [(0xFEFF, 0xFEFF)]
_SEVERAL = {
    "\\d": [(0x30, 0x39)],
    "\\w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "\\s": _SPACES,
}
_CARET = 0x5E
_CONTROL = {0: r"\0", 0x9: r"\t", 0xA: r"\n", 0xB: r"\v", 0xC: r"\f", 0xD: r"\r"}
_LAST = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|.)", re.DOTALL)
_LINE_ENDS: Ranges = [(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]
# Characters by which we distinguish a name from others: no other name may share its first 64.
_DISTINCT_CHARACTERS = 64


class _Prefix:
    """A node in the prefix tree of names.

    Attributes:
        following: longer prefixes, by their next character.
        is_name: whether the prefix is one of the names.
    """

    def __init__(self) -> None:
        self.following: dict[str, _Prefix] = {}
        self.is_name = False


def _subtract_ranges(ranges: Ranges, excluded: Ranges) -> Ranges:
    """Return the characters of ``ranges`` outside ``excluded``. All ranges are sorted."""
    left: Ranges = []
    others = iter(excluded)
    low, high = next(others, (1 << 21, 1 << 21))
    for first, last in ranges:
        start = first
        while low <= last:
            if start < low:
                left.append((start, low - 1))
            start = max(start, high + 1)
            if high > last:
                break
            low, high = next(others, (1 << 21, 1 << 21))
        if start <= last:
            left.append((start, last))
    return left


def _write_class(ranges: Ranges) -> str:
    if not ranges:
        raise ValueError("a class in a pattern has only characters that JSON escapes")
    (low, high), *others = ranges
    if low == _CARET:
        # xgrammar would negate a class that begins with an escaped ^.
        ranges = [*([(low + 1, high)] if high > low else []), *others, (low, low)]
        if len(ranges) == 1:
            return _write_character(low)
    return "[" + "".join(f"{_write_character(a)}-{_write_character(b)}" for a, b in ranges) + "]"


def _write_character(code: int) -> str:
    if code > 0x7E:
        return f"\\u{{{code:x}}}"
    return f"\\{chr(code)}" if chr(code) in "[]^-\\/.*+?(){}|$" else chr(code)


PLAIN_CHARACTER = _write_class(_PLAIN)
_EVERYTHING: Ranges = [(0, _LAST)]


def match_other_names(names: Iterable[str]) -> str:
    """Write a pattern for strings without escapes that differ from all ``names``."""
    root = _Prefix()
    for name in names:
        if not all(any(low <= ord(each) <= high for low, high in _PLAIN) for each in name):
            continue  # it needs an escape, so it differs from all these strings
        node = root
        for each in name[:_DISTINCT_CHARACTERS]:
            node = node.following.setdefault(each, _Prefix())
        node.is_name = True
    return f"^{_match_others(root, 0)}$"


def rewrite_pattern(pattern: str) -> str:
    """Rewrite a pattern so that xgrammar 0.2.8 matches the same texts as Python.

    xgrammar matches ``.`` with line ends, too. It negates a class that begins with an escaped
    ``^``, and it treats digits after a character's code as a part of the code.
    """
    return "|".join("".join(map(_correct_part, parts)) for parts in split_alternatives(pattern))


def _correct_part(part: str) -> str:
    if part == ".":
        return r"[^\n]"
    part = _ESCAPE.sub(lambda match: _write_escape(match[0]), part)
    return _write_class(_collect_ranges(list_members(part))) if part.startswith(r"[\^") else part


def _write_escape(escape: str) -> str:
    """Write the character for an escape with a code. Return other escapes unchanged."""
    code = decode_character(escape)
    if code is None or escape[1:2] not in ("x", "u") or code > _LAST or code in _SURROGATES:
        return escape
    if code in _CONTROL:
        return _CONTROL[code]
    return _write_character(code) if code <= 0x7E else chr(code)


def rewrite_search(pattern: str) -> str:
    """Write a pattern for the strings in which ``pattern`` occurs.

    We need this because xgrammar matches every pattern with the whole string.

    Raises:
        ValueError: a part of the pattern allows only characters that JSON escapes.
    """
    written = []
    for begins, between, ends in map(strip_anchors, split_alternatives(pattern)):
        before, after = ("" if anchor else f"{PLAIN_CHARACTER}*" for anchor in (begins, ends))
        middle = "".join(map(_rewrite_part, _replace_optional_groups(between)))
        if not middle and not (begins and ends):
            after = f"{PLAIN_CHARACTER}*" if not before else ""
        written.append(
            before + (f"({middle})" if before or after else middle) * bool(middle) + after
        )
    return f"^({'|'.join(written)})$" if len(written) > 1 else f"^{written[0]}$"


def _replace_optional_groups(parts: list[str]) -> list[str]:
    """Replace ``(a)?`` by ``(|a)``.

    xgrammar accepts the beginning of an optional group as the whole if something in it repeats.
    """
    written: list[str] = []
    groups: list[int] = []
    closed: int | None = None  # index of the group that the last part ends
    in_braces = repeated = False  # whether the last part is inside a repetition, or ends one
    for part in parts:
        if part == "?" and closed is not None:
            written[closed] += "|"
            closed = None
        elif part == "?" and repeated:
            repeated = False  # a lazy repetition allows the same texts
        else:
            repeated = part in ("*", "+", "?") or (part == "}" and in_braces)
            in_braces = part == "{" or (in_braces and part != "}")
            closed = groups.pop() if part == ")" and groups else None
            if part.startswith("("):
                groups.append(len(written))
            written.append("(" if part.startswith("(") else part)
    return written


def _rewrite_part(part: str) -> str:
    """Write a part of a pattern without JSON's escaped characters."""
    if part == ".":
        return _write_class(_subtract_ranges(_PLAIN, _LINE_ENDS))
    if part.lower() in _SEVERAL or (part.startswith("[") and len(part) > 1):
        ranges = _collect_ranges(list_members(part))
        excluded = ranges if part.startswith("[^") else _subtract_ranges(_EVERYTHING, ranges)
        return _write_class(_subtract_ranges(_PLAIN, excluded))
    if part.startswith("\\"):
        part = _write_escape(part)
    return _write_character(ord(part)) if len(part) == 1 and ord(part) > 0x7E else part


def _collect_ranges(members: list[tuple[str, str]]) -> Ranges:
    """Return the characters of a class's members as sorted, disjoint ranges."""
    ranges: Ranges = []
    for first, last in members:
        if first.lower() in _SEVERAL:
            several = _SEVERAL[first.lower()]
            ranges += several if first.islower() else _subtract_ranges(_EVERYTHING, several)
            # No range begins with several characters, so the hyphen and the last one are literal.
            ranges += [(0x2D, 0x2D)] if last else []
            first, last = (last, "") if last else ("", "")
        low, high = (decode_character(each) if each else None for each in (first, last or first))
        if low is None or high is None:
            continue
        ranges.append((low, high))
    merged: Ranges = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return merged


def _match_others(node: _Prefix, length: int) -> str:
    """Write a pattern for the text after a prefix of names."""
    if length == _DISTINCT_CHARACTERS:
        return ""
    here = sorted((ord(each), ord(each)) for each in node.following)
    choices = [f"{_write_class(_subtract_ranges(_PLAIN, here))}{PLAIN_CHARACTER}*"]
    for each, after in node.following.items():
        rest = _match_others(after, length + 1)
        if rest:
            choices.append(_write_character(ord(each)) + rest)
    return f"({'' if node.is_name else '|'}{'|'.join(choices)})"
