"""Speed of the KV copy kernel over grid sizes, tiles and warps, and what it costs a forward pass.

    python benchmarks/kv_copy.py [--output FILE]

Copies 8,192 tokens between pools of Llama-3.1-8B's KV shape (1 GiB), pages of 16 tokens scattered
on both sides, from the first GPU to the second (on a machine of one GPU: within it), and gathers
and scatters them locally. Beside each figure stands the plain copy of as many bytes. Also: the same
for rows of few bytes, and how much longer matrix products on the source GPU take per GiB pushed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pd.kernels.kv_copy import copy_to_peer
from pd.kernels.kv_copy_triton import LOCAL_SHAPE, PEER_SHAPE, LaunchShape, Side, copy_rows

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS = (8, 16, 24, 32, 48, 64, 96, 132, 264)
TILES = (8192, 16384, 32768)
WARPS = (4, 8)
TOKENS, PAGE = 8192, 16
# What vLLM needs for a prompt of as many tokens (reference-numbers.md): a push is to cost little
# of it.
PREFILL_MS = 210.8
# layers, heads, head_dim, tokens: rows of 2,048 bytes, 256 and 64.
SHAPES = {
    "llama-8b": (32, 8, 128, TOKENS),
    "row-256": (16, 2, 64, 65536),
    "row-64": (8, 1, 32, 65536),
}


class Case:
    """Two pools and the slots of one sequence in each."""

    def __init__(self, name: str, source: torch.device, target: torch.device) -> None:
        layers, heads, dim, tokens = SHAPES[name]
        self.name, self.tokens, self.layers = name, tokens, layers
        generator = torch.Generator(source).manual_seed(0)
        shape = (layers, 2, 2 * tokens, heads, dim)
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device=source)
        self.pool.view(torch.int16).random_(generator=generator)
        self.peer = torch.zeros(shape, dtype=torch.bfloat16, device=target)
        self.slots = self._pages(source, generator)
        self.peer_slots = self._pages(source, generator)
        self.row = heads * dim * 2
        self.num_bytes = layers * 2 * tokens * self.row
        self.packed = torch.empty(self.num_bytes, dtype=torch.uint8, device=source)
        # A first copy by torch opens peer access.
        self.peer[0, 0, :1].copy_(self.pool[0, 0, :1])

    def _pages(self, device: torch.device, generator: torch.Generator) -> torch.Tensor:
        pages = torch.randperm(2 * self.tokens // PAGE, device=device, generator=generator)
        slots = pages[: self.tokens // PAGE, None] * PAGE + torch.arange(PAGE, device=device)
        return slots.flatten().to(torch.int32)

    def push(self, shape: LaunchShape) -> None:
        copy_to_peer(
            self.pool,
            self.slots,
            self.peer.data_ptr(),
            self.peer.shape[2],
            self.peer_slots,
            0,
            self.layers,
            shape,
        )

    def gather(self, shape: LaunchShape) -> None:
        self._local(self._pool_side(), Side(self.packed.data_ptr(), 0, self.tokens), shape)

    def scatter(self, shape: LaunchShape) -> None:
        self._local(Side(self.packed.data_ptr(), 0, self.tokens), self._pool_side(), shape)

    def _pool_side(self) -> Side:
        return Side(self.pool.data_ptr(), 0, self.pool.shape[2], self.slots)

    def _local(self, source: Side, target: Side, shape: LaunchShape) -> None:
        planes = 2 * self.layers
        copy_rows(source, target, self.tokens, planes, self.row, self.pool.device, shape)

    def plain(self) -> None:
        """The ceiling of a push: as many bytes that lie together."""
        half = self.pool.view(-1)[: self.num_bytes // 2]
        self.peer.view(-1)[: self.num_bytes // 2].copy_(half)

    def plain_local(self) -> None:
        """The ceiling of a gather."""
        self.packed.copy_(self.pool.view(-1).view(torch.uint8)[: self.num_bytes])

    def check(self) -> None:
        """Raise unless the peer's pool holds what was pushed last and nothing else."""
        expected = torch.zeros_like(self.peer)
        rows = self.pool.index_select(2, self.slots).to(expected.device)
        expected.index_copy_(2, self.peer_slots.long().to(expected.device), rows)
        bits = torch.int16
        if not torch.equal(expected.view(bits), self.peer.view(bits)):
            raise AssertionError(f"{self.name}: the peer's pool is wrong")


