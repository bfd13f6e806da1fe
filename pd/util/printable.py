"""Makes text from outside safe for logs and terminals."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def escape_text(text: str, keep: str = "") -> str:
    """Replace unprintable characters outside ``keep`` by Python's escape sequences.

    These begin a line, move the cursor or are invisible: control characters (C0, DEL, C1),
    separators of lines and paragraphs, and marks of the writing direction, for example. We also
    escape lone surrogates, because they cannot be encoded. Spaces of every width stay.
    """
    if text.isprintable():
        return text
    return "".join(c if _is_shown(c) or c in keep else _escape_character(c) for c in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escape_character(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Align the cells of rows to columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
