"""Text from clients and nodes in messages, cut short."""

from __future__ import annotations

import reprlib

# Characters of a value in a message.
_SHOWN = 100
# A value of megabytes is not written out before it is cut.
_brief = reprlib.Repr()
_brief.maxlevel = 3
_brief.maxlist = _brief.maxdict = 20
_brief.maxstring = _brief.maxlong = _brief.maxother = 4 * _SHOWN


def brief(value: object) -> str:
    """A value as it may stand in a message: its ``repr``, cut after 100 characters."""
    return shorten(_brief.repr(value), _SHOWN)


def shorten(text: str, most: int) -> str:
    """A text, cut after so many characters."""
    return text if len(text) <= most else text[:most] + "…"
