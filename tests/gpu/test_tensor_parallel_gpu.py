"""Several GPUs, a process each: the tokens of one, in graphs and without; sums between them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint, reference_generate
from greedy_engine import generate

from pd.core.config import NodeConfig
from pd.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
KINDS = ["llama3", "qwen2", "qwen3", "mixtral", "qwen3_moe"]
needs_four = pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")


def check_tokens(path: Path, size: int, ep_size: int = 1) -> None:
    """Decode steps of one or two sequences run in a graph, others do not."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 17, 40, 150, 300)]
    config = NodeConfig(
        role="unified",
        model=path,
        device="cuda",
        dtype="float32",
        tp_size=size,
        ep_size=ep_size,
        kv_cache_tokens=4096,
        context_length=512,
        cuda_graph_batch_sizes=(1, 2),
        max_running_requests=8,
    )
    engine = Engine.build(config)
    try:
        runner: Any = engine.runner
        runner.pool = engine.pool
        found = generate(runner, prompts, 24, max_chunk=100, seed=0)
        alone = [generate(runner, [p], 24, max_chunk=400, seed=0)[0] for p in prompts]
    finally:
        engine.close()
    expected = reference_generate(path, prompts, 24)
    assert [s.output for s in found] == expected
    assert [s.output for s in alone] == expected


@pytest.mark.parametrize("architecture", KINDS)
def test_two_gpus_equal_transformers(checkpoint: Callable[[str], Path], architecture: str) -> None:
    check_tokens(checkpoint(architecture), 2)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_two_gpus_with_different_experts_equal_transformers(
    checkpoint: Callable[[str], Path], architecture: str
) -> None:
    check_tokens(checkpoint(architecture), 2, ep_size=2)


@needs_four
@pytest.mark.parametrize("ep_size", [2, 4])
def test_four_gpus_with_different_experts_equal_transformers(
    checkpoint: Callable[[str], Path], ep_size: int
) -> None:
    check_tokens(checkpoint("deepseek_v3"), 4, ep_size)


@needs_four
@pytest.mark.parametrize("architecture", KINDS)
def test_four_gpus_equal_transformers(architecture: str, tmp_path: Path) -> None:
    check_tokens(make_checkpoint(architecture, tmp_path, num_key_value_heads=4), 4)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=needs_four)])
def test_sums_through_peer_memory_and_nccl(size: int, tmp_path: Path) -> None:
    program = Path(__file__).with_name("tensor_parallel_rank.py")
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, program, tmp_path / "rendezvous", str(size), str(rank), "cuda"],
            env=os.environ | {"PYTHONPATH": path},
        )
        for rank in range(size)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
