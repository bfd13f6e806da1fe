"""Open batches keep their files, and ended ones have a bound and an end."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pd.core.errors import InvalidRequestError, NotFoundError
from pd.proxy.storage import batches, files
from pd.proxy.storage.batches import BatchProgress, BatchStore, StoredBatch
from pd.proxy.storage.database import Database
from pd.proxy.storage.files import FileStore, StorageFullError, StoredFile, make_file_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT = 10_000
NOTHING = BatchProgress(0, 0, 0)


class Stores(NamedTuple):
    files: FileStore
    batches: BatchStore

    async def upload(self, size: int = 10) -> str:
        async with self.files.open_upload("a") as content:
            await content.write(b"x" * size)
            return (await self.files.add_file("a", content, "in", "batch", 3600)).name

    async def add_batch(self, name: str) -> StoredBatch:
        now = time.time()
        batch = StoredBatch(
            name=f"batch_{uuid.uuid4().hex}",
            endpoint="/v1/completions",
            input_file_id=name,
            created=now,
            expires=now + 100,
            output_name=make_file_name(),
            error_name=make_file_name(),
        )
        await self.batches.add_batch("a", batch)
        return batch

    def list_contents(self) -> set[str]:
        """The names of the contents on the disk."""
        return {path.name for path in self.files.get_path(make_file_name()).parent.iterdir()}


@contextmanager
def open_stores(path: Path) -> Iterator[Stores]:
    database = Database(path)
    store = FileStore(database, LIMIT)
    try:
        yield Stores(store, BatchStore(database, LIMIT))
    finally:
        store.close()
        database.close()


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with open_stores(tmp_path) as opened:
        yield opened


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    later = time.time() + seconds
    monkeypatch.setattr(files.time, "time", lambda: later)


def test_an_open_batch_keeps_its_input_and_its_results(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        name = await stores.upload()
        batch = await stores.add_batch(name)
        stray = make_file_name()
        for content in (batch.output_name, batch.error_name, stray):
            stores.files.get_path(content).write_bytes(b"{}")
            os.utime(stores.files.get_path(content), (0, 0))
        pass_time(monkeypatch, files.FILE_SECONDS)
        await stores.files.remove_expired()
        assert stores.list_contents() == {name, batch.output_name, batch.error_name}
        with pytest.raises(NotFoundError):
            await stores.files.get_file("a", name)
        await stores.batches.end_batch("a", batch.name, NOTHING, [])
        await stores.files.remove_expired()
        assert stores.list_contents() == set()

    asyncio.run(run())


def test_results_of_open_batches_take_room(stores: Stores) -> None:
    async def run() -> None:
        batch = await stores.add_batch(await stores.upload(1000))
        await stores.batches.save_progress({batch.name: BatchProgress(1, 0, 8000)})
        with pytest.raises(StorageFullError):
            await stores.upload(2000)
        await stores.upload(1000)
        with pytest.raises(StorageFullError, match="results"):
            await stores.add_batch(batch.input_file_id)
        (found,) = await stores.batches.list_open()
        assert found.used == LIMIT and found.batch.completed == 1

    asyncio.run(run())


def test_the_files_of_an_ended_batch_appear_with_its_end(tmp_path: Path) -> None:
    """Also for another process."""
    with open_stores(tmp_path) as one, open_stores(tmp_path) as two:

        async def run() -> None:
            batch = await one.add_batch(await one.upload())
            assert (await two.batches.cancel_batch("a", batch.name)).status == "cancelling"
            now = time.time()
            output = StoredFile(batch.output_name, now, now + 9, 5, "out", "batch_output")
            await one.batches.end_batch("a", batch.name, BatchProgress(1, 0, 5), [output])
            ended = await two.batches.get_batch("a", batch.name)
            assert (ended.status, ended.has_output, ended.has_errors) == ("cancelled", True, False)
            assert await two.files.get_file("a", batch.output_name) == output
            with pytest.raises(InvalidRequestError, match="cancelled"):
                await two.batches.cancel_batch("a", batch.name)
            for owner in ("b", ""):
                with pytest.raises(NotFoundError):
                    await two.batches.get_batch(owner, batch.name)
            assert not await two.batches.list_open()

        asyncio.run(run())


def test_ended_batches_are_removed(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(batches, "MAX_ENDED", 3)
        name = await stores.upload()
        names = []
        for _ in range(5):
            batch = await stores.add_batch(name)
            await stores.batches.end_batch("a", batch.name, NOTHING, [])
            names.insert(0, batch.name)
        listed = await stores.batches.list_batches("a", None, 10)
        # The last one ended after the others were counted.
        assert [batch.name for batch in listed] == names[:4]
        open_batch = await stores.add_batch(name)
        pass_time(monkeypatch, batches.BATCH_SECONDS + 1)
        await stores.batches.change_batch(open_batch.name, lambda batch: batch)
        other = await stores.upload()
        await stores.add_batch(other)
        listed = await stores.batches.list_batches("a", None, 10)
        assert [batch.input_file_id for batch in listed] == [other, name]

    asyncio.run(run())
