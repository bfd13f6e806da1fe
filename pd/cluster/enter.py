"""Runs a command in the directory and with the environment that standard input begins with.

``python -m pd.cluster.enter COMMAND…`` reads one line of JSON and becomes the command, which gets
the rest of standard input. So an environment, which may hold secrets, is part of no command line.
"""

from __future__ import annotations

import os
import sys

import msgspec

_MAX_LINE_BYTES = 1 << 20


class Surroundings(msgspec.Struct):
    """Directory and environment of a command; an empty directory is the one it is started in."""

    directory: str = ""
    environment: dict[str, str] = {}

    def line(self) -> bytes:
        """The line that standard input begins with."""
        return msgspec.json.encode(self) + b"\n"


_SURROUNDINGS = msgspec.json.Decoder(Surroundings)


def _read_line() -> bytes:
    """The first line of standard input, and nothing of what follows it."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def main() -> None:
    """Become the command of the arguments. Ends with status 1 and a line if that cannot be."""
    try:
        surroundings = _SURROUNDINGS.decode(_read_line())
        if surroundings.directory:
            os.chdir(os.path.expanduser(surroundings.directory))
        os.execvpe(sys.argv[1], sys.argv[1:], os.environ | surroundings.environment)
    except (OSError, msgspec.MsgspecError) as error:
        raise SystemExit(f"cannot run {sys.argv[1]}: {error}") from None


if __name__ == "__main__":
    main()
