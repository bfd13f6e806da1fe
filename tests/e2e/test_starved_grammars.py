"""Structured output of a split that gets a quarter of its CPU time comes late, and is valid.

Failover stays on, so that a node which calls itself stuck would be taken out; nothing may use it.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest
from busy import busy_loops, two_cores
from processes import deployment
from troubles import no_troubles

from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from pathlib import Path

LOOPS = 6


def schema(number: int) -> dict[str, Any]:
    """Each has another name, so that each is compiled."""
    properties = {
        f"name{number}": {"type": "string", "maxLength": 3 + number},
        "kind": {"enum": ["a", "b", {"c": number}]},
        "counts": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    }
    required = [f"name{number}", "kind"]
    return {"type": "object", "properties": properties, "required": required}


@pytest.mark.starved
@pytest.mark.timeout(600)
def test_output_is_valid_beside_six_busy_loops(tmp_path: Path) -> None:
    """The grammars, and as many prompts without one, are asked for at once."""

    def ask(number: int) -> dict[str, Any]:
        params: dict[str, Any] = {"max_new_tokens": 120, "sampling_seed": number}
        if number % 2:
            params["json_schema"] = schema(number)
        body = {"text": f"Prompt {number}:", "sampling_params": params}
        answer = httpx.post(f"{running.proxy.url}/generate", json=body, timeout=500)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    split = deployment(EMBEDDED_MODEL, tmp_path)
    with two_cores(), split as running:
        troubles = no_troubles(running.proxy.url)
        with busy_loops(LOOPS), troubles, ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(ask, range(20)))
        running.wait_idle()
    ended = 0
    for number, answer in enumerate(answers):
        if number % 2 and answer["meta_info"]["finish_reason"]["type"] == "stop":
            jsonschema.validate(json.loads(answer["text"]), schema(number))
            ended += 1
    assert ended
