"""Random bodies get an answer or a 400 that names a field, never a 500 and never silence."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from damaged_values import damage
from fake_node import EOS
from proxy_cluster import Cluster
from tool_models import QWEN, tokenizer, write_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

PART: list[Any] = [
    {"type": "input_text", "text": "a"},
    {"type": "output_text", "text": "b", "annotations": []},
    {"type": "refusal", "refusal": "no"},
    {"type": "input_image", "image_url": "x"},
]
ITEMS: list[Any] = [
    {"role": "user", "content": "hello"},
    {"type": "message", "role": "developer", "content": PART[:1]},
    {"type": "message", "role": "assistant", "content": PART[1:3], "status": "completed"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"type": "function_call_output", "call_id": "d", "output": PART[:2]},
    {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "pd1.!!"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
    {"type": "item_reference", "id": "x"},
]
TOOLS: list[Any] = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
    {"type": "function", "name": "g", "description": "d", "parameters": None},
    {"type": "web_search"},
]
FIELDS: dict[str, list[Any]] = {
    "model": ["fake", "none", ""],
    "instructions": ["Be brief."],
    "tools": [TOOLS[:1], TOOLS[:2], TOOLS],
    "tool_choice": [
        "auto",
        "none",
        "required",
        {"type": "function", "name": "f"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
    ],
    "text": [
        {"format": {"type": "json_object"}, "verbosity": "medium"},
        {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    ],
    "reasoning": [{"effort": "low", "summary": "auto"}],
    "include": [["reasoning.encrypted_content"], []],
    "metadata": [{"a": "b"}],
    "previous_response_id": ["resp_" + "0" * 32, "x"],
    "store": [True, False],
    "max_output_tokens": [1, 5, 1 << 40],
    "temperature": [0, 1.5],
    "top_p": [0.5],
    "stream_options": [{"include_obfuscation": False}],
    "parallel_tool_calls": [False],
    "truncation": ["disabled"] * 5 + ["auto"],
    "background": [False] * 5 + [True],
}


def make_body(rng: random.Random) -> Any:
    names = rng.sample(list(FIELDS), rng.randrange(6))
    body: Any = {name: rng.choice(FIELDS[name]) for name in names}
    items = rng.choices(ITEMS, weights=[5] * (len(ITEMS) - 1) + [1], k=rng.randrange(1, 6))
    body["input"] = items if rng.random() < 0.8 else "hello"
    body["stream"] = rng.random() < 0.5
    return body if rng.random() < 0.4 else damage(rng, body)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    ids = tokenizer().encode("<think>hm</think>hello", add_special_tokens=False).ids
    with ExitStack() as stack:
        cluster = Cluster(stack, write_model(tmp_path_factory.mktemp("model"), QWEN))
        size = {"total": 2000, "free": 2000}
        cluster.node("unified", lambda *_: [*ids, EOS], context_length=4000, pages=size)
        yield cluster.client(failover="off")


def check_bodies(client: httpx.Client, seed: int, count: int) -> None:
    print(f"seed {seed}")
    rng, statuses = random.Random(seed), set()
    for _ in range(count):
        body = json.dumps(make_body(rng))
        response = client.post(
            "/v1/responses", content=body, headers={"Content-Type": "application/json"}
        )
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code == 200 and "event-stream" in response.headers["content-type"]:
            assert '"response.completed"' in response.text or "incomplete" in response.text, body
        elif response.status_code == 200:
            assert response.json()["status"] in ("completed", "incomplete"), body
        else:
            assert response.json()["error"]["message"], body
    assert statuses >= {200, 400}


def test_random_bodies(client: httpx.Client) -> None:
    check_bodies(client, random.randrange(1 << 32), 300)


@pytest.mark.full
def test_ten_thousand_random_bodies(client: httpx.Client) -> None:
    check_bodies(client, random.randrange(1 << 32), 10_000)
