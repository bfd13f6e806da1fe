"""Nodes die, come back, join, leave, and are shared by several proxies."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fake_node import FakeNode, wait_until
from proxy_cluster import read_events, wait_for_agreement, wait_for_all

from pd.core.messages import ErrorInfo, Failed, Finish, NodeHeartbeat
from pd.proxy.nodes.channel import Sockets
from pd.proxy.nodes.node_http import NodeHttp

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from proxy_cluster import Cluster

    from pd.proxy.nodes.channel import NodeChannel
    from pd.proxy.nodes.node_handle import ServerInfo
    from pd.proxy.server import ProxyThread

BODY: dict[str, Any] = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 20}}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules on a shorter clock."""
    monkeypatch.setattr("pd.proxy.nodes.pool.POLL_INTERVAL", 0.1)
    monkeypatch.setattr("pd.proxy.nodes.pool.HEARTBEAT_INTERVAL", 0.1)
    monkeypatch.setattr("pd.proxy.nodes.pool.SILENCE_SECONDS", 0.3)
    monkeypatch.setattr("pd.proxy.nodes.pool.LEASE_SECONDS", 1.2)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def post(url: str, **body: Any) -> tuple[int, Any]:
    """Status and body, or the list of events."""
    with (
        httpx.Client(timeout=20) as client,
        client.stream("POST", url + "/generate", json=BODY | body) as response,
    ):
        if body.get("stream") and response.status_code == 200:
            return 200, read_events(response)
        response.read()
        return response.status_code, response.json()


def ready(proxy: ProxyThread) -> bool:
    wait_for_agreement(proxy)
    return httpx.get(proxy.url + "/readiness").status_code == 200


def workers(proxy: ProxyThread) -> list[dict[str, Any]]:
    wait_for_agreement(proxy)
    listed: list[dict[str, Any]] = httpx.get(proxy.url + "/workers").json()["workers"]
    return listed


def failed(result: Future[tuple[int, Any]], message: str) -> None:
    status, body = result.result(20)
    error = body[-1]["error"] if isinstance(body, list) else body["error"]
    assert (status, error["code"]) == (200 if isinstance(body, list) else 502, "node_failed")
    assert message in error["message"]


def works_again(proxy: ProxyThread, *nodes: FakeNode) -> None:
    wait_until(lambda: ready(proxy))
    for node in nodes:
        node.auto = True
    assert post(proxy.url)[0] == 200


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_node_fails_its_requests_and_is_used_again_after_its_restart(
    cluster: Cluster, background: ThreadPoolExecutor, victim: str, stream: bool
) -> None:
    prefill, decode = cluster.pair(auto=False)
    proxy = cluster.proxy()
    node, other = (prefill, decode) if victim == "prefill" else (decode, prefill)
    result = background.submit(post, proxy.url, stream=stream)
    request = other.wait_generate()
    if stream and victim == "decode":
        prefill.say(prefill.wait_generate(), [40])
    node.wait_generate()
    node.kill()
    failed(result, f"{victim} node {node.instance_id}")
    other.wait_abort(request.room)
    wait_until(lambda: not ready(proxy))
    assert post(proxy.url)[0] == 503
    node.auto = other.auto = True
    node.restart()
    wait_until(lambda: ready(proxy))
    assert post(proxy.url)[0] == 200
    assert other.generates[-1].peer == node.instance_id


def test_a_restart_that_nobody_noticed_fails_the_old_instances_requests(
    cluster: Cluster, background: ThreadPoolExecutor
) -> None:
    prefill, _ = cluster.pair(auto=False)
    proxy = cluster.proxy()
    result = background.submit(post, proxy.url)
    prefill.wait_generate()
    prefill.restart()
    failed(result, "was lost")


def test_a_node_that_falls_silent_is_lost_though_its_port_answers(
    cluster: Cluster, background: ThreadPoolExecutor
) -> None:
    _, decode = cluster.pair(auto=False)
    proxy = cluster.proxy()
    result = background.submit(post, proxy.url)
    decode.wait_generate()
    decode.silent = True
    failed(result, "no heartbeat")
    assert not ready(proxy)
    decode.silent = False
    wait_until(lambda: ready(proxy))


def test_a_nodes_message_that_is_lost_fails_its_requests_at_once(
    cluster: Cluster, background: ThreadPoolExecutor
) -> None:
    prefill, decode = cluster.pair(auto=False)
    proxy = cluster.proxy()
    result = background.submit(post, proxy.url)
    prefill.say(prefill.wait_generate(), [40])
    request = decode.wait_generate()
    decode.say(request, [40, 41])
    lost = Failed(to="", sender="", room=request.room, error=ErrorInfo("node_failed", "lost"))
    decode.number(request.sender, lost)
    failed(result, "messages from it were lost")
    works_again(proxy, prefill, decode)


