"""``choices`` of ``/generate``: the likeliest of several options, with the scores of all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fake_node import FakeNode, wait_until
from proxy_tokenizers import byte_level

from pd.core.messages import Finish
from pd.proxy.dispatch.dispatcher import ABORTED
from pd.proxy.requests.fields import MAX_OPTIONS

if TYPE_CHECKING:
    from concurrent.futures import Future

    import httpx
    from proxy_cluster import Cluster

    from pd.core.messages import Generate

TOKENS = byte_level()
METHODS = ("token_length_normalized", "greedy_token", "unconditional_likelihood")


def ids(text: str) -> list[int]:
    return list(TOKENS.encode(text).ids)


def choose(client: httpx.Client, choices: list[Any], **body: Any) -> Any:
    prompt = {} if {"text", "input_ids"} & body.keys() else {"input_ids": [5, 6, 7]}
    response = client.post("/generate", json={"choices": choices, **prompt, **body})
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: httpx.Client, **body: Any) -> dict[str, Any]:
    prompt = {} if {"text", "input_ids"} & body.keys() else {"input_ids": [5, 6, 7]}
    response = client.post("/generate", json={"choices": [[8], [9]], **prompt, **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def prompts(node: FakeNode) -> list[list[int]]:
    return [np.frombuffer(request.token_ids, "<i4").tolist() for request in node.generates]


# ---- requests and answers; the scripted nodes give token t the log probability -t/100


def test_the_shape_of_an_answer(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    prefill.cached_tokens = 1
    body = choose(cluster.client(), [[40, 60], [30, 50], [45]], rid="mine")
    assert set(body) == {"text", "output_ids", "meta_info"}
    assert body["output_ids"] == [30, 50]
    meta = body["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta.pop("stages").keys() == {"queue", "bootstrap", "prefill", "transfer", "decode"}
    scored = meta.pop("choices")
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "choices_method": "token_length_normalized",
    }
    assert [s["score"] for s in scored] == pytest.approx([-0.5, -0.4, -0.45])
    assert [s["normalized_logprob"] for s in scored] == pytest.approx([-0.5, -0.4, -0.45])
    assert set(scored[0]) == {"text", "score", "normalized_logprob", "token_logprobs"}
    texts = [TOKENS.decode([token]) for token in (40, 60)]
    assert scored[0]["token_logprobs"] == [[-0.4, 40, texts[0]], [-0.6, 60, texts[1]]]
    assert body["text"] == scored[1]["text"] == TOKENS.decode([30, 50])
    assert decode.generates == []


def test_a_node_gets_each_option_after_the_prompt_and_generates_nothing(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    choose(cluster.client(), [[8], [9, 10]], priority=3, cache_salt="mine", rid="r")
    assert prompts(prefill) == [[5, 6, 7, 8], [5, 6, 7, 9, 10]]
    for request in prefill.generates:
        params = request.params
        assert (params.max_tokens, params.temperature, params.n) == (1, 0.0, 1)
        assert params.prompt_logprobs_start == 3
        assert (request.priority, request.namespace, request.peer) == (3, "mine", "")


@pytest.mark.parametrize(("number", "chosen"), list(enumerate((1, 0, 2))))
def test_the_method_is_the_clients(cluster: Cluster, number: int, chosen: int) -> None:
    cluster.pair()
    method, choices = METHODS[number], [[50, 90, 90], [60, 60], [70] * 8]
    body = choose(cluster.client(), choices, choices_method=method)
    assert body["output_ids"] == choices[chosen]
    assert body["meta_info"]["choices_method"] == method


def test_unconditional_likelihood_computes_the_options_alone_too(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    body = choose(cluster.client(), [[8, 9], [10]], choices_method=METHODS[2])
    assert prompts(prefill) == [[5, 6, 7, 8, 9], [5, 6, 7, 10], [8, 9], [10]]
    assert [r.params.prompt_logprobs_start for r in prefill.generates] == [3, 3, 0, 0]
    scored = body["meta_info"]["choices"]
    alone = [[entry[0] for entry in s["unconditional_token_logprobs"]] for s in scored]
    assert alone == [[None, -0.09], [None]]
    assert [s["score"] for s in scored] == pytest.approx([-0.17 / 2 + 0.09 / 2, -0.1])
    assert body["meta_info"]["prompt_tokens"] == 3


def test_texts_are_tokenized_together_with_the_prompt(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    choices = [" world", " fox", "lo, the"]
    body = choose(cluster.client(), choices, text="oh hel")
    assert prompts(prefill) == [ids("oh hel" + choice) for choice in choices]
    assert [scored["text"] for scored in body["meta_info"]["choices"]] == choices
    assert body["text"] in choices
    assert body["meta_info"]["prompt_tokens"] == len(ids("oh hel"))


def test_an_option_begins_with_the_first_token_that_the_prompt_lacks(cluster: Cluster) -> None:
    """``the qu`` ends within the token of ``quick``."""
    prefill, _ = cluster.pair()
    prompt, whole = ids("the qu"), ids("the quick")
    start = next(i for i, pair in enumerate(zip(prompt, whole, strict=False)) if len({*pair}) > 1)
    assert 0 < start < len(prompt)
    body = choose(cluster.client(), ["ick", "漢字"], text="the qu")
    merged, plain = body["meta_info"]["choices"]
    assert [entry[1] for entry in merged["token_logprobs"]] == whole[start:]
    assert [entry[1] for entry in plain["token_logprobs"]] == ids("漢字")
    assert [r.params.prompt_logprobs_start for r in prefill.generates] == [start, len(prompt)]


def test_an_option_that_would_swallow_the_whole_prompt_has_tokens_of_its_own(
    cluster: Cluster,
) -> None:
    prefill, _ = cluster.pair()
    assert ids("he")[:1] != ids("hello")[:1]
    choose(cluster.client(), ["llo"], text="he")
    assert prompts(prefill) == [ids("he") + ids("llo")]
    assert prefill.generates[0].params.prompt_logprobs_start == len(ids("he"))


def test_texts_and_token_ids_mix(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    client = cluster.client()
    body = choose(client, [" fox", [8, 9]], input_ids=[5])
    assert prompts(prefill) == [[5, *ids(" fox")], [5, 8, 9]]
    assert body["meta_info"]["choices"][1]["text"] == TOKENS.decode([8, 9])
    choose(client, [" fox", [8, 9.0]], text="the")
    assert prompts(prefill)[2:] == [ids("the fox"), [*ids("the"), 8, 9]]


def test_without_a_tokenizer_token_ids_serve(cluster: Cluster) -> None:
    cluster.pair()
    body = choose(cluster.client(text=False), [[9], [8]])
    assert (body["text"], body["output_ids"]) == ("", [8])
    assert body["meta_info"]["choices"][0]["token_logprobs"] == [[-0.09, 9, ""]]


def test_options_may_repeat_and_one_is_enough(cluster: Cluster) -> None:
    cluster.pair()
    client = cluster.client()
    assert len(choose(client, [[9], [8], [8]])["meta_info"]["choices"]) == 3
    assert choose(client, [[9]])["output_ids"] == [9]


# ---- one node


@pytest.mark.parametrize("policy", ["round_robin", "random", "power_of_two", "cache_aware"])
def test_all_options_go_to_one_node_whatever_the_policy(cluster: Cluster, policy: str) -> None:
    for _ in range(3):
        cluster.node("prefill")
    cluster.node("decode")
    client = cluster.client(policy=policy)
    choices = [[number] for number in range(10, 30)]
    for turn in range(1, 4):
        choose(client, choices, choices_method=METHODS[2])
        seen = sorted(len(node.generates) for node in cluster.prefill)
        assert sum(seen) == 40 * turn
        assert all(count % 40 == 0 for count in seen), seen
    metrics = client.get("/metrics").text
    assert 'pd_proxy_routing_decisions_total{reason="same_request",role="prefill"} 117.0' in metrics


def test_requests_with_choices_share_the_nodes(cluster: Cluster) -> None:
    for _ in range(2):
        cluster.node("prefill")
    cluster.node("decode")
    client = cluster.client(policy="round_robin")
    wait_until(lambda: all(w["ready"] for w in client.get("/workers").json()["workers"]))
    for _ in range(4):
        choose(client, [[8], [9], [10]])
    assert [len(node.generates) for node in cluster.prefill] == [6, 6]


# ---- refusals

REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"choices": []}, f"choices must have 1 to {MAX_OPTIONS} options, not 0", "choices"),
    ({"choices": [[8]] * 1025}, f"1 to {MAX_OPTIONS} options, not 1025", "choices"),
    ({"choices": "yes"}, "choices must be a list of texts or lists of token ids", "choices"),
    ({"choices": ["a", ""]}, "choices[1] is empty", "choices[1]"),
    ({"choices": [[8], []]}, "choices[1] is empty", "choices[1]"),
    ({"choices": ["a", 5]}, "choices[1] must be a text or a list of token ids", "choices[1]"),
    ({"choices": [["a"]]}, "choices[0] must be a text or a list of token ids", "choices[0]"),
    (
        {"choices": [[8], [1000]]},
        "choices[1] has the token id 1000, which is out of vocabulary",
        "choices[1]",
    ),
    (
        {"choices": [[8], [-1]]},
        "choices[1] has the token id -1, which is out of vocabulary",
        "choices[1]",
    ),
    ({"choices": [[8], [9] * 197]}, "with choices[1], the prompt is too long", "choices[1]"),
    ({"choices": ["a", "b" * 100_000]}, "choices[1] has 100000 characters", "choices[1]"),
    ({"input_ids": [[5], [6]]}, "input_ids is a batch of 2; send a request for each", "input_ids"),
    ({"text": ["a"]}, "text is a batch of 1", "text"),
    ({"stream": True}, "set stream to false", "stream"),
    ({"return_logprob": True}, "return_logprob cannot be combined with choices", "return_logprob"),
    ({"sampling_params": {"n": 2}}, "n is 2", "n"),
    ({"sampling_params": {"regex": "a"}}, "choices and a grammar", "choices"),
    ({"sampling_params": {"min_new_tokens": 200}}, "min_new_tokens must be", "min_new_tokens"),
    ({"choices_method": "best"}, "choices_method must be", "choices_method"),
    ({"choices": None, "choices_method": METHODS[0]}, "only for choices", "choices_method"),
    ({"input_ids": []}, "input_ids is empty", "input_ids"),
]


def test_what_makes_no_sense_is_refused_by_name(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    client = cluster.client()
    for body, says, param in REFUSALS:
        error = refused(client, **body)
        assert says in error["message"], (body, error)
        assert error["param"] == param, (body, error)
    assert prefill.generates == []


def test_texts_need_a_tokenizer(cluster: Cluster) -> None:
    cluster.pair()
    error = refused(cluster.client(text=False), choices=[[8], "a"])
    assert "no tokenizer" in error["message"]
    assert error["param"] == "choices[1]"


def test_no_more_is_tokenized_than_of_the_largest_batch(cluster: Cluster) -> None:
    cluster.pair()
    error = refused(cluster.client(), text="a" * 10_000, choices=["b"] * 1000)
    assert "1000 choices with the prompt before each have 10001000 characters" in error["message"]
    assert error["param"] == "choices"


def test_options_count_as_requests_in_the_queue(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    client = cluster.client(max_queue=3)
    choose(client, [[8], [9], [10]])
    error = refused(client, choices=[[8], [9]], choices_method=METHODS[2])
    assert "exceeds the queue of 3" in error["message"]
    assert len(prefill.generates) == 3


# ---- ends before the end


def silent(cluster: Cluster) -> FakeNode:
    """A node that leaves the answers to the test."""
    return cluster.node("unified", auto=False)


def received(node: FakeNode, count: int = 3) -> list[Generate]:
    """The requests of a node, once it has so many."""
    node.wait_generate(count)
    return list(node.generates)


def answer_all(node: FakeNode, requests: list[Generate]) -> None:
    for request in requests:
        node.reply(request)


def posting(client: httpx.Client, **body: Any) -> Future[httpx.Response]:
    """A choice among three options, asked for on another thread."""
    asked = {"input_ids": [5, 6, 7], "choices": [[8], [9], [10]]} | body
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(client.post, "/generate", json=asked)
    pool.shutdown(wait=False)
    return answer


def nothing_is_left(client: httpx.Client) -> bool:
    workers = client.get("/workers").json()["workers"]
    return all(worker["running"] == worker["queued_tokens"] == 0 for worker in workers)


def test_an_abort_ends_all_options(cluster: Cluster) -> None:
    node = silent(cluster)
    client = cluster.client()
    answer = posting(client, rid="mine")
    requests = received(node)
    answer_all(node, requests[:1])
    assert client.post("/abort_request", json={"rid": "mine"}).json()["aborted"] >= 2
    response = answer.result()
    assert response.status_code == 200
    body = response.json()
    assert (body["text"], body["output_ids"]) == ("", [])
    assert body["meta_info"]["finish_reason"] == {"type": "abort", "message": ABORTED}
    assert body["meta_info"]["choices"] == []
    for request in requests[1:]:
        node.wait_abort(request.room)
    wait_until(lambda: nothing_is_left(client))
    # The name is free again.
    again = posting(client, rid="mine")
    answer_all(node, received(node, 6)[3:])
    assert again.result().json()["output_ids"] == [8]


def test_a_deadline_ends_all_options(cluster: Cluster) -> None:
    node = silent(cluster)
    client = cluster.client()
    answer = posting(client, timeout=0.5)
    requests = received(node)
    answer_all(node, requests[:1])
    assert answer.result().status_code == 408
    for request in requests[1:]:
        node.wait_abort(request.room)
    wait_until(lambda: nothing_is_left(client))


def test_an_option_that_fails_ends_the_others(cluster: Cluster) -> None:
    node = silent(cluster)
    client = cluster.client()
    answer = posting(client)
    requests = received(node)
    node.fail(requests[1], "node_failed")
    assert answer.result().status_code == 502
    for request in (requests[0], requests[2]):
        node.wait_abort(request.room)
    wait_until(lambda: nothing_is_left(client))


def test_a_node_that_is_lost_fails_the_request(cluster: Cluster) -> None:
    node = silent(cluster)
    client = cluster.client()
    answer = posting(client)
    received(node)
    node.restart()
    response = answer.result()
    assert response.status_code == 502
    assert "was lost" in response.json()["error"]["message"]
    wait_until(lambda: nothing_is_left(client))


def test_a_node_that_sends_too_few_log_probabilities_fails_the_request(cluster: Cluster) -> None:
    node = silent(cluster)
    answer = posting(cluster.client())
    first, *others = received(node)
    answer_all(node, others)
    node.say(first, [1], prompt_logprobs=[], cached_tokens=0, finish=Finish("length"))
    response = answer.result()
    assert response.status_code == 502
    assert "log probabilities of 0 prompt tokens, not 1" in response.json()["error"]["message"]
