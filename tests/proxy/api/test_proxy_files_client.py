"""OpenAI's client works unchanged with files."""

from __future__ import annotations

import io
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from fake_node import wait_until
from proxy_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY, OTHER_KEY = "key", "other"
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\r\n'
FORM = {"Content-Type": "multipart/form-data; boundary=b"}


@pytest.fixture(scope="module")
def client(model_dir: str) -> Iterator[openai.OpenAI]:
    with ExitStack() as stack:
        proxy = Cluster(stack, model_dir).proxy(
            wait_ready=0, api_key=KEY, admin_api_key=OTHER_KEY, files_mb=5
        )
        yield openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=KEY, max_retries=0)


def upload(
    client: openai.OpenAI, content: bytes, name: str = "in.jsonl"
) -> openai.types.FileObject:
    return client.files.create(file=(name, io.BytesIO(content)), purpose="batch")


def post_form(client: openai.OpenAI, body: bytes, headers: dict[str, str] = FORM) -> httpx.Response:
    key = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{client.base_url}files", content=body, headers=key | headers)


def test_a_file_comes_back_as_it_was(client: openai.OpenAI) -> None:
    content = LINE * 30_000  # several blocks
    file = upload(client, content, "Größe.jsonl")
    assert file.id.startswith("file-")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "Größe.jsonl", "batch")
    assert file.expires_at is not None and file.expires_at - file.created_at == 30 * 86400
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_a_file_belongs_to_its_key(client: openai.OpenAI) -> None:
    file = upload(client, LINE)
    stranger = client.with_options(api_key=OTHER_KEY)
    for call in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    assert file.id not in [other.id for other in stranger.files.list()]
    client.files.delete(file.id)


