"""Fields of requests and answers that clients of vLLM and SGLang know, beside OpenAI's."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fake_node import EOS
from hypothesis import given
from hypothesis import strategies as st
from proxy_cluster import read_events
from test_proxy_chat import HELLO, chat, prompt_of
from test_proxy_completions import TOKENS, complete, ids, says, stream

from pd.proxy.requests.openai import CompletionRequest

if TYPE_CHECKING:
    from proxy_cluster import Cluster

    from pd.core.grammar import Grammar


def grammar_of(cluster: Cluster, count: int = 1) -> Grammar:
    grammar = cluster.prefill[0].wait_generate(count).params.grammar
    assert grammar is not None
    return grammar


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"regex": "a+b"}, "regex", "a+b"),
        ({"guided_regex": "a+b"}, "regex", "a+b"),
        ({"structured_outputs": {"regex": "a+b"}}, "regex", "a+b"),
        ({"json_schema": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"json_schema": "$$ANY$$"}, "json_schema", "{}"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
        ({"guided_choice": ["a", 'b"\\', "ä\n"]}, "ebnf", 'root ::= "a" | "b\\"\\\\" | "ä\\x0a"'),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "ebnf", 'root ::= "yes" | "no"'),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
    ],
)
def test_constraints_by_every_name(
    cluster: Cluster, fields: dict[str, Any], kind: str, text: str
) -> None:
    cluster.pair(says("x"))
    client = cluster.client()
    complete(client, **fields)
    assert grammar_of(cluster).kind == kind
    assert grammar_of(cluster).text == text
    chat(client, **fields)
    assert grammar_of(cluster, 2) == grammar_of(cluster)


def test_bad_words_become_the_tokens_of_both_spellings(cluster: Cluster) -> None:
    cluster.pair(says("x"))
    client = cluster.client()
    fields: dict[str, Any] = {"bad_words": ["fox", " the quick"], "allowed_token_ids": [7, 5]}
    complete(client, **fields)
    sequences = {tuple(ids(text)) for text in ("fox", " fox", " the quick")}
    spaced, plain = tuple(ids(" fox")), tuple(ids("fox"))
    if len(spaced) != len(plain) or spaced[0] == plain[0]:
        sequences.remove(spaced)
    params = cluster.prefill[0].wait_generate().params
    assert (set(params.bad_sequences), params.allowed_token_ids) == (sequences, (7, 5))
    chat(client, **fields)
    native = {"text": "a", "sampling_params": fields}
    assert client.post("/generate", json=native).status_code == 200
    for count in (2, 3):
        again = cluster.prefill[0].wait_generate(count).params
        assert again.bad_sequences == params.bad_sequences
        assert again.allowed_token_ids == params.allowed_token_ids


def test_an_error_about_a_constraint_names_the_clients_field(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(auto=False)
    client = cluster.client()
    asked = {"prompt": "a", "guided_choice": ["b"]}
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.post, "/v1/completions", json=asked)
        request = prefill.wait_generate()
        prefill.fail(request, "invalid_request", "ebnf does not compile", param="ebnf")
        response = asking.result(20)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["message"], error["param"]) == ("guided_choice does not compile", "guided_choice")


def test_options_of_a_structural_tag_are_honoured(cluster: Cluster) -> None:
    cluster.pair(says("x"))
    client = cluster.client()
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<n>", "schema": SCHEMA, "end": "</n>"}],
        "triggers": ["<n>"],
    }
    for number, options in enumerate(
        ({}, {"at_least_one": True}, {"at_least_one": False, "stop_after_first": True}), 1
    ):
        chat(client, response_format=tag | options)
        found = json.loads(grammar_of(cluster, number).text)["format"]
        for name in ("at_least_one", "stop_after_first"):
            assert found.get(name, False) is options.get(name, False)


def test_prefixes_are_shared_only_with_the_same_salt_and_key(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(says("x"))
    client = cluster.client()
    fields = [{}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "a"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/generate", {"text": "a"}),
        ("/generate", {"text": "a", "choices": ["b"]}),
    ]
    for path, body in asked:
        for each in fields:
            assert client.post(path, json=body | each).status_code == 200
    namespaces = [request.namespace for request in prefill.generates]
    assert len(namespaces) == len(asked) * len(fields)
    for number in range(len(fields)):
        assert len(set(namespaces[number :: len(fields)])) == 1
    assert namespaces[:2] == ["", "a"]
    assert len(set(namespaces)) == len(fields)


PART = st.text("\x000123:ab", max_size=6)


@given(first=st.tuples(PART, PART), second=st.tuples(PART, PART))
def test_no_two_pairs_of_salt_and_key_have_one_namespace(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    def namespace(salt: str, key: str) -> str:
        given = {"prompt": "a", "cache_salt": salt, "extra_key": key}
        return CompletionRequest.from_object(given).namespace

    assert (namespace(*first) == namespace(*second)) == (first == second)
    # What a client could choose as its salt to get at the prefixes of others.
    assert (namespace(namespace(*first), "") == namespace(*first)) == (
        namespace(*first) == first[0] and not first[1]
    )


def test_what_ended_an_answer(cluster: Cluster) -> None:
    cluster.pair(says("hello world"))
    client = cluster.client()
    (choice,) = complete(client, max_tokens=50)["choices"]
    assert (choice["stop_reason"], choice["matched_stop"]) == (None, EOS)
    (choice,) = complete(client, max_tokens=50, stop="wor")["choices"]
    assert (choice["stop_reason"], choice["matched_stop"]) == ("wor", "wor")
    (choice,) = complete(client, max_tokens=1)["choices"]
    assert (choice["stop_reason"], choice["matched_stop"]) == (None, None)


def test_a_stop_string_may_stay_in_the_text(cluster: Cluster) -> None:
    cluster.pair(says("hello world, the fox"))
    client = cluster.client()
    asked = {"max_tokens": 50, "stop": ["orl", "never"]}
    assert complete(client, **asked)["choices"][0]["text"] == "hello w"
    kept = complete(client, **asked, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "hello worl"
    *chunks, _ = stream(client, **asked, include_stop_str_in_output=True)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "hello worl"
    native = {"text": "hello", "sampling_params": {"stop": "orl", "no_stop_trim": True}}
    assert client.post("/generate", json=native).json()["text"] == "hello worl"


def test_a_stop_token_may_stay_in_the_text(cluster: Cluster) -> None:
    cluster.pair(says("ab"))
    native: dict[str, Any] = {
        "text": "hello",
        "sampling_params": {"no_stop_trim": True, "skip_special_tokens": False},
    }
    answer = cluster.client().post("/generate", json=native).json()
    assert answer["text"] == "ab" + TOKENS.decode([EOS], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(None, 3)),
        ({"truncate_prompt_tokens": 100}, slice(None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 150}, slice(-50, None)),
    ],
)
def test_a_prompt_may_be_cut(cluster: Cluster, fields: dict[str, Any], kept: slice) -> None:
    prefill, _ = cluster.pair()
    prompt = list(range(5, 75))
    complete(cluster.client(), prompt=prompt, **{"max_tokens": 2, **fields})
    found = np.frombuffer(prefill.wait_generate().token_ids, "<i4").tolist()
    assert found == prompt[kept]


def test_the_echo_of_a_cut_prompt_is_what_is_left(cluster: Cluster) -> None:
    cluster.pair(says("x"))
    asked = {"prompt": "hello world", "truncate_prompt_tokens": 2, "echo": True, "logprobs": 0}
    (choice,) = complete(cluster.client(), **asked)["choices"]
    left = ids("hello world")[-2:]
    assert choice["text"] == TOKENS.decode(left) + "x"
    assert len(choice["logprobs"]["tokens"]) == len(left) + len(ids("x")) + 1


def test_log_probabilities_of_a_prompt(cluster: Cluster) -> None:
    cluster.pair(says("ab"))
    client = cluster.client()
    prompt = [5, 6, 7]
    body = complete(client, prompt=prompt, max_tokens=4, prompt_logprobs=2)
    (choice,) = body["choices"]
    assert choice["logprobs"] is None
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    # The fake node's likeliest tokens are t, t + 1, …
    assert list(second) == ["6", "7"]
    assert [second[t]["rank"] for t in ("6", "7")] == [1, 2]
    assert second["6"]["logprob"] == -0.06
    assert second["6"]["decoded_token"] == TOKENS.decode([6])
    assert list(third) == ["7", "8"]
    # Fewer of the likeliest tokens beside those of the answer.
    body = complete(client, prompt=prompt, max_tokens=4, prompt_logprobs=0, logprobs=2)
    (choice,) = body["choices"]
    assert [list(p or {}) for p in choice["prompt_logprobs"]] == [[], ["6"], ["7"]]
    assert len(choice["logprobs"]["tokens"]) == len(ids("ab")) + 1
    assert len(choice["logprobs"]["top_logprobs"][0]) == 2
    body = complete(client, prompt=prompt, max_tokens=4, prompt_logprobs=2, logprobs=1)
    assert len(body["choices"][0]["logprobs"]["top_logprobs"][0]) == 1
    body = chat(client, prompt_logprobs=1, max_tokens=4)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert body["choices"][0]["logprobs"] is None


def test_tokens_may_be_named_by_their_ids(cluster: Cluster) -> None:
    cluster.pair(says("ab"))
    client = cluster.client()
    asked = {"max_tokens": 4, "return_tokens_as_token_ids": True}
    logprobs = complete(client, **asked, logprobs=1)["choices"][0]["logprobs"]
    names = [f"token_id:{token}" for token in [*ids("ab"), EOS]]
    assert logprobs["tokens"] == names
    assert [name for entry in logprobs["top_logprobs"] for name in entry] == names
    content = chat(client, **asked, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == names


def test_an_echo_of_token_ids_has_their_special_tokens(cluster: Cluster) -> None:
    cluster.pair(says("x"))
    body = complete(cluster.client(), prompt=[0, *ids("ab"), 1], echo=True, logprobs=0)
    (choice,) = body["choices"]
    assert choice["text"] == "<s>ab</s>x"
    logprobs = choice["logprobs"]
    starts = [choice["text"][start:] for start in logprobs["text_offset"]]
    assert starts[0].startswith("<s>ab")
    assert starts[1].startswith("ab")


def test_the_last_message_may_be_echoed(cluster: Cluster) -> None:
    cluster.pair(says(" world"))
    client = cluster.client()
    messages = [*HELLO, {"role": "assistant", "content": "hello"}]
    asked = {"messages": messages, "continue_final_message": True, "echo": True}
    assert chat(client, **asked)["choices"][0]["message"]["content"] == "hello world"
    with client.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as response:
        *chunks, _ = read_events(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "hello world"
    assert chat(client, echo=True)["choices"][0]["message"]["content"] == " world"


def test_usage_of_a_chat_grows_from_nothing(cluster: Cluster) -> None:
    cluster.pair(says("hello world, the fox"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"messages": HELLO, "stream": True, "stream_options": options}
    with cluster.client().stream("POST", "/v1/chat/completions", json=asked) as response:
        first, *chunks, last, _ = read_events(response)
    assert first["usage"]["completion_tokens"] == 0
    assert first["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in (first, *chunks)]
    assert counts == sorted(set(counts))
    assert counts[-1] == last["usage"]["completion_tokens"]


def test_roles_and_parts_that_templates_know(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(says("x"))
    content = ["a", {"type": "input_text", "text": "b"}, {"type": "text", "text": "c"}]
    chat(cluster.client(), messages=[{"role": "critic", "content": content}])
    assert "<critic>a\nb\nc</critic>" in prompt_of(prefill)


def test_parts_of_other_apis_are_text(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(says("x"))
    content = [
        {"type": "output_text", "text": "a", "annotations": []},
        {"type": "text", "text": None},
        {"type": "refusal", "refusal": "b"},
    ]
    chat(cluster.client(), messages=[{"role": "user", "content": content}])
    assert "<user>a\nb</user>" in prompt_of(prefill)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "critic"])
def test_a_content_that_is_null_or_absent_is_empty(cluster: Cluster, role: str) -> None:
    prefill, _ = cluster.pair(says("x"))
    client = cluster.client()
    for number, message in enumerate(({"role": role, "content": None}, {"role": role}), 1):
        chat(client, messages=[*HELLO, message])
        assert f"<user>hello</user><{role}></{role}>" in prompt_of(prefill, number)


def test_invocations_are_chats_or_completions_by_their_bodies(cluster: Cluster) -> None:
    cluster.pair(says("hello world"))
    client = cluster.client(api_key="s3cret")
    assert client.post("/invocations", json={"prompt": "a"}).status_code == 401
    client.headers["Authorization"] = "Bearer s3cret"

    def asked(**body: Any) -> Any:
        return client.post("/invocations", json=body)

    completed = asked(prompt="a", max_tokens=50).json()
    assert (completed["object"], completed["choices"][0]["text"]) == (
        "text_completion",
        "hello world",
    )
    chatted = asked(messages=HELLO, prompt=None).json()
    assert chatted["object"] == "chat.completion"
    assert chatted["choices"][0]["message"]["content"] == "hello world"
    body = {"messages": HELLO, "stream": True}
    with client.stream("POST", "/invocations", json=body) as response:
        *chunks, done = read_events(response)
    assert done == "DONE"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for wrong, param in (
        ({}, "messages"),
        ({"prompt": ""}, "prompt"),
        ({"messages": HELLO, "prompt": "a"}, "prompt"),
        ({"messages": HELLO, "n": 0}, "n"),
    ):
        answer = asked(**wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_models_are_known_by_their_directory_too(cluster: Cluster) -> None:
    cluster.pair(says("x"), model_path="/models/m")
    client = cluster.client()
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["root"]) == ("fake", "/models/m")
    for name in ("fake", "/models/m", "default", None):
        body = complete(client, model=name)
        assert body["model"] == (name or "fake")
    response = client.post("/v1/completions", json={"prompt": "a", "model": "/models/other"})
    assert response.status_code == 404


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_batches_of_texts_and_names_of_tokens(cluster: Cluster, prefix: str) -> None:
    cluster.pair()
    client = cluster.client()
    texts = ["hello", "the fox", ""]
    asked = {"prompt": texts, "return_token_strs": True}
    answer = client.post(f"{prefix}/tokenize", json=asked).json()
    assert answer["tokens"] == [ids(text) for text in texts]
    assert answer["count"] == [len(ids(text)) for text in texts]
    assert answer["token_strs"] == [TOKENS.encode(text).tokens for text in texts]
    back = client.post(f"{prefix}/detokenize", json={"tokens": answer["tokens"][:2]}).json()
    assert back["text"] == texts[:2]
    one = client.post(f"{prefix}/tokenize", json={"prompt": "hello"}).json()
    assert (one["tokens"], one["token_strs"]) == (ids("hello"), None)
    many = client.post(f"{prefix}/tokenize", json={"prompt": ["a"] * 5000})
    assert many.status_code == 400
    assert "4096" in many.json()["error"]["message"]


def test_values_that_ask_for_nothing_are_accepted(cluster: Cluster) -> None:
    cluster.pair()
    client = cluster.client()
    complete(client, lora_path="", vllm_xargs={})
    native = {"text": "a", "lora_path": "", "image_data": [], "return_prompt_token_ids": False}
    assert client.post("/generate", json=native).status_code == 200
