"""The directory where a proxy keeps what it stores for clients."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from pd.core.errors import SetupError

_LOCK = "lock"


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
            self.path = _find_parent() / f"pd-proxy-{secrets.token_hex(16)}"
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


def _find_parent() -> Path:
    """Return the directory for temporary files. On a host without one, the first use fails."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.devnull)