def test_requests_that_a_node_gave_up_unheard_fail(
    cluster: Cluster, background: ThreadPoolExecutor
) -> None:
    """It lacked a message of this proxy, or the proxy stood still for a lease."""
    prefill, decode = cluster.pair(auto=False)
    proxy = cluster.proxy()
    result = background.submit(post, proxy.url)
    prefill.wait_generate()
    decode.wait_generate()
    decode.losses += 1
    before = dict(decode.heartbeats)
    failed(result, "it gave up its requests")
    # Until it knows of the loss, another process sends what it will fail.
    wait_until(lambda: all(decode.heartbeats[name] > count + 2 for name, count in before.items()))
    works_again(proxy, prefill, decode)


def test_the_prefill_nodes_death_does_not_matter_once_decoding_runs(
    cluster: Cluster, background: ThreadPoolExecutor
) -> None:
    prefill, decode = cluster.pair(auto=False)
    proxy = cluster.proxy()
    result = background.submit(post, proxy.url)
    prefill.say(prefill.wait_generate(), [40])
    decode.say(decode.wait_generate(), [40, 41])
    wait_until(lambda: workers(proxy)[0]["running"] == 0)
    prefill.kill()
    wait_until(lambda: not workers(proxy)[0]["ready"])
    decode.say(decode.wait_generate(), [42], position=2, finish=Finish("length"))
    status, body = result.result(20)
    assert (status, body["output_ids"]) == (200, [40, 41, 42])


