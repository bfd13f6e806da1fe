"""``--transfer-backend auto`` on GPUs: nvlink where one process can map the other's pool."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cluster import Cluster
from processes import deployment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

OUTPUT_TOKENS = 8
PROMPT = list(range(7, 200))
FLAGS = ["--transfer-backend", "auto", "--dtype", "float32", "--max-running-requests", "8"]


def served(model: Path, logs: Path, **settings: Any) -> tuple[str, str]:
    """Serve a prompt; the backend that carried its KV, and the prefill node's log."""
    with Cluster(model, prefill=0, decode=0, unified=1) as cluster:
        request = cluster.client.generate(PROMPT, cluster.unified, max_tokens=OUTPUT_TOKENS)
        expected = request.tokens()
    with deployment(model, logs, node_flags=FLAGS, **settings) as running:
        stream = running.stream(PROMPT, OUTPUT_TOKENS).join()
        assert stream.succeeded_as(expected), (stream, stream.output, expected)
        running.wait_idle()
    log = (logs / "prefill0.log").read_text()
    (backend,) = set(re.findall(r"KV for decode node \S+ travels by (\w+)", log))
    return backend, log


def test_nvlink_between_the_gpus_of_a_host(checkpoint: Callable[[str], Path], tmp_path) -> None:
    other = min(1, torch.cuda.device_count() - 1)
    devices = {
        "prefill_flags": ["--device", "cuda:0"],
        "decode_flags": ["--device", f"cuda:{other}"],
    }
    backend, _ = served(checkpoint("qwen3"), tmp_path, **devices)
    assert backend == "nvlink"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_where_the_prefill_node_does_not_see_the_gpu(
    checkpoint: Callable[[str], Path], tmp_path
) -> None:
    alone = {
        f"{role}_env": {"CUDA_VISIBLE_DEVICES": str(number)}
        for number, role in enumerate(("prefill", "decode"))
    }
    backend, log = served(checkpoint("qwen3"), tmp_path, devices=["cuda:0"], **alone)
    assert backend in ("nixl", "tcp")
    assert "cannot map the decode node's GPU" in log


def test_another_with_expandable_segments(checkpoint: Callable[[str], Path], tmp_path) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    backend, log = served(checkpoint("qwen3"), tmp_path, devices=["cuda:0"], env=env)
    assert backend in ("nixl", "tcp")
    assert "peers cannot map memory of expandable segments" in log
