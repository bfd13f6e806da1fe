"""Random batches get an answer or a 400, and random lines a result or the end of their batch."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from damaged_values import damage
from proxy_batches import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    echo,
    make_line,
    make_lines,
    read_results,
    upload,
    wait_ended,
)
from proxy_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

FIELDS: dict[str, list[Any]] = {
    "metadata": [{}, {"a": "b"}, {"x" * 65: "y"}, {str(n): "" for n in range(17)}],
    "output_expires_after": [
        {"anchor": "created_at", "seconds": 3600},
        {"anchor": "created_at", "seconds": 10},
        {"anchor": "now", "seconds": 3600},
    ],
    "model": ["fake"],
    "stream": [False, True],
}
QUERIES = ["", "?limit=1", "?limit=0", "?limit=x", "?after=", "?after=batch_1", "?after=%00", "?x"]
LINES: list[Any] = [
    make_line("a", COMPLETIONS, prompt="hi", max_tokens=3),
    make_line("b", COMPLETIONS, prompt=["hi", "there"], max_tokens=1, n=2),
    make_line("c", COMPLETIONS, prompt=[5, 6], stream=True),
    make_line("d", CHAT, messages=[{"role": "user", "content": "hi"}]),
    make_line("e", CHAT, messages=[]),
    make_line("f", RESPONSES, input="hi", store=False),
]


@pytest.fixture(scope="module")
def client(model_dir: str) -> Iterator[openai.OpenAI]:
    with ExitStack() as stack:
        cluster = Cluster(stack, model_dir)
        cluster.node("unified", echo)
        proxy = cluster.proxy(failover="off")
        client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0)
        yield stack.enter_context(client)


def check_bodies(client: openai.OpenAI, seed: int, count: int) -> None:
    print(f"seed {seed}")
    rng, statuses = random.Random(seed), set()
    file = upload(client, make_lines(1))
    names = ["file-" + "0" * 32, "file-", "../x", "batch_" + "0" * 32, "\0", "é"]
    with httpx.Client(base_url=str(client.base_url), timeout=20) as http:
        for _ in range(count):
            body: Any = {
                "input_file_id": file if rng.random() < 0.8 else rng.choice(names),
                "endpoint": rng.choice([CHAT, COMPLETIONS, RESPONSES]),
                "completion_window": "24h",
            }
            for name in rng.sample(list(FIELDS), rng.randrange(3)):
                body[name] = rng.choice(FIELDS[name])
            if rng.random() < 0.5:
                body = damage(rng, body)
            headers = {"Content-Type": "application/json"}
            answer = http.post("batches", content=json.dumps(body), headers=headers)
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 429), (body, answer.text)
            other = f"batches/{rng.choice(names)}".encode().replace(b"\0", b"%00").decode()
            for odd in (
                http.get("batches" + rng.choice(QUERIES)),
                http.get(other),
                http.post(
                    f"{other}/cancel", content=rng.choice([b"", b"{}", b"["]), headers=headers
                ),
                http.get(f"files/{rng.choice(names[:2])}/content"),
            ):
                assert odd.status_code in (200, 400, 404), (odd.url, odd.text)
    assert statuses >= {200, 400}


def check_lines(client: openai.OpenAI, seed: int, count: int) -> None:
    print(f"seed {seed}")
    rng, statuses = random.Random(seed), set()
    for _ in range(count):
        endpoint = rng.choice([CHAT, COMPLETIONS, RESPONSES])
        lines = [line | {"url": endpoint} for line in rng.sample(LINES, rng.randrange(1, 5))]
        if rng.random() < 0.5:
            lines[0] = damage(rng, lines[0])
        content = b"\n".join(json.dumps(line).encode() for line in lines)
        if rng.random() < 0.2:
            place = rng.randrange(len(content))
            content = content[:place] + rng.choice([b"\xff", b"\0", b"\n", b"{"]) + content[place:]
        file = client.files.create(file=("a", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h"
        )
        batch = wait_ended(client, batch)
        statuses.add(batch.status)
        counts = batch.request_counts
        assert counts is not None, content
        found = [read_results(client, each) for each in (batch.output_file_id, batch.error_file_id)]
        assert [counts.completed, counts.failed] == list(map(len, found)), content
        if batch.status == "failed":
            assert batch.errors is not None and batch.errors.data, content
            assert counts.total == 0, content
        else:
            assert batch.status == "completed" and counts.total == sum(map(len, found)), content
            codes = [
                line["response"]["status_code"] for line in found[1].values() if line["response"]
            ]
            assert all(400 <= code < 500 for code in codes), (content, found)
        for name in (file.id, batch.output_file_id, batch.error_file_id):
            if name is not None:
                client.files.delete(name)
    assert statuses == {"completed", "failed"}


def test_random_bodies(client: openai.OpenAI) -> None:
    check_bodies(client, random.randrange(1 << 32), 300)


def test_random_lines(client: openai.OpenAI) -> None:
    check_lines(client, random.randrange(1 << 32), 60)


@pytest.mark.full
def test_ten_thousand_random_bodies(client: openai.OpenAI) -> None:
    check_bodies(client, random.randrange(1 << 32), 10_000)


@pytest.mark.full
def test_two_thousand_files_of_random_lines(client: openai.OpenAI) -> None:
    check_lines(client, random.randrange(1 << 32), 2000)
