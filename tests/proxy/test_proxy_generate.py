"""``/generate``, the native endpoint."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from fake_node import EOS
from proxy_cluster import read_events
from proxy_tokenizers import byte_level

if TYPE_CHECKING:
    import httpx
    from proxy_cluster import Cluster

TOKENS = byte_level()
# With what some take for ends of lines, as does the client of these tests.
TEXT = "hello world, the quick brown\x85\u2028\u2029 fox 😀"


def ids(text: str) -> list[int]:
    return list(TOKENS.encode(text).ids)


def speak(prompt: list[int], index: int) -> list[int]:
    return [*ids(TEXT), EOS]


def generate(client: httpx.Client, sampling: dict[str, Any] | None = None, **body: Any) -> Any:
    prompt = {} if {"text", "input_ids"} & body.keys() else {"text": "hello"}
    response = client.post("/generate", json=prompt | body | {"sampling_params": sampling or {}})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, sampling: dict[str, Any] | None = None, **body: Any) -> list[Any]:
    asked = {"text": "hello", "stream": True, "sampling_params": sampling or {}} | body
    with client.stream("POST", "/generate", json=asked) as response:
        assert response.status_code == 200
        return read_events(response)


def test_the_shape_of_an_answer(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(speak)
    prefill.cached_tokens = 1
    body = generate(cluster.client(), rid="mine")
    assert set(body) == {"text", "output_ids", "meta_info"}
    assert body["text"] == TEXT
    assert body["output_ids"] == [*ids(TEXT), EOS]
    meta = body["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": len(ids("hello")),
        "completion_tokens": len(ids(TEXT)) + 1,
        "cached_tokens": 1,
        "stages": {
            "queue": 0.125,
            "bootstrap": 0.0625,
            "prefill": 1.5,
            "transfer": 0.25,
            "decode": 0.5,
        },
    }


def test_defaults_and_native_names(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    client = cluster.client()
    assert generate(client)["meta_info"]["finish_reason"] == {"type": "length"}
    params = prefill.wait_generate().params
    assert (params.max_tokens, params.temperature) == (128, 1.0)
    generate(client, {"max_new_tokens": 7, "min_new_tokens": 2, "sampling_seed": 9})
    params = prefill.wait_generate(2).params
    assert (params.max_tokens, params.min_tokens, params.seed) == (7, 2, 9)


def test_the_default_length_gives_way_to_the_context(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    generate(cluster.client(), input_ids=[5] * 150)
    assert prefill.wait_generate().params.max_tokens == 50


def test_a_stream_is_cumulative(cluster: Cluster) -> None:
    cluster.pair(speak)
    *events, done = stream(cluster.client())
    assert done == "DONE"
    assert events[-1]["text"] == TEXT
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    for shorter, longer in pairwise(events):
        assert longer["text"].startswith(shorter["text"])
        assert longer["output_ids"][: len(shorter["output_ids"])] == shorter["output_ids"]
        assert shorter["meta_info"]["finish_reason"] is None


def test_an_incremental_stream_adds_up(cluster: Cluster) -> None:
    cluster.pair(speak)
    *events, _ = stream(cluster.client(), incremental=True, return_logprob=True)
    assert "".join(event["text"] for event in events) == TEXT
    assert [t for event in events for t in event["output_ids"]] == [*ids(TEXT), EOS]
    logprobs = [x for e in events for x in e["meta_info"]["output_token_logprobs"]]
    assert [token for _, token, _ in logprobs] == [*ids(TEXT), EOS]
    assert events[-1]["meta_info"]["completion_tokens"] == len(ids(TEXT)) + 1


def test_a_batch_is_a_list_in_order(cluster: Cluster) -> None:
    cluster.pair(lambda prompt, index: [prompt[0] + 100 * index, EOS])
    client = cluster.client()
    body = generate(client, input_ids=[[10], [11], [12]], rid="b")
    assert [r["output_ids"] for r in body] == [[10, EOS], [11, EOS], [12, EOS]]
    assert [r["meta_info"]["id"] for r in body] == ["b_0", "b_1", "b_2"]
    assert isinstance(generate(client, input_ids=[[10]]), list)
    assert len(generate(client, text=["hello", "world"])) == 2
    body = generate(client, {"n": 2}, input_ids=[10])
    assert [r["output_ids"] for r in body] == [[10, EOS], [110, EOS]]
    *events, _ = stream(client, {"n": 2}, text=None, input_ids=[[10], [11]])
    last = {event["index"]: event["output_ids"] for event in events}
    assert last == {0: [10, EOS], 1: [110, EOS], 2: [11, EOS], 3: [111, EOS]}


def test_each_prompt_may_have_its_own_sampling_and_name(cluster: Cluster) -> None:
    cluster.pair()
    asked = {
        "input_ids": [[5], [6]],
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        "rid": ["a", "b"],
    }
    body = cluster.client().post("/generate", json=asked).json()
    assert [len(r["output_ids"]) for r in body] == [1, 2]
    assert [r["meta_info"]["id"] for r in body] == ["a", "b"]


@pytest.mark.parametrize("stop", ["quick", ["nothing", "quick"]])
def test_stop_strings(cluster: Cluster, stop: Any) -> None:
    cluster.pair(speak)
    body = generate(cluster.client(), {"stop": stop})
    assert body["text"] == "hello world, the "
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "quick"}
    assert TOKENS.decode(body["output_ids"]).endswith("quick")


def test_log_probabilities(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(lambda p, i: ids("hello world"))
    client = cluster.client()
    count = len(ids("hello world"))
    sampling = {"max_new_tokens": count}
    meta = generate(client, sampling, return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == []
    expected = [[-t / 100, t, TOKENS.decode([t])] for t in ids("hello world")]
    assert meta["output_token_logprobs"] == expected
    assert "output_top_logprobs" not in meta
    assert prefill.wait_generate().params.prompt_logprobs_start is None

    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = generate(client, sampling, input_ids=[40, 41, 42], **asked)["meta_info"]
    logprobs = [[logprob, token] for logprob, token, _ in meta["input_token_logprobs"]]
    assert logprobs == [[None, 40], [-0.41, 41], [-0.42, 42]]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * count
    assert meta["input_top_logprobs"][0] is None

    meta = generate(client, sampling, input_ids=[40, 41, 42], **asked | {"logprob_start_len": 2})
    assert [t for _, t, _ in meta["meta_info"]["input_token_logprobs"]] == [42]


def test_no_new_tokens_scores_the_prompt(cluster: Cluster) -> None:
    cluster.pair()
    asked = {"input_ids": [40, 41], "return_logprob": True, "logprob_start_len": 0}
    body = generate(cluster.client(), {"max_new_tokens": 0}, **asked)
    assert (body["text"], body["output_ids"]) == ("", [])
    assert body["meta_info"]["completion_tokens"] == 0
    assert len(body["meta_info"]["input_token_logprobs"]) == 2


def test_a_fault_of_the_proxy_is_an_error_and_no_hang(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(self: object, token_id: int) -> bytes:
        raise RuntimeError("a bug")

    prefill, _ = cluster.pair()
    client = cluster.client()
    monkeypatch.setattr("pd.proxy.detokenizer.TokenTable.token_bytes", burst)
    response = client.post("/generate", json={"text": "hello"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal"
    assert "a bug" not in response.text
    prefill.wait_abort(prefill.wait_generate().room)


def test_what_the_prefill_node_knows_is_waited_for(cluster: Cluster) -> None:
    """Two connections have no common order: the decode node may end before token 1 arrives."""
    import threading

    prefill, decode = cluster.pair(speak)
    prefill.auto = False
    prefill.cached_tokens = 1
    client = cluster.client()

    def late() -> None:
        request = prefill.wait_generate()
        decode.wait_generate()
        threading.Event().wait(0.1)
        prefill.reply(request)

    thread = threading.Thread(target=late)
    thread.start()
    body = generate(client)
    thread.join()
    assert body["text"] == TEXT
    assert body["meta_info"]["cached_tokens"] == 1
