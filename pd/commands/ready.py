"""The one line on standard output that says that a process serves."""

from __future__ import annotations

import json
from typing import NamedTuple


class Ready(NamedTuple):
    """Who serves where."""

    role: str
    url: str
    instance_id: str


def announce(ready: Ready) -> None:
    """Print the line. Everything else that a process says goes to standard error."""
    print(json.dumps({"event": "ready", **ready._asdict()}), flush=True)


def parse(line: str) -> Ready | None:
    """What a line announces, or None for any other line."""
    try:
        event = json.loads(line)
        if event["event"] == "ready":
            return Ready(event["role"], event["url"], event["instance_id"])
    except (ValueError, KeyError, TypeError):
        pass
    return None
