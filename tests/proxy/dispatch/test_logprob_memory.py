"""Log probabilities of one client's answers do not use up the proxy's memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fake_node import wait_until
from proxy_cluster import read_events

from pd.core.messages import Finish
from pd.proxy.dispatch.job import Job
from pd.proxy.dispatch.logprob_memory import MAX_BYTES, LogprobMemory, estimate_entry_bytes
from pd.proxy.http.api_keys import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.proxy.server import ProxyThread

KEYS = [ApiKey(key, "inference") for key in ("greedy", "modest")]
TOP = 9
# Of answers to requests for TOP likeliest tokens.
PART = 50
LIMIT = 4 * PART * estimate_entry_bytes(TOP)

pytestmark = pytest.mark.one_process("patches the limit, and each process has its part of it")


@pytest.fixture
def node(cluster: Cluster) -> FakeNode:
    return cluster.node("unified", auto=False, context_length=1000)


@pytest.fixture
def proxy(cluster: Cluster, node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> ProxyThread:
    """A proxy in which all answers may hold four parts, and those of one key two."""
    monkeypatch.setattr("pd.proxy.dispatch.logprob_memory.MAX_BYTES", LIMIT)
    return cluster.proxy(text=False, api_keys=KEYS)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def memory(proxy: ProxyThread) -> LogprobMemory:
    served: Any = proxy.proxy
    found: LogprobMemory = served._dispatcher._logprob_memory
    return found


def post(proxy: ProxyThread, key: str, **fields: Any) -> httpx.Response:
    body = {
        "input_ids": [5],
        "return_logprob": True,
        "top_logprobs_num": TOP,
        "sampling_params": {"max_new_tokens": 400},
    }
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{proxy.url}/generate", json=body | fields, headers=headers, timeout=20)


def say(node: FakeNode, number: int, part: int, finish: Finish | None = None) -> None:
    """A part of the answer to one of the requests, with its log probabilities."""
    tokens = [7] * PART
    entries = node.logprobs(tokens, TOP)
    request = node.wait_generate(number)
    node.say(request, tokens, position=part * PART, logprobs=entries, finish=finish)


END = Finish("length")


def test_a_client_that_holds_too_much_ends_its_own_largest_answer(
    proxy: ProxyThread, node: FakeNode, pool: ThreadPoolExecutor
) -> None:
    large = pool.submit(post, proxy, "greedy")
    say(node, 1, 0)
    small = pool.submit(post, proxy, "greedy")
    node.wait_generate(2)
    modest = pool.submit(post, proxy, "modest")
    node.wait_generate(3)
    wait_until(lambda: memory(proxy).total == PART * estimate_entry_bytes(TOP))
    say(node, 1, 1)
    assert not node.aborts
    say(node, 2, 0)  # three parts of one key
    refused = large.result()
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    error = refused.json()["error"]
    assert error["code"] == "queue_full"
    assert "too many log probabilities" in error["message"]
    node.wait_abort(node.generates[0].room)
    say(node, 2, 1, END)
    assert len(small.result().json()["output_ids"]) == 2 * PART
    for part in range(2):
        say(node, 3, part, END if part else None)
    assert len(modest.result().json()["output_ids"]) == 2 * PART
    wait_until(lambda: memory(proxy).total == 0)


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["whole", "cumulative"])
def test_one_answer_may_not_hold_more_than_its_client(
    proxy: ProxyThread, node: FakeNode, pool: ThreadPoolExecutor, fields: dict[str, Any]
) -> None:
    """A stream whose events repeat what came before holds all of it, too."""
    answer = pool.submit(post, proxy, "greedy", **fields)
    for part in range(3):
        say(node, 1, part)
    assert "too many log probabilities" in answer.result().text
    wait_until(lambda: memory(proxy).total == 0)


def test_a_stream_holds_nothing_of_what_it_has_given(
    proxy: ProxyThread, node: FakeNode, pool: ThreadPoolExecutor
) -> None:
    def stream() -> list[Any]:
        body = {
            "prompt": [5],
            "logprobs": 5,
            "max_tokens": 400,
            "stream": True,
        }
        headers = {"Authorization": "Bearer greedy"}
        url = f"{proxy.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=20) as response:
            return read_events(response)

    events = pool.submit(stream)
    for part in range(8):
        say(node, 1, part, END if part == 7 else None)
    *given, last = events.result()
    assert last == "DONE"
    tokens = [token for event in given for token in event["choices"][0]["logprobs"]["tokens"]]
    assert len(tokens) == 8 * PART
    logprobs = [p for e in given for p in e["choices"][0]["logprobs"]["token_logprobs"]]
    assert None not in logprobs
    assert memory(proxy).total == 0


def test_log_probabilities_of_prompts_count(
    proxy: ProxyThread, node: FakeNode, pool: ThreadPoolExecutor
) -> None:
    prompt = [5] * (3 * PART)
    params = {"max_new_tokens": 2}
    answer = pool.submit(
        post, proxy, "greedy", input_ids=prompt, logprob_start_len=0, sampling_params=params
    )
    request = node.wait_generate()
    of_prompt, of_token = node.logprobs(prompt, TOP), node.logprobs([7], TOP)
    node.say(request, [7], prompt_logprobs=of_prompt, logprobs=of_token)
    assert answer.result().status_code == 429


def test_where_all_hold_too_much_the_owner_of_most_ends_an_answer() -> None:
    memory = LogprobMemory()
    share = MAX_BYTES // 5 * 2
    jobs = [Job(str(number), "test", owner=owner) for number, owner in enumerate("aabc")]
    assert memory.add_bytes(jobs[0], share - 2) is None
    assert memory.add_bytes(jobs[1], 1) is None
    assert memory.add_bytes(jobs[2], share) is None
    assert memory.add_bytes(jobs[3], share) is jobs[2] or jobs[3]
    memory.release_job(jobs[2])
    assert memory.add_bytes(jobs[3], 1) is None
    for job in jobs:
        memory.release_job(job)
    assert memory.total == 0
    assert not memory._held


def test_processes_share_the_memory() -> None:
    assert LogprobMemory(4).owner_limit == MAX_BYTES // 8
