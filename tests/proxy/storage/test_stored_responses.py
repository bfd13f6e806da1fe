"""What a proxy stores is bounded, has an end, and belongs to its key."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pd.core.errors import NotFoundError, SetupError, UnavailableError
from pd.proxy.storage import database as database_module
from pd.proxy.storage import responses
from pd.proxy.storage.database import Database
from pd.proxy.storage.directory import StorageDirectory, make_and_hold
from pd.proxy.storage.failures import FailureLog
from pd.proxy.storage.responses import ResponseNotFoundError, ResponseStore, StoredResponse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LARGE = StoredResponse(b"r" * 300, b"m" * 300)


def make_name() -> str:
    return f"resp_{uuid.uuid4().hex}"


@contextmanager
def open_database(path: Path) -> Iterator[Database]:
    database = Database(path)
    try:
        yield database
    finally:
        database.close()


def has(store: ResponseStore, owner: str, name: str) -> bool:
    try:
        asyncio.run(store.get_response(owner, name))
    except NotFoundError:
        return False
    return True


def test_the_oldest_responses_of_a_key_make_room(tmp_path: Path) -> None:
    with open_database(tmp_path) as database:
        store = ResponseStore(database, 2000)
        other = make_name()
        asyncio.run(store.add_response("b", other, LARGE))
        names = [make_name() for _ in range(4)]
        for name in names:
            asyncio.run(store.add_response("a", name, LARGE))
        assert [has(store, "a", name) for name in names] == [False, False, True, True]
        assert has(store, "b", other)
        with pytest.raises(ResponseNotFoundError) as evicted:
            asyncio.run(store.get_previous("a", names[0]))
        assert (evicted.value.kind, evicted.value.status) == ("previous_response_not_found", 400)
        asyncio.run(store.delete_response("a", names[2]))
        asyncio.run(store.add_response("a", names[0], LARGE))
        assert [has(store, "a", name) for name in names] == [True, False, False, True]


def test_a_response_has_a_lifetime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_database(tmp_path) as database:
        store, name = ResponseStore(database, 2000), make_name()
        asyncio.run(store.add_response("a", name, LARGE))
        later = time.time() + responses.RESPONSE_SECONDS + 1
        monkeypatch.setattr(responses.time, "time", lambda: later)
        assert not has(store, "a", name)
        # Writes on the storage's thread also remove expired rows.
        monkeypatch.setattr(responses, "_SMALL_BYTES", 0)
        asyncio.run(store.add_response("b", make_name(), LARGE))
        rows: Any = asyncio.run(database.run(lambda c: c.execute("SELECT id FROM responses")))
        assert (name,) not in rows.fetchall()


def test_two_processes_share_what_is_stored(tmp_path: Path) -> None:
    with open_database(tmp_path) as one, open_database(tmp_path) as two:
        name = make_name()
        asyncio.run(ResponseStore(one, 2000).add_response("a", name, LARGE))
        assert asyncio.run(ResponseStore(two, 2000).get_response("a", name)) == LARGE


def test_a_response_that_fills_its_keys_room_stays(tmp_path: Path) -> None:
    with open_database(tmp_path) as database:
        store = ResponseStore(database, 2000)
        names = [make_name() for _ in range(3)]
        filling = StoredResponse(b"r" * 1000, b"m" * (1000 - responses._ROW_BYTES))
        for name, stored in zip(names, [LARGE, LARGE, filling], strict=True):
            asyncio.run(store.add_response("a", name, stored))
        assert [has(store, "a", name) for name in names] == [False, False, True]
        too_large = StoredResponse(b"r" * 1001, filling.messages)
        asyncio.run(store.add_response("a", make_name(), too_large))
        assert not has(store, "a", names[2])


def test_small_writes_need_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_database(tmp_path) as database, open_database(tmp_path) as other:
        store, reader = ResponseStore(database, 1 << 20), ResponseStore(other, 1 << 20)
        assert not has(store, "a", make_name())  # opens the database
        with monkeypatch.context() as patch:
            patch.setattr(database, "run", None)
            for _ in range(responses._AT_ONCE):
                name = make_name()
                asyncio.run(store.add_response("a", name, LARGE))
                assert has(reader, "a", name)
            with pytest.raises(TypeError):  # one of several goes to the thread
                asyncio.run(store.add_response("a", make_name(), LARGE))
        large = StoredResponse(bytes(responses._SMALL_BYTES), b"[]")
        with monkeypatch.context() as patch, pytest.raises(TypeError):
            patch.setattr(database, "run", None)
            asyncio.run(store.add_response("a", make_name(), large))


def test_the_event_loop_waits_for_no_lock(tmp_path: Path) -> None:
    """Another process has the lock meanwhile."""

    async def write_while_locked(store: ResponseStore, other: sqlite3.Connection) -> None:
        other.execute("BEGIN IMMEDIATE")
        writing = asyncio.create_task(store.add_response("a", name, LARGE))
        for _ in range(20):
            await asyncio.sleep(0.005)
            assert not writing.done()
        other.rollback()
        await writing

    with open_database(tmp_path) as database:
        store, name = ResponseStore(database, 1 << 20), make_name()
        assert not has(store, "a", name)
        other = sqlite3.connect(tmp_path / "storage.sqlite")
        asyncio.run(write_while_locked(store, other))
        other.close()
        assert has(store, "a", name)


def test_a_slow_disk_slows_the_event_loop_down_only_now_and_then(tmp_path: Path) -> None:
    def write_slowly(_: sqlite3.Connection) -> bool:
        time.sleep(2 * database_module._SLOW_SECONDS)
        return True

    with open_database(tmp_path) as database:
        assert not has(ResponseStore(database, 2000), "a", make_name())
        assert database.try_at_once(write_slowly)
        began = time.monotonic()
        assert not database.try_at_once(write_slowly)
        while not database.try_at_once(lambda _: True):
            time.sleep(0.05)
        assert time.monotonic() - began > database_module._PAUSE_SECONDS / 2


def test_the_log_of_writes_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "_LOG_BYTES", 64 << 10)
    monkeypatch.setattr(responses, "_AT_ONCE", 4)
    log, lengths = tmp_path / "storage.sqlite-wal", []
    with open_database(tmp_path) as database:
        store = ResponseStore(database, 64 << 20)
        for _ in range(100):
            asyncio.run(store.add_response("a", make_name(), LARGE))
            lengths.append(log.stat().st_size)
    assert max(lengths) < 512 << 10
    shortened = [after for before, after in itertools.pairwise(lengths) if after < before]
    assert shortened and all(shortened), "the first write to an empty log waits for the disk"


def test_a_broken_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "storage.sqlite").write_bytes(b"no database" * 100)
    with open_database(tmp_path) as database, pytest.raises(UnavailableError, match="storage"):
        asyncio.run(ResponseStore(database, 2000).add_response("a", make_name(), LARGE))


def test_the_same_failure_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    for code, name in [(errno.ENOSPC, "a"), (errno.ENOSPC, "b"), (errno.EIO, "a")]:
        failures.report(tmp_path, OSError(code, os.strerror(code), name))
    assert len(caplog.records) == 2


def test_a_directory_has_one_proxy(tmp_path: Path) -> None:
    first, second = StorageDirectory(str(tmp_path / "s")), StorageDirectory(str(tmp_path / "s"))
    assert first.open().stat().st_mode & 0o777 == 0o700
    with pytest.raises(SetupError, match="another proxy"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_a_temporary_directory_ends_with_its_proxy() -> None:
    directory = StorageDirectory(None)
    path = directory.open()
    assert not path.exists(), "nothing is stored yet"
    with open_database(path) as database:
        assert not has(ResponseStore(database, 2000), "a", make_name())
    assert path.stat().st_mode & 0o777 == 0o700
    directory.close()
    assert not path.exists()


def test_directories_of_killed_proxies_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = StorageDirectory(None)
    with open_database(living.open()) as database:
        store, name = ResponseStore(database, 2000), make_name()
        asyncio.run(store.add_response("a", name, LARGE))
        killed = tmp_path / f"pd-proxy-{'0' * 32}"
        program = (
            "import asyncio, os, sys, pathlib; from pd.proxy.storage.database import Database\n"
            "database = Database(pathlib.Path(sys.argv[1]))\n"
            "asyncio.run(database.run(lambda connection: None))\n"
            "os.kill(os.getpid(), 9)"
        )
        assert subprocess.run([sys.executable, "-c", program, str(killed)]).returncode == -9
        assert (killed / "storage.sqlite").exists()
        kept = tmp_path / "kept"
        kept.mkdir()
        (kept / "file").touch()
        link = tmp_path / f"pd-proxy-{'1' * 32}"
        link.symlink_to(kept)
        StorageDirectory(None).open()
        assert not killed.exists()
        assert link.is_symlink() and (kept / "file").exists(), "links are not followed"
        assert has(store, "a", name), "a living proxy keeps its own"
    living.close()


def test_a_directory_that_vanishes_is_made_again(tmp_path: Path) -> None:
    """A proxy may remove it as a leftover between its making and its lock."""
    path = tmp_path / "directory"
    os.close(make_and_hold(path))
    path.rmdir()
    with open_database(path) as database:
        assert not has(ResponseStore(database, 2000), "a", make_name())
