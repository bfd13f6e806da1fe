"""Real nodes whose checkpoints differ in one file: they are not paired, and the proxy says why."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tiny
from processes import Process, free_port, wait_ready, wait_until

from pd.core.errors import HandshakeError
from pd.core.node_info import check_compatible

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODE = ("--load-format", "dummy", "--kv-cache-tokens", "512", "--cpu-threads", "1")
PROMPT = [5, 6, 7]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def copy_of(model: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(model, to)
    raw = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(raw | config))
    return to


def start(stack: ExitStack, logs: Path, name: str, *command: str) -> Process:
    process = Process(*command, "--port", str(free_port()), log=logs / f"{name}.log")
    stack.callback(process.stop)
    return process


def test_a_pair_with_other_ends_of_answers_is_not_ready_and_says_so(
    stack: ExitStack, tmp_path: Path
) -> None:
    one = copy_of(tiny.tiny_model(), tmp_path / "one" / "model")
    other = copy_of(one, tmp_path / "other" / "model", eos_token_id=[7, 255])
    same = copy_of(one, tmp_path / "elsewhere" / "model")
    model = ("--transfer-backend", "tcp", *NODE, "--model")
    prefill = start(
        stack, tmp_path, "p", "prefill", "--bootstrap-port", str(free_port()), *model, str(one)
    )
    decode = start(stack, tmp_path, "d", "decode", *model, str(other))
    workers = ("--prefill", prefill.url, "--decode", decode.url)
    proxy = start(stack, tmp_path, "proxy", "proxy", *workers)

    def readiness() -> str:
        return httpx.get(f"{proxy.url}/readiness", timeout=10).text

    wait_until(lambda: "eos_token_ids" in readiness(), 60, readiness)
    assert "prefill has eos_token_ids '255', decode has '7, 255'" in readiness()
    # An equal checkpoint in another directory fits.
    equal = start(stack, tmp_path, "e", "decode", *model, str(same))
    httpx.post(f"{proxy.url}/workers", json={"role": "decode", "url": equal.url}, timeout=10)
    wait_ready(proxy, [prefill, decode, equal])
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    assert httpx.post(f"{proxy.url}/generate", json=body, timeout=60).status_code == 200
    assert decode.server_info()["queues"]["transfer"] == 0


def test_a_handshake_names_the_setting_that_differs(tmp_path: Path) -> None:
    """As a proxy of another release might pair them."""
    prefill = tiny.tiny_node("prefill")
    model = copy_of(tiny.tiny_model(), tmp_path / "model", rope_theta=500.0, rms_norm_eps=1e-6)
    settings = {"load_format": "dummy", "page_size": 4, "kv_cache_tokens": 2048}
    decode = tiny.start_node("decode", model, **settings)
    try:
        with pytest.raises(HandshakeError) as raised:
            check_compatible(prefill.node.own, decode.node.own)
    finally:
        prefill.stop()
        decode.stop()
    assert "rms_norm_eps differs: prefill node" in str(raised.value)
    assert "has '1e-05', decode node" in str(raised.value)
    assert "different, too: rope.theta" in str(raised.value)
