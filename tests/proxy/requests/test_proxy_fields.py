"""Every field that OpenAI, vLLM and SGLang define, at every place: obeyed, or a 400 with advice."""

from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pytest
from fake_node import EOS, FakeNode
from programs import import_program
from proxy_cluster import Cluster
from proxy_tokenizers import byte_level
from tool_models import QWEN, SPECIAL

from pd.proxy.requests import admin, chat, native, openai, tokens
from pd.proxy.requests.known_fields import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    KNOWN,
    OBEYED,
    OTHER_APIS,
    TOKENIZE,
    FieldPlace,
    explain_refusal,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

MODELS = (admin, chat, native, openai, tokens)
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello"},
    CHAT: {"messages": MESSAGES},
    GENERATE: {"text": "hello"},
    TOKENIZE: {"prompt": "hello"},
    DETOKENIZE: {"tokens": [40, 41]},
    "/abort_request": {"rid": "nobody"},
    "/workers": {"role": "decode", "url": "http://127.0.0.1:9"},
    "/workers/{instance_id}": {"role": "auto"},
}
# What an object needs, or the fields beside it.
OBJECTS: dict[str, dict[str, Any]] = {"response_format": {"type": "json_object"}}
BESIDE: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}}
# Other APIs have tests of their own.
PLACES = [place for place in OBEYED if OTHER_APIS.isdisjoint(place.endpoints)]
CELLS = [(place, name) for place in PLACES for name in KNOWN if name not in OBEYED[place]]
# Nobody takes this for a value that asks for nothing.
ODD: Any = {"odd": [1]}


class Reached(NamedTuple):
    """A proxy on a node that says what its test wants."""

    client: httpx.Client
    node: FakeNode


def tokenizer() -> Any:
    made = byte_level(with_bos=True)
    made.add_special_tokens(SPECIAL)
    return made


TOKENS = tokenizer()
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
SAYS = "<think>\nhm\n</think>\n\n<|im_start|>the quick" + CALL + "\n" + CALL + "brown fox"


