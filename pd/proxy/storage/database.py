"""The database of a proxy's storage, and the thread that uses it.

All processes of a proxy open the same SQLite database. It is a file, so what it has survives a
restart if the directory does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from pd.core.errors import UnavailableError
from pd.proxy.storage.directory import make_and_hold

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# Another process holds the lock for the time of one statement or two.
_BUSY_SECONDS = 5.0
_FILE = "storage.sqlite"
# Triggers keep the sums, because a key may have a hundred thousand rows.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses(
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, expires REAL NOT NULL, size INTEGER NOT NULL,
    response BLOB NOT NULL, messages BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS responses_by_owner ON responses(owner);
CREATE INDEX IF NOT EXISTS responses_by_end ON responses(expires);
CREATE TABLE IF NOT EXISTS response_bytes(owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS response_added AFTER INSERT ON responses BEGIN
    INSERT INTO response_bytes VALUES (new.owner, new.size)
        ON CONFLICT(owner) DO UPDATE SET bytes = bytes + new.size;
END;
CREATE TRIGGER IF NOT EXISTS response_removed AFTER DELETE ON responses BEGIN
    UPDATE response_bytes SET bytes = bytes - old.size WHERE owner = old.owner;
END;
CREATE TABLE IF NOT EXISTS files(
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
    size INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS files_by_owner ON files(owner, size);
CREATE INDEX IF NOT EXISTS files_by_end ON files(expires);
CREATE TABLE IF NOT EXISTS batches(
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, is_open INTEGER NOT NULL, created REAL NOT NULL,
    input TEXT NOT NULL, output TEXT NOT NULL, errors TEXT NOT NULL, size INTEGER NOT NULL,
    record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS batches_by_owner ON batches(owner);
CREATE INDEX IF NOT EXISTS batches_open ON batches(is_open) WHERE is_open;
"""


class Database:
    """Runs functions on a connection, one after the other, on a thread of its own.

    The disk may be slow, so neither the event loop nor the threads that prepare requests wait for
    it.

    Attributes:
        directory: of the database. It exists after the first call.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self._connection: sqlite3.Connection | None = None
        # Shows other proxies that the directory is in use.
        self._held: int | None = None

    def exists(self) -> bool:
        """Whether anything was ever stored. Reads the disk."""
        return (self.directory / _FILE).exists()

    async def run(
        self,
        function: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Call ``function(connection, …)`` in a transaction.

        Raises UnavailableError if the disk is full or broken, and the function's own errors.
        """

        def call() -> T:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                with self._connection:
                    return function(self._connection, *args, **options)
            except (sqlite3.Error, OSError) as error:
                logger.exception("the storage in %s failed", self.directory)
                raise UnavailableError(
                    f"the proxy's storage failed ({error}); send responses with store: "
                    "false, or start the proxy with --storage-dir"
                ) from None

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _connect(self) -> sqlite3.Connection:
        if self._held is None:
            self._held = make_and_hold(self.directory)
        connection = sqlite3.connect(
            self.directory / _FILE, timeout=_BUSY_SECONDS, check_same_thread=False
        )
        # A write goes to the log without waiting for the disk; a crash of the host loses the last.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(_SCHEMA)
        return connection

    def close(self) -> None:
        """Finish what is under way. Nothing may be called after it."""
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()
        if self._held is not None:
            os.close(self._held)


def lock_database(connection: sqlite3.Connection) -> None:
    """Begin a transaction that reads before it writes. Other processes wait for its end."""
    connection.execute("BEGIN IMMEDIATE")
