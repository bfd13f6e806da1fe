"""Checks clients' grammars in GBNF."""

from __future__ import annotations

import re

from pd.core.brief import short_repr
from pd.structured.pattern_parts import MAX_NUMBER, is_too_large

# NOTE: Strangers send grammars, so each alternative ends where it cannot fail: no backtracking.
_PART = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)'  # a text
    r"|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)"  # a class
    r"|#[^\n]*"  # a comment
    r"|[A-Za-z_.-][A-Za-z0-9_.-]*"  # the name of a rule
    r"|([0-9]+)",
    re.DOTALL,
)


def check_numbers(grammar: str) -> None:
    """Raise ValueError for a token id or repetition count that xgrammar would misread."""
    for number in _PART.findall(grammar):
        if is_too_large(number):
            raise ValueError(f"the number {short_repr(number)} is too large (at most {MAX_NUMBER})")
