"""Bodies that are almost right get an answer: never a 500, never silence."""

from __future__ import annotations

import copy
import json
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from fake_node import EOS
from proxy_cluster import Cluster
from tool_models import QWEN, tokenizer, write_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

TOOL = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
CALLS = [{"function": {"name": "f", "arguments": {"a": "x"}}}]
FORMAT = {"type": "object", "properties": {"a": {"type": "integer"}}}
MARK = {"type": "ephemeral", "ttl": "5m"}
ANTHROPIC: dict[str, Any] = {
    "model": "fake",
    "system": [{"type": "text", "text": "s", "cache_control": MARK}],
    "messages": [
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "g"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "r"}],
                    "is_error": False,
                },
                {"type": "text", "text": "u", "cache_control": MARK},
            ],
        },
    ],
    "tools": [
        {"name": "f", "description": "d", "input_schema": TOOL["parameters"], "strict": True},
        {"type": "custom", "name": "g", "input_schema": {"type": "object"}, "cache_control": MARK},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "cache_control": MARK,
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
# A valid body of each endpoint, with most of its fields.
BODIES: dict[str, dict[str, Any]] = {
    "/api/chat": {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "assistant", "content": "a", "thinking": "t", "tool_calls": CALLS},
            {"role": "tool", "tool_name": "f", "content": "r"},
            {"role": "user", "content": "u"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "think": True,
        "keep_alive": "5m",
        "stream": False,
        "logprobs": False,
        "options": {"num_predict": 5, "num_ctx": 900, "temperature": 0.5, "stop": ["x"], "seed": 1},
    },
    "/api/generate": {
        "model": "fake",
        "prompt": "p",
        "system": "s",
        "format": FORMAT,
        "raw": False,
        "images": [],
        "suffix": "",
        "options": {"num_predict": 5, "top_k": 3, "top_p": 0.5, "repeat_penalty": 1.1},
    },
    "/api/show": {"model": "fake", "verbose": True},
    "/v1/messages": ANTHROPIC
    | {
        "max_tokens": 5,
        "metadata": {"user_id": "u"},
        "stop_sequences": ["x"],
        "stream": False,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "service_tier": "auto",
        "timeout": 9,
    },
    "/v1/messages/count_tokens": ANTHROPIC,
    "/v1/score": {
        "model": "fake",
        "query": "q",
        "items": ["a", "b"],
        "label_token_ids": [5, 6],
        "apply_softmax": True,
        "item_first": False,
        "add_special_tokens": True,
        "priority": 1,
        "cache_salt": "s",
        "prefix_lease": 1,
        "timeout": 9,
        "rid": "r",
    },
}
ODD: list[Any] = [
    *(None, True, False, 0, -1, 5, 1 << 40, 10**30, 0.5, -1e300, 1e308),
    *("", "x", "\ud800", "\0", "5m", "json", "a" * 5000, "😀", "<|im_end|>", "nice:latest"),
    *([], {}, [[]], [None], [{}], {"": None}, {"type": "x"}, [1, "a", {}], {"a": {"b": [{}]}}),
    {"type": "text", "text": "x"},
    {"role": "user", "content": "x"},
]


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """List the containers and keys of everything within a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from list_places(item)


def draw_body(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Change a valid body in a few places, or its text in one."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(list_places(body))
        if not places:
            break
        container, key = rng.choice(places)
        if rng.random() < 0.15:
            del container[key]
        elif rng.random() < 0.15 and isinstance(container, dict):
            container[rng.choice(("content", "type", "stream", "n", "x"))] = copy.deepcopy(
                rng.choice(ODD)
            )
        else:
            container[key] = copy.deepcopy(rng.choice(ODD))
    data = json.dumps(body).encode()
    if rng.random() < 0.05:
        place = rng.randrange(len(data))
        data = data[:place] + rng.choice((b"", b"\xff", b"[" * 500, b'"')) + data[place + 1 :]
    return data


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = tokenizer()

    def answer(prompt: list[int], index: int) -> list[int]:
        return [*model.encode("ok").ids, EOS]

    with ExitStack() as stack:
        cluster = Cluster(stack, write_model(tmp_path_factory.mktemp("fuzz") / "model", QWEN))
        cluster.node("unified", answer, context_length=1000, pages={"total": 500, "free": 500})
        yield cluster.client(workers=1)


def check_bodies(client: httpx.Client, path: str, rng: random.Random, count: int) -> None:
    statuses: dict[int, int] = {}
    for _ in range(count):
        body = draw_body(rng, BODIES[path])
        headers = {"Content-Type": "application/json"}
        answer = client.post(path, content=body, headers=headers, timeout=10)
        assert answer.status_code < 500, (body, answer.text)
        assert answer.status_code not in (401, 403, 405, 408, 415), (body, answer.text)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
    assert statuses.keys() >= {200, 400}, f"the bodies are all alike: {statuses}"
    answer = client.post(path, json=BODIES[path], timeout=10)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
def test_fuzzed_bodies_are_answered(client: httpx.Client, path: str, seed: int) -> None:
    check_bodies(client, path, random.Random(seed), 300)


@pytest.mark.full
@pytest.mark.parametrize("path", BODIES)
def test_ten_thousand_fuzzed_bodies_are_answered(
    client: httpx.Client, path: str, seed: int
) -> None:
    check_bodies(client, path, random.Random(seed + 1), 10_000)
