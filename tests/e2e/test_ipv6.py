"""Every process listens on ``::1`` and reaches the others there."""

from __future__ import annotations

import random
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import backends
import httpx
import pytest
from lacking import skip_or_fail
from tiny import VOCAB_SIZE, tiny_cluster

from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends import Backend
    from cluster import Cluster

PROMPT = [random.Random(6).randrange(VOCAB_SIZE - 2) for _ in range(90)]


@pytest.fixture(scope="module", autouse=True)
def ipv6() -> None:
    """Skips, but in CI, where the kernel has no IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        skip_or_fail(f"this machine has no ::1: {error}")


def answers(cluster: Cluster) -> Iterator[list[int]]:
    """Answers to a first request, to one whose prefix is cached, and to a streamed one."""
    config = ProxyConfig(
        prefill=[node.url for node in cluster.prefill],
        decode=[node.url for node in cluster.decode],
        unified=[node.url for node in cluster.unified],
        host="::1",
        port=0,
    )
    with ProxyThread(config) as proxy, httpx.Client(base_url=proxy.url, timeout=60) as client:
        assert urlsplit(proxy.url).hostname == "::1"
        ready = client.get("/readiness")
        assert ready.status_code == 200, ready.text
        sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        for prompt in (PROMPT, PROMPT[:64] + PROMPT[:8]):
            body = {"input_ids": prompt, "sampling_params": sampling}
            response = client.post("/generate", json=body)
            assert response.status_code == 200, response.text
            yield response.json()["output_ids"]
        with client.stream("POST", "/generate", json=body | {"stream": True}) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"


@backends.over([backends.TCP, backends.FAKE, backends.NIXL], sample=[backends.TCP])
def test_the_split_serves_on_ipv6_as_unified_does(backend: Backend) -> None:
    settings = {"host": "::1", "page_size": 4}
    with tiny_cluster(0, 0, 1, **settings) as cluster:
        (node,) = cluster.unified
        assert urlsplit(node.url).hostname == "::1"
        expected = list(answers(cluster))
    with tiny_cluster(1, 1, **settings, transfer_backend=backend.flag) as cluster:
        assert list(answers(cluster)) == expected
        cluster.wait_idle()
