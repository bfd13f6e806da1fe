"""A Kubernetes API of a test's own, which lists and watches EndpointSlices over TLS."""

from __future__ import annotations

import json
import queue
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from pd.proxy.nodes.discovery.kubernetes_api import KubernetesApi

if TYPE_CHECKING:
    from pathlib import Path

    from certificates import CertificateFiles

TOKEN = "first-token"
NAMESPACE = "serving"


def make_slice(
    name: str,
    *addresses: str,
    port: int | None = 30000,
    port_name: str = "http",
    conditions: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    ports = (
        [] if port is None else [{"name": "other", "port": 9}, {"name": port_name, "port": port}]
    )
    return {
        "metadata": {"name": name, "labels": {"app": "pd"}, "resourceVersion": "7"},
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [address], "conditions": conditions or {"ready": True}, "nodeName": "n"}
            for address in addresses
        ],
        "ports": ports,
        **more,
    }


class KubernetesServer:
    """Answers lists from ``slices``, and watches from what the test says.

    Attributes:
        token: the only one that is accepted.
        answers: status, headers and body of the next requests instead, in turn.
        requests: path and query of all requests that showed the token.
        refused: number of requests that did not.
        page: slices of a page of a list.
    """

    def __init__(self, authority: str, files: CertificateFiles, account: Path) -> None:
        self.token, self.page, self.refused = TOKEN, 50, 0
        self.slices: list[dict[str, Any]] = []
        self.version = "10"
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.account = account
        account.mkdir()
        for name, text in (("token", TOKEN + "\n"), ("namespace", NAMESPACE)):
            (account / name).write_text(text)
        with open(authority) as file:
            (account / "ca.crt").write_text(file.read())
        self._said: queue.Queue[bytes | None] = queue.Queue()
        self._is_closed = False
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.handle(self)

            def log_message(self, format: str, *values: Any) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        self.end_watch()
        self._server.shutdown()
        self._server.server_close()

    def api(self) -> KubernetesApi:
        port = str(self._server.server_address[1])
        environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
        return KubernetesApi(self.account, environment)

    def say(self, kind: str, item: dict[str, Any]) -> None:
        """Send an event to the watch that runs, or to the next one."""
        self.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    def write(self, data: bytes) -> None:
        self._said.put(data)

    def end_watch(self) -> None:
        self._said.put(None)

    @property
    def watches(self) -> list[dict[str, str]]:
        return [query for _, query in list(self.requests) if "watch" in query]

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.headers["Authorization"] != f"Bearer {self.token}":
            self.refused += 1
            self._reply(handler, 401, {}, b"{}")
            return
        parts = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.requests.append((parts.path, query))
        if self.answers:
            self._reply(handler, *self.answers.pop(0))
        elif "watch" in query:
            self._stream(handler)
        else:
            start = int(query.get("continue", 0))
            end = start + self.page
            meta = {"resourceVersion": self.version}
            if end < len(self.slices):
                meta["continue"] = str(end)
            body = {"kind": "EndpointSliceList", "metadata": meta, "items": self.slices[start:end]}
            self._reply(handler, 200, {}, json.dumps(body).encode())

    def _reply(
        self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    def _stream(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        while not self._is_closed and (data := self._said.get()) is not None:
            handler.wfile.write(data)
            handler.wfile.flush()
        handler.close_connection = True
