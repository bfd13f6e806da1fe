"""Requests as attackers send them, and the proxies and scripted nodes that they are sent to."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))

if TYPE_CHECKING:
    from collections.abc import Iterator

JSON = {"Content-Type": "application/json"}
# What a browser sends for a page that wants to drive a service of the machine on which it runs:
# a form, a script of another origin, one in a sandbox, one whose name now resolves to loopback.
WEB_PAGES: dict[str, dict[str, str]] = {
    "text": {"Origin": "http://evil.example", "Content-Type": "text/plain"},
    "form": {"Origin": "null", "Content-Type": "application/x-www-form-urlencoded"},
    "script": {"Origin": "http://evil.example", **JSON},
    "old browser": {"Content-Type": "text/plain", "User-Agent": "Mozilla/5.0 (X11; Linux)"},
    "rebound name": {"Host": "evil.example:8000", "Origin": "http://evil.example:8000", **JSON},
    "rebound name, read": {"Host": "evil.example:8000", **JSON},
}
# Whatever parameter a path has.
_PARAMETER = re.compile(r"\{[^}]*\}")


def routes_of(app: Any) -> Iterator[tuple[str, str]]:
    """Method and path of every route that may change something, as its application has them."""
    for route in app.routes:
        for method in (getattr(route, "methods", None) or set()) - {"GET", "HEAD", "OPTIONS"}:
            yield method, _PARAMETER.sub("x", route.path)
