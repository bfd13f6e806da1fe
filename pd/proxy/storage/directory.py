"""The directory where a proxy keeps what it stores for clients."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

from pd.core.errors import SetupError

logger = logging.getLogger(__name__)

_LOCK = "lock"
_TEMPORARY = re.compile(r"pd-proxy-[0-9a-f]{32}")


class StorageDirectory:
    """A directory of one proxy, whose processes share it. Nobody else on the host can read it.

    Attributes:
        path: the directory, once open.
    """

    def __init__(self, path: str | None) -> None:
        """``path``: None for a temporary directory, which is removed at the end."""
        self._given = path
        self._lock: int | None = None
        self.path: Path

    def open(self) -> Path:
        """Make the directory if needed, and lock it. Raises SetupError.

        The first use makes a temporary one, because most proxies store nothing, and some have no
        disk. Nobody can guess its name.
        """
        if self._given is None:
            parent = _find_parent()
            remove_leftovers(parent)
            self.path = parent / f"pd-proxy-{secrets.token_hex(16)}"
            return self.path
        self.path = Path(self._given)
        flag = f"--storage-dir {self.path}"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise SetupError(
                f"{flag}: another proxy uses this directory; give each proxy its own"
            ) from None
        except OSError as error:
            self.close()
            raise SetupError(f"{flag} cannot be used: {error.strerror}") from None
        return self.path

    def close(self) -> None:
        """Unlock the directory, or remove it if it is temporary. May be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._given is None and hasattr(self, "path"):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.path)


def make_and_hold(path: Path) -> int:
    """Make a directory unless it is there, and lock it, so that no proxy removes it as a leftover.

    Returns a descriptor, which holds the lock until it is closed. Raises OSError.
    """
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_SH)
                # Another proxy may have removed it before we held it.
                if os.path.samestat(os.fstat(held), os.stat(path)):
                    return held
            except BaseException:
                os.close(held)
                raise
            os.close(held)


def remove_leftovers(parent: Path) -> None:
    """Remove temporary directories whose proxies were killed: ours, and locked by no process."""
    if not parent.is_dir():
        return
    with os.scandir(parent) as entries:
        names = [entry.path for entry in entries if _TEMPORARY.fullmatch(entry.name)]
    for name in names:
        try:
            _remove_unless_held(name)
        except FileNotFoundError:
            pass  # its proxy or another one removed it
        except OSError as error:
            logger.warning("leftover of a proxy: %s cannot be removed: %s", name, error.strerror)


def _remove_unless_held(path: str) -> None:
    if os.lstat(path).st_uid != os.geteuid():
        return
    # A link is an error here, and rmtree does not follow links either.
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    except BlockingIOError:
        return
    finally:
        os.close(held)


def _find_parent() -> Path:
    """Return the directory for temporary files. On a host without one, the first use fails."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.devnull)
