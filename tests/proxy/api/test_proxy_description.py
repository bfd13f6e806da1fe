"""``/openapi.json`` and ``/docs`` describe what the proxy takes and answers."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from json_schema import problems, references, resolve
from proxy_cluster import Cluster, read_events
from starlette.routing import Route

from pd.proxy.requests.openai import CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.proxy.server import ProxyThread

API_PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
OWN = ("/openapi.json", "/docs")
JSON_TYPE, EVENTS_TYPE = "application/json", "text/event-stream"


@pytest.fixture(scope="module")
def proxy(model_dir: str) -> Iterator[ProxyThread]:
    with ExitStack() as stack:
        cluster = Cluster(stack, model_dir)
        cluster.pair()
        yield cluster.proxy()


@pytest.fixture(scope="module")
def client(proxy: ProxyThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    answer = client.get("/openapi.json")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == JSON_TYPE
    described: dict[str, Any] = answer.json()
    return described


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    schema: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"][JSON_TYPE][
        "schema"
    ]
    return resolve(schema["$ref"], document)


def answer_schema(document: dict[str, Any], path: str, kind: str = JSON_TYPE) -> dict[str, Any]:
    schema: dict[str, Any] = document["paths"][path]["post"]["responses"]["200"]["content"][kind][
        "schema"
    ]
    return schema


def fields_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    """A body's fields, and those of the objects in it as ``object.field``."""
    fields: dict[str, Any] = {}
    for name, field in body_schema(document, path)["properties"].items():
        fields[name] = field
        for reference in references(field):
            inner = resolve(reference, document).get("properties", {})
            fields |= {f"{name}.{field}": schema for field, schema in inner.items()}
    return fields


def test_it_is_openapi(document: dict[str, Any]) -> None:
    assert re.fullmatch(r"3\.1\.\d+", document["openapi"])
    assert set(document["info"]) >= {"title", "version"}
    operations = [
        (method, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if path.startswith("/")
    ]
    assert {method for method, _ in operations} == {"get", "post", "delete"}
    names = [operation["operationId"] for _, operation in operations]
    assert len(set(names)) == len(names)
    for _, operation in operations:
        assert operation["description"], operation
        assert {"200", "4XX", "5XX"} == set(operation["responses"])
        assert all(response["description"] for response in operation["responses"].values())
    for reference in references(document):
        resolve(reference, document)


@pytest.mark.one_process("reads the routes of the proxy in this process")
def test_every_route_is_described(proxy: ProxyThread, document: dict[str, Any]) -> None:
    assert proxy.proxy is not None
    routes = [route for route in proxy.proxy._app.routes if isinstance(route, Route)]
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    assert described == {
        (method, re.sub(r":path", "", route.path))
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
        if route.path not in OWN
    }
    with_body = {
        path for path, item in document["paths"].items() if "requestBody" in item.get("post", {})
    }
    assert with_body == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/score",
        "/api/chat",
        "/api/generate",
        "/api/show",
        "/v1/responses",
        "/v1/files",
        "/v1/batches",
        "/invocations",
        "/generate",
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
        "/abort_request",
        "/workers",
        "/workers/{instance_id}",
    }


def test_every_field_is_described(document: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize",
                 "/abort_request", "/workers", "/workers/{instance_id}"):  # fmt: skip
        for name, field in fields_of(document, path).items():
            if not name.startswith("messages."):
                assert field.get("description"), (path, name)
    fields = fields_of(document, "/v1/completions")
    assert "prompt" in body_schema(document, "/v1/completions")["required"]
    assert fields["n"]["default"] == 1
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 64}
    assert fields["temperature"]["default"] == 1.0
    assert {"type": "null"} in fields["stop"]["anyOf"]
    native = fields_of(document, "/generate")
    assert native["sampling_params.max_new_tokens"]["anyOf"][0]["minimum"] == 0
    assert native["logprob_start_len"]["default"] == -1


def documented(row: str) -> list[str]:
    return re.findall(r"`([a-z_.]+)`", row)


def test_fields_of_the_documentation_are_in_it(document: dict[str, Any]) -> None:
    table = API_PAGE[API_PAGE.index("| field | default") : API_PAGE.index("\\* or the value")]
    rows = [row for row in table.splitlines() if row.startswith("|")]
    common = [name for row in rows for name in documented(row.split("|")[1])]
    assert len(common) > 25
    chat, completions = (
        fields_of(document, path) for path in ("/v1/chat/completions", "/v1/completions")
    )
    for name in common:
        assert name in chat, name
        assert name in completions or name == "top_logprobs", name
    assert {"prompt", "echo"} <= completions.keys()
    only_chat = API_PAGE[API_PAGE.index("| chat | `messages`") :].partition("\n")[0]
    assert set(documented(only_chat)) <= chat.keys()
    takes = API_PAGE[API_PAGE.index("Send `text` or") : API_PAGE.index("In the answer, ")]
    native = fields_of(document, "/generate")
    known = native.keys() | {name.rpartition(".")[2] for name in native}
    assert set(documented(takes)) <= known


def examples() -> list[tuple[str, Any]]:
    """Paths and bodies of the requests with curl."""
    found = re.findall(r"curl (?:-N )?http://127\.0\.0\.1:8000(/\S+)[^']*'Content-Type: "
                       r"application/json'\s*(?:\\\s*)?-d\s*'([^']*)'", API_PAGE)  # fmt: skip
    return [(path, json.loads(body)) for path, body in found]