def seconds(work: Callable[[], Any], device: torch.device, calls: int = 8) -> float:
    """Device time of one call, the median of three times ``calls`` in a row, so that the time of
    the launches themselves does not count."""
    work()
    times = []
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(stop) / 1e3 / calls)
    return sorted(times)[1]


def sweep(case: Case, what: str, device: torch.device) -> list[dict[str, Any]]:
    """Every launch shape for one of push, gather, scatter; prints a table."""
    ceiling = case.plain if what == "push" else case.plain_local
    ceiling_gb_s = case.num_bytes / seconds(ceiling, device) / 1e9
    rows = []
    # Each tile and number of warps is a kernel to compile, so small rows try one tile only.
    tiles = TILES if case.name == "llama-8b" else (PEER_SHAPE.tile_bytes,)
    for tile, warps, programs in itertools.product(tiles, WARPS, PROGRAMS):
        shape = LaunchShape(programs, tile, warps)
        if what == "push":
            case.peer.zero_()
            torch.cuda.synchronize(case.peer.device)
        work = getattr(case, what)
        gb_s = case.num_bytes / seconds(lambda s=shape, w=work: w(s), device) / 1e9
        if what == "push":
            case.check()
        rows.append(
            {
                "case": case.name,
                "what": what,
                "programs": programs,
                "tile_bytes": tile,
                "num_warps": warps,
                "gb_s": round(gb_s, 1),
                "ceiling_gb_s": round(ceiling_gb_s, 1),
            }
        )
    print(f"{case.name} {what}: plain copy {ceiling_gb_s:.0f} GB/s")
    print("  tile warps " + "".join(f"{p:>7}" for p in PROGRAMS))
    for tile, warps in itertools.product(tiles, WARPS):
        line = [r["gb_s"] for r in rows if (r["tile_bytes"], r["num_warps"]) == (tile, warps)]
        print(f"{tile:>6} {warps:>5} " + "".join(f"{gb_s:>7.0f}" for gb_s in line), flush=True)
    return rows


def interference(case: Case, device: torch.device, shape: LaunchShape) -> dict[str, Any]:
    """What pushing 1 GiB adds to matrix products that run at the same time."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    b, out = torch.randn_like(a), torch.empty_like(a)
    side = torch.cuda.Stream(device, priority=-1)
    pushes = 4

    def products() -> None:
        for _ in range(30):
            torch.mm(a, b, out=out)

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(pushes):
                case.push(shape)
        products()

    alone = seconds(products, device, 1)
    together = seconds(both, device, 1)
    lost_ms = (together - alone) * 1e3 / (pushes * case.num_bytes / (1 << 30))
    return {
        "case": case.name,
        "what": "interference",
        "programs": shape.programs,
        "tile_bytes": shape.tile_bytes,
        "num_warps": shape.num_warps,
        "lost_ms_per_gib": round(lost_ms, 2),
        "lost_percent_of_prefill": round(100 * lost_ms / PREFILL_MS, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the measurements as JSON")
    args = parser.parse_args()
    source = torch.device("cuda", 0)
    target = torch.device("cuda", min(1, torch.cuda.device_count() - 1))
    torch.cuda.set_device(source)
    name = torch.cuda.get_device_name(source)
    print(f"{name}, from {source} to {target}; torch {torch.__version__}")
    results = []
    for shape_name in SHAPES:
        case = Case(shape_name, source, target)
        for what in ("push", "gather", "scatter"):
            results += sweep(case, what, source)
        if shape_name == "llama-8b":
            for programs in (16, 32, 64, 132):
                shape = LaunchShape(programs, PEER_SHAPE.tile_bytes, PEER_SHAPE.num_warps)
                results.append(interference(case, source, shape))
                print(results[-1])
        del case
    print(f"in use: push {PEER_SHAPE}, gather and scatter {LOCAL_SHAPE}")
    if args.output is not None:
        document = {
            "benchmark": "kv_copy",
            "command": " ".join(["python", *sys.argv]),
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"gpus": torch.cuda.device_count(), "gpu": name, "torch": torch.__version__},
            "settings": {"page_size": PAGE, "shapes": SHAPES},
            "results": results,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n")


def commit() -> str:
    """Of the working tree; given by PD_COMMIT where there is no repository."""
    if "PD_COMMIT" in os.environ:
        return os.environ["PD_COMMIT"]
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
