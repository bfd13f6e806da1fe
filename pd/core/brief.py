"""Shortens text from clients and nodes before it enters a message."""

from __future__ import annotations

import reprlib

# Characters of a value in a message.
_SHOWN = 100
# Bounds the work: without it, repr() would write out megabytes before we cut them.
_brief = reprlib.Repr()
_brief.maxlevel = 3
_brief.maxlist = _brief.maxdict = 20
_brief.maxstring = _brief.maxlong = _brief.maxother = 4 * _SHOWN


def short_repr(value: object) -> str:
    """Return the ``repr`` of a value, cut after 100 characters."""
    return shorten_text(_brief.repr(value), _SHOWN)


def shorten_text(text: str, limit: int) -> str:
    """Cut a text after ``limit`` characters."""
    return text if len(text) <= limit else text[:limit] + "…"
