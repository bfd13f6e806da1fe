"""The line on standard output with which a process announces that it serves."""

from __future__ import annotations

import json
from typing import NamedTuple

from pd.core.errors import SetupError


class Ready(NamedTuple):
    """Role, URL and instance id of a process that serves."""

    role: str
    url: str
    instance_id: str


def announce(ready: Ready) -> None:
    """Print the line. All other output of a process goes to standard error.

    Raises SetupError if it cannot be printed: whoever waits for it would wait for ever.
    """
    try:
        print(json.dumps({"event": "ready", **ready._asdict()}), flush=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise SetupError(f"cannot print the ready line on standard output: {why}") from None


def parse(line: str) -> Ready | None:
    """The announcement in a line, or None for any other line."""
    try:
        event = json.loads(line)
        if event["event"] == "ready":
            return Ready(event["role"], event["url"], event["instance_id"])
    except (ValueError, KeyError, TypeError):
        pass
    return None
