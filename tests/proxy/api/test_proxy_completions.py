"""``/v1/completions``: shapes, streams, n, echo, log probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fake_node import EOS
from msgspec.structs import asdict
from proxy_cluster import read_events
from proxy_tokenizers import byte_level

from pd.core.sampling_params import SamplingDefaults

if TYPE_CHECKING:
    import httpx
    from proxy_cluster import Cluster

PATH = "/v1/completions"
TOKENS = byte_level()


def ids(text: str) -> list[int]:
    return list(TOKENS.encode(text).ids)


def says(text: str, end: bool = True) -> Any:
    """An answer function: always this text."""
    return lambda prompt, index: ids(text) + [EOS] * end


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"prompt": "hello"} | body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def stream(client: httpx.Client, **body: Any) -> list[Any]:
    with client.stream("POST", PATH, json={"prompt": "hello", "stream": True} | body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return read_events(response)


def test_the_shape_and_usage_of_an_answer(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(says("the quick brown fox 😀"))
    prefill.cached_tokens = 0
    body = complete(cluster.client(), model="fake", max_tokens=50)
    answer_tokens = len(ids("the quick brown fox 😀")) + 1
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "text": "the quick brown fox 😀",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "matched_stop": EOS,
        "token_ids": None,
        "prompt_token_ids": None,
        "prompt_logprobs": None,
    }
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["usage"] == {
        "prompt_tokens": len(ids("hello")),
        "completion_tokens": answer_tokens,
        "total_tokens": len(ids("hello")) + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "reasoning_tokens": 0,
    }


def test_both_nodes_get_their_part_at_once(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    asked = {
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": -1,
        "min_p": 0.125,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": 42,
        "stop_token_ids": [9],
        "logit_bias": {"7": -100},
        "ignore_eos": True,
        "priority": 3,
        "cache_salt": "tenant",
        "timeout": 30,
        "rid": "mine",
        "user": "me",
        "store": True,
        "metadata": {},
        "service_tier": "auto",
        "best_of": 1,
    }
    assert complete(cluster.client(), **asked)["id"] == "mine"
    p, d = prefill.wait_generate(), decode.wait_generate()
    assert p.room == d.room
    assert len(p.room) == 16
    assert (p.peer, d.peer) == (decode.instance_id, prefill.instance_id)
    assert d.peer_bootstrap == f"http://boot.{prefill.instance_id}"
    assert p.params == d.params
    assert np.frombuffer(p.token_ids, "<i4").tolist() == [5, 6, 7]
    assert (p.priority, p.namespace, p.timeout) == (3, "tenant", 30)
    params = p.params
    assert (params.max_tokens, params.min_tokens, params.n, params.seed) == (9, 2, 1, 42)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 0, 0.125)
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1)
    assert (params.repetition_penalty, params.logit_bias) == (1.5, {7: -100.0})
    assert (params.stop_token_ids, params.ignore_eos) == ((9,), True)


RECOMMENDED = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
}


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_what_the_model_recommends_is_the_default_of_v1_alone(
    cluster: Cluster, endpoint: str
) -> None:
    prefill, decode = cluster.pair(sampling_defaults=RECOMMENDED)
    client = cluster.client()
    defaults = asdict(SamplingDefaults()) if endpoint == "/generate" else RECOMMENDED
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    cases: list[dict[str, Any]] = [{}, dict.fromkeys(RECOMMENDED), {"temperature": 0.0}, neutral]
    for number, asked in enumerate(cases, start=1):
        body: dict[str, Any] = {"max_tokens": 2} | asked
        if endpoint == "/generate":
            body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2} | asked}
        elif "chat" in endpoint:
            body["messages"] = [{"role": "user", "content": "hi"}]
        else:
            body["prompt"] = "hi"
        response = client.post(endpoint, json=body)
        assert response.status_code == 200, response.text
        said = {name: value for name, value in asked.items() if value is not None}
        for node in (prefill, decode):
            params = node.wait_generate(number).params
            assert {name: getattr(params, name) for name in RECOMMENDED} == defaults | said


def test_requests_without_a_seed_get_different_ones(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    client = cluster.client()
    for _ in range(2):
        complete(client)
    assert prefill.wait_generate(1).params.seed != prefill.wait_generate(2).params.seed


def test_prompts_of_a_batch_have_seeds_of_their_own(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    complete(cluster.client(), prompt=["hello", "hello"])
    assert prefill.wait_generate(1).params.seed != prefill.wait_generate(2).params.seed
    complete(cluster.client(), prompt=["hello", "hello"], seed=7)
    assert [prefill.wait_generate(number).params.seed for number in (3, 4)] == [7, 7]


@pytest.mark.parametrize(
    ("seed", "used"),
    [
        (7, 7),
        (7.0, 7),
        (-2, (1 << 63) - 2),
        (-(1 << 63), 0),
        ((1 << 63) - 1, (1 << 63) - 1),
    ],
)
def test_any_signed_integer_of_64_bits_is_a_seed(cluster: Cluster, seed: float, used: int) -> None:
    prefill, _ = cluster.pair()
    client = cluster.client()
    complete(client, seed=seed)
    for name in ("sampling_seed", "seed"):
        asked = {"input_ids": [5], "sampling_params": {name: seed}}
        assert client.post("/generate", json=asked).status_code == 200
    assert [prefill.wait_generate(number).params.seed for number in (1, 2, 3)] == [used] * 3


def test_minus_one_is_no_seed(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    complete(cluster.client(), prompt=["hello", "hello"], seed=-1)
    assert prefill.wait_generate(1).params.seed != prefill.wait_generate(2).params.seed


def test_a_number_without_a_fraction_is_an_integer(cluster: Cluster) -> None:
    """As in JSON Schema: some clients write all numbers alike."""
    prefill, _ = cluster.pair()
    client = cluster.client()
    asked = {
        "prompt": [5.0, 6],
        "max_tokens": 3.0,
        "n": 2.0,
        "top_k": 5.0,
        "logprobs": 1.0,
        "stop_token_ids": [9.0],
    }
    assert complete(client, **asked)["usage"]["completion_tokens"] == 6
    request = prefill.wait_generate()
    assert np.frombuffer(request.token_ids, "<i4").tolist() == [5, 6]
    params = request.params
    numbers = [params.max_tokens, params.n, params.top_k, *params.stop_token_ids]
    assert numbers == [3, 2, 5, 9]
    assert all(type(number) is int for number in numbers)
    answer = client.post("/detokenize", json={"tokens": [float(i) for i in ids("hello")]})
    assert answer.json()["text"] == "hello"


def test_defaults(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    body = complete(cluster.client())
    params = prefill.wait_generate().params
    assert (params.max_tokens, params.temperature, params.top_p, params.n) == (16, 1.0, 1.0, 1)
    assert body["choices"][0]["finish_reason"] == "length"
    assert prefill.wait_generate().timeout is None


def test_one_token_needs_no_decode_node(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    assert complete(cluster.client(), max_tokens=1)["usage"]["completion_tokens"] == 1
    assert prefill.wait_generate().peer == ""
    assert decode.generates == []


def test_a_unified_node_does_everything(cluster: Cluster) -> None:
    unified = cluster.node("unified", says("hello world"))
    body = complete(cluster.client(), max_tokens=50)
    assert body["choices"][0]["text"] == "hello world"
    assert unified.wait_generate().peer == ""


def test_the_stop_token_id_is_named_and_not_shown(cluster: Cluster) -> None:
    cluster.pair(says("hello world"))
    body = complete(cluster.client(), stop_token_ids=[EOS], max_tokens=50)
    (choice,) = body["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("hello world", EOS)


def test_a_stream_adds_up_to_the_answer(cluster: Cluster) -> None:
    cluster.pair(says("über naïve 漢字 😀👩‍👧!"))
    client = cluster.client()
    events = stream(client, max_tokens=100, stream_options={"include_usage": True})
    assert events[-1] == "DONE"
    *chunks, last = events[:-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "über naïve 漢字 😀👩‍👧!"
    assert all("�" not in c["choices"][0]["text"] for c in chunks)
    assert [c["usage"] for c in chunks] == [None] * len(chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"
    assert last["choices"] == []
    assert last["usage"] == complete(client, max_tokens=100)["usage"]
    assert len({event["id"] for event in events[:-1]}) == 1


def test_usage_so_far_in_every_chunk(cluster: Cluster) -> None:
    cluster.pair()
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(cluster.client(), max_tokens=9, stream_options=options)[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 9
    assert {event["usage"]["prompt_tokens"] for event in events} == {
        events[-1]["usage"]["prompt_tokens"]
    }


def test_usage_so_far_is_what_the_chunks_before_have_brought(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(lambda prompt, index: [prompt[0]] * 5)
    prefill.cached_tokens = 1
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": [[10], [11, 12], [13, 14]], "n": 2, "return_token_ids": True}
    events = stream(cluster.client(), **asked, max_tokens=5, stream_options=options)[:-1]
    told = 0
    for event in events[:-1]:
        told += len(event["choices"][0]["token_ids"])
        assert event["usage"]["completion_tokens"] == told
    assert told == 30
    assert {event["usage"]["prompt_tokens"] for event in events} == {5}
    assert events[-1]["usage"]["completion_tokens"] == 30
    # The prefill node's word may come after the last token.
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_usage_is_not_streamed_unless_asked_for(cluster: Cluster) -> None:
    cluster.pair()
    assert all("usage" not in event for event in stream(cluster.client())[:-1])


def test_prompts_and_choices_are_numbered_prompt_first(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(lambda prompt, index: [prompt[0] + 50 * index] * 3)
    client = cluster.client()
    prompts = [[10], [11, 12], [13]]
    body = complete(client, prompt=prompts, n=2, max_tokens=3, return_token_ids=True)
    expected = {i: [prompts[i // 2][0] + 50 * (i % 2)] * 3 for i in range(6)}
    assert {c["index"]: c["token_ids"] for c in body["choices"]} == expected
    assert [c["index"] for c in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 18
    # The choices of a prompt share one request, so its KV is computed and moved once.
    assert len(prefill.generates) == 3
    got: dict[int, list[int]] = {}
    for event in stream(client, prompt=prompts, n=2, max_tokens=3, return_token_ids=True)[:-1]:
        (choice,) = event["choices"]
        begun = choice["index"] in got
        assert choice["prompt_token_ids"] == (None if begun else prompts[choice["index"] // 2])
        got.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert got == expected
    assert [c["prompt_token_ids"] for c in body["choices"]] == [p for p in prompts for _ in "ab"]


def test_lists_of_strings_are_several_prompts(cluster: Cluster) -> None:
    cluster.pair(lambda prompt, index: prompt)
    body = complete(cluster.client(), prompt=["hello", "world"], max_tokens=1)
    assert len(body["choices"]) == 2


def test_special_tokens_are_added_to_text_prompts_once(cluster: Cluster, tmp_path: Any) -> None:
    byte_level(with_bos=True).save(str(tmp_path / "tokenizer.json"))
    prefill, _ = cluster.pair()
    client = cluster.client(tokenizer=str(tmp_path))
    complete(client)
    complete(client, add_special_tokens=False)
    first, second = (np.frombuffer(prefill.wait_generate(i).token_ids, "<i4") for i in (1, 2))
    assert first.tolist() == [0, *ids("hello")]
    assert second.tolist() == ids("hello")


def test_a_long_prompt_is_tokenized_like_a_short_one(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(context_length=10**6, pages={"total": 10**6})
    text = "hello world " * 2000
    complete(cluster.client(), prompt=text)
    assert np.frombuffer(prefill.wait_generate().token_ids, "<i4").tolist() == ids(text)


def test_skip_special_tokens_can_be_turned_off(cluster: Cluster) -> None:
    cluster.pair(lambda prompt, index: [0, *ids("hello")])
    client = cluster.client()
    assert complete(client, max_tokens=10)["choices"][0]["text"] == "hello"
    shown = complete(client, max_tokens=10, skip_special_tokens=False)["choices"][0]["text"]
    assert shown == "<s>hello"


class TestStopStrings:
    def test_found_across_tokens_and_told_to_both_nodes(self, cluster: Cluster) -> None:
        prefill, decode = cluster.pair(says("hello world, the quick brown fox", end=False))
        client = cluster.client()
        body = complete(client, stop=["d, the q", "zzz"], max_tokens=50)
        (choice,) = body["choices"]
        assert choice["text"] == "hello worl"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "d, the q")
        # Usage counts through the token that completed it, and no further.
        tokens = ids("hello world, the quick brown fox")
        count = next(i for i in range(99) if "d, the q" in TOKENS.decode(tokens[:i]))
        assert body["usage"]["completion_tokens"] == count
        room = prefill.wait_generate().room
        for node in (prefill, decode):
            assert node.wait_abort(room, index=0).to == node.instance_id

    def test_nothing_of_it_is_ever_streamed(self, cluster: Cluster) -> None:
        cluster.pair(says("hello world, the quick brown fox", end=False))
        events = stream(cluster.client(), stop="world, the", max_tokens=50)
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "hello "

    def test_what_only_began_like_one_is_shown_at_the_end(self, cluster: Cluster) -> None:
        cluster.pair(says("hello wor"))
        body = complete(cluster.client(), stop="world", max_tokens=50)
        assert body["choices"][0]["text"] == "hello wor"

    def test_one_choice_stops_while_the_other_goes_on(self, cluster: Cluster) -> None:
        texts = ["hello world", "hello wide world and so on"]
        prefill, decode = cluster.pair(lambda prompt, index: [*ids(texts[index]), EOS])
        body = complete(cluster.client(), stop="wide", n=2, max_tokens=50)
        assert [c["text"] for c in body["choices"]] == ["hello world", "hello "]
        room = prefill.wait_generate().room
        assert decode.wait_abort(room, index=1)
        assert [a.index for a in decode.aborts] == [1]

    def test_min_tokens_come_first(self, cluster: Cluster) -> None:
        cluster.pair(says("a b a b a b", end=False))
        body = complete(cluster.client(), stop="b", min_tokens=4, max_tokens=50)
        assert body["choices"][0]["text"] == "a b a "


class TestLogprobs:
    def test_lists_run_parallel_to_the_tokens(self, cluster: Cluster) -> None:
        cluster.pair(says("hello 😀!"))
        (choice,) = complete(cluster.client(), logprobs=2, max_tokens=50)["choices"]
        logprobs, tokens = choice["logprobs"], [*ids("hello 😀!"), EOS]
        assert {len(values) for values in logprobs.values()} == {len(tokens)}
        assert logprobs["token_logprobs"] == [-t / 100 for t in tokens]
        for token, text, top in zip(
            tokens, logprobs["tokens"], logprobs["top_logprobs"], strict=True
        ):
            assert top[text] == -token / 100
            assert len(top) == 2
        starts = [choice["text"][offset:] for offset in logprobs["text_offset"]]
        assert starts[0] == "hello 😀!"
        assert starts[-2] == "!"
        assert starts[-1] == ""

    def test_half_characters_stay_distinct(self, cluster: Cluster) -> None:
        cluster.pair(says("😀"))
        (choice,) = complete(cluster.client(), logprobs=0, max_tokens=50)["choices"]
        parts = choice["logprobs"]["tokens"][:-1]
        assert all(part.startswith("bytes:\\x") for part in parts) or parts == ["😀"]

    def test_streams_carry_each_token_once(self, cluster: Cluster) -> None:
        cluster.pair(says("hello world, the quick brown fox"))
        client = cluster.client()
        whole = complete(client, logprobs=1, max_tokens=50)["choices"][0]["logprobs"]
        parts = [
            event["choices"][0]["logprobs"]
            for event in stream(client, logprobs=1, max_tokens=50)[:-1]
        ]
        for name, values in whole.items():
            assert [value for part in parts for value in part[name]] == values

    def test_echo_puts_the_prompt_in_front(self, cluster: Cluster) -> None:
        prefill, _ = cluster.pair(says(" world"))
        client = cluster.client()
        prompt = "hello, the"
        (choice,) = complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=9)["choices"]
        assert choice["text"] == prompt + " world"
        logprobs = choice["logprobs"]
        count = len(ids(prompt))
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:count] == [-t / 100 for t in ids(prompt)[1:]]
        assert "".join(logprobs["tokens"][:count]) == prompt
        assert logprobs["text_offset"][count] == len(prompt)
        assert prefill.wait_generate().params.prompt_logprobs_start == 0
        events = stream(client, prompt=prompt, echo=True, max_tokens=9)[:-1]
        assert "".join(e["choices"][0]["text"] for e in events) == prompt + " world"

    @pytest.mark.parametrize("prompt", ["hello, the", [5, 6, 7]])
    def test_max_tokens_0_scores_the_prompt_alone(self, cluster: Cluster, prompt: Any) -> None:
        prefill, decode = cluster.pair()
        client = cluster.client()
        asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
        body = complete(client, **asked)
        tokens = ids(prompt) if isinstance(prompt, str) else prompt
        (choice,) = body["choices"]
        assert choice["text"] == (prompt if isinstance(prompt, str) else TOKENS.decode(prompt))
        assert choice["logprobs"]["token_logprobs"] == [None, *(-t / 100 for t in tokens[1:])]
        assert body["usage"]["completion_tokens"] == 0
        assert choice["finish_reason"] == "length"
        assert prefill.wait_generate().params.max_tokens == 1
        assert decode.generates == []
        (event,) = stream(client, **asked)[:-1]
        assert event["choices"][0]["logprobs"] == choice["logprobs"]

    def test_prompt_logprobs_that_do_not_come_are_an_error(self, cluster: Cluster) -> None:
        prefill, _ = cluster.pair()
        prefill.logprobs = lambda tokens, top: []  # type: ignore[method-assign]
        asked = {"prompt": [5, 6], "echo": True, "logprobs": 0, "max_tokens": 0}
        prefill.auto = False
        client = cluster.client()
        import threading

        from pd.core.messages import Finish, TokenLogprobs

        def answer() -> None:
            request = prefill.wait_generate()
            finish = Finish("length")
            prefill.say(request, [5], finish=finish, logprobs=[TokenLogprobs(5, -1.0)])

        threading.Thread(target=answer).start()
        response = client.post(PATH, json=asked)
        assert response.status_code == 502
        assert "0 prompt tokens, not 2" in response.text
