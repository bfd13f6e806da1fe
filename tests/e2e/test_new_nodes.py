"""Real nodes: a request that follows a 200 of a node's /health is served, whenever it comes."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
import pytest
from processes import Process, free_port, wait_until
from tiny import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)

NODE = ("--load-format", "dummy", "--kv-cache-tokens", "512", "--transfer-backend", "tcp")
BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
ROUNDS = 3


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def start(stack: ExitStack, logs: Path, role: str, *flags: str) -> Process:
    process = Process(role, *flags, log=logs / f"{role}.log")
    stack.callback(process.stop)
    return process


def test_the_first_request_after_a_prefill_node_is_healthy_is_served(
    stack: ExitStack, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    model = ("--model", str(tiny_model()), *NODE)
    port = str(free_port())
    decode = start(stack, tmp_path, "decode", *model, "--port", "0")
    workers = ("--prefill", f"http://127.0.0.1:{port}", "--decode", decode.url)
    proxy = start(stack, tmp_path, "proxy", *workers, "--port", "0", "--failover", "off")
    registry = ("--bootstrap-port", str(free_port()))
    client = stack.enter_context(httpx.Client(timeout=60))
    assert client.post(f"{proxy.url}/generate", json=BODY).status_code == 503
    for _ in range(ROUNDS):
        time.sleep(rng.random())  # the proxy polls once a second
        prefill = start(stack, tmp_path, "prefill", *model, *registry, "--port", port)
        wait_until(lambda: is_healthy(client, port), 60)
        answer = client.post(f"{proxy.url}/generate", json=BODY)
        assert answer.status_code == 200, answer.text
        prefill.kill()
        wait_until(lambda: client.post(f"{proxy.url}/generate", json=BODY).status_code == 503, 60)


def is_healthy(client: httpx.Client, port: str) -> bool:
    try:
        return client.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False
