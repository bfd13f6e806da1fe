"""``python tensor_parallel_rank.py RENDEZVOUS SIZE RANK DEVICE``: one rank that checks sums."""

from __future__ import annotations

import os
import random
import sys

import torch

from pd.engine.tensor_parallel.group import ProcessGroup
from pd.engine.tensor_parallel.peer_memory import choose_max_bytes


def main() -> None:
    rendezvous, size, rank, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    group = ProcessGroup(rank, size, rendezvous, device)
    assert (group._peers is not None) == (kind == "cuda")
    check_sums(group, device)
    if kind == "cuda":
        check_replays(group, device)
        torch.cuda.synchronize()
    os._exit(0)  # as workers end


def check_sums(group: ProcessGroup, device: torch.device) -> None:
    """Of sizes on both sides of what goes through peer memory, with programs that pause."""
    seed = 0
    print(f"seed {seed}")
    most = choose_max_bytes(group.size) // 2
    sizes = [1, 1000, 4096, 4097, most - 8, most, most + 8, 4 * most]
    sizes += random.Random(seed).choices(range(1, 2 * most), k=200 if device.type == "cuda" else 4)
    for size in sizes:
        generator = torch.Generator().manual_seed(size)
        x = torch.randint(-60, 60, (group.size, size), generator=generator).to(device)
        total = group.all_reduce(x[group.rank].to(torch.bfloat16))
        # Of whole numbers below 256, which have one sum in any order.
        assert torch.equal(total, x.sum(0).to(torch.bfloat16)), size


def check_replays(group: ProcessGroup, device: torch.device) -> None:
    """Thousands of sums in graphs, without a pause in which the ranks would meet."""
    count = torch.zeros((), dtype=torch.int64, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    whole = group.size * (group.size + 1) // 2

    def sums() -> None:
        for _ in range(20):
            count.add_(1).remainder_(25)
            mine = (count * (group.rank + 1)).to(torch.bfloat16).repeat(8192)
            wrong.add_((group.all_reduce(mine) != whole * count).sum())

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
    main()
