"""The line on standard output with which a process announces that it serves."""

from __future__ import annotations

import json
from typing import NamedTuple


class Ready(NamedTuple):
    """Role, URL and instance id of a process that serves."""

    role: str
    url: str
    instance_id: str


def announce(ready: Ready) -> None:
    """Print the line. All other output of a process goes to standard error."""
    print(json.dumps({"event": "ready", **ready._asdict()}), flush=True)


def parse(line: str) -> Ready | None:
    """The announcement in a line, or None for any other line."""
    try:
        event = json.loads(line)
        if event["event"] == "ready":
            return Ready(event["role"], event["url"], event["instance_id"])
    except (ValueError, KeyError, TypeError):
        pass
    return None
