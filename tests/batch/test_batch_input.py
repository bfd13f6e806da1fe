"""Every line of a batch's input is checked before anything is sent."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from batch_helpers import COMPLETIONS, read_results, request_line, write_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batch_helpers import ScriptedServer

GOOD = json.dumps(request_line("a", prompt="x"))


def changed(**members: Any) -> str:
    line = request_line("b", prompt="x") | members
    return json.dumps({name: value for name, value in line.items() if value is not ...})


# A second line, and what the error says of it.
WRONG_LINES = [
    ("{", "is not valid JSON"),
    ('{"custom_id": "b"', "is not valid JSON"),
    ('{"custom_id": NaN}', "is not valid JSON"),
    ('{"a":' * 100_000, "is not valid JSON"),
    ('{"custom_id": "\\ud800"}', "is not valid JSON"),
    ('["a"]', "must be a JSON object, not '[\"a\"]'"),
    (changed(custom_id=...), "has no custom_id"),
    (changed(custom_id=7), "custom_id must be a string that is not empty, not 7"),
    (changed(custom_id=""), "not ''"),
    (changed(custom_id="x" * 600), "custom_id has 600 characters, at most 512"),
    (changed(custom_id="a"), "already in line 1"),
    (changed(method="GET"), "method must be POST, not 'GET'"),
    (changed(url=None), "url must be a string that is not empty, not None"),
    (changed(body=...), "has no body"),
    (changed(body=[1]), "body must be a JSON object, not '[1]'"),
    (GOOD.replace('"x"', '"x", "stream": 1e999'), "body cannot be read (Number out of range"),
    (GOOD.replace('"x"', f'"x", "stream": [{"1" * 5000}]'), "body cannot be read (Integer value"),
    (GOOD.replace('"x"', '"x", "stream": {"a": -1e999}'), "body cannot be read (Number out of"),
    ('{"custom_id": 1e999}', "cannot be read (Number out of range - at `$.custom_id`): "),
    (f' {{"url": {"1" * 5000}}}', "cannot be read (Integer value out of range - at `$.url`): "),
    ("1e999", "must be a JSON object, not '1e999'"),
]


@pytest.mark.parametrize(("line", "message"), WRONG_LINES)
def test_a_wrong_line_is_named_with_its_value_and_nothing_is_sent(
    line: str,
    message: str,
    tmp_path: Path,
    serve: Callable[..., ScriptedServer],
    batch: Callable[..., tuple[int, str]],
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f"{GOOD}\n{line}\n")
    status, text = batch(source, tmp_path / "out.jsonl", "--url", "http://127.0.0.1:9")
    assert status == 2 and text.count("\n") == 1
    assert f"{source} line 2: " in text and message in text and len(text) < 1000
    assert not (tmp_path / "out.jsonl").exists()


def test_other_wrong_lines_are_counted(
    tmp_path: Path, batch: Callable[..., tuple[int, str]]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f"{GOOD}\n{GOOD}\n[]\n\n{{")
    _, text = batch(source, tmp_path / "out.jsonl", "--url", "http://127.0.0.1:9")
    assert "line 2: custom_id 'a' is already in line 1" in text
    assert "2 more lines have errors" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{in} {out}", "--url"),
        ("{in} {out} --url ftp://host", "--url must be like http://HOST:PORT"),
        ("{in} {out} --url http://me:a-secret@host", "without a user and password"),
        ("{in} {out} --url http://host/?key=1", "--url must be like"),
        ("{in} {out} --url http://host --concurrency 0", "must be 1 to 1024, not 0"),
        ("{in} {out} --url http://host --timeout inf", "must be a number of seconds"),
        ("{in} {out} --url http://host --max-retries -1", "must be a number from 0 on, not -1"),
        ("{in} {out} --url http://host --concurency 3", "did you mean --concurrency?"),
        ("{in} {out} --url http://host --api-key a-secret\n", "API key must consist of printable"),
        ("{none} {out} --url http://host", "cannot read {none}: No such file or directory"),
        ("{empty} {out} --url http://host", "{empty} has no requests"),
        ("{in} {in} --url http://host", "both input and output"),
        ("{in} {notes} --url http://host", "{notes} line 1 is not an answer of a batch"),
        ("{in} {out} --url http://host:99999", "--url must be like"),
    ],
)
def test_arguments_that_cannot_be_right_are_errors_of_one_line(
    arguments: str, message: str, tmp_path: Path, batch: Callable[..., tuple[int, str]]
) -> None:
    names = {name: str(tmp_path / name) for name in ("in", "out", "none", "empty", "notes")}
    (tmp_path / "in").write_text(GOOD)
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "notes").write_text("to do")
    status, text = batch(*arguments.format(**names).split(" "))
    assert status == 2 and message.format(**names) in text and text.count("\n") == 1
    assert (tmp_path / "notes").read_text() == "to do"
    assert (tmp_path / "in").read_text() == GOOD


def test_bodies_are_sent_as_they_are(
    tmp_path: Path,
    serve: Callable[..., ScriptedServer],
    batch: Callable[..., tuple[int, str]],
) -> None:
    """Whatever the lines look like: Windows' line ends and byte order mark, blank lines, members
    that nobody knows, characters that other tools take for line ends, numbers of any size."""
    body = '{"prompt": "a\\u0000\\"\u2028\x85é\\n", "seed": 1e400, "x": 12345678901234567890}'
    custom_id = '\u2028 ../../etc \\\\ \\" 🙂'
    line = f'{{"custom_id": "{custom_id}", "method": "POST", "url": "{COMPLETIONS}", "body": '
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    text = f'\ufeff\r\n{line}{body} , "more": [1]}}\r\n\r\n{GOOD}'
    source.write_bytes(text.encode())
    server = serve()
    assert batch(source, out, "--url", server.url + "/v1/")[0] == 0
    assert sorted(server.bodies) == sorted([body.encode(), b'{"prompt": "x"}'])
    assert set(read_results(out)) == {json.loads(f'"{custom_id}"'), "a"}


def test_requests_that_a_batch_cannot_send_get_an_error_line(
    tmp_path: Path,
    serve: Callable[..., ScriptedServer],
    batch: Callable[..., tuple[int, str]],
) -> None:
    lines = [
        request_line("stream", prompt="x", stream=True),
        request_line("embed", "/v1/embeddings", input="x"),
        request_line("elsewhere", "http://evil.example/v1/completions"),
        request_line("ok", prompt="x", stream=False),
    ]
    server, out = serve(), tmp_path / "out.jsonl"
    source = write_lines(tmp_path / "in.jsonl", lines)
    for _ in range(2):
        status, text = batch(source, out, "--url", server.url)
        assert status == 3 and "1 of 4 requests succeeded" in text and "3 were refused" in text
        results = read_results(out)
        assert results["stream"]["error"]["code"] == "unsupported_stream"
        assert results["embed"]["error"]["code"] == "unsupported_url"
        assert "'/v1/embeddings'" in results["embed"]["error"]["message"]
        assert results["elsewhere"]["response"] is None
    assert len(server.bodies) == 1
