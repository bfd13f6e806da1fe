"""Every refusal of the contract: status, shape, and a message that names what was wrong."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from proxy_cluster import Cluster

from pd.core.errors import MAX_MESSAGE_CHARACTERS, InvalidRequestError, error_body
from pd.core.grammar import MAX_GRAMMAR_BYTES
from pd.proxy.requests.fields import describe_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
JSON = {"Content-Type": "application/json"}
ANY_TEXT = {"type": "any_text"}
EVEN = {"type": "integer", "multipleOf": 2}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<n>", "schema": EVEN, "end": "</n>"}],
    "triggers": ["<n>"],
}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(model_dir: str) -> Iterator[httpx.Client]:
    with ExitStack() as stack:
        cluster = Cluster(stack, model_dir)
        for node in cluster.pair():
            node.overrides["pages"] = {"total": 40}  # a pool of 160 tokens, a context of 200
        client = cluster.client()
        yield client
        seen = [node.generates for node in cluster.prefill + cluster.decode]
        assert seen == [[], []], "a node saw a request that should have been refused"


@pytest.fixture(scope="module")
def token_client(model_dir: str) -> Iterator[httpx.Client]:
    """A proxy without a tokenizer."""
    with ExitStack() as stack:
        cluster = Cluster(stack, model_dir)
        cluster.pair()
        yield cluster.client(text=False)


def check(response: httpx.Response, status: int, says: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"], error
    assert isinstance(error["type"], str)
    assert isinstance(error["code"], str)
    if param is not None:
        assert error["param"] == param


# Fields that docs/fields.md lists as not supported, each with a value that asks for something and
# one that does not.
UNSUPPORTED: dict[str, tuple[Any, Any]] = {
    "logprob_token_ids": ([5], []),
    "thinking_token_budget": (5, None),
    "custom_params": ({"a": 1}, {}),
    "watermarking": (True, False),
    "return_prompt_text": (True, False),
    "return_routed_experts": (True, False),
}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def completion(**fields: Any) -> tuple[str, Any]:
    return COMPLETIONS, {"prompt": [5, 6]} | fields


def chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"messages": HELLO} | fields


def generate(sampling: Any = None, **fields: Any) -> tuple[str, Any]:
    body: dict[str, Any] = {} if {"text", "input_ids"} & fields.keys() else {"input_ids": [5, 6]}
    if sampling is not None:
        body["sampling_params"] = sampling
    return GENERATE, body | fields


BAD_REQUESTS: list[tuple[tuple[str, Any], str, str | None]] = [
    # types are never converted
    (completion(max_tokens="5"), "max_tokens must be an integer, not '5' (a string)", "max_tokens"),
    (completion(max_tokens=True), "not True (a boolean)", "max_tokens"),
    (completion(max_tokens=5.5), "not 5.5 (a number)", "max_tokens"),
    (completion(temperature="hot"), "'hot'", "temperature"),
    (completion(temperature=False), "False", "temperature"),
    (completion(stream=1), "stream must be a boolean", "stream"),
    (completion(stream="true"), "stream must be a boolean", "stream"),
    (completion(model=5), "model must be a string", "model"),
    (completion(seed=1.5), "seed must be an integer", "seed"),
    (completion(allowed_token_ids=[]), "allowed_token_ids is empty", "allowed_token_ids"),
    (completion(allowed_token_ids=[1000]), "outside the vocabulary of 1000", "allowed_token_ids"),
    (completion(allowed_token_ids=[5] * 1025), "at most 1024 are", "allowed_token_ids"),
    (completion(bad_words="no"), "bad_words must be a list of texts, not 'no'", "bad_words"),
    (completion(bad_words=["no", " "]), "bad_words may not contain an empty text", "bad_words"),
    (completion(bad_words=["x"] * 257), "bad_words has 257 texts; at most 256", "bad_words"),
    (completion(bad_words=["x" * 4097]), "at most 4096 characters in all, not 4097", "bad_words"),
    (completion(bad_words=["zqj" * 400]), "tokens in all; at most 1024", "bad_words"),
    (completion(logit_bias=[1]), "logit_bias must be an object", "logit_bias"),
    (completion(logit_bias={"x": 1}), "'x'", "logit_bias"),
    (completion(logit_bias={"5": "1"}), "'1'", None),
    (completion(stop=5), "stop must be a string or a list of strings", "stop"),
    (completion(stop=["a", 5]), "stop must be", "stop"),
    (completion(stop_token_ids="5"), "a list of integers", "stop_token_ids"),
    (completion(ignore_eos=0), "a boolean", "ignore_eos"),
    (completion(cache_salt=5), "cache_salt must be a string", "cache_salt"),
    (completion(extra_key=["a"]), "extra_key must be a string", "extra_key"),
    *(
        (asked(**{name: value}), f"{name} is not supported yet", name)
        for asked in (completion, chat, generate)
        for name, (value, _) in UNSUPPORTED.items()
    ),
    (completion(return_prompt_token_ids=True), "called return_token", "return_prompt_token_ids"),
    (completion(user=5), "user must be a string", "user"),
    (completion(truncate_prompt_tokens=0), "at least 1, or -1", "truncate_prompt_tokens"),
    (completion(prompt_logprobs=1, stream=True), "set stream to false", "prompt_logprobs"),
    (completion(prompt_logprobs=-1), "between 0 and", "prompt_logprobs"),
    (completion(priority="high"), "'high'", "priority"),
    (completion(timeout="1"), "timeout must be a finite number", "timeout"),
    (completion(stream=True, stream_options=True), "an object", "stream_options"),
    (chat(logprobs=1), "logprobs must be a boolean", "logprobs"),
    (chat(top_logprobs="2", logprobs=True), "top_logprobs must be an integer", "top_logprobs"),
    (generate({"temperature": "1"}), "sampling_params.temperature", "sampling_params.temperature"),
    (generate([1]), "sampling_params must be an object", "sampling_params"),
    # ranges
    (completion(max_tokens=0), "at least 1", "max_tokens"),
    (completion(max_tokens=-1), "-1", "max_tokens"),
    (completion(min_tokens=17), "min_tokens must be between 0 and 16, not 17", "min_tokens"),
    (completion(temperature=-0.1), "-0.1", "temperature"),
    (completion(temperature=1e9), "1000000000.0", "temperature"),
    (completion(top_p=0), "top_p must be above 0", "top_p"),
    (completion(top_p=1.1), "1.1", "top_p"),
    (completion(top_k=-2), "-2", "top_k"),
    (completion(min_p=2), "min_p", "min_p"),
    (completion(presence_penalty=3), "presence_penalty", "presence_penalty"),
    (completion(frequency_penalty=-3), "frequency_penalty", "frequency_penalty"),
    (completion(repetition_penalty=0), "repetition_penalty", "repetition_penalty"),
    (completion(seed=1 << 63), "64 bits", "seed"),
    (completion(seed=-(1 << 63) - 1), "64 bits", "seed"),
    (completion(priority=1 << 63), "64 bits", "priority"),
    (completion(n=1 << 100), "n must be an integer of at most 64 bits", "n"),
    (completion(n=0), "n must be between 1 and 64", "n"),
    (completion(n=65), "n must be between 1 and 64", "n"),
    (completion(logprobs=21), "logprobs must be between 0 and 20, not 21", "logprobs"),
    (completion(logprobs=-1), "-1", "logprobs"),
    (completion(logit_bias={"5": 101}), "logit_bias", "logit_bias"),
    (completion(logit_bias={"1000": 1}), "outside the vocabulary of 1000", "logit_bias"),
    (completion(stop_token_ids=[1000]), "outside the vocabulary of 1000", "stop_token_ids"),
    (completion(stop=[""]), "empty string", "stop"),
    (
        completion(stop=["x" * 4000, "y" * 97]),
        "stop must have at most 4096 characters in all, not 4097",
        "stop",
    ),
    (completion(stop=["x"] * 65), "at most 64", "stop"),
    (completion(timeout=0), "timeout", "timeout"),
    (completion(priority=1 << 40), "priority", "priority"),
    (completion(rid=""), "rid", "rid"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "top_logprobs"),
    (chat(top_logprobs=1), "needs logprobs", "top_logprobs"),
    (generate(return_logprob=True, logprob_start_len=3), "only 2", "logprob_start_len"),
    (generate(logprob_start_len=-2), "-2", "logprob_start_len"),
    (generate(top_logprobs_num=21), "top_logprobs_num", "top_logprobs_num"),
    (generate({"max_new_tokens": -1}), "max_new_tokens", "max_new_tokens"),
    (generate({"min_new_tokens": 200}), "min_new_tokens", "min_new_tokens"),
    (generate({"sampling_seed": 1e300}), "sampling_seed", "sampling_params.sampling_seed"),
    (generate({"sampling_seed": 5.5}), "sampling_seed", "sampling_params.sampling_seed"),
    # prompts
    ((COMPLETIONS, {}), "prompt must be", "prompt"),
    (completion(prompt=""), "prompt is empty", "prompt"),
    (completion(prompt=[]), "prompt is empty", "prompt"),
    (completion(prompt=[[]]), "prompt is empty", "prompt"),
    (completion(prompt=[5, -1]), "-1", "prompt"),
    (completion(prompt=[5, 1000]), "token id 1000, which is out of vocabulary", "prompt"),
    (completion(prompt=[5, "a"]), "'a'", "prompt"),
    (completion(prompt=[5, True]), "prompt", "prompt"),
    (completion(prompt=[5, 1.5]), "1.5", "prompt"),
    (completion(prompt=[[5], [6, 1.5]]), "[6, 1.5]", "prompt"),
    (completion(prompt=[5, 10**400]), "the model has 1000 tokens", "prompt"),
    (completion(stop_token_ids=[5.5]), "a list of integers", "stop_token_ids"),
    (completion(prompt={"a": 1}), "prompt must be", "prompt"),
    (completion(prompt=5), "prompt must be", "prompt"),
    (completion(prompt=[7] * 200), "200 tokens, but this model's maximum", "prompt"),
    (completion(prompt=[7] * 161), "161 tokens; the nodes' KV pools hold 160", "prompt"),
    (completion(prompt=[7] * 100, max_tokens=101), "maximum context length is 200", None),
    (completion(prompt="hello " * 300), "context length is 200", "prompt"),
    (generate(text="a", input_ids=[5]), "exactly one of text and input_ids", None),
    ((GENERATE, {}), "exactly one of text and input_ids", None),
    (generate(text=[5]), "a string or a list of strings", "text"),
    (generate(input_ids="a"), "a list of token ids", "input_ids"),
    (generate(input_ids=[[5], []]), "input_ids is empty", "input_ids"),
    (generate(input_ids=[[5], [6]], rid=["a"]), "a list of 2 strings", "rid"),
    (generate([{}], input_ids=[[5], [6]]), "a list of 2 objects", "sampling_params"),
    (generate(return_logprob=[True]), "return_logprob must be a boolean, not", "return_logprob"),
    (
        generate(return_logprob=[True], input_ids=[[5], [6]]),
        "return_logprob must be a boolean or a list of 2 booleans",
        "return_logprob",
    ),
    (
        generate(return_logprob=[True, 1], input_ids=[[5], [6]]),
        "return_logprob[1] must be a boolean, not 1",
        "return_logprob[1]",
    ),
    (
        generate(logprob_start_len=[0, -2], input_ids=[[5], [6]]),
        "logprob_start_len[1] must be between -1",
        "logprob_start_len[1]",
    ),
    (
        generate(top_logprobs_num=[21, 0], input_ids=[[5], [6]]),
        "top_logprobs_num[0] must be between 0 and 20, not 21",
        "top_logprobs_num[0]",
    ),
    (generate([{}, 1], input_ids=[[5], [6]]), "must be an object, not 1", "sampling_params[1]"),
    # messages
    ((CHAT, {}), "messages must be a list", "messages"),
    (chat(messages=[]), "at least one message", "messages"),
    (chat(messages="hello"), "messages must be a list", "messages"),
    (chat(messages=["hello"]), "messages[0] must be an object", "messages[0]"),
    (chat(messages=[{"role": "", "content": "x"}]), "1 to 64 characters", "messages[0].role"),
    (chat(messages=[{"role": 5, "content": "x"}]), "1 to 64 characters", "messages[0].role"),
    (chat(messages=[{"content": "x"}]), "messages[0].role", "messages[0].role"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        "may contain only parts like",
        "messages[0].content",
    ),
    (
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]),
        "may contain only parts like",
        "messages[0].content",
    ),
    (
        chat(messages=[{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]),
        "may contain only parts like",
        "messages[0].content",
    ),
    (chat(messages=[{"role": "user", "content": 5}]), "not 5", "messages[0].content"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        "image_url",
        "messages[0].content",
    ),
    (
        chat(continue_final_message=True, add_generation_prompt=True),
        "cannot both be true",
        "continue_final_message",
    ),
    # what would change the result and is not supported is never ignored
    (completion(best_of=2), "best_of is not supported; ask for n answers", "best_of"),
    (completion(suffix="x"), "suffix is not supported", "suffix"),
    (completion(top_logprobs=2), "is called logprobs here", "top_logprobs"),
    (chat(reasoning_effort="much"), "reasoning_effort", "reasoning_effort"),
    (chat(thinking_token_budget=5), "is not supported", "thinking_token_budget"),
    (completion(vllm_xargs={"a": 1}), "is not supported", "vllm_xargs"),
    (generate({"typical_p": 0.9}), "is not supported", "sampling_params.typical_p"),
    (generate({"extra_args": {"a": 1}}), "is not supported", "sampling_params.extra_args"),
    (chat(no_repeat_ngram_size=3), "is not supported", "no_repeat_ngram_size"),
    (completion(use_beam_search=True), "use_beam_search", "use_beam_search"),
    (completion(response_format={"type": "grammar"}), "not 'grammar'", "response_format"),
    (completion(response_format=schema_format({"not": {}})), "'not'", "response_format"),
    (
        completion(response_format=schema_format({"not": {}})),
        "not enforced by this server; set strict to false to ignore it",
        "response_format",
    ),
    (completion(response_format=schema_format(5)), "'schema'", "response_format"),
    (
        chat(response_format={"type": "json_object", "json_schema": "schema"}),
        "object 'json_schema', not 'schema'",
        "response_format",
    ),
    (
        completion(response_format={"type": "json_object", "json_schema": {"schema": "x"}}),
        "object 'schema', not 'x'",
        "response_format",
    ),
    (
        completion(response_format={"type": "json_schema", "schema": {}, "json_schema": [1]}),
        "object 'json_schema', not [1]",
        "response_format",
    ),
    (
        completion(response_format={"type": "json_schema", "schema": None, "json_schema": None}),
        "object 'json_schema', not None",
        "response_format",
    ),
    (chat(response_format={"type": "structural_tag"}), "object 'format'", "response_format"),
    (
        chat(response_format={"type": "structural_tag", "structures": [{}], "triggers": ["<"]}),
        "'structures[0].begin', not None",
        "response_format",
    ),
    (
        chat(response_format={"type": "structural_tag", "structures": [], "triggers": "<"}),
        "'triggers', not '<'",
        "response_format",
    ),
    (
        chat(response_format=TAG | {"at_least_one": "yes"}),
        "must have a boolean 'at_least_one', not 'yes'",
        "response_format",
    ),
    (
        completion(response_format=TAG),
        "'multipleOf' (at format/tags/0/content/json_schema)",
        "response_format",
    ),
    (
        completion(structured_outputs={"structural_tag": TAG}),
        "'multipleOf' (at format/tags/0/content/json_schema)",
        "structured_outputs.structural_tag",
    ),
    (
        chat(structured_outputs={"structural_tag": {"structures": [5], "triggers": ["<"]}}),
        "a list of objects 'structures'",
        "structured_outputs.structural_tag",
    ),
    (
        chat(structured_outputs={"structural_tag": '{"type": "structural_tag"}'}),
        "object 'format', not None",
        "structured_outputs.structural_tag",
    ),
    (
        generate({"structural_tag": "[]"}),
        "structural_tag must be an object, not []",
        "structural_tag",
    ),
    (completion(regex=5), "regex", "regex"),
    (completion(guided_json=5), "guided_json", "guided_json"),
    (completion(guided_choice=[]), "1 to 1024 texts", "guided_choice"),
    (completion(guided_choice=["a", ""]), "empty text", "guided_choice"),
    (
        completion(guided_json={"multipleOf": 3}),
        "'multipleOf' (at the root) is not enforced",
        "guided_json",
    ),
    (
        completion(structured_outputs={"json": {"not": {}}}),
        "not enforced",
        "structured_outputs.json",
    ),
    (
        completion(structured_outputs={"json": {}, "regex": "a"}),
        "cannot constrain the same output",
        "structured_outputs.regex",
    ),
    (
        completion(structured_outputs={"whitespace_pattern": "x"}),
        "is not supported",
        "structured_outputs.whitespace_pattern",
    ),
    (completion(regex="a", ebnf="root ::= x"), "regex and ebnf", "ebnf"),
    (
        completion(regex="a", response_format={"type": "json_object"}),
        "response_format and regex",
        "regex",
    ),
    (chat(response_format={"type": "json_schema"}), "json_schema", "response_format"),
    (completion(tools=[{"type": "function"}]), "tools is for /v1/chat/completions", "tools"),
    (chat(tool_choice="required"), "tool_choice", "tool_choice"),
    (chat(echo=1), "echo", "echo"),
    (generate({"regex": 5}), "regex", "sampling_params.regex"),
    (generate({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}), "regex", "sampling_params.regex"),
    (generate({"json_schema": "{"}), "is not JSON", "json_schema"),
    (generate({"json_schema": [1]}), "json_schema", "sampling_params.json_schema"),
    (generate({"json_schema": EVEN}), "'multipleOf'", "json_schema"),
    (generate({"structural_tag": "{"}), "is not JSON", "structural_tag"),
    (
        generate({"structural_tag": {"format": {"type": "json_schema", "json_schema": EVEN}}}),
        "'multipleOf' (at format/json_schema) is not enforced",
        "structural_tag",
    ),
    (generate({"ebnf": "root ::= x", "regex": "a"}), "regex and ebnf", "ebnf"),
    (generate(image_data="x"), "image_data", "image_data"),
    (chat(add_special_tokens=True), "add_special_tokens is not supported", "add_special_tokens"),
    (generate({"max_tokens": 5}), "is called max_new_tokens here", "sampling_params.max_tokens"),
    (generate({"min_tokens": 3}), "is called min_new_tokens here", "sampling_params.min_tokens"),
    (
        generate([{}, {"max_tokens": 5}], input_ids=[[5], [6]]),
        "is called max_new_tokens here",
        "sampling_params[1].max_tokens",
    ),
    (("/tokenize", {"messages": HELLO, "chat_template": "x"}), "is not supp", "chat_template"),
    (("/tokenize", {"messages": HELLO, "documents": [{}]}), "does not show documents", "documents"),
    (("/tokenize", {"prompt": "a", "return_token_strs": 1}), "a boolean", "return_token_strs"),
]


ASKS_FOR_NOTHING = [
    completion(best_of=1, suffix="", tools=[], max_tokens=None),
    chat(add_special_tokens=False, tools=[], tool_choice="none", echo=False),
    chat(include_reasoning=True, reasoning_effort="high"),
    *(
        asked(**{name: value for name, (_, value) in UNSUPPORTED.items()})
        for asked in (completion, chat, generate)
    ),
    chat(reasoning_effort="max"),
    chat(messages=[*HELLO, {"role": "assistant", "content": None}, *HELLO]),
    generate({"max_tokens": None, "max_new_tokens": 3, "regex": None}),
    ("/tokenize", {"messages": HELLO, "tools": [], "chat_template": None, "documents": []}),
    ("/tokenize", {"prompt": "a", "return_token_strs": False}),
]


GRAMMARS = [
    (completion(response_format=schema_format({"not": {}}, strict=False)), "json_schema"),
    (chat(response_format={"type": "json_object"}), "json_schema"),
    (chat(response_format={"type": "json_object", "json_schema": None}), "json_schema"),
    (
        completion(response_format={"type": "json_schema", "schema": {}, "json_schema": None}),
        "json_schema",
    ),
    (generate({"regex": "a"}), "regex"),
    (generate({"json_schema": {"type": "string"}}), "json_schema"),
    (generate({"structural_tag": {"format": ANY_TEXT}}), "structural_tag"),
    (chat(response_format={"type": "structural_tag", "format": ANY_TEXT}), "structural_tag"),
    (
        completion(response_format={"type": "structural_tag", "structures": [], "triggers": []}),
        "structural_tag",
    ),
]


@pytest.mark.parametrize(("request_", "kind"), GRAMMARS, ids=str)
def test_both_nodes_are_told_the_grammar(
    cluster: Cluster, request_: tuple[str, Any], kind: str
) -> None:
    nodes = cluster.pair()
    path, body = request_
    assert cluster.client().post(path, json=body).status_code == 200
    for node in nodes:
        grammar = node.generates[-1].params.grammar
        assert grammar is not None
        assert grammar.kind == kind


@pytest.mark.parametrize("request_", ASKS_FOR_NOTHING, ids=str)
def test_values_that_ask_for_nothing_are_accepted(
    cluster: Cluster, request_: tuple[str, Any]
) -> None:
    cluster.pair()
    path, body = request_
    response = cluster.client().post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("request_", "says", "param"), BAD_REQUESTS, ids=str)
def test_bad_requests_are_refused_by_name(
    client: httpx.Client, request_: tuple[str, Any], says: str, param: str | None
) -> None:
    path, body = request_
    check(client.post(path, json=body), 400, says, param)
    streamed = client.post(path, json={"stream": True} | body)
    assert streamed.status_code == 400


def test_stream_options_are_for_streams(client: httpx.Client) -> None:
    path, body = completion(stream_options={"include_usage": True})
    check(client.post(path, json=body), 400, "only for streams", "stream_options")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE, "/tokenize", "/abort_request"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b"\xff\xfe", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}',
     b'{"a": "\\ud800"}', b"[" * 50_000],
)  # fmt: skip
def test_what_is_no_json_is_refused(client: httpx.Client, path: str, body: bytes) -> None:
    check(client.post(path, content=body, headers=JSON), 400, "not valid JSON")


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"x"'])
def test_a_body_is_an_object(client: httpx.Client, body: bytes) -> None:
    check(client.post(GENERATE, content=body, headers=JSON), 400, "must be a JSON object")


def test_a_value_is_shown_in_short() -> None:
    shown = {
        5: "5 (an integer)",
        "long " * 100: "'" + ("long " * 100)[:99] + "… (a string)",
    }
    assert {value: describe_value(value) for value in shown} == shown
    assert describe_value([[[]] * 1000] * 1000).startswith("[[[], [], ")
    assert len(describe_value({"a": [{"b": ["c" * 1000] * 1000}] * 1000})) < 200


LONG, LONG_PATH = "\uffff" * 20_000, "x" * 20_000
REFLECTING: list[tuple[str, str, Any]] = [
    ("POST", *completion(model=LONG)),
    ("POST", *completion(model=LONG[:4000])),
    ("POST", *chat(model=LONG[:4000])),
    ("POST", *generate(model=LONG[:4000])),
    ("POST", "/tokenize", {"prompt": "a", "model": LONG[:4000]}),
    ("POST", "/abort_request", {"rid": LONG}),
    ("POST", "/abort_request", {"rid": LONG[:256]}),
    ("POST", "/workers", {"role": "prefill", "url": LONG}),
    ("POST", "/workers", {"role": "prefill", "url": f"http://{LONG_PATH}/path"}),
    ("POST", *generate(rid=LONG)),
    ("POST", *completion(stop=LONG)),
    ("POST", *completion(suffix=[LONG] * 50)),
    ("POST", *chat(messages=[{"role": LONG, "content": "a"}])),
    ("POST", *chat(messages=[{"role": "user", "content": [{"type": LONG}]}])),
    ("POST", *completion(logit_bias={LONG: 1})),
    ("GET", f"/v1/models/{LONG_PATH}", None),
    ("DELETE", f"/workers/{LONG_PATH}", None),
    ("GET", f"/{LONG_PATH}", None),
    ("PUT", f"/workers/{LONG_PATH}", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), REFLECTING)
def test_an_error_repeats_no_more_than_a_little_of_the_request(
    client: httpx.Client, method: str, path: str, body: Any
) -> None:
    response = client.request(method, path, json=body)
    check(response, response.status_code, "")
    assert 400 <= response.status_code < 500
    assert len(response.json()["error"]["message"]) < 500, response.text[:1000]


def test_an_error_of_the_chat_template_is_cut_short(cluster: Cluster, tmp_path: Path) -> None:
    source = "{{ raise_exception('not with ' + messages[0].content) }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    shutil.copy(Path(cluster.model_dir, "tokenizer.json"), tmp_path)
    cluster.pair()
    client = cluster.client(tokenizer=str(tmp_path))
    path, body = chat(messages=[{"role": "user", "content": LONG}])
    response = client.post(path, json=body)
    check(response, 400, "not with \uffff", "messages")
    assert len(response.json()["error"]["message"]) < 1000


def test_no_error_is_longer_than_a_page() -> None:
    message = error_body(InvalidRequestError("x" * 1_000_000))["error"]["message"]
    assert message == "x" * MAX_MESSAGE_CHARACTERS + "…"


@pytest.mark.one_process("changes a constant of a running proxy")
def test_a_body_is_bounded(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd.proxy.http.bodies.MAX_BODY_BYTES", 1000)
    check(client.post(GENERATE, content=b" " * 5000, headers=JSON), 400, "5000 bytes; at most 1000")


def test_a_text_that_no_context_holds_is_not_tokenized(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "a b " * 5000})
    check(response, 400, "prompt has 20000 characters", "prompt")


@pytest.mark.parametrize(
    "request_",
    [
        completion(prompt=[7] * 200),
        completion(prompt=[7] * 100, max_tokens=101),
        completion(prompt="a b " * 5000),
        chat(messages=[{"role": "user", "content": "hello " * 300}]),
        chat(max_completion_tokens=200),
        generate(input_ids=[7] * 200),
        generate(text="a", choices=["b", "c " * 300]),
    ],
    ids=str,
)
def test_clients_know_that_a_prompt_is_too_long(
    client: httpx.Client, request_: tuple[str, Any]
) -> None:
    """LangChain, LiteLLM and others shorten a chat after an error of this code or these words."""
    path, body = request_
    error = client.post(path, json=body).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 200 tokens" in error["message"]
    assert error["param"] == "max_tokens" or "the prompt is too long" in error["message"]


def test_a_prompt_that_no_pool_holds_has_the_same_code(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json={"prompt": [7] * 161})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_headers_are_bounded(client: httpx.Client) -> None:
    import contextlib
    import json
    import socket

    url = client.base_url
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(4000):
                connection.sendall(b"a" * 1000)
                connection.settimeout(0.001)
                with contextlib.suppress(TimeoutError):
                    if connection.recv(10, socket.MSG_PEEK):
                        break
                connection.settimeout(5)
        connection.settimeout(5)
        head, body = connection.recv(4096).split(b"\r\n\r\n")
    assert b"431" in head.splitlines()[0]
    assert json.loads(body)["error"]["code"] == "invalid_request"


def test_a_request_after_a_long_body_may_have_headers_too(client: httpx.Client) -> None:
    for size in (10, 300_000, 10):
        response = client.post(GENERATE, content=b" " * size, headers=JSON)
        check(response, 400, "not valid JSON")


def test_broken_http_is_answered_in_the_same_shape(client: httpx.Client) -> None:
    import json
    import socket

    url = client.base_url
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(b"\x00nonsense\r\n\r\n")
        answer = connection.makefile("rb").read()
    head, body = answer.split(b"\r\n\r\n")
    assert b"400" in head.splitlines()[0]
    assert json.loads(body)["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/health", 405),
        ("DELETE", "/workers/nobody", 404),
        ("GET", "/v1/models/nothing", 404),
    ],
)
def test_unknown_paths_and_methods(
    client: httpx.Client, method: str, path: str, status: int
) -> None:
    check(client.request(method, path), status, "")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/workers", "GET, HEAD, POST"),
        ("/workers/nobody", "DELETE, POST"),
        ("/ping", "GET, HEAD, POST"),
        ("/health", "GET, HEAD"),
        ("/v1/models/a/b", "GET, HEAD"),
        ("/docs", "GET, HEAD"),
        (GENERATE, "POST"),
    ],
)
def test_a_405_names_all_methods_of_the_path(client: httpx.Client, path: str, methods: str) -> None:
    response = client.put(path, json={})
    check(response, 405, f"PUT {path} is not possible")
    assert response.headers["Allow"] == methods


@pytest.mark.parametrize("request_", [completion(model="gpt"), chat(model="gpt")])
def test_an_unknown_model_is_404(client: httpx.Client, request_: tuple[str, Any]) -> None:
    check(client.post(request_[0], json=request_[1]), 404, "'gpt'; served: fake", "model")


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/workers", {}, "role"),
        ("/workers", {"role": "queen", "url": "http://x"}, "'queen'"),
        ("/workers", {"role": "prefill", "url": "x:1"}, "http://host:port"),
        ("/abort_request", {}, "abort_all"),
        ("/abort_request", {"rid": "a", "abort_all": True}, "either"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "a list of token ids or a list of such lists"),
        ("/detokenize", {"tokens": [-1]}, "-1"),
    ],
)
def test_administration_refuses_nonsense(
    client: httpx.Client, path: str, body: Any, says: str
) -> None:
    check(client.post(path, json=body), 400, says)


def test_aborting_an_unknown_request_is_404(client: httpx.Client) -> None:
    check(client.post("/abort_request", json={"rid": "nobody"}), 404, "'nobody'", "rid")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hello"}),
        (COMPLETIONS, {"prompt": [5], "stop": "x"}),
        (CHAT, {"messages": HELLO}),
        (GENERATE, {"text": "hello"}),
        (GENERATE, {"input_ids": [5], "sampling_params": {"stop": ["x"]}}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_text_without_a_tokenizer_says_what_to_do(
    token_client: httpx.Client, path: str, body: Any
) -> None:
    check(token_client.post(path, json=body), 400, "--tokenizer")


def test_token_ids_need_no_tokenizer(token_client: httpx.Client) -> None:
    body = token_client.post(GENERATE, json={"input_ids": [5]}).json()
    assert len(body["output_ids"]) == 128
    assert body["text"] == ""
    asked = {"prompt": [5], "return_token_ids": True}
    (choice,) = token_client.post(COMPLETIONS, json=asked).json()["choices"]
    assert (choice["text"], len(choice["token_ids"])) == ("", 16)


def test_without_nodes_it_is_503_and_says_when_to_retry(cluster: Cluster) -> None:
    client = cluster.client(wait_ready=0, prefill=["http://127.0.0.1:9"])
    for path, body in (completion(), chat(), generate()):
        response = client.post(path, json=body)
        check(response, 503, "node")
        assert int(response.headers["Retry-After"]) >= 1
    response = client.get("/readiness")
    check(response, 503, "http://127.0.0.1:9")
    assert "Retry-After" in response.headers
    assert client.get("/health").status_code == 200
    assert client.get("/v1/models").json()["data"] == []


def test_a_prefill_node_alone_serves_single_tokens_only(cluster: Cluster) -> None:
    cluster.node("prefill")
    proxy = cluster.proxy(wait_ready=0)
    client = cluster.client(proxy)
    from fake_node import wait_until

    wait_until(lambda: client.get("/workers").json()["workers"][0]["ready"])
    assert client.get("/readiness").status_code == 503
    check(client.post(GENERATE, json={"input_ids": [5]}), 503, "no node")
    one = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    assert client.post(GENERATE, json=one).json()["output_ids"] == [10]


def test_the_api_key_guards_everything_but_health(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    client = cluster.client(api_key="s3cret")
    for path in ("/health", "/readiness", "/metrics"):
        assert client.get(path).status_code == 200
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "s3cret"},
        {"Authorization": "Basic s3cret"},
    ]
    for headers in wrong:
        for method, path in (("GET", "/workers"), ("POST", GENERATE), ("GET", "/nothing")):
            response = client.request(method, path, headers=headers)
            check(response, 401, "API key")
            assert "s3cret" not in response.text
    assert client.get("/workers", headers={"Authorization": "bearer s3cret"}).status_code == 200
    right = {"Authorization": "Bearer s3cret"}
    assert client.get("/workers", headers=right).status_code == 200
    assert client.post(GENERATE, json={"input_ids": [5]}, headers=right).status_code == 200
    # Nodes tell keys apart, without knowing them.
    owner = prefill.wait_generate().owner
    assert owner
    assert "s3cret" not in owner
