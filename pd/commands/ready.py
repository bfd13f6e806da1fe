"""The line on standard output by which a process announces that it serves."""

from __future__ import annotations

import json
import sys
from typing import NamedTuple

from pd.core.errors import SetupError
from pd.util.output import check_output


class Ready(NamedTuple):
    """Role, URL and instance id of a serving process."""

    role: str
    url: str
    instance_id: str


def announce_ready(ready: Ready) -> None:
    """Print the line. All other output of a process goes to standard error.

    Raises SetupError if printing fails, because a reader would wait for the line forever. We do not
    wait for a reader.
    """
    try:
        print(json.dumps({"event": "ready", **ready._asdict()}), flush=True)
        check_output(sys.stdout)
    except OSError as error:
        why = error.strerror or str(error)
        raise SetupError(f"cannot print the ready line on standard output: {why}") from None


def parse_ready(line: str) -> Ready | None:
    """Parse an announcement; None for any other line."""
    try:
        event = json.loads(line)
        if event["event"] == "ready":
            return Ready(event["role"], event["url"], event["instance_id"])
    except (ValueError, KeyError, TypeError):
        pass
    return None
