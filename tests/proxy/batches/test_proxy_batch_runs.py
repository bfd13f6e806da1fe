"""OpenAI's client works unchanged with batches, and lines are answered as single requests are."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import openai
import pytest
from fake_node import wait_until
from proxy_batches import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    echo,
    make_line,
    make_lines,
    read_results,
    reply_to,
    start,
    upload,
    wait_completed,
    wait_ended,
)
from proxy_cluster import Cluster

from pd.batch.output import BatchOutput
from pd.core.errors import SetupError
from pd.proxy.batches.run import check_input

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fake_node import FakeNode

    from pd.proxy.storage.batches import BatchProblem

KEY, OTHER_KEY = "key", "other"


class Served(NamedTuple):
    client: openai.OpenAI
    node: FakeNode


@pytest.fixture(scope="module")
def served(model_dir: str) -> Iterator[Served]:
    with ExitStack() as stack:
        cluster = Cluster(stack, model_dir)
        node = cluster.node("unified", echo)
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


@pytest.fixture
def held(model_dir: str) -> Iterator[Served]:
    """A node that answers when the test says so."""
    with ExitStack() as stack:
        cluster = Cluster(stack, model_dir)
        node = cluster.node("unified", echo, auto=False)
        proxy = cluster.proxy(files_mb=1, max_queue=8)
        client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0)
        yield Served(stack.enter_context(client), node)


def test_a_cancelled_batch_keeps_its_results(held: Served) -> None:
    client, node = held
    batch = start(client, make_lines(30))
    reply_to(node, 0, 5)
    wait_completed(client, batch, 5)
    under_way = node.wait_generate(9)
    assert client.batches.cancel(batch.id).status == "cancelling"
    node.wait_abort(under_way.room)
    batch = wait_ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (30, 5, 25)
    answers = read_results(client, batch.output_file_id)
    errors = read_results(client, batch.error_file_id)
    assert (len(answers), len(errors)) == (5, 25) and answers.keys().isdisjoint(errors)
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.batches.cancel(batch.id)


def test_a_batch_cancelled_before_its_lines_are_checked_has_no_results(held: Served) -> None:
    """Its lines may be anything."""
    client, _ = held
    waiting = threading.Event()

    def check_later(path: Path, endpoint: str) -> tuple[int, tuple[BatchProblem, ...]]:
        assert waiting.wait(30)
        return check_input(path, endpoint)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pd.proxy.batches.runner.check_input", check_later)
        file = client.files.create(file=("lines.jsonl", b"no line\n"), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
        )
        assert client.batches.cancel(batch.id).status == "cancelling"
        waiting.set()
        batch = wait_ended(client, batch)
    assert batch.status == "cancelled" and not batch.output_file_id and not batch.error_file_id


def test_the_input_of_an_open_batch_cannot_be_deleted(held: Served) -> None:
    client, node = held
    batch = start(client, make_lines(1))
    node.wait_generate()
    with pytest.raises(openai.BadRequestError, match=batch.id):
        client.files.delete(batch.input_file_id)
    node.reply(node.generates[0])
    assert wait_ended(client, batch).status == "completed"
    assert client.files.delete(batch.input_file_id).deleted


def test_results_beyond_the_room_of_their_key_end_a_batch(held: Served) -> None:
    client, node = held
    node.auto = True
    filler = "x" * ((1 << 20) - 40_000)
    upload(client, [make_line("filler", prompt=filler)])
    batch = wait_ended(client, start(client, make_lines(150)))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data
    assert [error.code for error in batch.errors.data] == ["storage_full"]
    counts = batch.request_counts
    assert counts is not None and 10 < counts.completed < 150
    assert len(read_results(client, batch.output_file_id)) == counts.completed
    assert sum(file.bytes for file in client.files.list()) <= 1 << 20


def test_clients_have_room_while_batches_run(held: Served) -> None:
    """Half of the queue (8) is for clients."""
    client, node = held
    batch = start(client, make_lines(20))
    node.wait_generate(4)
    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(client.completions.create, model="", prompt="x", max_tokens=4)
            for _ in range(4)
        ]
        node.wait_generate(8)
        assert [generate.priority for generate in node.generates] == [-1] * 4 + [0] * 4
        reply_to(node, 4, 8)
        assert all(answer.result().choices[0].text for answer in answers)
    node.auto = True
    reply_to(node, 0, 4)
    assert wait_ended(client, batch).status == "completed"


def test_a_key_has_so_many_open_batches(held: Served) -> None:
    client, node = held
    batches = [start(client, make_lines(1)) for _ in range(16)]
    with pytest.raises(openai.RateLimitError, match="16"):
        start(client, make_lines(1))
    for batch in batches[2:]:
        client.batches.cancel(batch.id)
    reply_to(node, 0, 2)
    statuses = [wait_ended(client, batch).status for batch in batches]
    assert statuses == ["completed"] * 2 + ["cancelled"] * 14
    assert len(node.generates) == 2, "two batches of a key run at a time"


def test_requests_of_a_failing_node_are_repeated(held: Served) -> None:
    client, node = held
    batch = start(client, make_lines(1))
    node.fail(node.wait_generate(), "node_failed")
    reply_to(node, 1, 2)
    batch = wait_ended(client, batch)
    assert batch.error_file_id is None and batch.status == "completed"


@pytest.mark.one_process("shortens the window of this process")
def test_requests_without_a_result_expire(held: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, node = held
    monkeypatch.setattr("pd.proxy.api.batches_api.WINDOW_SECONDS", 1.5)
    batch = start(client, make_lines(30))
    reply_to(node, 0, 3)
    batch = wait_ended(client, batch)
    assert batch.status == "expired" and batch.expired_at
    counts = batch.request_counts
    assert counts is not None and (counts.completed, counts.failed) == (3, 27)
    assert len(read_results(client, batch.output_file_id)) == 3
    errors = read_results(client, batch.error_file_id)
    assert len(errors) == 27
    assert {line["error"]["code"] for line in errors.values()} == {"batch_expired"}


def test_batches_of_two_keys_take_turns(cluster: Cluster) -> None:
    node = cluster.node("unified", echo, auto=False)
    proxy = cluster.proxy(api_key=KEY, admin_api_key=OTHER_KEY, batch_concurrency=4)
    with (
        openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=KEY) as client,
        openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=OTHER_KEY) as other,
    ):
        large = start(client, make_lines(40))
        node.wait_generate(4)
        small = start(other, make_lines(4))
        wait_until(lambda: other.batches.retrieve(small.id).status == "in_progress")
        reply_to(node, 0, 20)
        assert wait_ended(other, small).status == "completed"
        assert client.batches.retrieve(large.id).status == "in_progress"
        node.auto = True
        reply_to(node, 20, 24)
        assert wait_ended(client, large).status == "completed"
        assert len(node.generates) == 44


@pytest.mark.one_process("breaks the disk of this process")
def test_a_batch_goes_on_after_the_disk_failed(
    held: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, node = held
    add_line, failures = BatchOutput.append_line, iter([False, False, True])

    def fail_once(output: BatchOutput, line: bytes) -> None:
        if next(failures, False):
            raise SetupError("cannot write the file: no space left")
        add_line(output, line)

    monkeypatch.setattr(BatchOutput, "append_line", fail_once)
    monkeypatch.setattr("pd.proxy.batches.runner.RETRY_SECONDS", 0.1)
    node.auto = True
    batch = wait_ended(client, start(client, make_lines(20)))
    assert batch.status == "completed" and len(read_results(client, batch.output_file_id)) == 20


@pytest.mark.one_process("breaks the disk of this process")
def test_a_full_disk_is_tried_less_and_less_often_and_logged_once(
    held: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, node = held
    add_line, times, is_full = BatchOutput.append_line, list[float](), threading.Event()

    def fail_while_full(output: BatchOutput, line: bytes) -> None:
        if is_full.is_set():
            times.append(time.monotonic())
            raise SetupError("cannot write the file: no space left")
        add_line(output, line)

    monkeypatch.setattr(BatchOutput, "append_line", fail_while_full)
    monkeypatch.setattr("pd.proxy.batches.runner.RETRY_SECONDS", 0.1)
    monkeypatch.setattr("pd.proxy.batches.runner.MAX_RETRY_SECONDS", 0.4)
    node.auto = True
    is_full.set()
    batch = start(client, make_lines(1))
    wait_until(lambda: len(times) >= 5)
    is_full.clear()
    batch = wait_ended(client, batch)
    assert batch.status == "completed" and len(read_results(client, batch.output_file_id)) == 1
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert all(pause >= least for pause, least in zip(pauses, [0.1, 0.2, 0.4, 0.4], strict=False))
    assert [batch.id in each.message for each in caplog.records if each.levelname == "ERROR"] == [
        True
    ]


def test_metrics_count_batches_and_their_requests(held: Served) -> None:
    client, node = held
    before = read_batch_metrics(client)
    batch = start(client, make_lines(4))
    reply_to(node, 0, 1)
    wait_completed(client, batch, 1)
    wait_until(lambda: read_batch_metrics(client)["pd_proxy_open_batches", "in_progress"] == 1)
    client.batches.cancel(batch.id)
    wait_ended(client, batch)
    wrong = client.files.create(file=("lines.jsonl", b"no line\n"), purpose="batch")
    failed = client.batches.create(
        input_file_id=wrong.id, endpoint=COMPLETIONS, completion_window="24h"
    )
    assert wait_ended(client, failed).status == "failed"
    wait_until(lambda: not read_batch_metrics(client)["pd_proxy_open_batches", "cancelling"])
    after = read_batch_metrics(client)
    assert after - before == Counter(
        {
            ("pd_proxy_ended_batches_total", "cancelled"): 1,
            ("pd_proxy_ended_batches_total", "failed"): 1,
            ("pd_proxy_batch_requests_total", "completed"): 1,
            ("pd_proxy_batch_requests_total", "failed"): 3,
        }
    )


def read_batch_metrics(client: openai.OpenAI) -> Counter[tuple[str, str]]:
    """Read the values of metrics of batches by name and label."""
    text = httpx.get(f"{str(client.base_url).partition('/v1')[0]}/metrics").text
    found = re.findall(r'^(pd_proxy_\w*batch\w*(?<!_created))\{\w+="(\w+)"\} (\S+)$', text, re.M)
    return Counter({(name, label): int(float(value)) for name, label, value in found})


def test_batches_of_a_removed_key_are_not_continued(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.node("unified", echo, auto=False)

    @contextmanager
    def serve(key: str) -> Iterator[openai.OpenAI]:
        with ExitStack() as stack:
            proxy = Cluster(stack, cluster.model_dir).proxy(
                unified=[node.url], api_key=key, storage_dir=str(tmp_path), batch_concurrency=2
            )
            client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=key)
            yield stack.enter_context(client)

    with serve(KEY) as client:
        batch = start(client, make_lines(9))
        reply_to(node, 0, 3)
        wait_completed(client, batch, 3)
        node.wait_generate(5)
    node.auto = True
    with serve(OTHER_KEY) as client:
        # Its own batch is younger.
        assert wait_ended(client, start(client, make_lines(1))).status == "completed"
        assert len(node.generates) == 6
    with serve(KEY) as client:
        batch = client.batches.retrieve(batch.id)
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data
        assert [error.code for error in batch.errors.data] == ["invalid_api_key"]
        assert len(read_results(client, batch.output_file_id)) == 3
    assert len(node.generates) == 6
