"""Batches on a real proxy, whose nodes answer as the test says, and runs that are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))

from batch_helpers import (
    CHAT,
    read_results,
    request_line,
    start_batch,
    status_of,
    write_lines,
)
from fake_node import wait_until
from proxy_cluster import Cluster
from proxy_tokenizers import byte_level

from pd.batch.run import GRACE_SECONDS
from pd.proxy.http.api_keys import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fake_node import FakeNode

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
KEYS = [ApiKey("a-secret", "inference")]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    model = tmp_path / "model"
    model.mkdir()
    byte_level().save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with ExitStack() as stack:
        yield Cluster(stack, str(model))


def echo(prompt: list[int], index: int) -> list[int]:
    return prompt


def test_a_proxy_answers_a_batch_as_it_answers_single_requests(
    cluster: Cluster, tmp_path: Path, batch: Callable[..., tuple[int, str]]
) -> None:
    cluster.pair(echo)
    proxy = cluster.proxy(api_keys=KEYS)
    message = {"role": "user", "content": 'Zoë "says"\u2028\n\\'}
    lines = [
        request_line("chat", CHAT, messages=[message], max_tokens=30),
        request_line("texts", prompt=["one", "two"], max_tokens=2, temperature=0),
        request_line("no model", prompt="x", model="nobody's"),
        request_line("wrong", prompt="x", max_tokens=-1),
        request_line("empty", CHAT),
        *(request_line(f"{i}", prompt=f"text {i}", max_tokens=6) for i in range(40)),
    ]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    status, text = batch(source, out, "--url", proxy.url, "--concurrency", 16)
    assert status == 3 and "42 of 45 requests succeeded, 3 were refused" in text
    results = read_results(out)
    assert [status_of(results[name]) for name in ("no model", "wrong", "empty")] == [404, 400, 400]
    assert results["wrong"]["response"]["body"]["error"]["param"] == "max_tokens"
    chat = results["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    assert chat == f"<user>{message['content']}<assistant>"[: len(chat)] and len(chat) > 10
    texts = [choice["text"] for choice in results["texts"]["response"]["body"]["choices"]]
    assert texts == ["on", "tw"]
    for i in range(40):
        assert results[f"{i}"]["response"]["body"]["choices"][0]["text"] == f"text {i}"[:6]

    sent = len(cluster.prefill[0].generates)
    assert batch(source, out, "--url", proxy.url)[0] == 3
    assert len(cluster.prefill[0].generates) == sent and read_results(out) == results
    status, text = batch(source, tmp_path / "other", "--url", proxy.url, "--api-key", "another")
    assert status == 1 and "refuses the API key" in text and text.count("\n") == 1


@pytest.fixture
def held(cluster: Cluster) -> tuple[str, FakeNode]:
    """The address of a proxy, and its node, which answers when the test says so."""
    node = cluster.node("unified", echo, auto=False)
    return cluster.proxy().url, node


def _wait_for_lines(path: Path, count: int) -> None:
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") == count)


def _wait_for_requests(node: FakeNode, count: int) -> None:
    """Wait for requests of a process that has just been started, which takes a while where other
    processes take the processor."""
    wait_until(lambda: len(node.generates) >= count, timeout=60)


def _end(process: subprocess.Popen[str]) -> str:
    """Standard error of a process that ends by itself."""
    _, text = process.communicate(timeout=60)
    assert "Traceback" not in text
    return text


def test_a_run_that_was_killed_is_gone_on_with(
    held: tuple[str, FakeNode], tmp_path: Path, batch: Callable[..., tuple[int, str]]
) -> None:
    url, node = held
    lines = [request_line(f"{i}", prompt=f"{i}", max_tokens=1) for i in range(6)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = start_batch(source, out, "--url", url, "--concurrency", 2)
    _wait_for_requests(node, 1)
    for count in range(1, 4):
        node.reply(node.wait_generate(count))
        _wait_for_lines(out, count)
    node.wait_generate(5)
    status, text = batch(source, out, "--url", url)
    assert status == 1 and f"another run writes {out}" in text
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    with out.open("ab") as file:
        file.write(out.read_bytes()[:90])  # as if it had been killed while it wrote

    node.auto = True
    status, text = batch(source, out, "--url", url)
    assert status == 0 and "6 of 6 requests succeeded (3 of them in earlier runs)" in text
    results = read_results(out)
    answers = {i: line["response"]["body"]["choices"][0]["text"] for i, line in results.items()}
    assert answers == {f"{i}": f"{i}" for i in range(6)}
    assert len(node.generates) == 5 + 3


def test_ctrl_c_waits_for_answers_and_a_second_one_does_not(
    held: tuple[str, FakeNode], tmp_path: Path
) -> None:
    url, node = held
    lines = [request_line(f"{i}", prompt=f"{i}", max_tokens=1) for i in range(4)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = start_batch(source, out, "--url", url, "--concurrency", 2)
    _wait_for_requests(node, 2)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None and "waiting up to 30 s" in process.stderr.readline()
    for count in (1, 2):
        node.reply(node.wait_generate(count))
    text = _end(process)
    assert process.returncode == 130
    assert "2 of 4 requests succeeded, 2 have no answer yet" in text
    assert "the same command continues from here" in text
    assert set(read_results(out)) == {"0", "1"} and len(node.generates) == 2

    process = start_batch(source, out, "--url", url)
    _wait_for_requests(node, 4)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None and process.stderr.readline()
    process.send_signal(signal.SIGINT)
    text = _end(process)
    assert process.returncode == 130 and time.monotonic() - began < GRACE_SECONDS
    assert "2 of 4 requests succeeded (2 of them in earlier runs), 2 have no answer yet" in text
    node.wait_abort(node.generates[2].room)
    assert set(read_results(out)) == {"0", "1"}


def test_standard_input_and_output(held: tuple[str, FakeNode]) -> None:
    url, node = held
    node.auto = True
    text = "".join(json.dumps(request_line(i, prompt=i, max_tokens=1)) + "\n" for i in "ab")
    process = start_batch("-", "-", "--url", url, stdin=subprocess.PIPE)
    answers, summary = process.communicate(text, timeout=60)
    assert process.returncode == 0 and summary.count("\n") == 1
    assert "answers are in standard output" in summary
    assert {json.loads(line)["custom_id"] for line in answers.splitlines()} == {"a", "b"}
