"""What nodes choose, show and count of their transfers."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cluster import random_prompts
from hand_off_helpers import scripted_cluster
from prometheus_client.parser import text_string_to_metric_families
from tiny import TOKEN_BYTES, tiny_cluster, tiny_node

from pd.transfer import registry as factory
from pd.transfer.tcp.manager import TcpManager

if TYPE_CHECKING:
    from pathlib import Path

    from pd.launch import NodeServer

PROMPT = next(random_prompts(31, [40]))


def shown(server: NodeServer) -> tuple[Any, ...]:
    info = httpx.get(f"{server.url}/server_info").json()
    return info["transfer_backend"], info["transfer_backends"], info["peers"]


def test_the_backend_of_each_pair_is_chosen_logged_once_and_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(factory, "AUTO", ("fake", "tcp"))
    with tiny_cluster(decode=2, transfer_backend="auto") as cluster:
        prefill, (one, two) = cluster.prefill[0], cluster.decode
        assert shown(prefill) == ("fake", ["fake", "tcp"], []), "nobody shook hands yet"
        with caplog.at_level(logging.INFO):
            for decode in (one, two, one):
                cluster.client.generate(PROMPT, (prefill, decode)).tokens()
        peers = {"transfer_backend": "fake"}
        backend, _, listed = shown(prefill)
        assert backend == "fake"
        assert listed == [
            {"instance_id": decode.instance_id, "role": "decode"} | peers for decode in (one, two)
        ]
        for decode in (one, two):
            prefills = [{"instance_id": prefill.instance_id, "role": "prefill"} | peers]
            assert shown(decode) == ("fake", ["fake", "tcp"], prefills)
            said = f"KV for decode node {decode.instance_id} travels by fake"
            assert caplog.text.count(said) == 1
        assert caplog.text.count(f"KV of prefill node {prefill.instance_id} travels by fake") == 2
        cluster.wait_idle()


def test_a_pair_of_auto_and_a_fixed_backend_uses_the_fixed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(factory, "AUTO", ("fake", "tcp"))
    with tiny_cluster(prefill_settings={"transfer_backend": "auto"}) as cluster:
        assert len(cluster.client.generate(PROMPT, cluster.pair).tokens()) == 16
        assert [shown(server)[0] for server in cluster.pair] == ["tcp", "tcp"]
        cluster.wait_idle()


def metrics(server: NodeServer) -> dict[str, float]:
    """Samples by name, of the backend ``tcp`` where they have one."""
    text = httpx.get(f"{server.url}/metrics").text
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {
        sample.name: sample.value
        for sample in samples
        if sample.labels.get("backend") == "tcp" and "le" not in sample.labels
    }


def test_both_nodes_count_bytes_and_times_of_each_transfer() -> None:
    with tiny_cluster() as cluster:
        assert metrics(cluster.prefill[0]) == metrics(cluster.decode[0]) == {}
        sizes = (40, 50, 60)
        for prompt in random_prompts(32, sizes):
            cluster.client.generate(prompt, cluster.pair).tokens()
        cluster.wait_idle()
        found = [metrics(server) for server in cluster.pair]
        for node in found:
            assert node["pd_transfer_bytes_total"] == sum(sizes) * TOKEN_BYTES
            for name in (
                "pd_transfer_wire_seconds",
                "pd_transfer_exposed_seconds",
                "pd_transfer_reservation_wait_seconds",
                "pd_transfer_gigabytes_per_second",
            ):
                assert node[f"{name}_count"] == 3, name
                assert 0 <= node[f"{name}_sum"] < 10, name
            rate = TOKEN_BYTES * min(sizes) / node["pd_transfer_wire_seconds_sum"] / 1e9
            assert node["pd_transfer_gigabytes_per_second_sum"] > rate
        prefill, decode = found
        assert prefill["pd_transfer_wire_seconds_sum"] == decode["pd_transfer_wire_seconds_sum"] > 0
        exposed = "pd_transfer_exposed_seconds_sum"
        assert decode[exposed] > prefill[exposed] > 0, "D adds what it took to accept the commit"


def test_a_slow_wire_shows_as_exposed_time_and_a_slow_reservation_as_wait(tmp_path: Path) -> None:
    slow = {"do": "delay_write", "seconds": 0.3}, {"do": "delay_reservation", "seconds": 0.6}
    with scripted_cluster(tmp_path, *slow) as cluster:
        cluster.client.generate(PROMPT, cluster.pair).tokens()
        cluster.wait_idle()
        for server in cluster.pair:
            text = httpx.get(f"{server.url}/metrics").text
            found = {
                sample.name: sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.labels == {"backend": "fake"}
            }
            assert found["pd_transfer_wire_seconds_sum"] >= 0.3
            assert found["pd_transfer_exposed_seconds_sum"] >= 0.3
            if server is cluster.prefill[0]:
                assert found["pd_transfer_reservation_wait_seconds_sum"] >= 0.15


def test_a_prompt_that_the_decode_node_holds_already_moves_no_bytes() -> None:
    """A prompt of whole pages that was answered before is in D's cache, as a page's multiple."""
    with tiny_cluster() as cluster:
        for _ in range(2):
            cluster.client.generate(PROMPT, cluster.pair).tokens()
            cluster.wait_idle()
        for server in cluster.pair:
            found = metrics(server)
            assert found["pd_transfer_bytes_total"] == len(PROMPT) * TOKEN_BYTES
            assert found["pd_transfer_reservation_wait_seconds_count"] == 2
            assert found["pd_transfer_wire_seconds_count"] == 1


def test_auto_uses_nixl_where_it_is_installed() -> None:
    if not os.environ.get("CI"):  # there it must be
        pytest.importorskip("nixl", reason="the library nixl is not installed")
    with tiny_cluster() as cluster:
        expected = cluster.client.generate(PROMPT, cluster.pair).tokens()
    with tiny_cluster(transfer_backend="auto", kv_digest=True) as cluster:
        assert cluster.client.generate(PROMPT, cluster.pair).tokens() == expected
        for server in cluster.pair:
            assert shown(server)[:2] == ("nixl", ["nixl", "tcp"])
        cluster.wait_idle()


def test_staging_slots_in_quarantine_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "AUTO", ("fake", "tcp"))
    monkeypatch.setattr(TcpManager, "quarantined_buffers", 3)
    server = tiny_node("decode", transfer_backend="auto")
    try:
        assert httpx.get(f"{server.url}/server_info").json()["staging"] == {"quarantined": 3}
        assert "\npd_transfer_quarantined_slots 3.0\n" in httpx.get(f"{server.url}/metrics").text
    finally:
        server.stop()
