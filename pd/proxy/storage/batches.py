"""Batches of requests, each with its state and the names of its files."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from pd.core.errors import InvalidRequestError, NotFoundError, QueueFullError
from pd.proxy.storage.database import lock_database
from pd.proxy.storage.files import (
    FILE_SECONDS,
    MAX_FILES,
    StorageFullError,
    StoredFile,
    count_bytes,
    count_files,
    find_file,
    insert_file,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from pd.proxy.storage.database import Database

BatchStatus = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
Outcome = Literal["completed", "failed", "expired", "cancelled"]

# The only completion window.
WINDOW_SECONDS = 86400.0
# How long an ended batch can be read.
BATCH_SECONDS = 30 * 86400.0
# Limits of batches that have not ended, per key and of all keys.
MAX_KEY_OPEN, MAX_OPEN = 16, 1024
# Limit of ended batches per key; the oldest make room.
MAX_ENDED = 1000
# Purpose of files with results.
OUTPUT_PURPOSE = "batch_output"
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_ID = re.compile("batch_[0-9a-f]{32}")


class BatchProblem(msgspec.Struct, frozen=True):
    """Why a batch failed.

    Attributes:
        line: number of the line of the input, from 1; None for the whole batch.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch.

    Attributes:
        name: its id.
        created, expires: in seconds since 1970. ``expires`` is the end of its window.
        outcome: the status that follows "finalizing".
        output_name, error_name: ids of the files for results. Clients see these files once the
            batch has ended, unless they are empty.
        output_seconds: lifetime of these files.
        total, completed, failed: numbers of requests.
        size: bytes of results.
        times: seconds since 1970 of the changes of status, by the new status.
        has_output, has_errors: whether the files exist, once the batch has ended.
    """

    name: str
    endpoint: str
    input_file_id: str
    created: float
    expires: float
    output_name: str
    error_name: str
    status: BatchStatus = "validating"
    outcome: Outcome = "completed"
    metadata: dict[str, str] | None = None
    output_seconds: float = FILE_SECONDS
    total: int = 0
    completed: int = 0
    failed: int = 0
    size: int = 0
    times: dict[str, float] = {}
    problems: tuple[BatchProblem, ...] = ()
    has_output: bool = False
    has_errors: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the batch has not ended."""
        return self.status in _OPEN

    def move_to(self, status: BatchStatus, **changes: object) -> StoredBatch:
        """Return the batch in its next status."""
        times = self.times | {status: time.time()}
        return msgspec.structs.replace(self, status=status, times=times, **changes)


class OpenBatch(NamedTuple):
    """A batch that has not ended.

    Attributes:
        used: bytes of the owner's files and results.
    """

    owner: str
    batch: StoredBatch
    used: int


class BatchProgress(NamedTuple):
    """How far a batch is."""

    completed: int
    failed: int
    size: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredBatch)


class BatchStore:
    """Keeps the batches of each key.

    Args:
        limit: bytes that the files and results of a key may have.
    """

    def __init__(self, database: Database, limit: int) -> None:
        self._database = database
        self.limit = limit

    async def add_batch(self, owner: str, batch: StoredBatch) -> None:
        """Add a new batch.

        Raises:
            InvalidRequestError: its input file does not exist.
            StorageFullError: the key has no room for the files of its results.
            QueueFullError: there are too many open batches.
        """
        await self._database.run(_add_batch, owner, batch, self.limit)

    async def get_batch(self, owner: str, name: str) -> StoredBatch:
        """Return a batch. Raises NotFoundError if the key has none of this name."""
        batch = await self._database.run(_find_batch, owner, name)
        if batch is None:
            raise _make_missing(name)
        return batch

    async def list_batches(self, owner: str, after: str | None, limit: int) -> list[StoredBatch]:
        """List a key's batches, the newest first. Raises InvalidRequestError if there is no batch
        ``after``."""
        return await self._database.run(_list_batches, owner, after, limit)

    async def cancel_batch(self, owner: str, name: str) -> StoredBatch:
        """Ask for the end of a batch.

        Raises NotFoundError, and InvalidRequestError if it has ended or is about to.
        """
        return await self._database.run(_cancel_batch, owner, name)

    async def list_open(self) -> list[OpenBatch]:
        """List the open batches of all keys, the oldest first."""
        return await self._database.run(_list_open)

    async def change_batch(
        self, name: str, change: Callable[[StoredBatch], StoredBatch]
    ) -> StoredBatch:
        """Replace a batch by ``change`` of it, and return the new one.

        ``change`` runs on the storage's thread. Raises NotFoundError.
        """
        return await self._database.run(_change_batch, name, change)

    async def save_progress(self, progress: dict[str, BatchProgress]) -> None:
        """Save how far batches are, by their names."""
        await self._database.run(_save_progress, progress)

    async def end_batch(
        self, owner: str, name: str, progress: BatchProgress, files: Sequence[StoredFile]
    ) -> None:
        """End a batch with its outcome, and show the files with its results, all at once."""
        await self._database.run(_end_batch, owner, name, progress, files)


def _make_missing(name: str) -> NotFoundError:
    return NotFoundError(f"there is no batch {name[:100]!r}, or it was removed")


# ---- the database


