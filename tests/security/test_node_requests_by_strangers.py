"""What strangers, recorders of the network and web pages cannot have a node do."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from edge_helpers import JSON, WEB_PAGES, routes_of
from starlette.datastructures import URL
from starlette.requests import Request
from tiny import tiny_node

from pd.cli import launch
from pd.net import signed_requests
from pd.net.cluster_key import derive_admin_key
from pd.net.signed_requests import sign_headers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pd.launch import NodeServer

KEY = b"0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[NodeServer]]:
    """Two with one cluster key."""
    started = [tiny_node("unified", cluster_key=KEY) for _ in range(2)]
    yield started
    for node in started:
        node.stop()


@pytest.fixture(scope="module")
def keyless() -> Iterator[NodeServer]:
    node = tiny_node("prefill")
    yield node
    node.stop()


def sign(node: NodeServer, path: str = "/drain", body: bytes = b"") -> dict[str, str]:
    key = derive_admin_key(KEY)
    assert key is not None
    return sign_headers(key, "POST", path, node.instance_id, body)[0]


def drains(node: NodeServer) -> bool:
    return httpx.get(f"{node.url}/health").status_code == 503


def status(url: str, headers: dict[str, str], body: bytes = b"") -> int:
    return httpx.post(url, headers=headers, content=body).status_code


def test_a_recorded_request_is_of_no_use_at_another_node_or_later(
    nodes: list[NodeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes
    recorded = sign(first)
    for renamed in ({}, {"PD-Expected-Instance": second.instance_id}):
        answer = httpx.post(f"{second.url}/drain", headers=recorded | renamed)
        assert answer.status_code == 401
    assert not drains(second)
    # Other paths, queries and bodies are other requests.
    assert status(f"{first.url}/flush_cache", recorded) == 401
    assert status(f"{first.url}/drain?force=1", recorded) == 401
    assert status(f"{first.url}/drain", recorded | JSON, b"{}") == 401
    assert status(f"{first.url}/drain", recorded) == 200
    assert status(f"{first.url}/undrain", sign(first, "/undrain")) == 200
    assert status(f"{first.url}/drain", recorded) == 401
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 2 * signed_requests.WINDOW_SECONDS)
    old = sign(first)
    monkeypatch.undo()
    assert status(f"{first.url}/drain", old) == 401
    assert not drains(first)


@pytest.mark.parametrize("host", ["x/undrain#", "x/undrain?", "x", "[", "user@x:99999/undrain#"])
def test_a_host_header_does_not_change_what_was_signed(
    nodes: list[NodeServer], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    node = nodes[0]

    def old_url(request: Request) -> URL:
        """The URL as older versions of Starlette put it together."""
        return URL(f"http://{request.headers['host']}{request.scope['path']}")

    monkeypatch.setattr(Request, "url", property(old_url))
    # Somebody keeps a request back and sends it to another path.
    kept = sign(node, "/undrain")
    assert status(f"{node.url}/drain", kept | {"Host": host}) == 401
    assert not drains(node)
    assert status(f"{node.url}/undrain", kept | {"Host": host}) == 200
    # What was signed is what was sent, with its encoding.
    assert status(f"{node.url}/%75ndrain", sign(node, "/undrain")) == 401
    assert status(f"{node.url}/%75ndrain", sign(node, "/%75ndrain")) == 200


def test_without_the_cluster_key_nothing_is_done(nodes: list[NodeServer]) -> None:
    node = nodes[0]
    for method, path in routes_of(node._admin.app):
        for headers in ({}, JSON, *WEB_PAGES.values()):
            answer = httpx.request(method, node.url + path, headers=headers, content=b"{}")
            assert answer.status_code == 401, path
    assert not drains(node)


@pytest.mark.parametrize("page", WEB_PAGES)
def test_a_web_page_cannot_drive_a_node_without_a_key(keyless: NodeServer, page: str) -> None:
    routes = [(keyless.url, *route) for route in routes_of(keyless._admin.app)]
    routes += [(keyless.bootstrap_url, *route) for route in routes_of(keyless._bootstrap.app)]
    assert len(routes) >= 5
    body = json.dumps({"abort_all": True}).encode()
    for url, method, path in routes:
        answer = httpx.request(method, url + path, headers=WEB_PAGES[page], content=body)
        assert answer.status_code in (403, 415), path
    assert not drains(keyless)


@pytest.mark.parametrize("page", ["script", "rebound name", "rebound name, read"])
def test_a_web_page_reads_nothing_of_a_node_without_a_key(keyless: NodeServer, page: str) -> None:
    for path in ("/health", "/server_info", "/metrics"):
        answer = httpx.get(keyless.url + path, headers=WEB_PAGES[page])
        assert answer.status_code == 403, path
        assert answer.json()["error"]["code"] == "forbidden"
    for host in ("localhost", "127.0.0.1:9", keyless.url.removeprefix("http://")):
        assert httpx.get(keyless.url + "/server_info", headers={"Host": host}).status_code == 200


def test_what_a_proxy_passes_on_is_not_local(keyless: NodeServer) -> None:
    for name in ("X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"):
        assert status(f"{keyless.url}/drain", {name: "127.0.0.1"}) == 403
    assert not drains(keyless)


def test_programs_of_this_host_need_no_key_where_there_is_none(keyless: NodeServer) -> None:
    port = keyless.url.rsplit(":", 1)[1]
    for host in ("localhost", f"localhost:{port}", "127.1.2.3", f"[::1]:{port}"):
        assert status(f"{keyless.url}/flush_cache", {"Host": host}) == 200
    own = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
    assert status(f"{keyless.url}/flush_cache", own) == 200
    other = own | {"Origin": "http://localhost:1"}
    assert status(f"{keyless.url}/flush_cache", other) == 403


class TestByHand:
    """``pd-launch admin``."""

    def ask(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
        done = launch(["admin", *arguments])
        out, err = capsys.readouterr()
        return done, json.loads(out) if done == 0 else err

    def test_with_the_key_file(
        self, nodes: list[NodeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        node = nodes[0]
        file = tmp_path / "cluster.key"
        file.write_bytes(KEY + b"\n")
        key = ("--cluster-key-file", str(file))
        done, said = self.ask(capsys, "drain", node.url, *key)
        assert (done, said) == (0, {"instance_id": node.instance_id, "draining": True})
        assert drains(node)
        assert self.ask(capsys, "undrain", node.url, *key)[1]["draining"] is False
        assert not drains(node)
        assert self.ask(capsys, "flush-cache", node.url, *key)[1]["freed_pages"] == 0
        assert self.ask(capsys, "abort-all", node.url, *key)[1]["aborted"] == 0
        done, said = self.ask(capsys, "drain", node.url)
        assert done == 1 and "cluster key" in said
        done, said = self.ask(capsys, "drain", node.url, *key, "--instance-id", "another")
        assert done == 1 and "is for instance 'another'" in said
        file.write_bytes(b"another key 1234")
        done, said = self.ask(capsys, "drain", node.url, *key)
        assert done == 1 and "not signed with this node's cluster key" in said
        assert not drains(node)

    def test_where_there_is_no_key(
        self, keyless: NodeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.ask(capsys, "drain", keyless.url)[0] == 0
        assert drains(keyless)
        assert self.ask(capsys, "undrain", keyless.url.removeprefix("http://"))[0] == 0
        assert not drains(keyless)
        # Whoever answers without proof of the key is no node of ours.
        file = tmp_path / "cluster.key"
        file.write_bytes(KEY)
        done, said = self.ask(capsys, "flush-cache", keyless.url, "--cluster-key-file", str(file))
        assert done == 1 and "did not prove" in said
