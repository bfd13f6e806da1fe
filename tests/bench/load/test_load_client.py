"""Requests of the harness itself take the way of the load."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest

from pd.bench.load import client
from pd.bench.load.client import fetch_from_here
from pd.bench.serve_client import Server
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def url() -> Iterator[str]:
    """A server whose model has a context of 77 tokens."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"data": [{"id": "m", "max_model_len": 77}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_http_proxy_of_the_environment_is_not_asked(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    status, text = fetch_from_here(f"{url}/v1/models")
    assert (status, "77" in text) == (200, True)
    assert Server(url, None).context_length() == 77


def test_tls_trusts_those_whom_the_load_trusts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the environment httpx does not read `SSL_CERT_FILE`; the context of the load has."""

    class ReadError(Exception):
        pass

    def context() -> None:
        raise ReadError

    monkeypatch.setattr(client, "make_tls_context", context)
    with pytest.raises(ReadError):
        fetch_from_here("https://127.0.0.1:9")
    with pytest.raises(SetupError, match="cannot reach http"):
        fetch_from_here("http://127.0.0.1:9")