@pytest.mark.one_process("counts on the turns that one process gives to nodes")
def test_one_nodes_death_leaves_other_pairs_alone(
    cluster: Cluster, background: ThreadPoolExecutor
) -> None:
    cluster.pair(auto=False)
    cluster.pair(auto=False)
    proxy = cluster.proxy(policy="round_robin")
    wait_for_all(cluster.client(proxy))
    results = [background.submit(post, proxy.url) for _ in range(2)]
    for node in cluster.prefill + cluster.decode:
        node.wait_generate()
    victim, survivor = cluster.prefill
    room = survivor.generates[0].room
    decode = next(d for d in cluster.decode if d.generates[0].room == room)
    victim.kill()
    survivor.say(survivor.generates[0], [40])
    decode.say(decode.generates[0], [40, 41], finish=Finish("length"))
    assert sorted(result.result(20)[0] for result in results) == [200, 502]
    assert ready(proxy)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_dead_node_gets_no_new_requests(
    cluster: Cluster, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its heartbeats are not missed yet: its connection is gone."""
    monkeypatch.setattr("pd.proxy.nodes.pool.SILENCE_SECONDS", 60.0)
    monkeypatch.setattr("pd.proxy.nodes.pool.LEASE_SECONDS", 60.0)
    cluster.pair()
    cluster.pair()
    proxy = cluster.proxy(policy="round_robin")
    assert [post(proxy.url)[0] for _ in range(8)] == [200] * 8
    victim = (cluster.prefill if role == "prefill" else cluster.decode)[0]
    victim.kill()
    wait_until(lambda: not all(worker["ready"] for worker in workers(proxy)))
    assert [post(proxy.url)[0] for _ in range(8)] == [200] * 8
    victim.start()
    wait_until(lambda: all(worker["ready"] for worker in workers(proxy)))
    assert [post(proxy.url)[0] for _ in range(8)] == [200] * 8


def test_nodes_may_start_after_the_proxy(cluster: Cluster) -> None:
    prefill, decode = FakeNode("prefill"), FakeNode("decode")
    for node in (prefill, decode):
        node.kill()
    proxy = cluster.proxy(wait_ready=0, prefill=[prefill.url], decode=[decode.url])
    assert not ready(proxy)
    assert [w["instance_id"] for w in workers(proxy)] == [None, None]
    for node in (prefill, decode):
        node.start()
    try:
        wait_until(lambda: ready(proxy))
        assert post(proxy.url)[0] == 200
    finally:
        for node in (prefill, decode):
            node.kill()


def test_a_node_that_drains_gets_nothing_new(cluster: Cluster) -> None:
    cluster.pair()
    spare = cluster.node("decode")
    proxy = cluster.proxy()
    spare.ready = False
    wait_until(lambda: not workers(proxy)[2]["ready"])
    for _ in range(5):
        assert post(proxy.url)[0] == 200
    assert spare.generates == []


def test_a_worker_of_another_role_is_not_used(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    proxy = cluster.proxy(wait_ready=0, decode=[prefill.url], prefill=[])
    wait_until(lambda: "is a prefill node" in (workers(proxy)[0]["problem"] or ""))
    assert not ready(proxy)


def test_workers_join_and_leave_at_run_time(
    cluster: Cluster, background: ThreadPoolExecutor
) -> None:
    prefill, decode = cluster.pair(auto=False)
    proxy = cluster.proxy(wait_ready=0, prefill=[], decode=[])
    client = cluster.client(proxy)
    for node in (prefill, decode):
        added = client.post("/workers", json={"role": node.role, "url": node.url})
        assert added.status_code == 200
        assert added.json()["role"] == node.role
    # Adding again changes nothing.
    client.post("/workers", json={"role": "prefill", "url": prefill.url + "/"})
    wait_until(lambda: ready(proxy))
    assert [w["url"] for w in workers(proxy)] == [prefill.url, decode.url]

    result = background.submit(post, proxy.url)
    first, second = prefill.wait_generate(), decode.wait_generate()
    assert client.delete(f"/workers/{decode.instance_id}").json()["draining"]
    assert post(proxy.url)[0] == 503
    prefill.say(first, [40])
    decode.say(second, [40, 41], finish=Finish("length"))
    assert result.result(20)[0] == 200
    wait_until(lambda: [w["url"] for w in workers(proxy)] == [prefill.url])
    assert client.delete(f"/workers/{decode.instance_id}").status_code == 404

    client.post("/workers", json={"role": "decode", "url": decode.url})
    wait_until(lambda: ready(proxy))
    # A worker that was never reached goes by its address.
    client.post("/workers", json={"role": "decode", "url": "http://127.0.0.1:9"})
    assert client.delete("/workers/127.0.0.1:9").status_code == 200
    assert len(workers(proxy)) == 2


@pytest.mark.one_process("looks at the channels and tasks of a proxy")
@pytest.mark.parametrize("is_back", [True, False])
def test_a_node_that_ends_while_it_drains_leaves_no_channel_and_no_task_behind(
    cluster: Cluster,
    background: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    is_back: bool,
) -> None:
    """It is forgotten as its last stream is lost, in the midst of the poll by which that shows:
    ``is_back`` says whether that finds the next instance or a closed port."""
    opened: list[NodeChannel] = []
    open_channel, ask = Sockets.open_channel, NodeHttp.fetch_server_info
    hold, held = threading.Event(), threading.Event()

    def open_noted(sockets: Sockets, *args: Any) -> NodeChannel:
        opened.append(open_channel(sockets, *args))
        return opened[-1]

    async def ask_when_let(http: NodeHttp, url: str) -> ServerInfo:
        while hold.is_set():
            held.set()
            await asyncio.sleep(0.005)
        return await ask(http, url)

    def open_now() -> int:
        return sum(not channel._socket.closed for channel in opened)

    monkeypatch.setattr(Sockets, "open_channel", open_noted)
    monkeypatch.setattr(NodeHttp, "fetch_server_info", ask_when_let)
    node = cluster.node("unified", auto=False)
    proxy = cluster.proxy()
    client = cluster.client(proxy)
    served: Any = proxy.proxy
    (watcher,) = served._pool._watchers.values()
    result = background.submit(post, proxy.url)
    node.wait_generate()
    assert client.delete(f"/workers/{node.instance_id}").json()["draining"]
    hold.set()
    assert held.wait(10)
    node.kill()
    if is_back:
        node.start()
    hold.clear()
    failed(result, "was lost")
    wait_until(watcher.done)
    assert watcher.cancelled() or watcher.exception() is None
    assert (workers(proxy), open_now()) == ([], 0)

    if not is_back:
        node.start()
    client.post("/workers", json={"role": "unified", "url": node.url})
    works_again(proxy, node)
    assert open_now() == 1


@pytest.mark.one_process("counts a proxy as one sender of messages")
def test_several_proxies_share_the_nodes(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    proxies = [cluster.proxy() for _ in range(3)]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda i: post(proxies[i % 3].url), range(30)))
    assert all(status == 200 and len(body["output_ids"]) == 20 for status, body in results)
    senders = {g.sender for g in prefill.generates}
    assert len(senders) == 3
    assert len({g.room for g in decode.generates}) == 30
    proxies[0].run(proxies[0].proxy.stop())  # type: ignore[union-attr]
    assert post(proxies[1].url)[0] == 200


def test_a_restarted_proxy_is_a_new_instance(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(post, cluster.proxy().url).result(20)[0] == 200
    assert len({g.sender for g in prefill.generates}) == 2


def test_messages_of_another_instance_or_proxy_are_dropped(
    cluster: Cluster, background: ThreadPoolExecutor
) -> None:
    prefill, decode = cluster.pair(auto=False)
    proxy = cluster.proxy()
    result = background.submit(post, proxy.url)
    first, second = prefill.wait_generate(), decode.wait_generate()
    error = ErrorInfo(kind="internal", message="forged")
    for to, sender in (("", "another instance"), ("another proxy", decode.instance_id)):
        decode.send(second.sender, Failed(to=to, sender=sender, room=second.room, error=error))
    prefill.say(first, [40])
    decode.say(second, [40, 41], finish=Finish("length"))
    assert result.result(20)[0] == 200


@pytest.mark.one_process("sends to the instance id that one process has")
def test_garbage_on_the_message_socket_does_no_harm(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    proxy = cluster.proxy()
    assert proxy.proxy is not None
    name = proxy.proxy.instance_id
    for frame in (b"", b"\xff" * 100, b"{}", b"\x81\xa4type\xa5Alien"):
        prefill.send_raw(name, frame)
    prefill.send("", NodeHeartbeat(to="", sender="", ready=True, queued_tokens=0, running=0))
    assert post(proxy.url)[0] == 200


def test_vllms_name_of_flushing_does_the_same_and_takes_no_get(cluster: Cluster) -> None:
    nodes = cluster.pair()
    client = cluster.client()
    assert client.post("/reset_prefix_cache").json()["flushed"] == [n.instance_id for n in nodes]
    assert all(node.http_requests[-1][0] == "/flush_cache" for node in nodes)
    for path in ("/reset_prefix_cache", "/flush_cache"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")


def test_with_a_cluster_key_nodes_are_administered_by_signed_requests(cluster: Cluster) -> None:
    key = b"0123456789abcdef0123456789abcdef"
    nodes = cluster.pair(cluster_key=key)
    client = cluster.client(cluster_key=key)
    assert client.post("/generate", json=BODY).status_code == 200
    answer = client.post("/flush_cache").json()
    assert answer == {"flushed": [node.instance_id for node in nodes], "skipped": []}
    for node in nodes:
        ((path, headers),) = node.http_requests
        assert path == "/flush_cache"
        assert headers["Authorization"].startswith("PD-HMAC ")


@pytest.mark.parametrize("key", [None, b"another key that is long enough"])
def test_without_the_cluster_key_nodes_do_not_listen(cluster: Cluster, key: bytes | None) -> None:
    cluster.pair(cluster_key=b"0123456789abcdef0123456789abcdef")
    proxy = cluster.proxy(wait_ready=0.5, cluster_key=key)
    assert not ready(proxy)
    wait_until(lambda: all("--cluster-key-file" in w["problem"] for w in workers(proxy)))
    assert "--cluster-key-file" in httpx.get(proxy.url + "/readiness").text


def test_readiness_names_the_sampling_defaults_that_differ(cluster: Cluster) -> None:
    cluster.node("prefill", sampling_defaults={"temperature": 0.6, "top_k": 20})
    cluster.node("decode")
    proxy = cluster.proxy(wait_ready=0.5)
    wait_until(lambda: all(worker["ready"] for worker in workers(proxy)))
    message = httpx.get(proxy.url + "/readiness").json()["error"]["message"]
    assert "prefill has recommended sampling" in message
    assert "(--generation-config) 'temperature 0.6, top_k 20', decode has 'none'" in message


@pytest.mark.parametrize(
    ("field", "values", "what"),
    [
        ("dtype", ("float32", "bfloat16"), "dtype"),
        ("kv_digest", (True, False), "--kv-digest"),
        ("drafter", ("eagle3 of a head", ""), "--speculative-algorithm"),
        ("model_id", ("a1", "b2"), "weights or a shape of the model with the fingerprint"),
    ],
)
def test_readiness_says_why_nodes_do_not_fit_together(
    cluster: Cluster, field: str, values: tuple[Any, Any], what: str
) -> None:
    cluster.node("prefill", **{field: values[0]})
    cluster.node("decode", **{field: values[1]})
    proxy = cluster.proxy(wait_ready=0.5)
    wait_until(lambda: all(worker["ready"] for worker in workers(proxy)))
    response = httpx.get(proxy.url + "/readiness")
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    there = values[1] if values[1] != "" else "no draft head"
    assert f"prefill has {what} {values[0]!r}, decode has {there!r}" in message


def test_flushing_names_the_node_that_failed(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    client = cluster.client()
    assert client.post("/flush_cache").status_code == 200
    decode.kill()
    response = client.post("/flush_cache")
    assert response.status_code == 502
    message = response.json()["error"]["message"]
    assert decode.url in message
    assert prefill.url not in message


def test_ready_waits_for_links_between_nodes_but_not_for_ever(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    decode.linked = []
    begun = time.monotonic()
    proxy = cluster.proxy(wait_ready=0.5)
    assert time.monotonic() - begun >= 0.5
    wait_until(lambda: list(decode.meet) == [prefill.instance_id])
    # It serves all the same: the first request makes the link.
    with httpx.Client(base_url=proxy.url) as client:
        wait_until(lambda: client.get("/readiness").status_code == 200)
    decode.linked = [prefill.instance_id]
    cluster.proxy(wait_ready=60.0)
    assert time.monotonic() - begun < 60.0
