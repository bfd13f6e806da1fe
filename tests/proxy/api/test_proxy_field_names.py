"""Errors name fields as in the API that the client uses, also errors of nodes about grammars."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from proxy_cluster import Cluster
from tool_models import QWEN, write_model

from pd.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx
    from fake_node import FakeNode

RESPONSES, MESSAGES, CHAT, GENERATE = "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"
USER = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
# A keyword that is not enforced.
UNFIT = SCHEMA | {"not": {}}
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "hello"},
    MESSAGES: {"model": "fake", "max_tokens": 9, "messages": USER},
    CHAT: {"model": "fake", "messages": USER, "stream": False},
    GENERATE: {"model": "fake", "prompt": "hello", "stream": False},
}


def ask_for_schema(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    if path == RESPONSES:
        return {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}
    if path == MESSAGES:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    return {"format": schema}


def ask_for_call(path: str, schema: dict[str, Any], name: str = "f") -> dict[str, Any]:
    """One strict function."""
    if path == MESSAGES:
        return {"tools": [{"name": name, "input_schema": schema, "strict": True}]}
    function = {"name": name, "parameters": schema, "strict": True}
    if path == RESPONSES:
        return {"tools": [{"type": "function"} | function]}
    return {"tools": [{"type": "function", "function": function}]}


FORMATS = {
    RESPONSES: "text.format",
    MESSAGES: "output_config.format",
    CHAT: "format",
    GENERATE: "format",
}
PARAMETERS = {
    RESPONSES: "tools[0].parameters",
    MESSAGES: "tools[0].input_schema",
    CHAT: "tools[0].function.parameters",
}


class Served(NamedTuple):
    client: httpx.Client
    node: FakeNode


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        cluster = Cluster(stack, write_model(tmp_path_factory.mktemp("model") / "model", QWEN))
        pages = {"total": 2000, "free": 2000}
        node = cluster.node("unified", auto=False, context_length=4000, pages=pages)
        yield Served(cluster.client(workers=1), node)


def read_message(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


def check_name(message: str, field: str) -> None:
    assert message.startswith(field), message
    assert message[len(field)] in ": .[", f"{message} names no other field"
    for name in {"response_format", "json_schema", "function.parameters"}:
        assert name not in message.removeprefix(field)


@pytest.mark.parametrize("path", FORMATS)
def test_a_schema_that_cannot_be_enforced(served: Served, path: str) -> None:
    body = BODIES[path] | ask_for_schema(path, UNFIT)
    check_name(read_message(served.client.post(path, json=body)), FORMATS[path])


@pytest.mark.parametrize("path", PARAMETERS)
def test_arguments_that_cannot_be_enforced(served: Served, path: str) -> None:
    body = BODIES[path] | ask_for_call(path, UNFIT)
    check_name(read_message(served.client.post(path, json=body)), PARAMETERS[path])


@pytest.mark.parametrize("path", PARAMETERS)
def test_names_of_functions(served: Served, path: str) -> None:
    body = BODIES[path] | ask_for_call(path, SCHEMA, "a b")
    field = "tools[0].function.name" if path == CHAT else "tools[0].name"
    check_name(read_message(served.client.post(path, json=body)), field)


def refuse_grammar(served: Served, path: str, fields: dict[str, Any]) -> str:
    """Have a node refuse the grammar of a request. Returns the error's message."""
    node, count = served.node, len(served.node.generates)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.client.post, path, json=BODIES[path] | fields)
        request = node.wait_generate(count + 1)
        grammar = request.params.grammar
        assert grammar is not None
        field = grammar.kind
        node.fail(request, InvalidRequestError.kind, f"{field}: it is wrong", field)
        return read_message(answer.result(20))


@pytest.mark.parametrize("path", FORMATS)
def test_a_schema_that_a_node_refuses(served: Served, path: str) -> None:
    message = refuse_grammar(served, path, ask_for_schema(path, SCHEMA))
    assert message == f"{FORMATS[path]}: it is wrong"


@pytest.mark.parametrize("path", PARAMETERS)
def test_arguments_that_a_node_refuses(served: Served, path: str) -> None:
    message = refuse_grammar(served, path, ask_for_call(path, SCHEMA))
    assert message == f"{PARAMETERS[path]}: it is wrong"


def test_a_choice_without_a_function_to_call(served: Served) -> None:
    body = BODIES[MESSAGES] | {"tool_choice": {"type": "any"}}
    assert read_message(served.client.post(MESSAGES, json=body)).startswith("tool_choice needs")
