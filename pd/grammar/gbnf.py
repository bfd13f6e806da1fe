"""Grammars in GBNF, as clients write them."""

from __future__ import annotations

import re

from pd.core.brief import brief
from pd.core.patterns import MAX_NUMBER, is_too_large

# NOTE: strangers write grammars, so each choice ends where it cannot fail.
_PART = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)'  # a text
    r"|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)"  # a class
    r"|#[^\n]*"  # a comment
    r"|[A-Za-z_.-][A-Za-z0-9_.-]*"  # the name of a rule
    r"|([0-9]+)",
    re.DOTALL,
)


def check_numbers(grammar: str) -> None:
    """Raise ValueError for a number, of a token or of repetitions, that xgrammar misreads."""
    for number in _PART.findall(grammar):
        if is_too_large(number):
            raise ValueError(
                f"the number {brief(number)} is too large; at most {MAX_NUMBER} is taken"
            )
