"""Two GPUs, a process each: the tokens of one, in graphs and without; sums through peer memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, reference_generate
from greedy_engine import generate

from pd.core.config import NodeConfig
from pd.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("architecture", ["llama3", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_greedy_tokens_equal_transformers(
    checkpoint: Callable[[str], Path], architecture: str
) -> None:
    """Decode steps of one or two sequences run in a graph, others do not."""
    path = checkpoint(architecture)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 17, 40, 150, 300)]
    config = NodeConfig(
        role="unified",
        model=path,
        device="cuda",
        dtype="float32",
        tp_size=2,
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


def test_sums_through_peer_memory_and_nccl(tmp_path: Path) -> None:
    """Each rank is a process that checks every sum, the same bits on both."""
    command = [sys.executable, __file__, str(tmp_path / "rendezvous")]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen([*command, str(rank)], env=os.environ | {"PYTHONPATH": path})
        for rank in range(2)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def _sums(rendezvous: str, rank: int) -> None:
    from pd.engine.tensor_parallel.group import ProcessGroup
    from pd.engine.tensor_parallel.peer_memory import MAX_BYTES

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = ProcessGroup(rank, 2, rendezvous, device)
    assert group._peers is not None
    sizes = [1, 1000, 4096, 4097, 65536, MAX_BYTES // 2, MAX_BYTES // 2 + 8, 1 << 20]
    for size in [*sizes, *np.random.default_rng(0).integers(1, 300000, 300).tolist()]:
        torch.manual_seed(size)
        x = torch.randn(2, size, device=device).to(torch.bfloat16)
        total = group.all_reduce(x[rank].clone())
        assert torch.equal(total, x[0] + x[1]), size
    _replays(group, device, rank)
    torch.cuda.synchronize()
    os._exit(0)  # as workers end


def _replays(group: Any, device: torch.device, rank: int) -> None:
    """Thousands of sums from graphs, without a pause in which the ranks would meet."""
    count = torch.zeros((), dtype=torch.int64, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def sums() -> None:
        for _ in range(20):
            count.add_(1).remainder_(40)
            mine = (count * (rank + 1)).to(torch.bfloat16).repeat(8192)
            wrong.add_((group.all_reduce(mine) != 3 * count).sum())

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        sums()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        sums()
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert int(wrong) == 0


if __name__ == "__main__":
    _sums(sys.argv[1], int(sys.argv[2]))