@pytest.mark.one_process("lowers a limit of this process")
def test_downloads_that_nobody_reads_are_few(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them holds a block in memory."""
    monkeypatch.setattr("pd.proxy.api.large_answers.MAX_KEY_ANSWERS", 2)
    with ExitStack() as stack:
        keys = {"api_key": KEY, "admin_api_key": OTHER_KEY}
        proxy = Cluster(stack, model_dir).proxy(wait_ready=0, **keys)
        client, other = (
            openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=0)
            for key in keys.values()
        )
        # More than the kernel takes for two sockets.
        large = upload(client, LINE * ((32 << 20) // len(LINE)))
        small = upload(client, LINE)
        with ExitStack() as unread:
            for _ in range(2):
                unread.enter_context(client.files.with_streaming_response.content(large.id))
            with pytest.raises(openai.RateLimitError, match="read them first"):
                client.files.content(large.id)
            assert client.files.content(small.id).read() == LINE
            others = upload(other, LINE * 10_000)
            assert other.files.content(others.id).read() == LINE * 10_000

        def can_read() -> bool:
            try:
                return len(client.files.content(large.id).read()) == large.bytes
            except openai.RateLimitError:
                return False

        wait_until(can_read)


def test_files_are_listed_in_pages(client: openai.OpenAI) -> None:
    ids = [upload(client, LINE).id for _ in range(3)]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1], "the client asks for all"
    assert [file.id for file in client.files.list(limit=1, order="asc")] == ids
    assert not client.files.list(purpose="other").data
    for number in ("0", "10001", "x", "²"):
        with pytest.raises(openai.BadRequestError, match="limit"):
            client.files.list(extra_query={"limit": number})
    with pytest.raises(openai.BadRequestError, match="after"):
        client.files.list(after="file-1")
    for name in ids:
        client.files.delete(name)


def test_a_key_has_room_for_so_many_bytes(client: openai.OpenAI) -> None:
    first = upload(client, b"x" * (3 << 20))
    for size in (3 << 20, 6 << 20):
        with pytest.raises(openai.BadRequestError, match="5 MiB together") as full:
            upload(client, b"x" * size)
        assert full.value.code == "storage_full"
    client.files.delete(first.id)
    client.files.delete(upload(client, b"x" * (4 << 20)).id)


def test_a_file_may_have_a_shorter_life(client: openai.OpenAI) -> None:
    file = client.files.create(
        file=("a", LINE),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    client.files.delete(file.id)
    with pytest.raises(openai.BadRequestError, match="3599"):
        client.files.create(
            file=("a", LINE),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3599},
        )


def test_unsuitable_forms_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch', not 'vision'"):
        client.files.create(file=("a", LINE), purpose="vision")
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    purpose, name = part % (b"purpose", b"", b"batch"), b'; filename="a"'
    for body, message in (
        (purpose + b"--b--", "file: missing"),
        (purpose + part % (b"file", b"", b"x") + b"--b--", "filename"),
        (purpose + part % (b"file", name, b"") + b"--b--", "empty"),
        (part % (b"file", name, b"x") + b"--b--", "purpose"),
        (part % (b"file", name, b"x") * 2 + b"--b--", "two files"),
        (purpose + part % (b"file", name, b"x"), "ends before"),
        (part % (b"purpose", b"", b"x" * 2000), "1024 bytes"),
        (purpose * 40, "32 parts"),
        (b"--b\r\n" + b"x" * 9000, "headers"),
        (b"x" * 9000, "does not begin"),
    ):
        answer = post_form(client, body)
        assert answer.status_code == 400, body
        assert message in answer.json()["error"]["message"], body
    answer = post_form(client, b"", {"Content-Type": "multipart/form-data"})
    assert "boundary" in answer.json()["error"]["message"]
    assert post_form(client, b"{}", {"Content-Type": "application/json"}).status_code == 415


def test_web_pages_cannot_upload(model_dir: str) -> None:
    """A page may send a form without asking the server."""
    form = {"file": ("a", LINE), "purpose": (None, "batch")}
    page = {"Origin": "http://evil.example", "User-Agent": "Mozilla/5.0"}
    with ExitStack() as stack:
        proxy = Cluster(stack, model_dir).proxy(
            wait_ready=0, tokenizer=None, cors_origins=["http://good.example"]
        )
        url = f"{proxy.url}/v1/files"
        own = {"Origin": proxy.url}
        for headers, status in (
            (page, 403),
            (page | {"Origin": "null"}, 403),
            ({"User-Agent": "Mozilla/5.0"}, 403),
            ({"Sec-Fetch-Site": "same-origin"}, 403),
            ({"Host": "evil.example"}, 403),
            (page | {"Origin": "http://good.example"}, 200),
            (page | own, 200),
            ({}, 200),
        ):
            assert httpx.post(url, files=form, headers=headers).status_code == status, headers
        # No other path takes forms.
        assert httpx.post(f"{proxy.url}/v1/completions", files=form).status_code == 415


def test_files_survive_a_restart(model_dir: str, tmp_path: Path) -> None:
    directory, ids = str(tmp_path / "storage"), []
    for _ in range(2):
        with ExitStack() as stack:
            proxy = Cluster(stack, model_dir).proxy(
                wait_ready=0, tokenizer=None, storage_dir=directory
            )
            client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0)
            for name in ids:
                assert client.files.content(name).read() == LINE
            ids.append(upload(client, LINE).id)


def test_an_unfinished_upload_leaves_nothing(model_dir: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        proxy = Cluster(stack, model_dir).proxy(
            wait_ready=0, tokenizer=None, storage_dir=str(tmp_path)
        )
        head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        body = head + b"x" * (3 << 20)  # two blocks are on the disk when the form turns out broken
        assert httpx.post(f"{proxy.url}/v1/files", content=body, headers=FORM).status_code == 400
        assert (tmp_path / "files").is_dir()
        assert not list((tmp_path / "files").iterdir())


def check_random_forms(client: openai.OpenAI, seed: int, count: int) -> None:
    print(f"seed {seed}")
    rng, statuses = random.Random(seed), set()
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    whole = part % (b"file", b'; filename="a"', b"\r\n--x") + part % (b"purpose", b"", b"batch")
    whole += b"--b--\r\n"
    pieces = [b"\r\n", b"--", b"--b", b"--b--", b";", b'"', b"\0", b"\xff", b"=", b"filename*=",
              b"utf-7''+2AA-", b"expires_after[seconds]", b"x" * 5000]  # fmt: skip
    for _ in range(count):
        body = bytearray(whole)
        for _ in range(rng.randrange(4)):
            place = rng.randrange(len(body) + 1)
            body[place : place + rng.choice((0, 1, 5))] = rng.choice(pieces)
        answer = post_form(client, bytes(body))
        statuses.add(answer.status_code)
        if answer.status_code == 200:
            client.files.delete(answer.json()["id"])
        else:
            assert answer.status_code == 400, (bytes(body), answer.text)
            assert answer.json()["error"]["message"], bytes(body)
    assert statuses == {200, 400}


def test_random_forms(client: openai.OpenAI) -> None:
    check_random_forms(client, random.randrange(1 << 32), 100)


@pytest.mark.full
def test_ten_thousand_random_forms(client: openai.OpenAI) -> None:
    check_random_forms(client, random.randrange(1 << 32), 10_000)
