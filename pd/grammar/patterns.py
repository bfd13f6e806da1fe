"""Regular expressions as xgrammar has to be given them, by themselves and about strings of JSON
that have no escapes.

xgrammar 0.2.8 has two ways to read a pattern about strings of JSON. One takes ``.`` and classes of
what is excluded for quotes and control characters too, so here every class names the characters
that it has. The other way, which is quicker, needs characters beyond ASCII to be written as
escapes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pd.core.patterns import alternatives, character, members, without_anchors

if TYPE_CHECKING:
    from collections.abc import Iterable

Ranges = list[tuple[int, int]]

# Characters that stand in a string of JSON as they are. Between those of different lengths in UTF-8
# one is left out: from a range across such lengths xgrammar makes bytes that are no UTF-8.
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
# Characters of a name that are told from others: nothing may begin with the first 64 of a name.
_TOLD_APART = 64


class _Beginning:
    """A node in the tree of the beginnings of names.

    Attributes:
        following: by the character that comes next.
        is_name: whether it is one of the names.
    """

    def __init__(self) -> None:
        self.following: dict[str, _Beginning] = {}
        self.is_name = False


def _without(ranges: Ranges, excluded: Ranges) -> Ranges:
    """Characters of ranges that are in none of others. All are in order."""
    found: Ranges = []
    others = iter(excluded)
    low, high = next(others, (1 << 21, 1 << 21))
    for first, last in ranges:
        start = first
        while low <= last:
            if start < low:
                found.append((start, low - 1))
            start = max(start, high + 1)
            if high > last:
                break
            low, high = next(others, (1 << 21, 1 << 21))
        if start <= last:
            found.append((start, last))
    return found


def _class(ranges: Ranges) -> str:
    if not ranges:
        raise ValueError("a pattern has a class of nothing but characters that JSON escapes")
    (low, high), *others = ranges
    if low == _CARET:
        # xgrammar takes a class that begins with an escaped ^ for one of what is excluded.
        ranges = [*([(low + 1, high)] if high > low else []), *others, (low, low)]
        if len(ranges) == 1:
            return _written(low)
    return "[" + "".join(f"{_written(a)}-{_written(b)}" for a, b in ranges) + "]"


def _written(code: int) -> str:
    if code > 0x7E:
        return f"\\u{{{code:x}}}"
    return f"\\{chr(code)}" if chr(code) in "[]^-\\/.*+?(){}|$" else chr(code)


PLAIN_CHARACTER = _class(_PLAIN)
_EVERYTHING: Ranges = [(0, _LAST)]


def any_name_but(names: Iterable[str]) -> str:
    """Strings without escapes that differ from all of some names."""
    root = _Beginning()
    for name in names:
        if not all(any(low <= ord(each) <= high for low, high in _PLAIN) for each in name):
            continue  # it has an escape, and so differs from all of these
        node = root
        for each in name[:_TOLD_APART]:
            node = node.following.setdefault(each, _Beginning())
        node.is_name = True
    return f"^{_but(root, 0)}$"


def matched_by(pattern: str) -> str:
    """A pattern of the same texts as xgrammar 0.2.8 has to be given it: it takes ``.`` for a line
    end, too, a class that begins with an escaped ``^`` for one of what is excluded, and digits
    behind the code of a character for a part of it."""
    return "|".join("".join(map(_corrected, parts)) for parts in alternatives(pattern))


def _corrected(part: str) -> str:
    if part == ".":
        return r"[^\n]"
    part = _ESCAPE.sub(lambda found: _as_itself(found[0]), part)
    return _class(_ranges(members(part))) if part.startswith(r"[\^") else part


def _as_itself(escape: str) -> str:
    """The character that an escape tells the code of; other escapes as they are."""
    code = character(escape)
    if code is None or escape[1:2] not in ("x", "u") or code > _LAST or code in _SURROGATES:
        return escape
    if code in _CONTROL:
        return _CONTROL[code]
    return _written(code) if code <= 0x7E else chr(code)


def found_in(pattern: str) -> str:
    """Strings in which a pattern is found, since xgrammar has every pattern match all of a string.

    Raises:
        ValueError: a part of it allows only characters that JSON escapes.
    """
    written = []
    for begins, between, ends in map(without_anchors, alternatives(pattern)):
        before, after = ("" if anchor else f"{PLAIN_CHARACTER}*" for anchor in (begins, ends))
        middle = "".join(map(_plain, _without_options(between)))
        if not middle and not (begins and ends):
            after = f"{PLAIN_CHARACTER}*" if not before else ""
        written.append(
            before + (f"({middle})" if before or after else middle) * bool(middle) + after
        )
    return f"^({'|'.join(written)})$" if len(written) > 1 else f"^{written[0]}$"


def _without_options(parts: list[str]) -> list[str]:
    """The same with ``(|a)`` for ``(a)?``: if something repeats in such a group, xgrammar takes its
    beginning for the whole."""
    written: list[str] = []
    groups: list[int] = []
    closed: int | None = None  # where the group begins that the last part ends
    in_braces = repeated = False  # whether the last part is inside a repetition, or ends one
    for part in parts:
        if part == "?" and closed is not None:
            written[closed] += "|"
            closed = None
        elif part == "?" and repeated:
            repeated = False  # which match is preferred matters to no grammar
        else:
            repeated = part in ("*", "+", "?") or (part == "}" and in_braces)
            in_braces = part == "{" or (in_braces and part != "}")
            closed = groups.pop() if part == ")" and groups else None
            if part.startswith("("):
                groups.append(len(written))
            written.append("(" if part.startswith("(") else part)
    return written


def _plain(part: str) -> str:
    """A part of a pattern, without the characters that JSON escapes."""
    if part == ".":
        return _class(_without(_PLAIN, _LINE_ENDS))
    if part.lower() in _SEVERAL or (part.startswith("[") and len(part) > 1):
        ranges = _ranges(members(part))
        excluded = ranges if part.startswith("[^") else _without(_EVERYTHING, ranges)
        return _class(_without(_PLAIN, excluded))
    if part.startswith("\\"):
        part = _as_itself(part)
    return _written(ord(part)) if len(part) == 1 and ord(part) > 0x7E else part


def _ranges(named: list[tuple[str, str]]) -> Ranges:
    """The characters that members of a class name, in order and apart."""
    found: Ranges = []
    for first, last in named:
        if first.lower() in _SEVERAL:
            several = _SEVERAL[first.lower()]
            found += several if first.islower() else _without(_EVERYTHING, several)
            # A range cannot begin with several characters: what follows stands for itself.
            found += [(0x2D, 0x2D)] if last else []
            first, last = (last, "") if last else ("", "")
        low, high = (character(each) if each else None for each in (first, last or first))
        if low is None or high is None:
            continue
        found.append((low, high))
    merged: Ranges = []
    for low, high in sorted(found):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return merged


def _but(node: _Beginning, length: int) -> str:
    """A pattern of the text that may come after a beginning of names."""
    if length == _TOLD_APART:
        return ""
    here = sorted((ord(each), ord(each)) for each in node.following)
    choices = [f"{_class(_without(_PLAIN, here))}{PLAIN_CHARACTER}*"]
    for each, after in node.following.items():
        rest = _but(after, length + 1)
        if rest:
            choices.append(_written(ord(each)) + rest)
    return f"({'' if node.is_name else '|'}{'|'.join(choices)})"