def test_examples_of_the_documentation_are_valid(document: dict[str, Any]) -> None:
    assert len(examples()) >= 7
    for path, body in examples():
        assert not problems(body, body_schema(document, path), document), path


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": 5},
        {"prompt": "a", "n": 0},
        {"prompt": "a", "temperature": "hot"},
        {"prompt": "a", "stop": 5},
        {"prompt": "a", "stream_options": True},
        {"prompt": "a", "seed": 1 << 64},
        {"prompt": "a", "max_tokens": 3.5},
    ],
)
def test_what_is_refused_is_not_valid(
    client: httpx.Client, document: dict[str, Any], body: dict[str, Any]
) -> None:
    assert client.post("/v1/completions", json=body).status_code == 400
    assert problems(body, body_schema(document, "/v1/completions"), document)


BARE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/generate": {"input_ids": [5]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


def kinds_of(field: dict[str, Any]) -> set[str]:
    """What a field may be; ``integers``: a list of them."""
    several = [kind for name in ("anyOf", "oneOf") for kind in field.get(name, ())]
    if several:
        return set().union(*map(kinds_of, several))
    if field.get("type") == "array":
        return {f"{kind}s" for kind in kinds_of(field["items"])}
    return {field.get("type", "")}


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), 1 << 63, 1e300], ids=["huge", "negative", "65 bits", "float"]
)
def test_every_integer_has_at_most_64_bits(
    client: httpx.Client, document: dict[str, Any], value: Any
) -> None:
    count = 0
    for path, bare in BARE.items():
        for name, field in fields_of(document, path).items():
            for kind in kinds_of(field) & {"integer", "integers"}:
                given = [value] if kind == "integers" else value
                outer, _, inner = name.partition(".")
                body = bare | {outer: {inner: given} if inner else given}
                answer = client.post(path, json=body)
                assert answer.status_code == 400, (path, name, answer.text[:300])
                message = answer.json()["error"]["message"]
                assert name.rpartition(".")[2] in message
                assert len(message) < 300
                count += 1
    assert count > 30


def test_null_is_valid_where_it_counts_as_absent(
    client: httpx.Client, document: dict[str, Any]
) -> None:
    schema = body_schema(document, "/v1/completions")
    body = dict.fromkeys(schema["properties"]) | {"prompt": [5]}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert not problems(body, schema, document)


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "n": 2}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 3, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "return_token_ids": True}),
    ("/v1/completions", {"prompt": [[5.0, 6]], "max_tokens": 3.0, "seed": -1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
        },
    ),
    ("/invocations", {"prompt": "hello", "max_tokens": 3}),
    ("/invocations", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 3}}),
    ("/generate", {"input_ids": [[5], [6]], "sampling_params": [{"stop": "x"}, {}]}),
    ("/generate", {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0}),
    ("/generate", {"input_ids": [[5], [6]], "return_logprob": [True, False]}),
    ("/generate", {"text": "hello", "choices": [" world", [8, 9]]}),
    (
        "/generate",
        {"input_ids": [5], "choices": [[8], [9]], "choices_method": "unconditional_likelihood"},
    ),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": [5, 6]}),
]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=str)
def test_answers_are_as_described(
    client: httpx.Client, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    assert not problems(body, body_schema(document, path), document)
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert not problems(answer.json(), answer_schema(document, path), document)
    if "tokenize" in path or "choices" in body:
        return
    body = body | {"stream": True}
    if path != "/generate":
        body["stream_options"] = {"include_usage": True}
    with client.stream("POST", path, json=body) as stream:
        *events, done = read_events(stream)
    assert done == "DONE"
    for event in events:
        assert not problems(event, answer_schema(document, path, EVENTS_TYPE), document)


def test_errors_are_as_described(client: httpx.Client, document: dict[str, Any]) -> None:
    answer = client.post("/v1/completions", json={"prompt": ""})
    error = document["paths"]["/v1/completions"]["post"]["responses"]["4XX"]
    assert not problems(answer.json(), error["content"][JSON_TYPE]["schema"], document)


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/version",
        "/get_model_info",
        "/server_info",
        "/load",
        "/tokenizer_info",
        "/v1/models",
        "/workers",
    ],
)
def test_facts_are_as_described(client: httpx.Client, document: dict[str, Any], path: str) -> None:
    response = document["paths"][path]["get"]["responses"]["200"]
    schema = response["content"][JSON_TYPE]["schema"]
    assert not problems(client.get(path).json(), schema, document)
    assert client.head(path).status_code == 200


def test_the_page_needs_nothing_from_elsewhere(client: httpx.Client) -> None:
    answer = client.get("/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = answer.text
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=\"?https?:", page)
    for part in ("/v1/completions", "cache_salt", "CompletionRequest", "DELETE"):
        assert part in page


def test_it_is_read_with_a_key_where_there_is_one_and_not_by_web_pages(model_dir: str) -> None:
    with ExitStack() as stack:
        proxy = Cluster(stack, model_dir).proxy(wait_ready=0, api_key="secret", tokenizer=None)
        keyless = Cluster(stack, model_dir).proxy(wait_ready=0, tokenizer=None)
        for path in OWN:
            assert httpx.get(proxy.url + path).status_code == 401
            key = {"Authorization": "Bearer secret"}
            assert httpx.get(proxy.url + path, headers=key).status_code == 200
            assert httpx.get(keyless.url + path).status_code == 200
            foreign = {"Origin": "http://evil.example"}
            assert httpx.get(proxy.url + path, headers=key | foreign).status_code == 403
            rebound = {"Host": "evil.example"}
            assert httpx.get(keyless.url + path, headers=rebound).status_code == 403


def test_long_prompts_are_not_copied_by_validation() -> None:
    """They are checked in parts, so that other threads run in between."""
    ids = list(range(1000)) * 1000
    asked = CompletionRequest.model_validate({"prompt": ids})
    assert asked.prompt is ids
