"""Replaces files atomically."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[int]:
    """Write a new file, and replace ``path`` with it at the end of the block.

    Yields a descriptor for reading and writing. It stays open after the block. Until the end of
    the block the file has a random name in the same folder, so nobody can put a link there before.
    It gets the owner and the mode of the old file. If the block raises, we close the descriptor and
    leave the old file as it is. A killed process leaves a harmless file.

    Raises OSError if the file cannot be created or cannot replace the old one.
    """
    fd, name = tempfile.mkstemp(prefix=".pd-", dir=path.parent)
    try:
        yield fd
        old = path.stat()
        mode = stat.S_IMODE(old.st_mode)
        try:
            os.fchown(fd, old.st_uid, old.st_gid)
        except PermissionError:
            own = os.fstat(fd)
            if own.st_gid != old.st_gid:
                mode &= ~stat.S_IRWXG  # these rights belonged to another group
        os.fchmod(fd, mode)
        os.fsync(fd)
        os.replace(name, path)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
