"""A request's name belongs to its client: nobody else can use it, end it or learn of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import edge_helpers  # noqa: F401  # makes the proxy's helpers known
import httpx
import pytest
from proxy_cluster import Cluster

from pd.core.messages import Finish
from pd.proxy.http.api_keys import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from fake_node import FakeNode

    from pd.proxy.server import ProxyThread

KEYS = [ApiKey("anna", "inference"), ApiKey("bert", "inference"), ApiKey("root", "admin")]


class Clients:
    """Of one proxy, whose nodes answer when they are told."""

    def __init__(self, cluster: Cluster, pool: ThreadPoolExecutor, keys: list[ApiKey]) -> None:
        self.prefill: FakeNode
        self.prefill, _ = cluster.pair(auto=False)
        self._proxy: ProxyThread = cluster.proxy(text=False, api_keys=keys)
        self._pool = pool

    def post(self, path: str, key: str, body: Any, **headers: str) -> httpx.Response:
        given = {"Authorization": f"Bearer {key}"} | headers
        return httpx.post(self._proxy.url + path, json=body, headers=given, timeout=20)

    def generate(self, key: str, headers: Any = None, **body: Any) -> Future[httpx.Response]:
        asked = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}} | body
        return self._pool.submit(self.post, "/generate", key, asked, **(headers or {}))

    def abort(self, key: str, rid: str) -> httpx.Response:
        return self.post("/abort_request", key, {"rid": rid})

    def answer(self) -> None:
        """All requests so far."""
        for request in self.prefill.generates:
            for index in range(request.params.n):
                self.prefill.say(request, [40], index=index, finish=Finish("length"))


@pytest.fixture
def clients() -> Iterator[Clients]:
    with ExitStack() as stack:
        cluster = Cluster(stack, "")
        pool = stack.enter_context(ThreadPoolExecutor(8))
        yield Clients(cluster, pool, KEYS)


def finish_of(running: Future[httpx.Response]) -> str:
    kind: str = running.result(20).json()["meta_info"]["finish_reason"]["type"]
    return kind


def refused(response: httpx.Response, rid: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "rid")
    assert repr(rid) in error["message"]


def test_a_name_in_use_is_refused_and_the_first_goes_on(clients: Clients) -> None:
    first = clients.generate("anna", rid="mine")
    clients.prefill.wait_generate()
    refused(clients.generate("anna", rid="mine").result(20), "mine")
    # Names of a batch's prompts count as well, whoever made them.
    batch = clients.generate("anna", rid="many", input_ids=[[5], [6]])
    clients.prefill.wait_generate(3)
    refused(clients.generate("anna", rid="many_1").result(20), "many_1")
    given = clients.generate("anna", rid=["a", "mine"], input_ids=[[5], [6]])
    refused(given.result(20), "mine")
    refused(clients.generate("anna", rid=["a", "a"], input_ids=[[5], [6]]).result(20), "a")
    clients.answer()
    assert finish_of(first) == "length"
    assert [r["meta_info"]["id"] for r in batch.result(20).json()] == ["many_0", "many_1"]
    # The end of a request frees its names.
    again = clients.generate("anna", rid="mine")
    clients.prefill.wait_generate(4)
    clients.answer()
    assert finish_of(again) == "length"


def test_a_key_ends_only_its_own_and_learns_nothing_of_others(clients: Clients) -> None:
    running = clients.generate("anna", rid="x")
    clients.prefill.wait_generate()
    foreign, unknown = clients.abort("bert", "x"), clients.abort("bert", "y")
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text == unknown.text.replace("'y'", "'x'")
    # Nor does the name being taken tell: it is free for others.
    own = clients.generate("bert", rid="x")
    clients.prefill.wait_generate(2)
    assert clients.post("/abort_request", "bert", {"abort_all": True}).status_code == 403
    assert clients.abort("bert", "x").json() == {"aborted": 1}
    assert finish_of(own) == "abort"
    assert not running.done()
    assert clients.abort("anna", "x").json() == {"aborted": 1}
    assert finish_of(running) == "abort"


def test_the_admin_key_ends_everybodys(clients: Clients) -> None:
    first, second = clients.generate("anna", rid="x"), clients.generate("bert", rid="x")
    third = clients.generate("anna")
    clients.prefill.wait_generate(3)
    assert clients.abort("root", "x").json() == {"aborted": 2}
    assert finish_of(first) == finish_of(second) == "abort"
    assert clients.post("/abort_request", "root", {"abort_all": True}).json() == {"aborted": 1}
    assert finish_of(third) == "abort"


def test_a_request_id_of_the_header_is_no_name_and_may_repeat(clients: Clients) -> None:
    header = {"X-Request-Id": "trace-7"}
    both = [clients.generate("anna", header) for _ in range(2)]
    clients.prefill.wait_generate(2)
    assert clients.abort("anna", "trace-7").status_code == 404
    clients.answer()
    assert [b.result(20).json()["meta_info"]["id"] for b in both] == ["trace-7"] * 2


def test_each_answer_of_several_has_its_own_id(clients: Clients) -> None:
    params = {"max_new_tokens": 1, "n": 3}
    one = clients.generate("anna", rid="a", sampling_params=params)
    batch = clients.generate("anna", rid="b", sampling_params=params, input_ids=[[5], [6]])
    clients.prefill.wait_generate(3)
    clients.answer()
    ids = [r["meta_info"]["id"] for r in one.result(20).json()]
    assert ids == ["a_0", "a_1", "a_2"]
    ids = [r["meta_info"]["id"] for r in batch.result(20).json()]
    assert ids == ["b_0_0", "b_0_1", "b_0_2", "b_1_0", "b_1_1", "b_1_2"]
