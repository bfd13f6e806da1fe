"""Batches, a server whose answers come from the test, and runs of the command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request_line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_results(path: Path) -> dict[str, Any]:
    """Return the output's lines by ``custom_id``. Each occurs once."""
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def status_of(line: Any) -> int:
    return int(line["response"]["status_code"])


class Scripted(NamedTuple):
    """An answer. Status 0 closes the connection without one."""

    status: int = 200
    body: bytes = b'{"choices": []}'
    headers: dict[str, str] = {}  # noqa: RUF012  # never changed


class ScriptedServer:
    """Answers a request by ``script``, which gets its body and how often it has come before."""

    def __init__(self, script: Callable[[dict[str, Any], int], Scripted]) -> None:
        self.script = script
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.most_under_way = 0
        self.stopped = False
        self._under_way = 0
        self._lock = threading.Lock()
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._reply(Scripted(body=b'{"data": []}'))

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                self._reply(scripted.answer(content, dict(self.headers)))

            def _reply(self, scripted_answer: Scripted) -> None:
                if not scripted_answer.status:
                    self.close_connection = True
                    return
                self.send_response(scripted_answer.status)
                for name, value in scripted_answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(scripted_answer.body)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client may have left
                    self.wfile.write(scripted_answer.body)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """A client that leaves is nothing to report."""

        self._http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def answer(self, content: bytes, headers: dict[str, str]) -> Scripted:
        with self._lock:
            times = self.bodies.count(content)
            self.bodies.append(content)
            self.headers.append(headers)
            self._under_way += 1
            self.most_under_way = max(self.most_under_way, self._under_way)
        try:
            return self.script(json.loads(content), times)
        finally:
            with self._lock:
                self._under_way -= 1

    def prompts(self) -> list[Any]:
        """The ``prompt`` of each request that came, in their order."""
        return [json.loads(body).get("prompt") for body in self.bodies]

    def stop(self) -> None:
        """Stop listening; connections that are there stay."""
        if not self.stopped:
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()
        self.stopped = True


def start_batch(*arguments: object, **settings: Any) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "pd.cli", "batch", *map(str, arguments)],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )
