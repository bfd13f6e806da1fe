"""Nodes that a proxy finds in Kubernetes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from certificates import Authority, CertificateFiles
from kubernetes_server import NAMESPACE, KubernetesServer, make_slice
from test_proxy_discovery import wait_for_urls

from pd.core.errors import UsageError
from pd.proxy.config import ProxyConfig
from pd.proxy.nodes.discovery import follower, kubernetes_source
from pd.proxy.nodes.discovery.follower import Follower
from pd.proxy.nodes.discovery.kubernetes_api import KubernetesApi
from pd.proxy.nodes.discovery.kubernetes_source import KubernetesSource
from pd.proxy.nodes.discovery.source import SourceError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
    from pathlib import Path

    from proxy_cluster import Cluster

PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
KEY = b"k" * 32

pytestmark = pytest.mark.one_process("each process follows its own sources, which tests replace")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, CertificateFiles]:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    return authority.cert, authority.issue("api")


@pytest.fixture
def server(
    certificates: tuple[str, CertificateFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KubernetesServer]:
    monkeypatch.setattr(kubernetes_source, "_SECONDS_BETWEEN_REQUESTS", 0.01)
    monkeypatch.setattr(follower, "RETRY_SECONDS", 0.01)
    made = KubernetesServer(*certificates, tmp_path / "account")
    yield made
    made.close()


def watch(
    server: KubernetesServer,
    check: Callable[[AsyncGenerator[frozenset[str], None]], Awaitable[None]],
    text: str = "app=pd",
) -> None:
    async def run() -> None:
        source = KubernetesSource(text, server.api())
        async with asyncio.timeout(30), contextlib.aclosing(source.watch_urls()) as lists:
            await check(lists)

    asyncio.run(run())


def first_list(server: KubernetesServer, text: str = "app=pd") -> set[str]:
    found: set[str] = set()

    async def check(lists: AsyncGenerator[frozenset[str], None]) -> None:
        found.update(await anext(lists))

    watch(server, check, text)
    return found


def urls(*hosts: str, port: int = 30000) -> frozenset[str]:
    return frozenset(f"http://{host}:{port}" for host in hosts)


def test_ready_endpoints_of_all_pages_are_nodes(server: KubernetesServer) -> None:
    server.page = 2
    server.slices = [
        make_slice("a", "10.0.0.1", "10.0.0.2"),
        make_slice("b", "10.0.0.3", conditions={"ready": False}),
        make_slice("c", "10.0.0.4", conditions={"ready": True, "terminating": True}),
        make_slice("d", "10.0.0.5", conditions={"ready": None}),
        make_slice("e", "2001:db8::1"),
        make_slice("f", "name.example.org", "0.0.0.0", "224.0.0.1"),
        make_slice("g", endpoints=None, ports=None),
    ]
    assert first_list(server) == urls("10.0.0.1", "10.0.0.2", "10.0.0.5", "[2001:db8::1]")
    (path, query), *_ = server.requests
    assert path == PATH and query["labelSelector"] == "app=pd"


@pytest.mark.parametrize(
    ("text", "path", "selector", "port"),
    [
        ("app=pd,role=decode", PATH, "app=pd,role=decode", 30000),
        ("other/app=pd", PATH.replace(NAMESPACE, "other"), "app=pd", 30000),
        ("app.kubernetes.io/name=pd", PATH, "app.kubernetes.io/name=pd", 30000),
        ("other/kubernetes.io/service-name=a", PATH.replace(NAMESPACE, "other"), None, 30000),
        ("role in (prefill, decode),!x,y!=z:8443", PATH, "role in (prefill, decode),!x,y!=z", 8443),
        ("app=pd:other", PATH, "app=pd", 9),
    ],
)
def test_the_text_names_namespace_selector_and_port(
    server: KubernetesServer, text: str, path: str, selector: str | None, port: int
) -> None:
    server.slices = [make_slice("a", "10.0.0.1")]
    assert first_list(server, text) == urls("10.0.0.1", port=port)
    asked, query = server.requests[0]
    assert asked == path and selector in (None, query["labelSelector"])


@pytest.mark.parametrize(
    "text",
    [
        *("", "=pd", "app=pd:", "app=pd:0", "app=pd:65536", "app=pd:Http", "app=pd:1:2", "a b"),
        *("ns/", "app=pd&limit=1", "app=pd\n", "app=pd#x", "../app=pd", "app=p/d", "a=b,,c=d"),
        *("role in ()", "a" * 64, f"{'a,' * 600}a", "é=1"),
    ],
)
def test_texts_that_are_no_selector_are_refused(tmp_path: Path, text: str) -> None:
    api = KubernetesApi(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    with pytest.raises(UsageError, match="--discover kubernetes:"):
        KubernetesSource(text, api)


def test_a_proxy_outside_of_a_cluster_or_without_a_key_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="does not run in a pod"):
        ProxyConfig(discover=["kubernetes:app=pd"], cluster_key=KEY).validate()
    with pytest.raises(UsageError, match="--cluster-key-file"):
        ProxyConfig(discover=["kubernetes:app=pd"]).validate()


def test_slices_without_the_port_are_left_out_and_named(
    server: KubernetesServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.slices = [make_slice("a", "10.0.0.1", port_name="grpc")]
    with pytest.raises(SourceError, match="'a' has no port named http"):
        first_list(server)
    server.slices.append(make_slice("b", "10.0.0.2"))
    server.slices.append(make_slice("c", "10.0.0.3", ports=[{"name": "", "port": 80}]))
    assert first_list(server) == urls("10.0.0.2") | urls("10.0.0.3", port=80)
    assert "'a' has no port named http" in caplog.text


def test_changes_arrive_through_watches_that_go_on_where_the_last_one_ended(
    server: KubernetesServer,
) -> None:
    server.slices = [make_slice("a", "10.0.0.1")]

    async def check(lists: AsyncGenerator[frozenset[str], None]) -> None:
        assert await anext(lists) == urls("10.0.0.1")
        server.say("ADDED", make_slice("b", "10.0.0.2"))
        assert await anext(lists) == urls("10.0.0.1", "10.0.0.2")
        server.say("DELETED", make_slice("a", "10.0.0.1"))
        assert await anext(lists) == urls("10.0.0.2")
        server.say("BOOKMARK", {"metadata": {"resourceVersion": "20"}, "endpoints": None})
        server.write(b'{"type": "MODIFIED", "object": {"metadata": {"na')
        server.end_watch()
        change = json.dumps({"type": "MODIFIED", "object": make_slice("b", "10.0.0.3")}).encode()
        for part in (b"\n", change[:40], change[40:], b"\r\n"):
            server.write(part)
        assert await anext(lists) == urls("10.0.0.3")

    watch(server, check)
    assert [query["resourceVersion"] for query in server.watches] == ["10", "20"]
    assert {query["allowWatchBookmarks"] for query in server.watches} == {"true"}
    assert len(server.requests) == 3


@pytest.mark.parametrize("how", ["event", "status"])
def test_a_version_that_expired_means_a_new_list_without_a_gap(
    server: KubernetesServer, how: str
) -> None:
    server.slices = [make_slice("a", "10.0.0.1")]

    async def check(lists: AsyncGenerator[frozenset[str], None]) -> None:
        assert await anext(lists) == urls("10.0.0.1")
        if how == "status":
            server.answers.append((410, {}, b"{}"))
        server.slices, server.version = [make_slice("b", "10.0.0.2")], "99"
        if how == "event":
            server.say(
                "ERROR", {"kind": "Status", "metadata": {}, "code": 410, "reason": "Expired"}
            )
            server.end_watch()
        assert await anext(lists) == urls("10.0.0.2")
        server.say("ADDED", make_slice("c", "10.0.0.3"))
        assert await anext(lists) == urls("10.0.0.2", "10.0.0.3")

    watch(server, check)
    assert server.watches[-1]["resourceVersion"] == "99"


def test_a_rotated_token_is_read_again(server: KubernetesServer) -> None:
    server.slices = [make_slice("a", "10.0.0.1")]

    async def check(lists: AsyncGenerator[frozenset[str], None]) -> None:
        await anext(lists)
        server.token = "second-token"
        (server.account / "token").write_text("second-token")
        server.end_watch()
        server.say("ADDED", make_slice("b", "10.0.0.2"))
        assert await anext(lists) == urls("10.0.0.1", "10.0.0.2")

    watch(server, check)
    assert server.refused == 0


def test_a_refused_token_keeps_the_nodes_until_a_new_one_is_there(server: KubernetesServer) -> None:
    server.slices = [make_slice("a", "10.0.0.1")]

    async def check() -> None:
        followed = Follower(KubernetesSource("app=pd", server.api()), lambda: None)
        task = asyncio.create_task(followed.follow_source())
        async with asyncio.timeout(30):
            while not followed.urls:
                await asyncio.sleep(0.01)
            server.token = "second-token"
            server.end_watch()
            while server.refused < 2:
                await asyncio.sleep(0.01)
            assert (
                followed.urls == urls("10.0.0.1")
                and "does not accept the token" in followed._problem
            )
            server.slices.append(make_slice("b", "10.0.0.2"))
            (server.account / "token").write_text("second-token")
            while len(followed.urls) < 2:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(check())


HUGE = b'{"metadata": {}, "items": [], "x": "' + b"x" * (3 << 20) + b'"}'
MANY = [make_slice(f"s{n}") for n in range(300)]


@pytest.mark.parametrize(
    ("status", "headers", "body", "problem"),
    [
        (302, {"Location": "https://127.0.0.1:1/"}, b"", "status 302"),
        (403, {}, b"{}", "let the service account list and watch endpointslices"),
        (400, {}, b"{}", "does not understand the selector"),
        (500, {}, b"\x1b[31m", "status 500"),
        (200, {}, HUGE, "exceeds 2097152 bytes"),
        (200, {}, b"[" * 200_000, "invalid answer"),
        (200, {}, b'{"metadata": {}, "x": ' + b"[" * 200_000, "invalid answer"),
        (200, {"Content-Encoding": "gzip"}, b"\x1f\x8b", "invalid answer"),
        (200, {}, b'{"metadata": {}, "items": 1}', "invalid answer"),
        (200, {}, json.dumps({"metadata": {}, "items": MANY}).encode(), "more than 256"),
    ],
)
def test_answers_that_make_no_sense_are_failures(
    server: KubernetesServer, status: int, headers: dict[str, str], body: bytes, problem: str
) -> None:
    server.answers = [(status, headers, body)]
    with pytest.raises(SourceError, match=problem) as raised:
        first_list(server)
    assert str(raised.value).isprintable() and len(server.requests) == 1


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (b"x" * (3 << 20), "exceeds 1048576 bytes"),
        (b"{}\n", "invalid answer"),
        (
            b'{"type": "ERROR", "object": {"code": 500, "message": "\\u001b[0m"}}\n',
            "ends the watch",
        ),
        (
            json.dumps(
                {
                    "type": "ADDED",
                    "object": make_slice("b", *(f"10.0.{n // 250}.{n % 250}" for n in range(300))),
                }
            ).encode()
            + b"\n",
            "300 addresses",
        ),
    ],
)
def test_watches_that_make_no_sense_are_failures(
    server: KubernetesServer, event: bytes, problem: str
) -> None:
    async def check(lists: AsyncGenerator[frozenset[str], None]) -> None:
        await anext(lists)
        server.write(event)
        await anext(lists)

    with pytest.raises(SourceError, match=problem) as raised:
        watch(server, check)
    assert str(raised.value).isprintable()


def test_pages_that_never_end_are_a_failure(server: KubernetesServer) -> None:
    page = {"metadata": {"resourceVersion": "1", "continue": "x"}, "items": []}
    server.answers = [(200, {}, json.dumps(page).encode())] * 3
    with pytest.raises(SourceError, match="does not end"):
        first_list(server)


def test_a_server_of_another_authority_gets_no_token(
    server: KubernetesServer, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with open(Authority(other).cert) as file:
        (server.account / "ca.crt").write_text(file.read())
    with pytest.raises(SourceError, match=r"(?i)certificate"):
        first_list(server)
    assert not server.requests and not server.refused


@pytest.mark.parametrize("name", ["token", "ca.crt", "namespace"])
@pytest.mark.parametrize("content", [None, b"", b"\xff", b"a\r\nHost: b"])
def test_a_service_account_that_is_incomplete_is_named(
    server: KubernetesServer, name: str, content: bytes | None
) -> None:
    path = server.account / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(SourceError, match=name):
        first_list(server)


def test_nodes_join_and_leave_with_their_endpoints(
    cluster: Cluster, server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_source, "KubernetesApi", server.api)
    nodes = [cluster.node("unified", cluster_key=KEY) for _ in range(2)]
    slices: list[Any] = [
        make_slice(f"s{n}", "127.0.0.1", port=node.http_port) for n, node in enumerate(nodes)
    ]
    server.slices = slices[:1]
    discover = ["kubernetes:app=pd"]
    proxy = cluster.proxy(unified=[], discover=discover, workers=1, cluster_key=KEY)
    wait_for_urls(proxy, nodes[0].url)
    server.say("ADDED", slices[1])
    wait_for_urls(proxy, *(node.url for node in nodes))
    server.say("MODIFIED", {**slices[0], "endpoints": []})
    wait_for_urls(proxy, nodes[1].url)


def test_the_api_is_found_as_in_a_pod(tmp_path: Path) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert KubernetesApi(tmp_path, environment)._base.startswith("https://[fd00::1]:6443/apis/")
    for port in ("", "x", "-1"):
        with pytest.raises(UsageError):
            KubernetesApi(tmp_path, environment | {"KUBERNETES_SERVICE_PORT": port})
