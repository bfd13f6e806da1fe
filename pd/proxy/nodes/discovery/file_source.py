"""Reads node addresses from a file, again whenever the file changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from pd.core.addresses import check_node_url
from pd.core.errors import InvalidRequestError
from pd.proxy.nodes.discovery.source import SourceError, check_count

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_CHECK_SECONDS = 0.25
_MAX_BYTES = 64 << 10


class FileSource:
    """A file with one URL per line. We ignore empty lines, and lines starting with ``#``.

    Replace the file by renaming a new one over it, because we might read half of a file being
    written.
    """

    def __init__(self, path: str) -> None:
        self.name = f"file:{path}"
        self._path = Path(path).expanduser()

    async def watch_urls(self) -> AsyncGenerator[frozenset[str], None]:
        """See :meth:`pd.proxy.nodes.discovery.source.Source.watch_urls`."""
        seen: tuple[int, int, int] | None = None
        while True:
            version = await asyncio.to_thread(self._read_version)
            if version != seen:
                yield await asyncio.to_thread(self._read_urls)
                seen = version
            await asyncio.sleep(_CHECK_SECONDS)

    def _read_version(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError as error:
            raise SourceError(f"cannot read {self._path}: {error.strerror}") from error
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _read_urls(self) -> frozenset[str]:
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise SourceError(f"cannot read {self._path}: {error.strerror}") from error
        if len(content) > _MAX_BYTES:
            raise SourceError(f"{self._path} is larger than {_MAX_BYTES} bytes")
        lines = [line.strip() for line in content.decode(errors="replace").splitlines()]
        urls = [line for line in lines if line and not line.startswith("#")]
        try:
            return check_count(self.name, frozenset(map(check_node_url, urls)))
        except InvalidRequestError as error:
            raise SourceError(f"{self._path}: {error.message}") from None
