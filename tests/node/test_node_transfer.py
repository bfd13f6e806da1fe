"""What nodes choose, show and count of their transfers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import httpx
from cluster import random_prompts
from tiny import tiny_cluster

from pd.transfer import factory

if TYPE_CHECKING:
    import pytest

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
