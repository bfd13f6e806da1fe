"""Stored responses, each with the chat that led to it."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    import sqlite3

    from pd.proxy.storage.database import Database

RESPONSE_SECONDS = 30 * 86400.0
_ID = re.compile("resp_[0-9a-f]{32}")
# Each row has a few fields and entries of indexes.
_ROW_BYTES = 256
# Most expired rows to remove at a time.
_EXPIRED_ROWS = 64
# Responses of at most this many bytes are written at once. Each of several is left to the thread,
# which then also removes expired ones and shortens the database's log.
_SMALL_BYTES, _AT_ONCE = 16 << 10, 128
# Removing makes this much more room than needed, because most writes then remove nothing.
_SPARE_BYTES = 1 << 20


class ResponseNotFoundError(InvalidRequestError):
    """``previous_response_id`` names no stored response of the client's key."""

    kind = "previous_response_not_found"


class StoredResponse(NamedTuple):
    """A response in JSON.

    Attributes:
        response: what the client got.
        messages: the chat with the answer, without instructions.
    """

    response: bytes
    messages: bytes


class ResponseStore:
    """Keeps each key's last responses, up to a number of bytes and for some time.

    Args:
        limit: bytes per key.
    """

    def __init__(self, database: Database, limit: int) -> None:
        self._database = database
        self._limit = limit
        self._written_at_once = 0

    async def add_response(self, owner: str, name: str, stored: StoredResponse) -> None:
        """Store a response. The oldest ones of the key make room. Raises UnavailableError."""
        row = (name, owner, time.time() + RESPONSE_SECONDS, _count_bytes(stored), *stored)
        if _count_bytes(stored) <= _SMALL_BYTES and self._written_at_once < _AT_ONCE:
            self._written_at_once += 1
            if self._database.try_at_once(_insert_response, row, self._limit):
                return
        self._written_at_once = 0
        await self._database.run(_add_response, row, self._limit)

    async def get_response(self, owner: str, name: str) -> StoredResponse:
        """Return a response. Raises NotFoundError if the key has none of this name."""
        stored = await self._database.run(_find_response, owner, name)
        if stored is None:
            raise _make_missing(name)
        return stored

    async def get_previous(self, owner: str, name: str) -> bytes:
        """Return the messages of a previous response. Raises ResponseNotFoundError."""
        stored = await self._database.run(_find_response, owner, name)
        if stored is None:
            raise ResponseNotFoundError(
                f"previous_response_id: there is no response {name[:100]!r}, or it was removed; "
                "send the whole chat as input",
                param="previous_response_id",
            )
        return stored.messages

    async def delete_response(self, owner: str, name: str) -> None:
        """Delete a response. Raises NotFoundError if the key has none of this name."""
        if not await self._database.run(_delete_response, owner, name):
            raise _make_missing(name)


def _make_missing(name: str) -> NotFoundError:
    return NotFoundError(f"there is no response {name[:100]!r}, or it was removed")


def _count_bytes(stored: StoredResponse) -> int:
    """Count the bytes that a response takes of its key's room."""
    return _ROW_BYTES + len(stored.response) + len(stored.messages)


# ---- the database


def _insert_response(connection: sqlite3.Connection, row: tuple[object, ...], limit: int) -> bool:
    """Insert a row. Returns whether its owner then has at most ``limit`` bytes."""
    connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
    return _count_stored(connection, row[1]) <= limit


def _count_stored(connection: sqlite3.Connection, owner: object) -> int:
    (total,) = connection.execute(
        "SELECT bytes FROM response_bytes WHERE owner = ?", (owner,)
    ).fetchone()
    return int(total)


def _add_response(connection: sqlite3.Connection, row: tuple[object, ...], limit: int) -> None:
    """Insert a row, and remove expired ones and the oldest of the owner beyond ``limit`` bytes."""
    connection.execute(
        "DELETE FROM responses WHERE rowid IN "
        "(SELECT rowid FROM responses WHERE expires < ? LIMIT ?)",
        (time.time(), _EXPIRED_ROWS),
    )
    if _insert_response(connection, row, limit):
        return
    name, owner, *_ = row
    goal = limit - min(_SPARE_BYTES, limit // 16)
    while (total := _count_stored(connection, owner)) > goal:
        deleted = connection.execute(
            "DELETE FROM responses WHERE rowid = (SELECT rowid FROM responses "
            "WHERE owner = ? AND (? OR id <> ?) ORDER BY rowid LIMIT 1)",
            (owner, total > limit, name),
        )
        if not deleted.rowcount:
            return


def _find_response(connection: sqlite3.Connection, owner: str, name: str) -> StoredResponse | None:
    if not _ID.fullmatch(name):
        return None
    row = connection.execute(
        "SELECT response, messages FROM responses WHERE id = ? AND owner = ? AND expires >= ?",
        (name, owner, time.time()),
    ).fetchone()
    return None if row is None else StoredResponse(*row)


def _delete_response(connection: sqlite3.Connection, owner: str, name: str) -> bool:
    found = connection.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (name, owner))
    return found.rowcount > 0
