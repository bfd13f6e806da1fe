"""Elastic nodes between which KV cannot travel serve alone what they cannot serve together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from elastic_workers import COST, ITL
from fake_node import wait_until
from proxy_cluster import wait_for_all

from pd.core.node_load import NodeLoad

if TYPE_CHECKING:
    from concurrent.futures import Future

    import httpx
    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate

PROMPT = [5, 6, 7, 8, 9]
SAMPLING = {"max_new_tokens": 4, "ignore_eos": True}


class Deployment:
    """An elastic pair, idle, so that each request is handed off, and a proxy."""

    def __init__(self, cluster: Cluster, **options: Any) -> None:
        self.nodes = list(cluster.pair(auto=False, elastic=True))
        for node in self.nodes:
            node.load = NodeLoad(cost=COST, itl=ITL, free_tokens=100_000, chunk=8192)
        self.prefill, self.decode = self.nodes
        self.client = cluster.client(text=False, **({"failover": "on"} | options))
        wait_for_all(self.client)
        self._pool = ThreadPoolExecutor(8)

    def ask(self) -> Future[httpx.Response]:
        body = {"input_ids": PROMPT, "sampling_params": SAMPLING}
        return self._pool.submit(self.client.post, "/generate", json=body)

    def whole(self) -> tuple[FakeNode, Generate] | None:
        """The node that was last asked to serve a request alone."""
        found = [(n, g) for n in self.nodes for g in n.generates if not g.peer]
        return found[-1] if found else None


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
@pytest.mark.parametrize("fault", ["pair", "peer"])
def test_a_request_whose_hand_off_failed_is_served_by_one_node(
    cluster: Cluster, fault: Any, policy: str
) -> None:
    d = Deployment(cluster, max_failovers=1, policy=policy)
    asked = d.ask()
    first = d.decode.wait_generate()
    assert first.peer == d.prefill.instance_id
    d.decode.fail(first, "transfer", fault=fault)
    wait_until(lambda: d.whole() is not None)
    node, request = d.whole() or (d.prefill, first)
    node.reply(request)
    assert asked.result().status_code == 200
