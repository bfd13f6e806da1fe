"""Files with keys, and users other than the owner who can access them."""

from __future__ import annotations

import os
import stat
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_READERS = (
    (stat.S_IROTH, "every user of this host can read"),
    (stat.S_IRGRP, "users of its group can read"),
)
_WRITERS = (
    (stat.S_IWOTH, "every user of this host can change"),
    (stat.S_IWGRP, "users of its group can change"),
)


def find_exposure(path: str | Path, content: str) -> list[str]:
    """Return warnings for the operator if other users can access a file with secrets.

    Args:
        content: description of the content, for the warnings.

    Raises:
        OSError: the file does not exist.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return []  # the mode of a pipe, say, means nothing
    warnings = []
    for groups in (_READERS, _WRITERS):
        exposure = next((text for right, text in groups if status.st_mode & right), None)
        if exposure is not None:
            warnings.append(f"{exposure} {content}: chmod 600 it")
    return warnings


def write_secret_file(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by this user only."""
    handle, new = tempfile.mkstemp(dir=path.parent, prefix=".pd-")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(new, path)
