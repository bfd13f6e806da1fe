"""Batches are handed to the nodes in parts, and end as a whole all the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fake_node import wait_until

if TYPE_CHECKING:
    from proxy_cluster import Cluster

    from pd.proxy.dispatch.dispatcher import Dispatcher
    from pd.proxy.server import ProxyThread

COUNT = 40
BODY = {"input_ids": [[5, 6]] * COUNT, "sampling_params": {"max_new_tokens": 4}}


@pytest.fixture
def proxy(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> ProxyThread:
    """Lets others act after every prompt."""
    monkeypatch.setattr("pd.proxy.dispatch.dispatcher._START_PROMPTS", 1)
    cluster.node("unified", auto=False)
    return cluster.proxy()


def dispatcher(proxy: ProxyThread) -> Dispatcher:
    assert proxy.proxy is not None
    return proxy.proxy._dispatcher


def act_after(proxy: ProxyThread, prompts: int, act: Any) -> None:
    """Call ``act`` on the event loop as soon as that many prompts were handed over."""
    started = dispatcher(proxy)._start_prompt
    count = 0

    def start(*args: Any) -> None:
        nonlocal count
        started(*args)
        count += 1
        if count == prompts:
            proxy._loop.call_soon(act)

    dispatcher(proxy)._start_prompt = start  # type: ignore[method-assign]


def post(proxy: ProxyThread, rid: str = "mine") -> httpx.Response:
    return httpx.post(proxy.url + "/generate", json=BODY | {"rid": rid}, timeout=20)


def check_that_all_is_over(proxy: ProxyThread) -> None:
    end = dispatcher(proxy)
    wait_until(lambda: not end.jobs)
    ledger = end.admission._ledger
    counts = (ledger.prompts, ledger.tokens, ledger.logprobs)
    assert (counts, end._attempts._rooms) == ((0, 0, 0), {})


@pytest.mark.one_process("reads the dispatcher's state")
def test_an_abort_ends_prompts_that_no_node_has_seen(cluster: Cluster, proxy: ProxyThread) -> None:
    act_after(proxy, 5, lambda: dispatcher(proxy).abort_rid("mine", None))
    results = post(proxy).json()
    assert [r["meta_info"]["finish_reason"]["type"] for r in results] == ["abort"] * COUNT
    assert len(cluster.unified[0].generates) < COUNT
    check_that_all_is_over(proxy)


@pytest.mark.one_process("reads the dispatcher's state")
def test_a_deadline_ends_prompts_that_no_node_has_seen(
    cluster: Cluster, proxy: ProxyThread
) -> None:
    def expire() -> None:
        (job,) = dispatcher(proxy).jobs
        dispatcher(proxy)._expire_job(job, 1.0)

    act_after(proxy, 5, expire)
    assert post(proxy).status_code == 408
    assert len(cluster.unified[0].generates) < COUNT
    check_that_all_is_over(proxy)


@pytest.mark.one_process("reads the dispatcher's state")
def test_prompts_that_end_early_do_not_end_the_batch(cluster: Cluster, proxy: ProxyThread) -> None:
    cluster.unified[0].auto = True
    with ThreadPoolExecutor(4) as pool:
        for response in pool.map(lambda i: post(proxy, f"mine-{i}"), range(4)):
            results = response.json()
            assert [len(r["output_ids"]) for r in results] == [4] * COUNT
    check_that_all_is_over(proxy)
