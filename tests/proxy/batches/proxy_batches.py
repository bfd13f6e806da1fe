"""Batches of a proxy, as OpenAI's client makes and reads them."""

from __future__ import annotations

import io
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from fake_node import EOS

if TYPE_CHECKING:
    import openai
    from fake_node import FakeNode
    from openai.types import Batch

    from pd.core.messages import Generate

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ENDED = ("completed", "failed", "expired", "cancelled")


def make_line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def make_lines(count: int) -> list[dict[str, Any]]:
    """Requests with ids from 0, whose prompts are token ids that tell their number."""
    prompts = ([5, 5 + number // 500, 5 + number % 500] for number in range(count))
    return [make_line(f"{n}", prompt=prompt, max_tokens=4) for n, prompt in enumerate(prompts)]


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch").id


def start(
    client: openai.OpenAI, lines: list[Any], endpoint: Any = COMPLETIONS, **options: Any
) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, lines),
        endpoint=endpoint,
        completion_window="24h",
        **options,
    )


def wait_ended(client: openai.OpenAI, batch: Batch, seconds: float = 20) -> Batch:
    deadline = time.monotonic() + seconds
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def read_results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of a file by ``custom_id``. Each occurs once."""
    if file_id is None:
        return {}
    text = client.files.content(file_id).text
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def read_number(generate: Generate) -> int:
    """The number of a request of :func:`make_lines`."""
    _, high, low = np.frombuffer(generate.token_ids, "<i4").tolist()
    return int(500 * (high - 5) + low - 5)


def echo(prompt: list[int], index: int) -> list[int]:
    return [*prompt[:30], EOS]


def reply_to(node: FakeNode, start: int, end: int) -> None:
    """Answer requests by their number, as they come."""
    for number in range(start, end):
        node.wait_generate(number + 1)
        node.reply(node.generates[number])


def wait_completed(client: openai.OpenAI, batch: Batch, count: int) -> None:
    """Wait until so many requests of a batch have succeeded."""
    deadline = time.monotonic() + 20
    while True:
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        if counts.completed >= count:
            return
        assert time.monotonic() < deadline, counts
        time.sleep(0.02)
