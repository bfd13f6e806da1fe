"""Times that the command line and the harness may change, in seconds."""

from __future__ import annotations

# How long a deployment may take to be ready.
WAIT_SECONDS = 300.0
# How long a process may take to end before it is killed: more than nodes and proxies give running
# requests (--drain-timeout).
GRACE_SECONDS = 35.0
