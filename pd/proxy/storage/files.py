"""Files that clients upload. Rows are in the database, and contents next to it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

from pd.core.errors import InvalidRequestError, NotFoundError, QueueFullError, UnavailableError
from pd.proxy.storage.database import lock_database
from pd.proxy.storage.failures import FailureLog

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from pd.proxy.storage.database import Database

P = ParamSpec("P")
T = TypeVar("T")

FILE_SECONDS, MIN_FILE_SECONDS = 30 * 86400.0, 3600
# OpenAI's limit.
MAX_FILE_BYTES = 512 << 20
# Limit per key.
MAX_FILES = 1000
# Simultaneous uploads to one process, because each of them holds a block.
MAX_UPLOADS, MAX_KEY_UPLOADS = 64, 16
# We read and write this much at a time.
BLOCK_BYTES = 1 << 20
_ID = re.compile("file-[0-9a-f]{32}")
# Most expired rows to remove at a time.
_EXPIRED_ROWS = 64
_SWEEP_SECONDS = 600.0
# Contents without a row that nobody has written to for this long are left from a killed process.
_ORPHAN_SECONDS = 3600.0
_FIELDS = "id, created, expires, size, filename, purpose"
# Inputs of open batches, which stay, and all files and contents that belong to something.
_INPUTS = "SELECT input FROM batches WHERE is_open"
_KNOWN = (
    "SELECT id FROM files UNION SELECT output FROM batches WHERE is_open "
    "UNION SELECT errors FROM batches WHERE is_open"
)


class StorageFullError(InvalidRequestError):
    """The key's files take all of its room. Waiting does not help, so clients must not retry."""

    kind = "storage_full"


class StoredFile(NamedTuple):
    """A file.

    Attributes:
        name: its id.
        created, expires: in seconds since 1970.
        size: in bytes.
    """

    name: str
    created: float
    expires: float
    size: int
    filename: str
    purpose: str


class NewFile:
    """The content of a file on its way to the disk. Others see it once the store has added it.

    We open the file for each block, so an upload holds no descriptor.

    Attributes:
        name: the id of the future file.
        size: bytes so far.
    """

    def __init__(self, store: FileStore, owner: str, room: int) -> None:
        """``room``: bytes that all uploads of the owner to this process may have together."""
        self._store, self._owner, self._room = store, owner, room
        self._block = bytearray()
        self._writing: asyncio.Future[None] | None = None
        self.name = make_file_name()
        self.size = 0
        self.is_added = False

    async def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            InvalidRequestError: the file is too large.
            StorageFullError: the key has no room.
            UnavailableError: the disk is full or broken.
        """
        self.size += len(data)
        if self.size > MAX_FILE_BYTES:
            raise InvalidRequestError(
                f"file: more than {MAX_FILE_BYTES >> 20} MiB; at most this is allowed",
                param="file",
            )
        incoming = self._store.incoming_bytes
        incoming[self._owner] += len(data)
        if incoming[self._owner] > self._room:
            raise _make_full(self._store.limit)
        self._block += data
        if len(self._block) >= BLOCK_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write everything to the disk. Raises UnavailableError."""
        block, self._block = bytes(self._block), bytearray()
        path = self._store.get_path(self.name)
        self._writing = asyncio.ensure_future(self._store.run(_append_block, path, block))
        await asyncio.shield(self._writing)

    async def close(self) -> None:
        """End the upload, and remove the content unless the file was added."""
        self._store.incoming_bytes[self._owner] -= self.size
        if self._writing is not None:
            await asyncio.wait([self._writing])  # a cancelled request does not wait for its write
        if not self.is_added:
            await self._store.run(_remove_content, self._store.get_path(self.name))


