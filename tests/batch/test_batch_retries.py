"""Requests that fail are sent again, in the same run or a later one; bad ones are not."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from batch_helpers import (
    CHAT,
    Scripted,
    read_results,
    request_line,
    status_of,
    write_lines,
)

from pd.batch import attempts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batch_helpers import ScriptedServer

ERROR = b'{"error": {"message": "as scripted"}}'


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """An input of five requests, and where the output goes."""
    lines = [request_line(f"id-{i}", prompt=i) for i in range(5)]
    return write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"


def test_an_answer_has_openais_shape(
    tmp_path: Path, serve: Callable[..., ScriptedServer], batch: Callable[..., tuple[int, str]]
) -> None:
    answer = b'{\r\n "choices": [1.50, "\xe2\x80\xa8\\n"]\n}'
    server = serve(lambda body, times: Scripted(200, answer, {"X-Request-Id": "theirs"}))
    source = write_lines(tmp_path / "in.jsonl", [request_line("a", CHAT, messages=[])])
    assert batch(source, tmp_path / "out.jsonl", "--url", server.url)[0] == 0
    (line,) = read_results(tmp_path / "out.jsonl").values()
    assert line == {
        "id": line["id"],
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "theirs", "body": json.loads(answer)},
        "error": None,
    }
    assert b'"body":{   "choices": [1.50,' in (tmp_path / "out.jsonl").read_bytes()
    (headers,) = server.headers
    assert line["id"] == headers["X-Request-Id"] and line["id"].startswith("batch_req_")
    assert headers["Authorization"] == "Bearer a-secret"


@pytest.mark.parametrize(
    "failure",
    [
        Scripted(429, ERROR, {"Retry-After": "0"}),
        Scripted(503, b"<html>busy</html>", {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        Scripted(500, ERROR, {"Retry-After": "soon"}),
        Scripted(0),
    ],
)
def test_busy_and_failing_servers_are_asked_again(
    failure: Scripted,
    files: tuple[Path, Path],
    serve: Callable[..., ScriptedServer],
    batch: Callable[..., tuple[int, str]],
) -> None:
    server = serve(lambda body, times: failure if times < 2 else Scripted())
    status, text = batch(*files, "--url", server.url)
    assert status == 0 and "5 of 5 requests succeeded" in text
    assert sorted(server.prompts()) == sorted([0, 1, 2, 3, 4] * 3)


def test_the_server_says_when_to_come_back(
    files: tuple[Path, Path],
    serve: Callable[..., ScriptedServer],
    batch: Callable[..., tuple[int, str]],
) -> None:
    came: dict[int, float] = {}
    waited: list[float] = []

    def script(body: dict[str, Any], times: int) -> Scripted:
        now = time.monotonic()
        if not times:
            came[body["prompt"]] = now
            return Scripted(429, ERROR, {"Retry-After": "1"})
        waited.append(now - came[body["prompt"]])
        return Scripted()

    assert batch(*files, "--url", serve(script).url)[0] == 0
    assert len(waited) == 5 and min(waited) >= 1


@pytest.mark.parametrize("failure", [Scripted(503, ERROR), Scripted(0), Scripted(408, ERROR)])
def test_what_failed_in_one_run_is_asked_again_in_the_next(
    failure: Scripted,
    files: tuple[Path, Path],
    serve: Callable[..., ScriptedServer],
    batch: Callable[..., tuple[int, str]],
) -> None:
    server = serve(lambda body, times: failure if body["prompt"] == 3 else Scripted())
    arguments = (*files, "--url", server.url, "--max-retries", 1)
    status, text = batch(*arguments)
    assert status == 1 and "4 of 5 requests succeeded, 1 failed" in text
    assert "the same command continues from here" in text
    line = read_results(files[1])["id-3"]
    if failure.status:
        assert status_of(line) == failure.status and line["error"] is None
    else:
        assert line["response"] is None and line["error"]["code"] == "connection_lost"
    # A request whose time was up has had its time in this run.
    assert server.prompts().count(3) == (1 if failure.status == 408 else 2)

    server.bodies.clear()
    server.script = lambda body, times: Scripted()
    status, text = batch(*arguments)
    assert status == 0 and "5 of 5 requests succeeded (4 of them in earlier runs)" in text
    assert server.prompts() == [3]
    assert {status_of(line) for line in read_results(files[1]).values()} == {200}
    server.stop()  # nothing is left to ask
    assert batch(*arguments)[0] == 0


def test_bad_requests_are_final(
    files: tuple[Path, Path],
    serve: Callable[..., ScriptedServer],
    batch: Callable[..., tuple[int, str]],
) -> None:
    statuses = [200, 400, 404, 413, 422]
    server = serve(lambda body, times: Scripted(statuses[body["prompt"]], ERROR))
    for _ in range(2):
        status, text = batch(*files, "--url", server.url)
        assert status == 3 and "1 of 5 requests succeeded" in text and "4 were refused" in text
    assert [status_of(read_results(files[1])[f"id-{i}"]) for i in range(5)] == statuses
    assert len(server.bodies) == 5


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", "invalid_answer"),
        (b'{"a": "\xff"}', "invalid_answer"),
        (b'{"a": NaN}', "invalid_answer"),
        (b"[1]", "invalid_answer"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "invalid_answer"),
        (b'{"a": "' + b"x" * 200_000 + b'"}', "answer_too_long"),
    ],
)
def test_an_answer_that_is_none_is_an_error_line(
    answer: bytes,
    code: str,
    files: tuple[Path, Path],
    serve: Callable[..., ScriptedServer],
    batch: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "MAX_ANSWER_BYTES", 1 << 20 if b"x" not in answer else 1000)
    server = serve(lambda body, times: Scripted(200, answer) if body["prompt"] else Scripted())
    assert batch(*files, "--url", server.url)[0] == 1
    results = read_results(files[1])
    assert status_of(results.pop("id-0")) == 200
    assert {line["error"]["code"] for line in results.values()} == {code}
    assert files[1].stat().st_size < 5000


def test_a_slow_answer_fails_its_request(
    files: tuple[Path, Path],
    serve: Callable[..., ScriptedServer],
    batch: Callable[..., tuple[int, str]],
) -> None:
    release = threading.Event()

    def script(body: dict[str, Any], times: int) -> Scripted:
        if body["prompt"] == 1:
            release.wait(20)
        return Scripted()

    assert batch(*files, "--url", serve(script).url, "--timeout", 0.3)[0] == 1
    release.set()
    assert read_results(files[1])["id-1"]["error"] == {
        "code": "timeout",
        "message": "no answer within 0.3 s",
    }


def test_requests_under_way_are_bounded(
    tmp_path: Path, serve: Callable[..., ScriptedServer], batch: Callable[..., tuple[int, str]]
) -> None:
    together = threading.Barrier(3)

    def script(body: dict[str, Any], times: int) -> Scripted:
        together.wait(10)
        return Scripted()

    lines = [request_line(str(i), prompt=i) for i in range(12)]
    server = serve(script)
    source = write_lines(tmp_path / "in.jsonl", lines)
    assert batch(source, tmp_path / "out.jsonl", "--url", server.url, "--concurrency", 3)[0] == 0
    assert server.most_under_way == 3


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_the_run(
    status: int,
    files: tuple[Path, Path],
    serve: Callable[..., ScriptedServer],
    batch: Callable[..., tuple[int, str]],
) -> None:
    server = serve(lambda body, times: Scripted(status, ERROR))
    ended, text = batch(*files, "--url", server.url, "--concurrency", 1)
    assert ended == 1 and "refuses the API key" in text
    assert len(server.bodies) == 1 and read_results(files[1]) == {}


def test_a_server_that_is_gone_ends_the_run(
    files: tuple[Path, Path],
    serve: Callable[..., ScriptedServer],
    batch: Callable[..., tuple[int, str]],
) -> None:
    def script(body: dict[str, Any], times: int) -> Scripted:
        if body["prompt"] == 2:
            threading.Thread(target=server.stop).start()
            while not server.stopped:
                time.sleep(0.01)
            return Scripted(0)
        return Scripted()

    server = serve(script)
    arguments = (*files, "--url", server.url, "--concurrency", 1, "--max-retries", 3)
    status, text = batch(*arguments)
    first, second, third = text.splitlines()
    assert status == 1 and "trying again up to 3 times" in first
    assert "2 of 5 requests succeeded, 3 have no answer yet" in second
    assert "cannot reach" in third and "tried 4 times" in third
    assert set(read_results(files[1])) == {"id-0", "id-1"}
    status, text = batch(*arguments)
    assert status == 1 and text.count("\n") == 1 and "cannot reach" in text


def test_a_server_that_fails_everything_ends_the_run(
    tmp_path: Path, serve: Callable[..., ScriptedServer], batch: Callable[..., tuple[int, str]]
) -> None:
    server = serve(lambda body, times: Scripted(502, ERROR))
    source = write_lines(tmp_path / "in.jsonl", [request_line(str(i), prompt=i) for i in range(50)])
    out = tmp_path / "out.jsonl"
    status, text = batch(source, out, "--url", server.url, "--concurrency", 2, "--max-retries", 0)
    assert status == 1 and re.search("1[01] requests in a row failed", text)
    assert "HTTP status 502: as scripted" in text and len(read_results(out)) <= 11
