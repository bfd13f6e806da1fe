"""OpenAI's client works unchanged with batches, and lines are answered as single requests are."""

from __future__ import annotations

import io
import json
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import openai
import pytest
from fake_node import EOS
from proxy_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fake_node import FakeNode
    from openai.types import Batch

KEY, OTHER_KEY = "key", "other"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ENDED = ("completed", "failed", "expired", "cancelled")


def make_line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def make_lines(count: int) -> list[dict[str, Any]]:
    return [make_line(f"{i}", prompt=f"text {i}", max_tokens=4) for i in range(count)]


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch").id


def start(
    client: openai.OpenAI, lines: list[Any], endpoint: Any = COMPLETIONS, **options: Any
) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, lines),
        endpoint=endpoint,
        completion_window="24h",
        **options,
    )


def wait_ended(client: openai.OpenAI, batch: Batch, seconds: float = 20) -> Batch:
    deadline = time.monotonic() + seconds
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def read_results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file by their ``custom_id``, of which there is one each."""
    if file_id is None:
        return {}
    text = client.files.content(file_id).text
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


class Served(NamedTuple):
    client: openai.OpenAI
    node: FakeNode


@pytest.fixture(scope="module")
def served(model_dir: str) -> Iterator[Served]:
    with ExitStack() as stack:
        cluster = Cluster(stack, model_dir)
        node = cluster.node("unified", lambda prompt, _: [*prompt[:30], EOS])
        proxy = cluster.proxy(api_key=KEY, admin_api_key=OTHER_KEY, files_mb=5)
        client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=KEY, max_retries=0)
        yield Served(stack.enter_context(client), node)


def test_a_batch_answers_each_line_as_a_single_request(served: Served) -> None:
    client, node = served
    message = {"role": "user", "content": 'Zoë "says"\u2028\n\\'}
    lines = [
        make_line("chat", CHAT, messages=[message]),
        make_line("wrong", CHAT, messages=[message], max_tokens=-1),
        make_line("no model", CHAT, messages=[message], model="nobody's"),
        make_line("stream", CHAT, messages=[message], stream=True),
        *(make_line(f"{i}", CHAT, messages=[message | {"content": f"{i}"}]) for i in range(40)),
    ]
    batch = start(client, lines, CHAT, metadata={"a": "b"})
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", CHAT, {"a": "b"})
    assert batch.expires_at == batch.created_at + 86400
    batch = wait_ended(client, batch)
    assert batch.status == "completed" and batch.errors is None
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (44, 41, 3)
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert list(times) == sorted(times, key=int), "each status has its time"
    output, errors = (
        read_results(client, name) for name in (batch.output_file_id, batch.error_file_id)
    )
    assert set(output) == {"chat", *map(str, range(40))}
    assert set(errors) == {"wrong", "no model", "stream"}
    single = client.chat.completions.create(model="", messages=lines[0]["body"]["messages"])
    answer = output["chat"]["response"]
    assert answer["status_code"] == 200 and answer["request_id"].startswith("batch_req_")
    assert answer["body"]["choices"][0]["message"]["content"] == single.choices[0].message.content
    assert errors["wrong"]["response"]["status_code"] == 400
    assert errors["wrong"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert errors["no model"]["response"]["status_code"] == 404
    assert errors["stream"]["response"] is None
    assert errors["stream"]["error"]["code"] == "unsupported_stream"
    priorities = [generate.priority for generate in node.generates]
    assert priorities == [-1] * 41 + [0], "batches come after clients"
    assert batch.output_file_id is not None
    file = client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@pytest.mark.parametrize(
    ("endpoint", "body"), [(COMPLETIONS, {"prompt": "hi"}), (RESPONSES, {"input": "hi"})]
)
def test_other_endpoints_have_batches(served: Served, endpoint: str, body: Any) -> None:
    batch = wait_ended(
        served.client, start(served.client, [make_line("a", endpoint, **body)], endpoint)
    )
    assert batch.status == "completed" and batch.error_file_id is None
    assert read_results(served.client, batch.output_file_id)["a"]["response"]["body"]["id"]


def test_a_batch_with_wrong_lines_fails_before_any_is_sent(served: Served) -> None:
    client, node = served
    before = len(node.generates)
    lines = [*make_lines(3), make_line("1", prompt="x"), {"custom_id": "x"}, make_line("c", CHAT)]
    batch = wait_ended(client, start(client, lines))
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    assert batch.errors is not None and batch.errors.data is not None
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (4, "duplicate_custom_id"),
        (5, "missing_required_parameter"),
        (6, "invalid_url"),
    ]
    assert len(node.generates) == before


def test_a_batch_belongs_to_its_key(served: Served) -> None:
    client = served.client
    batch = wait_ended(client, start(client, make_lines(1)))
    stranger = client.with_options(api_key=OTHER_KEY)
    for call in (stranger.batches.retrieve, stranger.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    assert not stranger.batches.list().data
    with pytest.raises(openai.NotFoundError):
        stranger.files.content(str(batch.output_file_id))
    with pytest.raises(openai.BadRequestError, match="input_file_id"):
        stranger.batches.create(
            input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
        )


def test_batches_are_listed_in_pages(served: Served) -> None:
    client = served.client
    ids = [start(client, make_lines(1)).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == ids[:0:-1] and page.has_more
    assert client.batches.list(limit=1, after=ids[1]).data[0].id == ids[0]
    with pytest.raises(openai.BadRequestError, match="after"):
        client.batches.list(after="batch_1")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.batches.list(limit=101)
    for name in ids:
        wait_ended(client, client.batches.retrieve(name))


def test_unsuitable_requests_are_refused_by_name(served: Served) -> None:
    client, file = served.client, upload(served.client, make_lines(1))
    good = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
    for field, value in (
        ("input_file_id", "file-1"),
        ("endpoint", "/v1/embeddings"),
        ("completion_window", "1h"),
        ("metadata", {"a": 1}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
    ):
        with pytest.raises(openai.BadRequestError, match=field) as refused:
            client.post("/batches", body=good | {field: value}, cast_to=object)
        assert str(refused.value.param).startswith(field)