class FileStore:
    """Keeps each key's files, up to a number of bytes and for some time. Processes share it.

    Attributes:
        limit: bytes per key. Unfinished uploads to one process have the rest of it together, and
            each process counts its own.
        incoming_bytes: bytes of unfinished uploads by owner.
    """

    def __init__(self, database: Database, limit: int) -> None:
        self._database = database
        self.limit = limit
        self.incoming_bytes: Counter[str] = Counter()
        self._uploads: Counter[str] = Counter()
        self._swept = -_SWEEP_SECONDS
        self._failures = FailureLog()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="files")

    async def run(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call a function that uses the disk, on another thread. Raises UnavailableError."""

        def call() -> T:
            try:
                return function(*args, **options)
            except OSError as error:
                self._failures.report(self._database.directory, error)
                raise UnavailableError(
                    f"the proxy's storage failed ({error.strerror}); try again later"
                ) from None

        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def get_path(self, name: str) -> Path:
        """Return the place of a content."""
        assert _ID.fullmatch(name)
        return self._database.directory / "files" / name

    @contextlib.asynccontextmanager
    async def open_upload(self, owner: str) -> AsyncIterator[NewFile]:
        """Begin a file. The end of the context removes its content unless it was added.

        Raises:
            QueueFullError: there are too many uploads.
            UnavailableError: the storage failed.
        """
        if self._uploads[owner] >= MAX_KEY_UPLOADS or self._uploads.total() >= MAX_UPLOADS:
            raise QueueFullError(f"{self._uploads[owner]} of your files are on their way; wait")
        self._uploads[owner] += 1
        try:
            # This also makes the directory.
            used = await self._database.run(count_bytes, owner)
            if time.monotonic() >= self._swept + _SWEEP_SECONDS:
                self._swept = time.monotonic()
                await self.remove_expired()
            file = NewFile(self, owner, self.limit - used)
            try:
                yield file
            finally:
                await file.close()
        finally:
            self._uploads[owner] -= 1
            # Owners without uploads leave nothing behind.
            if not self._uploads[owner]:
                del self._uploads[owner], self.incoming_bytes[owner]

    async def add_file(
        self, owner: str, content: NewFile, filename: str, purpose: str, seconds: float
    ) -> StoredFile:
        """Show a file whose content is complete, for ``seconds``.

        Raises StorageFullError, UnavailableError.
        """
        await content.flush()
        now = time.time()
        file = StoredFile(content.name, now, now + seconds, content.size, filename, purpose)
        # Its row may exist even if we are cancelled, so its content must stay from here on. Without
        # a row it is an orphan.
        content.is_added = True
        try:
            gone = await self._database.run(_add_file, owner, file, self.limit)
        except (StorageFullError, UnavailableError):
            content.is_added = False
            raise
        await self._remove_contents(gone)
        return file

    async def get_file(self, owner: str, name: str) -> StoredFile:
        """Return a file. Raises NotFoundError if the key has none of this name."""
        file = await self._database.run(find_file, owner, name)
        if file is None:
            raise _make_missing(name)
        return file

    async def list_files(
        self, owner: str, *, after: str | None, limit: int, is_ascending: bool, purpose: str | None
    ) -> list[StoredFile]:
        """List a key's files by age. Raises InvalidRequestError if there is no file ``after``."""
        return await self._database.run(_list_files, owner, after, limit, is_ascending, purpose)

    async def read_block(self, name: str, start: int) -> bytes:
        """Read the next bytes of a file. Raises NotFoundError if it was removed meanwhile."""
        block = await self.run(_read_block, self.get_path(name), start)
        if block is None:
            raise _make_missing(name)
        return block

    async def delete_file(self, owner: str, name: str) -> None:
        """Delete a file.

        Raises NotFoundError if the key has none of this name, and InvalidRequestError if an open
        batch reads it.
        """
        if not await self._database.run(_delete_file, owner, name):
            raise _make_missing(name)
        await self._remove_contents([name])

    async def remove_expired(self) -> None:
        """Remove expired files, and contents that a killed process left."""
        await self._remove_contents(await self._database.run(_delete_expired))
        old = await self.run(_list_old, self._database.directory / "files")
        if old:
            await self._remove_contents(await self._database.run(_select_orphans, old))

    async def _remove_contents(self, names: list[str]) -> None:
        for name in names:
            await self.run(_remove_content, self.get_path(name))

    def close(self) -> None:
        """Finish what is under way. Nothing may be called after it."""
        self._threads.shutdown()


def make_file_name() -> str:
    """Make the id of a new file."""
    return f"file-{uuid.uuid4().hex}"


def _make_missing(name: str) -> NotFoundError:
    return NotFoundError(f"there is no file {name[:100]!r}, or it was removed")


def _make_full(limit: int) -> StorageFullError:
    return StorageFullError(
        f"file: your files have at most {limit >> 20} MiB together (--files-mb of the proxy); "
        "delete some",
        param="file",
    )


# ---- the disk


def _append_block(path: Path, block: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        rest = memoryview(block)
        while rest:
            rest = rest[file.write(rest) :]


def _read_block(path: Path, start: int) -> bytes | None:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            return file.read(BLOCK_BYTES)
    except FileNotFoundError:
        return None


def _remove_content(path: Path) -> None:
    path.unlink(missing_ok=True)


def _list_old(directory: Path) -> list[str]:
    """List contents that nobody has written to for a while."""
    end = time.time() - _ORPHAN_SECONDS
    names = []
    if directory.is_dir():
        for path in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # its owner may delete it meanwhile
                if _ID.fullmatch(path.name) and path.stat().st_mtime < end:
                    names.append(path.name)
    return names


# ---- the database


def count_bytes(connection: sqlite3.Connection, owner: str) -> int:
    """Count the bytes of a key's files, and of the results of its open batches."""
    used = 0.0
    for table, condition in (("files", ""), ("batches", " AND is_open")):
        (size,) = connection.execute(
            f"SELECT TOTAL(size) FROM {table} WHERE owner = ?{condition}", (owner,)
        ).fetchone()
        used += size
    return int(used)


def count_files(connection: sqlite3.Connection, owner: str) -> int:
    """Count a key's files."""
    (count,) = connection.execute("SELECT COUNT(*) FROM files WHERE owner = ?", (owner,)).fetchone()
    return int(count)


def find_file(connection: sqlite3.Connection, owner: str, name: str) -> StoredFile | None:
    """Return a file of a key, or None."""
    if not _ID.fullmatch(name):
        return None
    row = connection.execute(
        f"SELECT {_FIELDS} FROM files WHERE id = ? AND owner = ? AND expires >= ?",
        (name, owner, time.time()),
    ).fetchone()
    return None if row is None else StoredFile(*row)


def _delete_expired(connection: sqlite3.Connection) -> list[str]:
    """Delete expired files. Returns their names."""
    lock_database(connection)
    rows = connection.execute(
        f"SELECT id FROM files WHERE expires < ? AND id NOT IN ({_INPUTS}) LIMIT ?",
        (time.time(), _EXPIRED_ROWS),
    ).fetchall()
    connection.executemany("DELETE FROM files WHERE id = ?", rows)
    return [name for (name,) in rows]


def _add_file(
    connection: sqlite3.Connection, owner: str, file: StoredFile, limit: int
) -> list[str]:
    """Insert a file. Returns the names of expired ones, which are deleted."""
    gone = _delete_expired(connection)
    count = count_files(connection, owner)
    if count >= MAX_FILES:
        raise StorageFullError(f"you have {count} files (limit {MAX_FILES}); delete some")
    if count_bytes(connection, owner) + file.size > limit:
        raise _make_full(limit)
    insert_file(connection, owner, file)
    return gone


def insert_file(connection: sqlite3.Connection, owner: str, file: StoredFile) -> None:
    """Insert a file whose content is complete, without a look at limits."""
    connection.execute(
        "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", (file[0], owner, *file[1:])
    )


def _list_files(
    connection: sqlite3.Connection,
    owner: str,
    after: str | None,
    limit: int,
    is_ascending: bool,
    purpose: str | None,
) -> list[StoredFile]:
    clauses = ["owner = ?", "expires >= ?"]
    values: list[object] = [owner, time.time()]
    if purpose is not None:
        clauses.append("purpose = ?")
        values.append(purpose)
    if after is not None:
        if find_file(connection, owner, after) is None:
            raise InvalidRequestError(
                f"after: there is no file {after[:100]!r}, or it was removed", param="after"
            )
        sign = ">" if is_ascending else "<"
        clauses.append(f"rowid {sign} (SELECT rowid FROM files WHERE id = ?)")
        values.append(after)
    order = "ASC" if is_ascending else "DESC"
    rows = connection.execute(
        f"SELECT {_FIELDS} FROM files WHERE {' AND '.join(clauses)} ORDER BY rowid {order} LIMIT ?",
        (*values, limit),
    )
    return [StoredFile(*row) for row in rows.fetchall()]


def _delete_file(connection: sqlite3.Connection, owner: str, name: str) -> bool:
    lock_database(connection)
    user = connection.execute(
        "SELECT id FROM batches WHERE is_open AND input = ? AND owner = ?", (name, owner)
    ).fetchone()
    if user is not None:
        raise InvalidRequestError(
            f"the file is the input of {user[0]}; cancel this batch, or wait for its end"
        )
    deleted = connection.execute("DELETE FROM files WHERE id = ? AND owner = ?", (name, owner))
    return deleted.rowcount > 0


def _select_orphans(connection: sqlite3.Connection, names: list[str]) -> list[str]:
    known = {name for (name,) in connection.execute(_KNOWN)}
    return [name for name in names if name not in known]
