"""``prefix_lease`` over HTTP and real nodes: a program's prompt survives the pressure of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cluster import Cluster, random_prompts, wait_until
from test_choices import System, behind_proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGE, POOL = 4, 80
PROMPT = list(range(3, 35))


@pytest.fixture(params=["split", "unified"])
def system(checkpoint: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[System]:
    layout = {} if request.param == "split" else {"prefill": 0, "decode": 0, "unified": 1}
    model = checkpoint("qwen3")
    with behind_proxy(
        Cluster(model, page_size=PAGE, kv_cache_tokens=PAGE * POOL, **layout)
    ) as system:
        yield system


def send(system: System, prompt: list[int], **body: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    meta: dict[str, Any] = system.choose(input_ids=prompt, sampling_params=sampling, **body)[
        "meta_info"
    ]
    return meta


def fill_cache(system: System) -> None:
    """Send prompts that need more than the whole pool together."""
    for prompt in random_prompts(1, [100] * 6):
        send(system, prompt)


def describe_leases(system: System) -> dict[str, int]:
    node = (system.cluster.prefill or system.cluster.unified)[0]
    leases: dict[str, int] = httpx.get(f"{node.url}/server_info").json()["prefix_leases"]
    return leases


def test_a_leased_prompt_is_still_cached_after_pressure(system: System) -> None:
    send(system, PROMPT)
    fill_cache(system)
    assert send(system, PROMPT)["cached_tokens"] == 0
    send(system, PROMPT, prefix_lease=60)
    assert describe_leases(system)["pages"] == len(PROMPT) // PAGE
    fill_cache(system)
    assert send(system, PROMPT)["cached_tokens"] == len(PROMPT) - PAGE


def test_an_abort_ends_the_lease_of_a_finished_request(system: System) -> None:
    for number in range(2):
        send(system, [number, *PROMPT[:15]], rid=f"program-{number}", prefix_lease=60)
    assert describe_leases(system)["leases"] == 2
    system.http.post("/abort_request", json={"rid": "program-0"}).raise_for_status()
    wait_until(lambda: describe_leases(system)["leases"] == 1, 10.0)
    system.http.post("/abort_request", json={"abort_all": True}).raise_for_status()
    wait_until(lambda: describe_leases(system)["leases"] == 0, 10.0)


def test_leases_of_a_whole_pool_hold_up_nobody(system: System) -> None:
    """The limits of a lease end before the pool, and running requests take leased pages, too."""
    for number in range(12):
        send(system, [100 + number] * 40, prefix_lease=60)
    assert describe_leases(system)["pages"] <= POOL // 8
    fill_cache(system)


def test_a_prompt_with_cache_control_is_leased(system: System) -> None:
    """Anthropic's mark; its counts add up to the prompt, and the second request reads the cache."""
    text = [{"type": "text", "text": "the thing", "cache_control": {"type": "ephemeral"}}]
    body: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    body["model"] = system.http.get("/v1/models").json()["data"][0]["id"]
    counted = {name: value for name, value in body.items() if name != "max_tokens"}
    count = system.http.post("/v1/messages/count_tokens", json=counted).json()["input_tokens"]
    usages = [system.http.post("/v1/messages", json=body).json()["usage"] for _ in range(2)]
    read = (count - 1) // PAGE * PAGE
    expected = {"input_tokens": 0, "output_tokens": 1}
    for usage, cached in zip(usages, (0, read), strict=True):
        names = {"cache_read_input_tokens": cached, "cache_creation_input_tokens": count - cached}
        assert usage == expected | names
    assert read > 0
    leases = describe_leases(system)
    assert (leases["granted"], leases["pages"]) == (2, count // PAGE)


@pytest.mark.parametrize("value", [-1, 61, "10", True])
def test_the_time_of_a_lease_is_checked(system: System, value: object) -> None:
    body = {"input_ids": PROMPT, "prefix_lease": value}
    response = system.http.post("/generate", json=body)
    assert response.status_code == 400
    assert "prefix_lease" in response.text
