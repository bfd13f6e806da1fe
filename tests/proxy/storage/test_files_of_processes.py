"""Files of a proxy of several processes."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import openai
import pytest
from proxy_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.one_process("starts several processes by itself")
BLOCK = b"0123456789abcde\n" * (1 << 16)  # 1 MiB


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def url(model_dir: str, request: pytest.FixtureRequest) -> Iterator[str]:
    with ExitStack() as stack:
        proxy = Cluster(stack, model_dir).proxy(
            wait_ready=0, workers=request.param, files_mb=5, tokenizer=None
        )
        yield f"{proxy.url}/v1"


def connect(url: str) -> openai.OpenAI:
    """A client with connections of its own, so to another process than the last one's."""
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_each_process_has_the_files_of_all(url: str) -> None:
    content = BLOCK + b"end"
    for _ in range(4):
        with connect(url) as client:
            file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
        for _ in range(3):
            with connect(url) as client:
                assert client.files.retrieve(file.id) == file
                assert client.files.content(file.id).read() == content
                assert [listed.id for listed in client.files.list()] == [file.id]
        with connect(url) as client:
            client.files.delete(file.id)
        with connect(url) as client, pytest.raises(openai.NotFoundError):
            client.files.content(file.id)


def test_a_key_has_its_room_once_in_all_processes(url: str) -> None:
    def upload(number: int) -> int:
        with connect(url) as client:
            try:
                file = client.files.create(file=(f"{number}", BLOCK), purpose="batch")
            except openai.BadRequestError as error:
                assert error.code == "storage_full"
                return 0
            return file.bytes

    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(upload, range(12)))
    assert sum(sizes) == 5 * len(BLOCK)
    with connect(url) as client:
        assert sum(file.bytes for file in client.files.list()) == 5 * len(BLOCK)
