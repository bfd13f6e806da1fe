"""training/evaluate_model.py against a server that knows the answers, and one that does not."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import evaluate_model
import pytest
import render_benchmarks
from embedded import heldout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class _Server(ThreadingHTTPServer):
    """Answers from ``known``, by the last question; to others with ``otherwise``."""

    known: dict[str, str]
    otherwise = "I do not know."
    status = 200
    requests: list[dict[str, Any]]
    keys: list[str | None]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "the-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.keys.append(self.headers["Authorization"])
        text = self.server.known.get(body["messages"][-1]["content"], self.server.otherwise)
        self._answer({"choices": [{"message": {"content": text}}]})

    def _answer(self, body: dict[str, Any]) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as found:
        found.known, found.requests, found.keys = {}, [], []
        for name in ("faq", "multi-turn", "arithmetic"):
            for example in heldout.evaluation_set(name):
                found.known |= {turn.question: turn.answer for turn in example.turns}
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def run(monkeypatch: pytest.MonkeyPatch, server: _Server | str, *flags: str) -> int:
    url = server if isinstance(server, str) else f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("sys.argv", ["evaluate_model.py", "--url", url, *flags])
    return evaluate_model.main()


class TestEvaluation:
    def test_right_answers_meet_the_bar(
        self,
        server: _Server,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert run(monkeypatch, server, "--skill", "faq", "--limit", "20") == 0
        assert "20/20" in capsys.readouterr().out
        assert len(server.requests) == 20
        assert all(body["temperature"] == 0 for body in server.requests)
        assert {body["model"] for body in server.requests} == {"the-model"}

    def test_wrong_answers_miss_it(
        self,
        server: _Server,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        server.known = {}
        assert run(monkeypatch, server, "--skill", "arithmetic", "--limit", "5") == 1
        assert "missed" in capsys.readouterr().out

    def test_the_result_file_makes_a_section_of_the_benchmarks(
        self, server: _Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "some_server.json"
        flags = ("--skill", "faq", "--limit", "4", "--server", "one thread", "--output", str(path))
        assert run(monkeypatch, server, *flags) == 0
        section = render_benchmarks.section(path, set())
        assert "| faq | 4 | 4 | 0 | 100.00% | 95.00% | True |" in section
        assert "server one thread" in section

    def test_later_turns_see_what_was_answered(
        self, server: _Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.known = {}
        server.otherwise = "something else"
        flags = ("--skill", "multi-turn", "--limit", "1", "--concurrency", "1")
        assert run(monkeypatch, server, *flags) == 1
        first, second = (body["messages"] for body in server.requests)
        assert second[: len(first)] == first
        assert second[len(first)] == {"role": "assistant", "content": "something else"}

    def test_sends_the_key(self, server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
        run(monkeypatch, server, "--skill", "faq", "--limit", "1", "--api-key", "secret")
        assert server.keys == ["Bearer secret"]

    def test_failed_requests_count_as_wrong_and_are_shown(
        self,
        server: _Server,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        server.status = 503
        flags = ("--skill", "faq", "--limit", "2", "--model", "m")
        assert run(monkeypatch, server, *flags) == 1
        assert "2 requests failed, the first with: /v1/chat/completions answered 503" in (
            capsys.readouterr().out
        )

    def test_no_server_is_status_2(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(monkeypatch, "http://127.0.0.1:9") == 2
        assert "evaluate_model: http://127.0.0.1:9/v1/models" in capsys.readouterr().err
