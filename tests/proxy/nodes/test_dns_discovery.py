"""Nodes that a proxy finds by DNS."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

import dns.name
import dns.rcode
import pytest
from dns_server import DnsServer
from fake_node import wait_until
from test_proxy_discovery import wait_for_urls

from pd.core.errors import UsageError
from pd.proxy.nodes.discovery import dns_source
from pd.proxy.nodes.discovery.dns_source import DnsSource, SystemResolver
from pd.proxy.nodes.discovery.flag import parse_source
from pd.proxy.nodes.discovery.source import SourceError
from pd.proxy.nodes.discovery.start_check import refuse_strangers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from proxy_cluster import Cluster

pytestmark = pytest.mark.one_process("each process follows its own sources, which tests replace")


@pytest.fixture
def server() -> Iterator[DnsServer]:
    with DnsServer(pd__test={"A": ["127.0.0.1"]}) as made:
        yield made


def source_of(server: DnsServer, text: str, **settings: object) -> DnsSource:
    return DnsSource(text, lambda: server.resolver(**settings))


def first_list(source: DnsSource) -> set[str]:
    async def ask() -> set[str]:
        async with contextlib.aclosing(source.watch_urls()) as lists:
            return set(await anext(lists))

    return asyncio.run(ask())


def test_addresses_of_both_families_are_nodes_at_the_port(server: DnsServer) -> None:
    server.records["pd.test."] = {"A": ["10.0.0.1", "10.0.0.2"], "AAAA": ["2001:db8::1"]}
    assert first_list(source_of(server, "pd.test:30000")) == {
        "http://10.0.0.1:30000",
        "http://10.0.0.2:30000",
        "http://[2001:db8::1]:30000",
    }


def test_aliases_are_followed_and_addresses_of_no_host_are_left_out(server: DnsServer) -> None:
    server.records["pd.test."] = {
        "A": ["0.0.0.0", "224.0.0.1", "10.0.0.1"],
        "AAAA": ["::", "ff02::1"],
    }
    assert first_list(source_of(server, "pd.test.:1")) == {"http://10.0.0.1:1"}


def test_srv_records_name_targets_and_ports(server: DnsServer) -> None:
    server.records["_http._tcp.pd.test."] = {
        "SRV": [f"0 0 {port} {name}.pd.test." for port, name in ((1, "a"), (2, "B"), (3, "c"))]
        + ["0 0 4 .", "0 0 0 a.pd.test."]
    }
    server.records["b.pd.test."] = {"AAAA": ["2001:db8::2"]}
    server.records["c.pd.test."] = {"A": ["10.0.0.3", "10.0.0.4"]}
    server.extra = [("a.pd.test.", "A", "10.0.0.1"), ("other.test.", "A", "10.9.9.9")]
    assert first_list(source_of(server, "_http._tcp.pd.test")) == {
        "http://10.0.0.1:1",
        "http://[2001:db8::2]:2",
        "http://10.0.0.3:3",
        "http://10.0.0.4:3",
    }
    assert "a.pd.test." not in {name for name, _, _ in server.queries}


def test_a_truncated_answer_is_asked_for_over_tcp(server: DnsServer) -> None:
    server.records["pd.test."] = {"A": [f"10.0.0.{n}" for n in range(1, 201)]}
    assert len(first_list(source_of(server, "pd.test:1"))) == 200
    assert ("pd.test.", "A", "udp") in server.queries and ("pd.test.", "A", "tcp") in server.queries


def test_more_addresses_than_a_proxy_takes_are_refused(server: DnsServer) -> None:
    server.records["pd.test."] = {"A": [f"10.0.{n // 100}.{n % 100}" for n in range(257)]}
    with pytest.raises(SourceError, match=r"257 addresses .at most 256"):
        first_list(source_of(server, "pd.test:1"))
    targets = [f"0 0 1 n{n}.pd.test." for n in range(257)]
    server.records["_x._tcp.pd.test."] = {"SRV": targets}
    with pytest.raises(SourceError, match=r"257 targets .at most 256"):
        first_list(source_of(server, "_x._tcp.pd.test"))


def test_search_domains_and_ndots_apply(server: DnsServer) -> None:
    search = [dns.name.from_text("ns.svc.test"), dns.name.from_text("svc.test")]
    server.records["pd.ns.svc.test."] = {"A": ["10.0.0.1"]}
    assert first_list(source_of(server, "pd.ns:1", search=search, ndots=5)) == {"http://10.0.0.1:1"}
    tried = [name for name, kind, _ in server.queries if kind == "A"]
    assert tried == ["pd.ns.ns.svc.test.", "pd.ns.svc.test."]


@pytest.mark.parametrize("text", ["none.test:1", "empty.test:1", "_x._tcp.none.test"])
def test_names_without_records_list_no_nodes(server: DnsServer, text: str) -> None:
    server.records["empty.test."] = {"TXT": ["x"]}
    assert first_list(source_of(server, text)) == set()


def test_failures_are_named_and_are_no_empty_list(
    server: DnsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns_source, "_QUERY_SECONDS", 0.2)
    server.rcodes = {"A": dns.rcode.SERVFAIL, "AAAA": dns.rcode.REFUSED}
    with pytest.raises(SourceError, match=r"no A records of pd\.test"):
        first_list(source_of(server, "pd.test:1"))
    server.is_silent = True
    with pytest.raises(SourceError, match=r"no A records of pd\.test"):
        first_list(source_of(server, "pd.test:1"))


def test_when_one_family_fails_its_last_addresses_hold_on(
    server: DnsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns_source, "_QUERY_SECONDS", 0.2)
    server.records["pd.test."] = {"A": ["10.0.0.1"], "AAAA": ["2001:db8::1"]}
    source = source_of(server, "pd.test:1")
    both = first_list(source)
    server.rcodes = {"AAAA": dns.rcode.SERVFAIL}
    server.records["pd.test."]["A"] = ["10.0.0.2"]
    assert first_list(source) == {"http://10.0.0.2:1", "http://[2001:db8::1]:1"} != both
    monkeypatch.setattr(dns_source, "HOLD_SECONDS", 0.0)
    assert first_list(source) == {"http://10.0.0.2:1"}


@pytest.mark.parametrize(("ttl", "pause"), [(0, 2.0), (7, 7.0), (86400, 30.0)])
def test_records_are_asked_for_again_when_they_expire_within_bounds(
    server: DnsServer, monkeypatch: pytest.MonkeyPatch, ttl: int, pause: float
) -> None:
    server.ttl = ttl
    server.records["pd.test."] = {"A": ["10.0.0.1"], "AAAA": ["2001:db8::1"]}
    pauses: list[float] = []
    real_sleep = asyncio.sleep

    async def follow() -> None:
        loop = asyncio.get_running_loop()

        async def sleep(seconds: float) -> None:
            # Loops of other threads sleep by the same function.
            if asyncio.get_running_loop() is not loop:
                return await real_sleep(seconds)
            pauses.append(seconds)

        monkeypatch.setattr(dns_source.asyncio, "sleep", sleep)
        async with contextlib.aclosing(source_of(server, "pd.test:1").watch_urls()) as lists:
            await anext(lists)
            await anext(lists)

    asyncio.run(follow())
    monkeypatch.undo()
    assert pauses == [pause]


def test_the_system_resolver_reads_its_file_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 127.0.0.2\nsearch ns.svc.test svc.test\noptions ndots:5\n")
    get = SystemResolver(str(path))
    assert get().nameservers == ["127.0.0.2"] and get().ndots == 5 and len(get().search) == 2
    assert get() is get()
    path.with_suffix(".new").write_text("nameserver 127.0.0.3\n")
    os.replace(path.with_suffix(".new"), path)
    assert get().nameservers == ["127.0.0.3"]
    path.unlink()
    with pytest.raises(SourceError, match="No such file"):
        first_list(DnsSource("pd.test:1", get))


def test_nodes_join_and_leave_as_records_change(
    cluster: Cluster, server: DnsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns_source, "MIN_SECONDS", 0.1)
    monkeypatch.setattr(dns_source, "SystemResolver", lambda: server.resolver)
    server.ttl = 0
    one, two = cluster.node("unified"), cluster.node("unified")
    srv = server.records["_http._tcp.pd.test."] = {"SRV": [f"0 0 {one.http_port} pd.test."]}
    proxy = cluster.proxy(unified=[], discover=["dns:_http._tcp.pd.test"], workers=1)
    wait_for_urls(proxy, one.url)
    srv["SRV"] = [f"0 0 {node.http_port} pd.test." for node in (one, two)]
    wait_for_urls(proxy, one.url, two.url)
    srv["SRV"] = [f"0 0 {two.http_port} pd.test."]
    wait_for_urls(proxy, two.url)


def test_a_proxy_without_a_key_refuses_to_start_on_nodes_of_other_hosts(server: DnsServer) -> None:
    source = source_of(server, "pd.test:1")
    asyncio.run(refuse_strangers([source, source_of(server, "none.test:1")]))
    server.records["pd.test."]["A"].append("10.0.0.1")
    with pytest.raises(
        UsageError, match=r"dns:pd.test:1 lists http://10.0.0.1:1: .*cluster-key-file"
    ):
        asyncio.run(refuse_strangers([source]))


def test_nodes_that_do_not_prove_the_key_are_not_used(
    cluster: Cluster, server: DnsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns_source, "SystemResolver", lambda: server.resolver)
    key, wrong = b"k" * 32, b"w" * 32
    ours = cluster.node("unified", cluster_key=key)
    strangers = [cluster.node("unified", cluster_key=other) for other in (wrong, None)]
    records = [f"0 0 {node.http_port} pd.test." for node in (*strangers, ours)]
    server.records["_http._tcp.pd.test."] = {"SRV": records}
    discover = ["dns:_http._tcp.pd.test"]
    proxy = cluster.proxy(unified=[], discover=discover, workers=1, cluster_key=key)
    wait_for_urls(proxy, ours.url)
    served = proxy.proxy.__dict__["_discovery"]
    for node in strangers:
        wait_until(lambda url=node.url: "prove" in served._problems.get(url, ""))  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    [
        *("pd", "pd:", "pd:0", "pd:65536", "pd:http", "pd:-1", "pd:٣", "pd: 1", ":1", "a b:1"),
        *("http://pd:1", "10.0.0.1:1", "[::1]:1", "::1:1", "a..b:1", f"{'a' * 64}:1"),
        *(f"{'a.' * 130}a:1", "_http._tcp.pd:1", "pd\n:1", "@pd:1", "pd:1/x", "pd:1:2"),
    ],
)
def test_texts_that_are_no_name_and_port_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--discover dns:"):
        parse_source(f"dns:{text}")