def say(_prompt: list[int], index: int) -> list[int]:
    ids = TOKENS.encode(SAYS + str(index), add_special_tokens=False).ids
    return [*ids, EOS, *[30 + i for i in range(100)]]


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reached]:
    directory = tmp_path_factory.mktemp("model")
    TOKENS.save(str(directory / "tokenizer.json"))
    config = {
        "chat_template": QWEN + "{{ reasoning_effort }}{{ variable }}",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    with ExitStack() as stack:
        cluster = Cluster(stack, str(directory))
        node = cluster.node("unified", say, context_length=4000, pages={"total": 2000})
        yield Reached(cluster.client(), node)


def body_at(place: FieldPlace, endpoint: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A body with these fields at a place."""
    bare = BODIES[endpoint]
    if not place.inside:
        return bare | fields
    inner = OBJECTS.get(place.inside, {}) | fields
    return bare | BESIDE.get(place.inside, {}) | {place.inside: inner}


def path_of(endpoint: str) -> str:
    return endpoint.replace("{instance_id}", "nobody")


def check_refused(reached: Reached, place: FieldPlace, name: str) -> None:
    for endpoint in place.endpoints:
        response = reached.client.post(
            path_of(endpoint), json=body_at(place, endpoint, {name: ODD})
        )
        assert response.status_code == 400, (endpoint, name, response.text[:200])
        error = response.json()["error"]
        path = f"{place.inside}.{name}" if place.inside else name
        assert error["param"] == path
        assert error["message"] == f"{path} {explain_refusal(place, name)}"


def check_neutral(reached: Reached, place: FieldPlace, name: str) -> None:
    for endpoint in place.endpoints:
        body = BODIES[endpoint]
        expected = reached.client.post(path_of(endpoint), json=body_at(place, endpoint, {}))
        for value in (None, *KNOWN[name]):
            if (endpoint, name, value) == (CHAT, "add_special_tokens", True):
                continue  # the template writes the special tokens
            body = body_at(place, endpoint, {name: value})
            response = reached.client.post(path_of(endpoint), json=body)
            assert response.status_code == expected.status_code, (body, response.text[:200])


def test_every_refusal_says_what_to_do() -> None:
    for place, name in CELLS:
        text = explain_refusal(place, name)
        assert text.startswith(("is ", "belongs ")), text
        other = {n for n in KNOWN if f"is called {n} here" in text}
        assert not other or other & OBEYED[place] or "top level" in text, (place, name, text)


def test_refused_fields_are_refused_by_name_with_advice(reached: Reached) -> None:
    """Some fields at every place; all of them in make test-all."""
    seed = time.time_ns()
    print("seed", seed)
    chosen = random.Random(seed)
    for place in PLACES:
        names = [name for where, name in CELLS if where == place]
        for name in chosen.sample(names, 12):
            check_refused(reached, place, name)
            check_neutral(reached, place, name)


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_all_refused_fields_are_refused_by_name_with_advice(
    reached: Reached, place: FieldPlace
) -> None:
    for where, name in CELLS:
        if where == place:
            check_refused(reached, place, name)
            check_neutral(reached, place, name)


MISPLACED: list[tuple[str, dict[str, Any], str]] = [
    (GENERATE, {"regex": "a"}, "regex belongs in sampling_params"),
    (GENERATE, {"json_schema": {}}, "json_schema belongs in sampling_params"),
    (GENERATE, {"ebnf": 'root ::= "a"'}, "ebnf belongs in sampling_params"),
    (GENERATE, {"max_new_tokens": 5}, "max_new_tokens belongs in sampling_params"),
    (GENERATE, {"max_tokens": 5}, "max_tokens is called sampling_params.max_new_tokens here"),
    (GENERATE, {"stop_sequences": ["a"]}, "stop_sequences is called sampling_params.stop here"),
    (GENERATE, {"guided_regex": "a"}, "guided_regex is called sampling_params.regex here"),
    (GENERATE, {"prompt": "a"}, "prompt is called text here"),
    (GENERATE, {"prompt_token_ids": [5]}, "prompt_token_ids is called input_ids here"),
    (GENERATE, {"logprobs": True}, "logprobs is called return_logprob here"),
    (GENERATE, {"echo": True}, "echo is for /v1/completions"),
    (GENERATE, {"messages": MESSAGES}, "messages is for /v1/chat/completions, /tokenize"),
    (GENERATE, {"sampling_params": {"echo": True}}, "sampling_params.echo is for /v1/com"),
    (
        GENERATE,
        {"sampling_params": {"structured_outputs": {"regex": "a"}}},
        "sampling_params.structured_outputs is written as regex, json_schema, ebnf",
    ),
    (
        GENERATE,
        {"sampling_params": {"response_format": {"type": "json_object"}}},
        "sampling_params.response_format is written as regex, json_schema, ebnf",
    ),
    (
        GENERATE,
        {"sampling_params": {"guided_json": {}}},
        "sampling_params.guided_json is called json_schema here",
    ),
    (
        GENERATE,
        {"sampling_params": {"max_completion_tokens": 5}},
        "sampling_params.max_completion_tokens is called max_new_tokens here",
    ),
    (
        GENERATE,
        {"sampling_params": {"truncate_prompt_tokens": 5}},
        "sampling_params.truncate_prompt_tokens is for /v1/completions, /v1/chat/completions, not",
    ),
    (
        GENERATE,
        {"sampling_params": {"return_logprob": True}},
        "sampling_params.return_logprob belongs at the top level of the request",
    ),
    (
        GENERATE,
        {"text": ["a", "b"], "sampling_params": [{}, {"stream": True}]},
        "sampling_params[1].stream belongs at the top level of the request",
    ),
    (COMPLETIONS, {"max_new_tokens": 5}, "max_new_tokens is called max_tokens here"),
    (COMPLETIONS, {"sampling_params": {"n": 2}}, "put its fields into the request itself"),
    (COMPLETIONS, {"input_ids": [5]}, "input_ids is called prompt here"),
    (COMPLETIONS, {"text": "a"}, "text is called prompt here"),
    (COMPLETIONS, {"stop_sequences": ["a"]}, "stop_sequences is called stop here"),
    (COMPLETIONS, {"messages": MESSAGES}, "messages is for /v1/chat/completions"),
    (COMPLETIONS, {"top_logprobs": 2}, "top_logprobs is called logprobs here"),
    (COMPLETIONS, {"include_usage": True}, "include_usage belongs in stream_options"),
    (COMPLETIONS, {"tools": [{"type": "function"}]}, "tools is for /v1/chat/completions"),
    (COMPLETIONS, {"extra_body": {"top_k": 5}}, "put them there"),
    (CHAT, {"input_ids": [5]}, "input_ids is for /v1/completions; a chat has messages"),
    (CHAT, {"max_new_tokens": 5}, "max_new_tokens is called max_tokens here"),
    (CHAT, {"sampling_seed": 5}, "sampling_seed is called seed here"),
    (CHAT, {"return_logprob": True}, "return_logprob is called logprobs here"),
    (CHAT, {"top_logprobs_num": 2}, "top_logprobs_num is called top_logprobs here"),
    (CHAT, {"enable_thinking": False}, "put it into chat_template_kwargs"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions is called tools here"),
    (CHAT, {"json": {}}, "json belongs in structured_outputs"),
    (
        CHAT,
        {"stream": True, "stream_options": {"max_tokens": 5}},
        "stream_options.max_tokens belongs at the top level of the request",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_object", "regex": "a"}},
        "response_format.regex belongs at the top level of the request",
    ),
    (
        CHAT,
        {"structured_outputs": {"regex": "a", "guided_json": {}}},
        "structured_outputs.guided_json belongs at the top level of the request",
    ),
    (TOKENIZE, {"max_tokens": 5}, "max_tokens is for /v1/completions, /v1/chat/completions, not"),
    (TOKENIZE, {"input_ids": [5]}, "input_ids is not a field here, where texts become token ids"),
    (DETOKENIZE, {"input_ids": [5]}, "input_ids is called tokens here"),
    ("/abort_request", {"request_id": "a"}, "request_id is called rid here"),
    ("/invocations", {"prompt": "a", "max_new_tokens": 5}, "max_new_tokens is called max_tokens"),
    (GENERATE, {"rid": "a", "request_id": "b"}, "rid and request_id differ"),
    (
        GENERATE,
        {"sampling_params": {"seed": 1, "sampling_seed": 2}},
        "sampling_seed and seed differ",
    ),
]


@pytest.mark.parametrize(("endpoint", "fields", "says"), MISPLACED, ids=str)
def test_a_field_at_the_wrong_place_is_told_the_right_one(
    reached: Reached, endpoint: str, fields: dict[str, Any], says: str
) -> None:
    before = len(reached.node.generates)
    response = reached.client.post(endpoint, json=BODIES.get(endpoint, {}) | fields)
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]
    assert len(reached.node.generates) == before


def test_fields_that_nobody_defines_are_ignored(reached: Reached) -> None:
    for endpoint in (COMPLETIONS, CHAT, GENERATE, TOKENIZE, DETOKENIZE):
        body = BODIES[endpoint] | {"whatever": 1, "x_vendor": {"a": []}}
        assert reached.client.post(endpoint, json=body).status_code == 200
    body = BODIES[GENERATE] | {"sampling_params": {"whatever": 1}}
    assert reached.client.post(GENERATE, json=body).status_code == 200


# ---- obeyed fields act

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
GBNF = 'root ::= "a"'
ASSISTANT = [*MESSAGES, {"role": "assistant", "content": "so"}]


class Acts(NamedTuple):
    """A value of a field that changes what the node is asked or what is answered.

    Attributes:
        beside: fields that both requests have.
        status: of the answer.
    """

    value: Any
    beside: dict[str, Any] = {}  # noqa: RUF012
    status: int = 200


LONG = {"max_tokens": 200}
VALUES: dict[str, Acts] = {
    "model": Acts("nobody", status=404),
    "messages": Acts(ASSISTANT),
    "prompt": Acts("another"),
    "text": Acts("another"),
    "tokens": Acts([42]),
    "echo": Acts(True),
    "add_special_tokens": Acts(False),
    "truncate_prompt_tokens": Acts(1),
    "truncation_side": Acts("right", {"truncate_prompt_tokens": 1}),
    "max_tokens": Acts(3),
    "max_completion_tokens": Acts(3),
    "max_new_tokens": Acts(3),
    "min_tokens": Acts(3),
    "min_new_tokens": Acts(3),
    "temperature": Acts(0.5),
    "top_p": Acts(0.5),
    "top_k": Acts(5),
    "min_p": Acts(0.5),
    "presence_penalty": Acts(0.5),
    "frequency_penalty": Acts(0.5),
    "repetition_penalty": Acts(1.5),
    "seed": Acts(11),
    "sampling_seed": Acts(11),
    "n": Acts(2),
    "logit_bias": Acts({"5": 1}),
    "allowed_token_ids": Acts([5]),
    "bad_words": Acts(["x"]),
    "token_ids_logprob": Acts([5], {"return_logprob": True}),
    "stop": Acts("quick"),
    "stop_regex": Acts("q[a-z]+k"),
    "stop_token_ids": Acts([300]),
    "no_stop_trim": Acts(True, {"stop": "quick"}),
    "include_stop_str_in_output": Acts(True, {"stop": "quick"}),
    "ignore_eos": Acts(True),
    "skip_special_tokens": Acts(False),
    "response_format": Acts({"type": "json_object"}),
    "regex": Acts("a+"),
    "json_schema": Acts(SCHEMA),
    "ebnf": Acts(GBNF),
    "structural_tag": Acts(TAG),
    "structured_outputs": Acts({"regex": "a+"}),
    "guided_json": Acts(SCHEMA),
    "guided_regex": Acts("a+"),
    "guided_grammar": Acts(GBNF),
    "guided_choice": Acts(["a", "b"]),
    "json": Acts(SCHEMA),
    "grammar": Acts(GBNF),
    "choice": Acts(["a", "b"]),
    "json_object": Acts(True),
    "choices": Acts(["a", "b"]),
    "choices_method": Acts("unconditional_likelihood", {"choices": ["a", "b"]}),
    "stream": Acts(True),
    "stream_options": Acts({"include_usage": True}, {"stream": True}),
    "include_usage": Acts(True),
    "continuous_usage_stats": Acts(True, {"include_usage": True}),
    "prompt_logprobs": Acts(1),
    "logprobs": Acts(True),
    "top_logprobs": Acts(2, {"logprobs": True}),
    "return_logprob": Acts(True),
    "logprob_start_len": Acts(0, {"return_logprob": True}),
    "top_logprobs_num": Acts(2, {"return_logprob": True}),
    "return_tokens_as_token_ids": Acts(True, {"logprobs": 1}),
    "return_token_ids": Acts(True),
    "return_prompt_token_ids": Acts(True),
    "return_token_strs": Acts(True),
    "rid": Acts("my-name"),
    "request_id": Acts("my-name"),
    "priority": Acts(5),
    "prefix_lease": Acts(30.0),
    "cache_salt": Acts("a"),
    "extra_key": Acts("a"),
    "timeout": Acts(100.0),
    "tools": Acts([FUNCTION]),
    "tool_choice": Acts("required", {"tools": [FUNCTION]}),
    "parallel_tool_calls": Acts(False, {"tools": [FUNCTION], "tool_choice": "required"}),
    "add_generation_prompt": Acts(False),
    "continue_final_message": Acts(True, {"messages": ASSISTANT}),
    "chat_template_kwargs": Acts({"variable": "shown"}),
    "reasoning_effort": Acts("low"),
    "separate_reasoning": Acts(False),
    "include_reasoning": Acts(False),
}
# Where a field needs another value or company than elsewhere.
AT: dict[tuple[str, str], Acts] = {
    (COMPLETIONS, "logprobs"): Acts(2),
    (CHAT, "return_tokens_as_token_ids"): Acts(True, {"logprobs": True}),
    (CHAT, "echo"): Acts(True, {"messages": ASSISTANT}),
    (TOKENIZE, "messages"): Acts(MESSAGES, {"prompt": None}),
    (TOKENIZE, "text"): Acts("another", {"prompt": None}),
    (TOKENIZE, "tools"): Acts([FUNCTION], {"prompt": None, "messages": MESSAGES}),
    (TOKENIZE, "add_generation_prompt"): Acts(False, {"prompt": None, "messages": MESSAGES}),
    (TOKENIZE, "continue_final_message"): Acts(True, {"prompt": None, "messages": ASSISTANT}),
    (TOKENIZE, "chat_template_kwargs"): Acts(
        {"variable": "shown"}, {"prompt": None, "messages": MESSAGES}
    ),
    (TOKENIZE, "reasoning_effort"): Acts("low", {"prompt": None, "messages": MESSAGES}),
    (DETOKENIZE, "skip_special_tokens"): Acts(False, {"tokens": [0, 40]}),
    (GENERATE, "input_ids"): Acts([40, 41], {"text": None}),
    (GENERATE, "sampling_params"): Acts({"max_new_tokens": 3}),
}
LABELS = {"user": "me", "safety_identifier": "me", "session_id": "s", "prompt_cache_key": "k",
          "store": True, "metadata": {"a": "b"}}  # fmt: skip
# Tests of their own: what they do shows in time, or with another chat template.
SHOWN_BY = {
    "documents": "test_chat_templates.py",
    "incremental": "test_proxy_generate.py",
    "stream_interval": "test_proxy_stream_interval.py",
    "stream_reasoning": "test_proxy_reasoning.py",
}
ACTING = [
    (place, endpoint, name)
    for place in PLACES
    for endpoint in place.endpoints
    for name in sorted(OBEYED[place])
    if endpoint in (COMPLETIONS, CHAT, GENERATE, TOKENIZE, DETOKENIZE)
    and place.inside != "response_format"
    and name not in LABELS
    and name not in SHOWN_BY
]


# Fields of a node's message that a request decides, except its timeout.
NODE_FIELDS = ("token_ids", "params", "namespace", "priority", "prefix_lease")


def observe(reached: Reached, endpoint: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status, and all that a request made of the node and got, but for what is never the same."""
    before = len(reached.node.generates)
    response = reached.client.post(endpoint, json=body)
    generates = []
    for sent in reached.node.generates[before:]:
        known = msgspec.structs.asdict(sent)
        timeout = known["timeout"]
        known = {name: known[name] for name in NODE_FIELDS}
        generates.append((known, timeout is not None))
    text = response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        text = repr(_without_times(json.loads(text)))
    else:
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        text = _joined([_without_times(json.loads(line)) for line in lines])
    return response.status_code, f"{generates}\n{text}"


def _without_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_times(each) for each in value]
    if not isinstance(value, dict):
        return value
    drawn = ("created", "e2e_latency", "stages")
    return {
        key: _without_times(each)
        for key, each in value.items()
        if key not in drawn and not (key == "id" and "my-name" not in str(each))
    }


def _joined(events: list[Any]) -> str:
    """A stream, however its tokens came together in events: its shape, and its texts in order."""
    shapes = [{str(sorted(event)) for event in events}]
    parts: dict[str, str] = {}
    for event in events:
        for choice in event.get("choices", [event]):
            delta = choice.get("delta", choice)
            for key, each in delta.items():
                if isinstance(each, str):
                    parts[key] = parts.get(key, "") + each
    says_usage = sum(event.get("usage") is not None for event in events) > 1
    return f"stream {shapes} {sorted(parts.items())} {says_usage}"


def check_acts(reached: Reached, place: FieldPlace, endpoint: str, name: str) -> None:
    acts = AT.get((endpoint, name)) or VALUES[name]
    seed: dict[str, Any] = {}
    if endpoint in (COMPLETIONS, CHAT):
        seed = {"seed": 5} | (LONG if not name.startswith("max_") else {})
    beside = acts.beside
    if endpoint == GENERATE:
        params: dict[str, Any] = {"sampling_seed": 5}
        if name == "seed":
            params = {"sampling_seed": None}
        if place.inside:
            params = params | beside
            beside = {}
        params |= beside.get("sampling_params", {})
        seed = {"sampling_params": params}
    base = BODIES[endpoint] | seed | {k: v for k, v in beside.items() if k != "sampling_params"}
    if not place.inside:
        changed = base | {name: acts.value}
        if endpoint == TOKENIZE and name in ("text", "messages"):
            base = BODIES[endpoint]
    elif place.inside == "sampling_params":
        changed = base | {"sampling_params": base["sampling_params"] | {name: acts.value}}
    else:
        base = base | BESIDE.get(place.inside, {})
        inner = beside if place.inside == "stream_options" else {}
        base = {key: value for key, value in base.items() if key not in inner}
        changed = base | {place.inside: inner | {name: acts.value}}
        base = base | ({place.inside: inner} if inner else {})
    if endpoint == GENERATE and name == "input_ids":
        base = BODIES[endpoint] | seed
    without, found = observe(reached, endpoint, base), observe(reached, endpoint, changed)
    assert without[0] == 200, (base, without)
    assert found[0] == acts.status, (changed, found)
    assert found != without, f"{name} of {place} does nothing: {changed}"


@pytest.mark.parametrize(
    ("place", "endpoint", "name"), ACTING, ids=[f"{e}-{p.inside}-{n}" for p, e, n in ACTING]
)
def test_an_obeyed_field_acts(
    reached: Reached, place: FieldPlace, endpoint: str, name: str
) -> None:
    check_acts(reached, place, endpoint, name)


def test_labels_change_nothing(reached: Reached) -> None:
    for endpoint in (COMPLETIONS, CHAT, GENERATE):
        body = BODIES[endpoint] | (
            {"sampling_params": {"seed": 5}} if endpoint == GENERATE else {"seed": 5}
        )
        assert observe(reached, endpoint, body | LABELS) == observe(reached, endpoint, body)
        for name in LABELS:
            response = reached.client.post(endpoint, json=body | {name: 5})
            assert response.status_code == 400


def test_a_prompt_may_go_without_special_tokens(reached: Reached) -> None:
    asked: dict[str, Any] = {"text": "hello", "add_special_tokens": False}
    for more in ({}, {"choices": ["a", "b"]}):
        before = len(reached.node.generates)
        assert reached.client.post(GENERATE, json=asked | more).status_code == 200
        first = np.frombuffer(reached.node.generates[before].token_ids, "<i4")
        assert first[0] == TOKENS.encode("hello", add_special_tokens=False).ids[0]


def test_every_obeyed_field_has_a_demonstration() -> None:
    own = {"role", "url", "abort_all"}
    shape = OBEYED[FieldPlace((COMPLETIONS, CHAT), "response_format")]
    for place in PLACES:
        names = OBEYED[place]
        for name in names - own - LABELS.keys() - SHOWN_BY.keys():
            assert name in VALUES or any(name == field for _, field in AT) or name in shape, (
                place,
                name,
            )
            assert name in KNOWN or name in shape, f"{name} of {place} is missing in KNOWN"
    assert not set(SHOWN_BY.values()) - {
        path.name for path in Path(__file__).parents[1].rglob("test_*.py")
    }


def test_the_page_of_fields_is_what_the_table_says() -> None:
    root = Path(__file__).parents[3]
    script = import_program("scripts/render_fields.py")
    assert (root / "docs" / "fields.md").read_text() == script.render()
