"""What servers, files and requests say does not control the terminal of a command."""

from __future__ import annotations

import json
import os
import pty
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest

from pd import cli
from pd.batch.output import open_output

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Clears the screen, forges a line, turns text round; C1, separators, a lone surrogate.
HOSTILE = "\x1b[2J\r\x1b]0;title\x07\x9b31m\x85\u2028\u202e\u2066\x7f"
FORGED = "pd-launch: everything is fine"


def check_terminal(text: str, *, lines: int | None = None) -> None:
    """Nothing in the text moves a cursor, and no line of it is the server's."""
    assert all(c in "\n\t" or c.isprintable() for c in text), ascii(text)
    assert not any(line.strip().startswith(FORGED) for line in text.split("\n")), text
    assert lines is None or text.count("\n") == lines, text


@contextmanager
def server(status: int, body: bytes, reason: str = "OK") -> Iterator[str]:
    """A server with one answer to everything; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            self.send_response(status, reason)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()


ERROR = {"error": {"message": f"no{HOSTILE}\n{FORGED}", "type": HOSTILE, "code": HOSTILE}}
ANSWERS = {
    "text": f"no{HOSTILE}\n{FORGED}".encode(),
    "raw JSON": json.dumps(ERROR, ensure_ascii=False).encode(),
    "JSON": json.dumps(ERROR).encode(),
    "info": json.dumps({"instance_id": f"{HOSTILE}\n{FORGED}", "role": HOSTILE}).encode(),
    "surrogates": b'{"error": {"message": "\\ud800\\udc80\\udc80"}}',
}


@pytest.mark.parametrize("status", [200, 400, 401, 404])
@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_of_a_server_are_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: str, status: int
) -> None:
    request = {"custom_id": f"a{HOSTILE}", "method": "POST", "url": "/v1/completions", "body": {}}
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(request) + "\n")
    output = str(tmp_path / "out.jsonl")
    with server(status, ANSWERS[answer]) as url:
        cli.launch(["admin", "drain", url])
        cli.launch(["batch", str(source), output, "--url", url, "--max-retries", "0"])
    for text in capsys.readouterr():
        check_terminal(text)


@pytest.mark.parametrize(
    "command",
    [
        ["{text}"],
        ["proxy", "--{text}"],
        ["proxy", "--port", "{text}"],
        ["proxy", "--policy", "{text}"],
        ["proxy", "--prefill", "http://{text}"],
        ["proxy", "--config", "{text}"],
        ["proxy", "--tls-cert", "{text}", "--tls-key", "{text}"],
        ["prefill", "--model", "{text}"],
        ["admin", "drain", "http://127.0.0.1:1/{text}"],
        ["admin", "{text}", "http://127.0.0.1:1"],
        ["batch", "{text}", "{text}", "--url", "http://127.0.0.1:1"],
        ["cluster", "up", "{text}"],
    ],
    ids=" ".join,
)
def test_errors_of_the_command_line_are_one_line(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    words = [word.format(text=f"x{HOSTILE}\n{FORGED}") for word in command]
    status: object
    try:
        status = cli.launch(words)
    except SystemExit as ended:
        status = ended.code
    assert status in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    check_terminal(err, lines=1)


@pytest.mark.parametrize("command", [["{text}"], ["serve", "--{text}"], ["report", "{text}"]])
def test_errors_of_benchmarks_are_one_line(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    words = [word.format(text=f"x{HOSTILE}\n{FORGED}") for word in command]
    status: object
    try:
        status = cli.bench(words)
    except SystemExit as ended:
        status = ended.code
    assert status in (1, 2)
    check_terminal(capsys.readouterr().err, lines=1)


@pytest.mark.parametrize(
    "text",
    [f'"{HOSTILE}": 1', f'port: "{HOSTILE}"', f'policy: "{HOSTILE}\\n{FORGED}"', HOSTILE],
)
def test_errors_about_settings_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "settings.yaml"
    escaped = "".join(f"\\u{ord(c):04x}" if c in HOSTILE else c for c in text)
    for content in (text, escaped):
        file.write_text(content, encoding="utf-8")
        try:
            assert cli.launch(["proxy", "--config", str(file)]) == 2
        except SystemExit as ended:
            assert ended.code == 2
        check_terminal(capsys.readouterr().err, lines=1)


def test_answers_of_a_batch_are_the_same_values_on_a_terminal(tmp_path: Path) -> None:
    """And the same bytes in a pipe."""
    answer = {"body": f"{HOSTILE} Grüße 🙂 \U000e0041", HOSTILE: [1]}
    line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
    reading, terminal = pty.openpty()
    path = tmp_path / "terminal"
    path.symlink_to(os.ttyname(terminal))
    output = open_output(path)
    output.append_line(line)
    output.close()
    text = os.read(reading, 1 << 16).decode().replace("\r\n", "\n")
    check_terminal(text, lines=1)
    assert json.loads(text) == answer
    assert "Grüße 🙂" in text
    for descriptor in (reading, terminal):
        os.close(descriptor)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    output = open_output(pipe)
    output.append_line(line)
    output.close()
    assert os.read(reading, 1 << 16) == line
    os.close(reading)
