"""The database of a proxy's storage, and the threads that use it.

All processes of a proxy open the same SQLite database. It is a file, so what it has survives a
restart if the directory does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from pd.core.errors import UnavailableError
from pd.proxy.storage.directory import make_and_hold
from pd.proxy.storage.failures import FailureLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# Another process holds the lock for the time of one statement or two.
_BUSY_SECONDS = 5.0
_FILE, _LOG = "storage.sqlite", "storage.sqlite-wal"
# The log of writes becomes part of the database at this length.
_LOG_BYTES = 4 << 20
# After a write that held the event loop up for this long, the storage's thread writes for a while.
_SLOW_SECONDS, _PAUSE_SECONDS = 0.02, 1.0
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
    it. Small writes are an exception, because they only reach the memory of the operating system,
    and handing one to a thread costs several times as much as the write. See :meth:`try_at_once`.

    Attributes:
        directory: of the database. It exists after the first call.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self._connection: sqlite3.Connection | None = None
        # Of the event loop. It does not wait for locks.
        self._quick: sqlite3.Connection | None = None
        # While the thread waits for the disk, the event loop leaves all writes to it.
        self._is_writing_log_back = False
        # When the event loop may write again after a slow write.
        self._paused_until = 0.0
        self._failures = FailureLog()
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
                    self._open()
                assert self._connection is not None
                with self._connection:
                    result = function(self._connection, *args, **options)
                self._shorten_log(self._connection)
                return result
            except (sqlite3.Error, OSError) as error:
                self._failures.report(self.directory, error)
                raise UnavailableError(
                    f"the proxy's storage failed ({error}); send responses with store: "
                    "false, or start the proxy with --storage-dir"
                ) from None

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def try_at_once(
        self,
        function: Callable[Concatenate[sqlite3.Connection, P], bool],
        *args: P.args,
        **options: P.kwargs,
    ) -> bool:
        """Call ``function(connection, …)`` in a transaction on the event loop's thread.

        The function may only write a few kilobytes. If it returns False, nothing is written.
        Returns whether it was written. If not, use :meth:`run`: another connection has the lock,
        the disk is slow or broken, or the database is not open.
        """
        began = time.perf_counter()
        if self._quick is None or self._is_writing_log_back or began < self._paused_until:
            return False
        try:
            with self._quick:
                is_written = function(self._quick, *args, **options)
                if not is_written:
                    self._quick.rollback()
                return is_written
        except sqlite3.Error as error:
            # The thread tries again, with patience for locks, and reports other errors.
            logger.debug("a write was left to the storage's thread: %s", error)
            return False
        finally:
            ended = time.perf_counter()
            if ended - began > _SLOW_SECONDS:
                self._paused_until = ended + _PAUSE_SECONDS

    def _open(self) -> None:
        """Connect, on the thread. Raises OSError and sqlite3.Error."""
        if self._held is None:
            self._held = make_and_hold(self.directory)
        connection = self._connect(_BUSY_SECONDS)
        # The mode stays in the file.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_SCHEMA)
        self._quick = self._connect(0.0)
        self._connection = connection

    def _connect(self, busy_seconds: float) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.directory / _FILE, timeout=busy_seconds, check_same_thread=False
        )
        # A write goes to the log without waiting for the disk; a crash of the host loses the last.
        connection.execute("PRAGMA synchronous = NORMAL")
        # Only the thread writes the log back, because this waits for the disk.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        return connection

    def _shorten_log(self, connection: sqlite3.Connection) -> None:
        """Make a long log part of the database. Call it on the thread.

        Other processes can write meanwhile, except during the last moments.
        """
        log = self.directory / _LOG
        if not log.exists() or log.stat().st_size < _LOG_BYTES:
            return
        self._is_writing_log_back = True
        try:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            # The first write to an empty log waits for the disk, so we write something.
            connection.execute("PRAGMA user_version = 1")
        except sqlite3.Error as error:  # the log stays longer, but everything is in it
            logger.warning("the log %s cannot be shortened: %s", log, error)
        finally:
            self._is_writing_log_back = False

    def close(self) -> None:
        """Finish what is under way. Nothing may be called after it."""
        self._thread.shutdown()
        for connection in (self._quick, self._connection):
            if connection is not None:
                connection.close()
        if self._held is not None:
            os.close(self._held)


def lock_database(connection: sqlite3.Connection) -> None:
    """Begin a transaction that reads before it writes. Other processes wait for its end."""
    connection.execute("BEGIN IMMEDIATE")
