"""``python -m pd.commands.bound PID ARGUMENTS…``: ``pd-launch`` that ends with its parent PID."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from pd.cli import launch

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the command, and get SIGTERM when the parent has ended in any way."""
    parent = int(sys.argv.pop(1))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before we asked for the signal
            return 1
    return launch()


if __name__ == "__main__":
    sys.exit(main())
