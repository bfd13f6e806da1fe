"""Compare sums between tensor-parallel ranks: NCCL and peer memory.

    python benchmarks/all_reduce.py --output benchmarks/results/all_reduce_gpu.json

Each GPU has a process, in groups of 2, 4 and 8 as far as there are GPUs. Sums are of bfloat16, as
in a decode step. Many of them run one after the other in a CUDA graph; a figure is the median of
replays, divided by the number of sums. Peer memory is measured even for sizes that a model leaves
to NCCL (``pd.engine.tensor_parallel.peer_memory.choose_max_bytes``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from pd.bench.report import write_report
from pd.engine.tensor_parallel import peer_memory
from pd.engine.tensor_parallel.group import ProcessGroup

SIZES = tuple(1 << power for power in range(13, 23))
_SUMS, _REPLAYS = 64, 9
_SECONDS = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write a result file")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)  # of the processes it starts
    args = parser.parse_args()
    if args.rank is not None:
        rendezvous, ranks, rank = args.rank
        _measure(rendezvous, int(ranks), int(rank))
    gpus = torch.cuda.device_count()
    if gpus < 2:
        parser.exit(1, "all_reduce.py: needs two GPUs\n")
    rows: list[dict[str, Any]] = []
    for ranks in (2, 4, 8):
        if ranks <= gpus:
            rows += _group(ranks)
    if args.output is not None:
        names = [torch.cuda.get_device_name(gpu) for gpu in range(gpus)]
        write_report(
            args.output,
            shlex.join(["python", "benchmarks/all_reduce.py", *sys.argv[1:]]),
            rows,
            measured=["pd", "benchmarks/all_reduce.py"],
            machine={"gpu": ", ".join(names)},
        )
    return 0


def _group(ranks: int) -> list[dict[str, Any]]:
    """Measure with a group of ranks, and return and print the rows of rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        group = [Path(directory, "rendezvous"), str(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", *group, str(rank)], stdout=subprocess.PIPE
            )
            for rank in range(ranks)
        ]
        try:
            said = processes[0].communicate(timeout=_SECONDS)[0]
            statuses = [process.wait(_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    print(said.decode(), end="", flush=True)
    if any(statuses):
        raise SystemExit(f"{ranks} ranks ended with {statuses}; see above")
    return [json.loads(line) for line in said.splitlines()]


def _measure(rendezvous: str, ranks: int, rank: int) -> None:
    """Measure as one rank, then end the process."""
    peer_memory._MAX_BYTES = ranks * SIZES[-1]
    group = ProcessGroup(rank, ranks, rendezvous, torch.device("cuda", rank))
    peers = group._peers
    for size in SIZES:
        row: dict[str, Any] = {"ranks": ranks, "bytes": size}
        for name, group._peers in (("nccl_us", None), ("peer_us", peers)):
            is_there = name == "nccl_us" or peers is not None
            row[name] = round(_sum_seconds(group, size) * 1e6, 1) if is_there else None
        if rank == 0:
            print(json.dumps(row), flush=True)
    torch.cuda.synchronize()
    os._exit(0)  # as workers end: ranks that are still connected must not wait


def _sum_seconds(group: ProcessGroup, size: int) -> float:
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=torch.device("cuda", group.rank))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        group.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        total = x
        for _ in range(_SUMS):
            total = group.all_reduce(total)
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times) / 1e3 / _SUMS


if __name__ == "__main__":
    sys.exit(main())
