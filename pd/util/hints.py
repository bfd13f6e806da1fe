"""Hints in error messages about unknown names."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Suggest the most similar known name, in parentheses; empty without one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
