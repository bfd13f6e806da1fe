"""``/generate``, the native endpoint."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from fake_node import EOS, FakeNode, wait_until
from proxy_cluster import read_events
from proxy_tokenizers import byte_level

from pd.core.messages import Finish
from pd.proxy.requests.native import GenerateRequest

if TYPE_CHECKING:
    import httpx
    from proxy_cluster import Cluster

    from pd.proxy.server import ProxyThread

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
    assert generate(client)["meta_info"]["finish_reason"] == {"type": "length", "length": 128}
    params = prefill.wait_generate().params
    assert (params.max_tokens, params.temperature) == (128, 1.0)
    generate(client, {"max_new_tokens": 7, "min_new_tokens": 2, "sampling_seed": 9})
    params = prefill.wait_generate(2).params
    assert (params.max_tokens, params.min_tokens, params.seed) == (7, 2, 9)


def test_parameters_of_a_batch_are_read_once(cluster: Cluster) -> None:
    body = {"input_ids": [[5], [6], [7]], "sampling_params": {"logit_bias": {"5": 1}}}
    asked = GenerateRequest.parse(json.dumps(body).encode())
    assert len({id(options.sampling) for options in asked.split_options(3)}) == 1
    prefill, _ = cluster.pair()
    answers = cluster.client().post("/generate", json=body).json()
    assert len(answers) == 3
    params = [prefill.wait_generate(number).params for number in (1, 2, 3)]
    assert [p.logit_bias for p in params] == [{5: 1.0}] * 3
    assert len({p.seed for p in params}) == 3


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


def test_each_prompt_may_have_its_own_log_probabilities(cluster: Cluster) -> None:
    """As in SGLang."""
    cluster.pair()
    asked = {
        "input_ids": [[5, 6, 7], [8, 9], [10]],
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": [True, False, True],
        "logprob_start_len": [1, -1, -1],
        "top_logprobs_num": [2, 0, 0],
    }
    client = cluster.client()
    metas = [answer["meta_info"] for answer in client.post("/generate", json=asked).json()]
    assert [len(m.get("output_token_logprobs", ())) for m in metas] == [2, 0, 2]
    assert [len(m.get("input_token_logprobs", ())) for m in metas] == [2, 0, 0]
    assert [len(m.get("output_top_logprobs", ())) for m in metas] == [2, 0, 0]
    assert "output_token_logprobs" not in metas[1]
    with client.stream("POST", "/generate", json=asked | {"stream": True}) as response:
        *events, _ = read_events(response)
    last = {event["index"]: event for event in events}
    assert [set(last[i]["meta_info"]) for i in range(3)] == [set(meta) for meta in metas]


@pytest.mark.parametrize("stop", ["quick", ["nothing", "quick"]])
def test_stop_strings(cluster: Cluster, stop: Any) -> None:
    cluster.pair(speak)
    body = generate(cluster.client(), {"stop": stop})
    assert body["text"] == "hello world, the "
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "quick"}
    assert TOKENS.decode(body["output_ids"]).endswith("quick")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_patterns(cluster: Cluster, *, is_streamed: bool) -> None:
    """As SGLang, ``matched`` shows the pattern."""
    cluster.pair(speak)
    sampling = {"stop_regex": "q[a-z]+k", "stop": "nothing"}
    if is_streamed:
        *_, body, _ = stream(cluster.client(), sampling)
    else:
        body = generate(cluster.client(), sampling)
    assert body["text"] == "hello world, the "
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "q[a-z]+k"}
    assert TOKENS.decode(body["output_ids"]).endswith("quick")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a*", "matches the empty text"),
        (["a", "^b"], "an anchor"),
        (7, "stop_regex must be a regular expression or a list of them, not 7"),
        ("a" * 2000, "at most 1024 characters in all, not 2000"),
    ],
)
@pytest.mark.parametrize("endpoint", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_stop_patterns_are_checked(
    cluster: Cluster, endpoint: str, value: object, message: str
) -> None:
    cluster.pair(speak)
    body: dict[str, Any]
    if endpoint == "/generate":
        body = {"text": "hello", "sampling_params": {"stop_regex": value}}
    elif endpoint == "/v1/completions":
        body = {"prompt": "hello", "stop_regex": value}
    else:
        body = {"messages": [{"role": "user", "content": "hello"}], "stop_regex": value}
    response = cluster.client().post(endpoint, json=body)
    assert response.status_code == 400, response.text
    assert message in response.text


def test_log_probabilities(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(lambda p, i: ids("hello world"))
    client = cluster.client()
    count = len(ids("hello world"))
    sampling = {"max_new_tokens": count}
    meta = generate(client, sampling, return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == []
    expected = [[-t / 100, t, TOKENS.decode([t])] for t in ids("hello world")]
    assert meta["output_token_logprobs"] == expected
    assert meta["output_token_logprobs_length"] == count
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


@pytest.mark.parametrize("start", [{}, {"logprob_start_len": -1}, {"logprob_start_len": 0}])
def test_no_new_tokens_scores_the_prompt(cluster: Cluster, start: dict[str, int]) -> None:
    """Without a start, the whole prompt is meant, as in SGLang."""
    cluster.pair()
    asked: dict[str, Any] = {"input_ids": [40, 41], "return_logprob": True} | start
    body = generate(cluster.client(), {"max_new_tokens": 0}, **asked)
    assert (body["text"], body["output_ids"]) == ("", [])
    assert body["meta_info"]["completion_tokens"] == 0
    assert len(body["meta_info"]["input_token_logprobs"]) == 2


@pytest.mark.one_process("replaces a function of the proxy")
def test_a_fault_of_the_proxy_is_an_error_and_no_hang(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(self: object, token_id: int) -> bytes:
        raise RuntimeError("a bug")

    prefill, _ = cluster.pair()
    client = cluster.client()
    monkeypatch.setattr("pd.proxy.text.detokenizer.TokenTable.get_bytes", burst)
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


LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}


def one_by_one(cluster: Cluster, **body: Any) -> tuple[list[Any], Any]:
    """Events of a stream of six tokens with an event for each, and the same answer as a whole."""
    node = cluster.node("unified", auto=False)
    client = cluster.client()
    body |= LOGPROBS | {"input_ids": [40, 41], "sampling_params": {"max_new_tokens": 6}}

    def say(position: int, more: bool) -> None:
        node.say(
            node.generates[-1],
            [50 + position],
            position=position,
            logprobs=FakeNode.logprobs([50 + position], 2),
            prompt_logprobs=FakeNode.logprobs([40, 41], 2) if position == 0 else None,
            finish=None if more else Finish("length"),
        )

    events = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (node.wait_generate(), say(0, True)))
        with client.stream("POST", "/generate", json=body | {"stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) < 6:
                        say(len(events), len(events) < 5)
        whole = pool.submit(lambda: client.post("/generate", json=body).json())
        node.wait_generate(2)
        for position in range(6):
            say(position, position < 5)
        return events, whole.result()


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_has_the_prompts_logprobs_in_its_first_and_its_last_event(
    cluster: Cluster, incremental: bool
) -> None:
    events, whole = one_by_one(cluster, incremental=incremental)
    metas = [event["meta_info"] for event in events]
    assert len(metas) == 6
    for name in ("input_token_logprobs", "input_top_logprobs"):
        assert metas[0][name] == metas[-1][name] == whole["meta_info"][name]
        assert len(metas[0][name]) == 2
        assert not any(name in meta for meta in metas[1:-1])


@pytest.mark.parametrize("name", ["output_token_logprobs", "output_top_logprobs"])
def test_logprobs_of_the_output_are_streamed_once_and_once_more_as_a_whole(
    cluster: Cluster, name: str
) -> None:
    events, whole = one_by_one(cluster)
    *parts, last = [event["meta_info"][name] for event in events]
    assert [len(part) for part in parts] == [1] * 5
    assert last == whole["meta_info"][name]
    assert [entry for part in parts for entry in part] == last[:5]
    assert [event["output_ids"] for event in events] == [
        [50, 51, 52, 53, 54, 55][: i + 1] for i in range(6)
    ]
    assert events[-1]["text"] == whole["text"]


@pytest.mark.one_process("reads the dispatcher's state")
def test_the_first_event_waits_for_the_prompts_logprobs(cluster: Cluster) -> None:
    prefill, decode = cluster.pair(auto=False)
    proxy = cluster.proxy()
    client = cluster.client(proxy)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream, client, {"max_new_tokens": 3}, **LOGPROBS)
        request = prefill.wait_generate()
        entries = FakeNode.logprobs([7, 8], 2)
        decode.say(request, [7, 8], logprobs=entries)  # token 1 is in the decode node's first too
        wait_until(lambda: bool(held(proxy)))
        asked = FakeNode.logprobs(ids("hello"), 2)
        prefill.say(request, [7], logprobs=entries[:1], prompt_logprobs=asked)
        decode.say(
            request, [9], position=2, logprobs=FakeNode.logprobs([9], 2), finish=Finish("length")
        )
        *events, _ = reading.result()
    assert [t for _, t, _ in events[0]["meta_info"]["input_token_logprobs"]] == ids("hello")
    assert events[-1]["output_ids"] == [7, 8, 9]


def held(proxy: ProxyThread) -> list[Any]:
    """Choices whose tokens wait for log probabilities of the prompt."""
    assert proxy.proxy is not None
    jobs = list(proxy.proxy._dispatcher.jobs)
    return [choice for job in jobs for g in job.generations for choice in g.held]


def test_large_events_of_a_cumulative_stream_are_fewer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.proxy.api.event_stream.FREE_EVENT_BYTES", 100)
    monkeypatch.setattr("pd.proxy.api.event_stream.CUMULATIVE_BYTES_PER_SECOND", 1000)
    cluster.pair(speak)
    client = cluster.client()
    *events, _ = stream(client)
    assert len(events) <= 3
    assert events[-1]["text"] == TEXT
    *events, _ = stream(client, incremental=True)
    assert "".join(event["text"] for event in events) == TEXT
