"""Nodes that a proxy finds by itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from fake_node import wait_until
from proxy_cluster import nodes_known, wait_for_all

from pd.core.errors import UsageError
from pd.proxy.nodes.discovery import discovery, follower
from pd.proxy.nodes.discovery.flag import parse_source, parse_sources

if TYPE_CHECKING:
    from pathlib import Path

    from proxy_cluster import Cluster

    from pd.proxy.server import ProxyThread

GENERATE = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}


def write_list(path: Path, *urls: str) -> None:
    new = path.with_suffix(".new")
    new.write_text("# nodes\n\n" + "".join(f"{url}\n" for url in urls))
    os.replace(new, path)


def urls_known(proxy: ProxyThread) -> list[set[str]]:
    return [{node["url"] for node in nodes} for nodes in nodes_known(proxy)]


def wait_for_urls(proxy: ProxyThread, *urls: str) -> None:
    wait_until(lambda: all(known == set(urls) for known in urls_known(proxy)))


def wait_for_roles(proxy: ProxyThread, roles: dict[str, str]) -> None:
    def known() -> list[dict[str, str]]:
        return [{node["url"]: node["role"] for node in nodes} for nodes in nodes_known(proxy)]

    wait_until(lambda: all(found == roles for found in known()), timeout=30)


def test_nodes_of_a_file_join_and_leave_as_it_changes(cluster: Cluster, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    prefill, decode = cluster.pair()
    unified = cluster.node("unified")
    write_list(nodes, prefill.url, decode.url)
    proxy = cluster.proxy(prefill=[], decode=[], unified=[], discover=[f"file:{nodes}"])
    wait_for_urls(proxy, prefill.url, decode.url)
    client = cluster.client(proxy)
    wait_for_all(client)
    assert client.post("/generate", json=GENERATE).status_code == 200
    write_list(nodes, unified.url)
    wait_for_urls(proxy, unified.url)
    wait_for_all(client)
    assert client.post("/generate", json=GENERATE).status_code == 200


@pytest.mark.one_process("looks into the process")
def test_nodes_stay_for_a_while_when_their_list_is_empty_or_gone(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "RETRY_SECONDS", 0.05)
    nodes = tmp_path / "nodes"
    unified = cluster.node("unified")
    write_list(nodes, unified.url)
    proxy = cluster.proxy(unified=[], discover=[f"file:{nodes}"], workers=1)
    wait_for_urls(proxy, unified.url)
    followed = proxy.proxy.__dict__["_discovery"]._followers[0]
    write_list(nodes)
    wait_until(lambda: followed._missing_since is not None)
    nodes.unlink()
    wait_until(lambda: "No such file" in followed._problem)
    assert urls_known(proxy) == [{unified.url}]
    followed.hold_seconds = 0.0
    wait_for_urls(proxy)
    write_list(nodes, unified.url)
    wait_for_urls(proxy, unified.url)


@pytest.mark.one_process("looks into the process")
def test_addresses_beyond_loopback_need_a_cluster_key(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = tmp_path / "nodes"
    unified = cluster.node("unified")
    write_list(nodes, "http://198.18.0.1:9", unified.url)
    proxy = cluster.proxy(unified=[], discover=[f"file:{nodes}"], workers=1)
    wait_for_urls(proxy, unified.url)
    assert "198.18.0.1:9 is ignored" in caplog.text and "--cluster-key-file" in caplog.text


@pytest.mark.parametrize("text", ["", "file:", "url:x", "/etc/nodes", "dns:"])
def test_unknown_sources_are_refused_with_the_forms_that_exist(text: str) -> None:
    with pytest.raises(UsageError, match="file:PATH"):
        parse_source(text)


def test_a_node_that_comes_back_with_another_role_is_used_in_that_role(
    cluster: Cluster, tmp_path: Path
) -> None:
    nodes = tmp_path / "nodes"
    prefill = cluster.node("prefill")
    write_list(nodes, prefill.url)
    proxy = cluster.proxy(prefill=[], discover=[f"file:{nodes}"])
    wait_for_roles(proxy, {prefill.url: "prefill"})
    prefill.role = "unified"
    prefill.restart()
    wait_for_roles(proxy, {prefill.url: "unified"})
    wait_for_all(cluster.client(proxy))


@pytest.mark.one_process("looks into the process")
def test_several_sources_each_keep_their_own_nodes(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "RETRY_SECONDS", 0.05)
    first, second = tmp_path / "first", tmp_path / "second"
    one, two, both = (cluster.node("unified") for _ in range(3))
    write_list(first, one.url, both.url)
    write_list(second, two.url, both.url)
    discover = [f"file:{first}", f"file:{second}"]
    proxy = cluster.proxy(unified=[], discover=discover, workers=1)
    wait_for_urls(proxy, one.url, two.url, both.url)
    followed = proxy.proxy.__dict__["_discovery"]._followers[0]
    followed.hold_seconds = 0.0
    first.unlink()
    wait_for_urls(proxy, two.url, both.url)
    write_list(second, two.url)
    wait_for_urls(proxy, two.url)


def test_nodes_given_by_url_stay_when_a_source_lists_them_no_longer(
    cluster: Cluster, tmp_path: Path
) -> None:
    nodes = tmp_path / "nodes"
    given, listed = cluster.node("unified"), cluster.node("unified")
    write_list(nodes, given.url, listed.url)
    proxy = cluster.proxy(unified=[given.url], discover=[f"file:{nodes}"])
    wait_for_urls(proxy, given.url, listed.url)
    write_list(nodes, listed.url)
    write_list(nodes, "http://127.0.0.1:1")
    wait_for_urls(proxy, given.url)


def test_a_node_that_an_administrator_removed_stays_away_until_it_is_listed_anew(
    cluster: Cluster, tmp_path: Path
) -> None:
    nodes = tmp_path / "nodes"
    kept, removed = cluster.node("unified"), cluster.node("unified")
    write_list(nodes, kept.url, removed.url)
    proxy = cluster.proxy(unified=[], discover=[f"file:{nodes}"])
    wait_for_urls(proxy, kept.url, removed.url)
    client = cluster.client(proxy)
    wait_for_all(client)
    name = removed.url.removeprefix("http://")
    assert client.delete(f"/workers/{name}").status_code == 200
    more = cluster.node("unified")
    write_list(nodes, kept.url, removed.url, more.url)
    wait_for_urls(proxy, kept.url, more.url)
    write_list(nodes, kept.url)
    wait_for_urls(proxy, kept.url)
    write_list(nodes, kept.url, removed.url)
    wait_for_urls(proxy, kept.url, removed.url)


@pytest.mark.one_process("looks into the process")
def test_two_addresses_of_one_node_are_one_node_and_the_other_is_used_when_the_first_is_gone(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_LAST_RETRY_SECONDS", 0.25)
    nodes = tmp_path / "nodes"
    unified = cluster.node("unified")
    other = unified.url.replace("127.0.0.1", "localhost")
    write_list(nodes, unified.url, other)
    proxy = cluster.proxy(unified=[], discover=[f"file:{nodes}"], workers=1)
    wait_for_all(cluster.client(proxy))
    (first,) = urls_known(proxy)[0]
    (second,) = {unified.url, other} - {first}
    write_list(nodes, second)
    wait_for_urls(proxy, second)


def test_a_proxy_waits_at_its_start_for_nodes_that_it_finds(
    cluster: Cluster, tmp_path: Path
) -> None:
    nodes = tmp_path / "nodes"
    write_list(nodes, cluster.node("unified").url)
    proxy = cluster.proxy(unified=[], discover=[f"file:{nodes}"])
    assert cluster.client(proxy).get("/readiness").status_code == 200


@pytest.mark.one_process("looks into the process")
def test_many_dead_addresses_cost_a_bounded_number_of_probes(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_REPORT_SECONDS", 0.0)
    nodes = tmp_path / "nodes"
    unified = cluster.node("unified")
    write_list(nodes, *(f"http://127.1.{n}.1:9" for n in range(255)), unified.url)
    proxy = cluster.proxy(unified=[], discover=[f"file:{nodes}"], workers=1)
    wait_for_urls(proxy, unified.url)
    served = proxy.proxy.__dict__["_discovery"]
    wait_until(lambda: len(served._problems) == 255)
    assert served._slots._value >= 0 and len(served._probes) == 255
    write_list(nodes, unified.url)
    wait_until(lambda: not served._probes and not served._problems)


def test_too_many_sources_are_refused() -> None:
    with pytest.raises(UsageError, match="given 9 times"):
        parse_sources(["file:/nodes"] * 9, has_key=False)
