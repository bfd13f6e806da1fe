"""The administrative HTTP interface and the metrics."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import httpx
import pytest
from cluster import TokenClient, start_node, wait_until
from msgspec.structs import asdict
from prometheus_client.parser import text_string_to_metric_families
from raw_peer import proxy_of
from requests_for_tests import make_generate
from tiny import tiny_cluster, tiny_model, tiny_node

from pd.core.config import NodeConfig
from pd.core.errors import NodeFailedError, SetupError, UsageError
from pd.core.messages import Failed, NodeHeartbeat, StepOutputs
from pd.core.sampling_params import SamplingDefaults
from pd.launch import NodeServer
from pd.net.cluster_key import derive_admin_key, derive_server_info_key
from pd.net.http_server import open_listener
from pd.net.signed_requests import (
    NONCE_HEADER,
    SIGNATURE_HEADER,
    check_reply,
    sign_headers,
)
from pd.node.admin import MAX_BODY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = b"0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def server() -> Iterator[NodeServer]:
    node = tiny_node("unified")
    yield node
    node.stop()


@pytest.fixture(scope="module")
def http(server: NodeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


INFO_FIELDS = {
    "role": "unified",
    "dtype": "float32",
    "page_size": 4,
    "tp_size": 1,
    "ep_size": 1,
    "transfer_backend": "none",
    "transfer_backends": [],
    "peers": [],
    "staging": {"quarantined": 0},
    "attention_backend": "torch",
    "context_length": 1024,
    "vocab_size": 256,
    "ready": True,
    "queues": {"waiting": 0, "prefill": 0, "running": 0, "retracted": 0},
}


def test_server_info_says_what_the_contract_lists(http: httpx.Client, server: NodeServer) -> None:
    info = http.get("/server_info").json()
    assert info | INFO_FIELDS == info
    assert info["instance_id"] == server.instance_id
    assert info["endpoints"] == {"zmq": server.node.endpoint, "bootstrap": ""}
    pages = info["pages"]
    assert set(pages) == {"total", "free", "cached", "locked", "reserved", "quarantined"}
    assert pages["total"] == sum(pages.values()) - pages["total"] == 512


@pytest.mark.parametrize(
    ("role", "queues"),
    [
        ("prefill", ["bootstrap", "waiting", "running", "in_flight"]),
        ("decode", ["preallocation", "transfer", "waiting", "running", "retracted"]),
    ],
)
def test_each_role_shows_its_queues(role: str, queues: list[str]) -> None:
    node = tiny_node(role)
    try:
        info = httpx.get(f"{node.url}/server_info").json()
        assert info["queues"] == dict.fromkeys(queues, 0)
        assert info["transfer_backend"] == "tcp"
        assert bool(info["endpoints"]["bootstrap"]) == (role == "prefill")
    finally:
        node.stop()


def test_recommended_sampling_is_published_and_nodes_that_differ_do_not_meet(
    tmp_path: Path,
) -> None:
    recommending = tmp_path / "model"
    shutil.copytree(tiny_model(), recommending)
    (recommending / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    models = [recommending, recommending, tiny_model()]
    settings = {"load_format": "dummy", "page_size": 4, "generation_config": "auto"}
    roles = ["prefill", "decode", "decode"]
    nodes = [start_node(r, m, **settings) for r, m in zip(roles, models, strict=True)]
    client = TokenClient(nodes)
    prefill, alike, other = nodes
    try:
        published = [
            httpx.get(f"{node.url}/server_info").json()["sampling_defaults"] for node in nodes
        ]
        plain = asdict(SamplingDefaults())
        assert published == [plain | {"temperature": 0.6, "top_k": 20}] * 2 + [plain]
        assert len(client.generate([1, 2, 3], [prefill, alike]).tokens()) == 16
        refused = client.generate([1, 2, 3], [prefill, other])
        with pytest.raises(NodeFailedError, match=r"'temperature 0.6, top_k 20'.* has 'none'"):
            refused.tokens()
    finally:
        client.close()
        for node in nodes:
            node.stop()


def test_health_is_503_before_start_and_while_draining() -> None:
    node = tiny_node("unified")
    try:
        assert httpx.get(f"{node.url}/health").status_code == 200
        assert httpx.post(f"{node.url}/drain").json() == {"draining": True}
        assert httpx.get(f"{node.url}/health").status_code == 503
        assert httpx.get(f"{node.url}/server_info").json()["ready"] is False
    finally:
        node.stop()


def test_everything_is_503_while_the_model_loads() -> None:
    config = tiny_node("unified")
    config.stop()
    loading = NodeServer(config.config)
    loading._http.start()
    try:
        wait_until(lambda: loading._http._servers[0].started, 5)
        answer = httpx.get(f"{loading.url}/server_info")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    finally:
        loading.stop()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "invalid body"),
        (b"[]", "invalid body"),
        (b'{"rid": 7}', "invalid body"),
        (b'{"rid": "a", "extra": 1}', "invalid body"),
        (b'{"rid": "\xff"}', "invalid body"),
        (b"{}", "give either"),
        (b'{"rid": "a", "abort_all": true}', "give either"),
        (b" " * (MAX_BODY_BYTES + 1), "too large"),
    ],
)
def test_a_bad_abort_is_a_400_in_openais_shape(http: httpx.Client, body: bytes, text: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post("/abort_request", content=body, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert text in error["message"] and error["type"] == "invalid_request_error"


def test_an_unknown_rid_is_a_404_and_aborting_nothing_is_fine(http: httpx.Client) -> None:
    answer = http.post("/abort_request", json={"rid": "nobody"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "rid")
    assert http.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 0}


@pytest.mark.parametrize("path", ["/flush_cache", "/drain", "/undrain", "/abort_request"])
def test_what_changes_something_is_not_a_get(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 405
    assert http.get("/nothing").status_code == 404


def test_abort_request_ends_a_running_request(http: httpx.Client, server: NodeServer) -> None:
    with proxy_of(server) as proxy:
        message = make_generate(
            range(9), to=server.instance_id, sender=proxy.name, params={"max_tokens": 1000}
        )
        proxy.send(message)
        proxy.receive(StepOutputs)
        assert http.post("/abort_request", json={"rid": "rid"}).json() == {"aborted": 1}
        assert proxy.receive(Failed).error.kind == "aborted"


def test_flush_cache_frees_what_is_unused(http: httpx.Client, server: NodeServer) -> None:
    with proxy_of(server) as proxy:
        proxy.send(make_generate(range(9), to=server.instance_id, sender=proxy.name))
        while not proxy.receive(StepOutputs).outputs[0].finish:
            pass
    wait_until(lambda: server.node.idle, 5)
    cached = http.get("/server_info").json()["pages"]["cached"]
    assert cached >= 2
    assert http.post("/flush_cache").json() == {"freed_pages": cached}
    pages = http.get("/server_info").json()["pages"]
    assert pages["free"] == pages["total"]


PATHS = ("/flush_cache", "/abort_request", "/drain", "/undrain")


def test_with_a_cluster_key_changes_must_be_signed_for_this_instance() -> None:
    node = tiny_node("unified", cluster_key=KEY)
    key = derive_admin_key(KEY)
    assert key is not None
    try:
        for path in PATHS:
            for headers in (
                {},
                {"Authorization": f"Bearer {key.hex()}"},
                {"Authorization": b"\xff"},
            ):
                answer = httpx.post(node.url + path, headers=headers)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["type"] == "authentication_error"
        headers, nonce = sign_headers(key, "POST", "/flush_cache", node.instance_id)
        answer = httpx.post(f"{node.url}/flush_cache", headers=headers)
        assert answer.status_code == 200
        proof = answer.headers[SIGNATURE_HEADER]
        assert check_reply(key, nonce, 200, answer.content, proof)
        # A refusal is proven, too.
        body = b'{"rid": "nobody"}'
        headers, nonce = sign_headers(key, "POST", "/abort_request", node.instance_id, body)
        answer = httpx.post(f"{node.url}/abort_request", headers=headers, content=body)
        assert answer.status_code == 404
        assert check_reply(key, nonce, 404, answer.content, answer.headers[SIGNATURE_HEADER])
        for path in ("/health", "/metrics", "/server_info"):
            assert httpx.get(node.url + path).status_code == 200
    finally:
        node.stop()


def test_with_a_cluster_key_a_node_proves_what_it_says_about_itself() -> None:
    node = tiny_node("unified", cluster_key=KEY)
    key = derive_server_info_key(KEY)
    assert key is not None
    try:
        url = f"{node.url}/server_info"
        answer = httpx.get(url, headers={NONCE_HEADER: "n"})
        assert check_reply(key, "n", 200, answer.content, answer.headers[SIGNATURE_HEADER])
        for nonce in ("", "n" * 65):
            assert SIGNATURE_HEADER not in httpx.get(url, headers={NONCE_HEADER: nonce}).headers
    finally:
        node.stop()


def test_undrain_takes_requests_again_unless_the_process_is_ending() -> None:
    node = tiny_node("unified")
    try:
        assert httpx.post(f"{node.url}/drain").json() == {"draining": True}
        assert httpx.post(f"{node.url}/undrain").json() == {"draining": False}
        assert httpx.get(f"{node.url}/health").status_code == 200
        with proxy_of(node) as proxy:
            proxy.send(make_generate(range(9), to=node.instance_id, sender=proxy.name))
            assert proxy.receive(StepOutputs).outputs
        node.node.drain(to_end=True)
        answer = httpx.post(f"{node.url}/undrain")
        assert answer.status_code == 503
        assert "about to exit" in answer.json()["error"]["message"]
        assert httpx.get(f"{node.url}/health").status_code == 503
    finally:
        node.stop()


def test_a_node_that_is_to_be_emptied_tells_its_proxies_at_once() -> None:
    node = tiny_node("unified")
    try:
        answer = httpx.post(f"{node.url}/drain?migrate=2")
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "migrate must be 0 or 1, not '2'"
        with proxy_of(node) as proxy:
            proxy.beat()
            assert not proxy.receive(NodeHeartbeat).leaving
            assert httpx.post(f"{node.url}/drain?migrate=1").json() == {"draining": True}
            told = proxy.receive(NodeHeartbeat)
            assert (told.ready, told.leaving) == (False, True)
            httpx.post(f"{node.url}/undrain")
            proxy.beat()
            told = proxy.receive(NodeHeartbeat)
            assert (told.ready, told.leaving) == (True, False)
    finally:
        node.stop()


def test_a_node_others_can_reach_needs_a_cluster_key() -> None:
    settings = tiny_node("unified")
    settings.stop()
    with pytest.raises(UsageError, match="--cluster-key-file"):
        NodeServer(NodeConfig(role="unified", model=settings.config.model, host="0.0.0.0"))


def test_a_port_in_use_is_named() -> None:
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"127.0.0.1:{port}.*choose another --port"):
            open_listener("127.0.0.1", port)


def metrics_of(url: str) -> dict[str, float]:
    """Samples by name and the values of their labels."""
    text = httpx.get(f"{url}/metrics").text
    return {
        " ".join([sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "le")]): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("le", "+Inf") == "+Inf"
    }


def test_metrics_count_requests_tokens_bytes_and_stages() -> None:
    with tiny_cluster() as cluster:
        prefill, decode = (server.url for server in cluster.pair)
        cluster.client.generate(range(10), cluster.pair, max_tokens=6).tokens()
        cluster.wait_idle()
        first, second = metrics_of(prefill), metrics_of(decode)
        assert first["pd_requests_total"] == second["pd_requests_total"] == 1
        assert (first["pd_output_tokens_total"], second["pd_output_tokens_total"]) == (1, 6)
        assert first["pd_transferred_bytes_total"] == second["pd_transferred_bytes_total"] > 0
        for stage in ("queue", "prefill", "transfer"):
            assert first[f"pd_stage_seconds_count {stage}"] == 1, stage
        for stage in ("bootstrap", "transfer", "decode"):
            assert second[f"pd_stage_seconds_count {stage}"] == 1, stage
        assert second["pd_pages free"] + second["pd_pages cached"] == 512
        assert second["pd_queue_length running"] == 0
        assert first["pd_radix_tokens looked_up"] == 10
        assert first["pd_run_delay_seconds_total"] >= 0.0
        httpx.post(f"{decode}/abort_request", json={"abort_all": True})
        endless = cluster.client.generate(range(10), cluster.pair, max_tokens=900)
        wait_until(lambda: len(endless.choices[0].tokens) > 2, 5)
        cluster.client.abort(endless)
        cluster.wait_idle()
        assert metrics_of(decode)["pd_requests_failed_total aborted"] == 1