def _add_batch(connection: sqlite3.Connection, owner: str, batch: StoredBatch, limit: int) -> None:
    lock_database(connection)
    _delete_old(connection, owner)
    if find_file(connection, owner, batch.input_file_id) is None:
        raise InvalidRequestError(
            f"input_file_id: there is no file {batch.input_file_id[:100]!r}, or it was removed",
            param="input_file_id",
        )
    (total,) = connection.execute("SELECT COUNT(*) FROM batches WHERE is_open").fetchone()
    (own,) = connection.execute(
        "SELECT COUNT(*) FROM batches WHERE is_open AND owner = ?", (owner,)
    ).fetchone()
    if own >= MAX_KEY_OPEN or total >= MAX_OPEN:
        raise QueueFullError(
            f"{own} of your batches have not ended (limit {MAX_KEY_OPEN}; {MAX_OPEN} of all keys); "
            "wait for them, or cancel some"
        )
    count = count_files(connection, owner)
    if count + 2 * (own + 1) > MAX_FILES:
        raise StorageFullError(
            f"you have {count} files (limit {MAX_FILES}), and each open batch needs room for two; "
            "delete some"
        )
    if count_bytes(connection, owner) >= limit:
        raise StorageFullError(
            f"your files have at most {limit >> 20} MiB together (--files-mb of the proxy), and "
            "nothing is left for results; delete some"
        )
    connection.execute(
        "INSERT INTO batches VALUES (?, ?, 1, ?, ?, ?, ?, ?, ?)",
        (
            batch.name,
            owner,
            batch.created,
            batch.input_file_id,
            batch.output_name,
            batch.error_name,
            0,
            _encoder.encode(batch),
        ),
    )


def _delete_old(connection: sqlite3.Connection, owner: str) -> None:
    """Delete ended batches of everybody that are too old, and of the owner beyond MAX_ENDED."""
    connection.execute(
        "DELETE FROM batches WHERE NOT is_open AND created < ?", (time.time() - BATCH_SECONDS,)
    )
    connection.execute(
        "DELETE FROM batches WHERE rowid IN (SELECT rowid FROM batches WHERE NOT is_open "
        "AND owner = ? ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
        (owner, MAX_ENDED),
    )


def _find_batch(connection: sqlite3.Connection, owner: str, name: str) -> StoredBatch | None:
    if not _ID.fullmatch(name):
        return None
    row = connection.execute(
        "SELECT record FROM batches WHERE id = ? AND owner = ?", (name, owner)
    ).fetchone()
    return None if row is None else _decoder.decode(row[0])


def _list_batches(
    connection: sqlite3.Connection, owner: str, after: str | None, limit: int
) -> list[StoredBatch]:
    clause, values = "owner = ?", [owner]
    if after is not None:
        if _find_batch(connection, owner, after) is None:
            raise InvalidRequestError(
                f"after: there is no batch {after[:100]!r}, or it was removed", param="after"
            )
        clause += " AND rowid < (SELECT rowid FROM batches WHERE id = ?)"
        values.append(after)
    rows = connection.execute(
        f"SELECT record FROM batches WHERE {clause} ORDER BY rowid DESC LIMIT ?", (*values, limit)
    )
    return [_decoder.decode(record) for (record,) in rows.fetchall()]


def _cancel_batch(connection: sqlite3.Connection, owner: str, name: str) -> StoredBatch:
    lock_database(connection)
    batch = _find_batch(connection, owner, name)
    if batch is None:
        raise _make_missing(name)
    if batch.status == "cancelling":
        return batch
    if batch.status not in ("validating", "in_progress"):
        raise InvalidRequestError(f"a batch that is {batch.status} cannot be cancelled")
    return _write_batch(connection, batch.move_to("cancelling", outcome="cancelled"))


def _list_open(connection: sqlite3.Connection) -> list[OpenBatch]:
    rows = connection.execute(
        "SELECT owner, record FROM batches WHERE is_open ORDER BY rowid"
    ).fetchall()
    used = {owner: count_bytes(connection, owner) for owner in {owner for owner, _ in rows}}
    return [OpenBatch(owner, _decoder.decode(record), used[owner]) for owner, record in rows]


def _change_batch(
    connection: sqlite3.Connection, name: str, change: Callable[[StoredBatch], StoredBatch]
) -> StoredBatch:
    lock_database(connection)
    return _write_batch(connection, change(_read_batch(connection, name)))


def _save_progress(connection: sqlite3.Connection, progress: dict[str, BatchProgress]) -> None:
    lock_database(connection)
    for name, each in progress.items():
        batch = _read_batch(connection, name)
        _write_batch(connection, msgspec.structs.replace(batch, **each._asdict()))


def _end_batch(
    connection: sqlite3.Connection,
    owner: str,
    name: str,
    progress: BatchProgress,
    files: Sequence[StoredFile],
) -> None:
    lock_database(connection)
    batch = _read_batch(connection, name)
    names = [file.name for file in files]
    for file in files:
        insert_file(connection, owner, file)
    _write_batch(
        connection,
        batch.move_to(
            batch.outcome,
            has_output=batch.output_name in names,
            has_errors=batch.error_name in names,
            **progress._asdict(),
        ),
    )


def _read_batch(connection: sqlite3.Connection, name: str) -> StoredBatch:
    row = connection.execute("SELECT record FROM batches WHERE id = ?", (name,)).fetchone()
    if row is None:
        raise _make_missing(name)
    return _decoder.decode(row[0])


def _write_batch(connection: sqlite3.Connection, batch: StoredBatch) -> StoredBatch:
    connection.execute(
        "UPDATE batches SET is_open = ?, size = ?, record = ? WHERE id = ?",
        (batch.is_open, batch.size, _encoder.encode(batch), batch.name),
    )
    return batch
