"""Compare launch shapes of the KV copy kernel, and a copy engine on runs of slots.

    python benchmarks/kv_copy.py --output FILE
    python benchmarks/kv_copy.py --work runs --output benchmarks/results/kv_copy_gpu.json

We copy 8,192 tokens between pools of Llama-3.1-8B's KV shape (1 GiB), from the first GPU to the
second (or within one), and gather and scatter them locally. Pages of 16 tokens are scattered on
both sides. The plain copy of as many bytes is the ceiling of each figure. Rows of few bytes are
measured, too. `runs` puts the same pages into longer runs, for the kernel as the nvlink backend
launches it and for a copy engine.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pd.bench.report import write_report
from pd.kernels.copy_engine import CopyEngine, SlotRuns
from pd.kernels.kv_copy import copy_to_peer
from pd.kernels.kv_copy_triton import LOCAL_SHAPE, PEER_SHAPE, LaunchShape, Side, copy_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.kernels.copy_engine import SlotRun

PROGRAMS = (8, 16, 24, 32, 48, 64, 96, 132, 264)
TILES = (8192, 16384, 32768)
WARPS = (4, 8)
TOKENS, PAGE = 8192, 16
# Pages that lie together.
RUNS = (1, 2, 4, 8, 16, 32, 64, 512)
WORK = ("push", "gather", "scatter", "runs")
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
        self._generator = generator
        self.lay(1)
        self.row = heads * dim * 2
        self.num_bytes = layers * 2 * tokens * self.row
        self.packed = torch.empty(self.num_bytes, dtype=torch.uint8, device=source)
        # A first copy by torch opens peer access.
        self.peer[0, 0, :1].copy_(self.pool[0, 0, :1])

    def lay(self, pages: int) -> None:
        """Scatter the tokens again on both sides, in runs of so many pages."""
        self.slots, self.peer_slots = self._runs(pages * PAGE), self._runs(pages * PAGE)

    def _runs(self, run: int) -> torch.Tensor:
        device, count = self.pool.device, self.tokens // run
        firsts = torch.randperm(2 * count, device=device, generator=self._generator)[:count] * run
        slots = firsts[:, None] + torch.arange(run, device=device)
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
        slabs = 2 * self.layers
        copy_rows(source, target, self.tokens, slabs, self.row, self.pool.device, shape)

    def plain(self) -> None:
        """Copy as many adjacent bytes: the ceiling of a push."""
        half = self.pool.view(-1)[: self.num_bytes // 2]
        self.peer.view(-1)[: self.num_bytes // 2].copy_(half)

    def plain_local(self) -> None:
        """Copy locally: the ceiling of a gather."""
        self.packed.copy_(self.pool.view(-1).view(torch.uint8)[: self.num_bytes])

    def check(self) -> None:
        """Raise unless the peer's pool holds exactly the last push."""
        expected = torch.zeros_like(self.peer)
        rows = self.pool.index_select(2, self.slots).to(expected.device)
        expected.index_copy_(2, self.peer_slots.long().to(expected.device), rows)
        bits = torch.int16
        if not torch.equal(expected.view(bits), self.peer.view(bits)):
            raise AssertionError(f"{self.name}: the peer's pool is wrong")


def seconds(work: Callable[[], Any], device: torch.device, calls: int = 8) -> float:
    """Measure the device time of one call: the median of three times ``calls`` in a row, so that
    launches do not count."""
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
    """Try every launch shape for push, gather or scatter, and print a table."""
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


def runs(case: Case, device: torch.device) -> list[dict[str, Any]]:
    """Compare the kernel with a copy engine for pages in runs, and print a table."""
    engine = CopyEngine(case.pool)
    ceiling_gb_s = case.num_bytes / seconds(case.plain, device) / 1e9
    print(f"{case.name} runs: plain copy {ceiling_gb_s:.0f} GB/s")
    print(f"{'pages':>6} {'KiB':>6} {'kernel':>7} {'engine':>7}")
    rows = []
    for pages in RUNS:
        case.lay(pages)
        slots = torch.stack((case.slots, case.peer_slots)).cpu().numpy()
        found = SlotRuns(slots).find_runs(0, case.tokens)
        peer, stream = case.peer.data_ptr(), torch.cuda.current_stream(device).cuda_stream

        def by_engine(found: list[SlotRun] = found, peer: int = peer, stream: int = stream) -> None:
            engine.copy_runs(found, peer, case.peer.shape[2], 0, case.layers, stream)

        rates = []
        for work in (lambda: case.push(PEER_SHAPE), by_engine):
            case.peer.zero_()
            torch.cuda.synchronize(case.peer.device)
            rates.append(case.num_bytes / seconds(work, device) / 1e9)
            case.check()
        run_bytes = case.tokens // len(found) * case.row
        row = {"case": case.name, "what": "runs", "pages": pages, "run_bytes": run_bytes}
        row |= {"kernel_gb_s": round(rates[0], 1), "engine_gb_s": round(rates[1], 1)}
        rows.append(row | {"ceiling_gb_s": round(ceiling_gb_s, 1)})
        print(f"{pages:>6} {run_bytes >> 10:>6} {rates[0]:>7.0f} {rates[1]:>7.0f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the measurements as JSON")
    parser.add_argument("--work", nargs="*", default=WORK, choices=WORK)
    args = parser.parse_args()
    source = torch.device("cuda", 0)
    target = torch.device("cuda", min(1, torch.cuda.device_count() - 1))
    torch.cuda.set_device(source)
    print(f"{torch.cuda.get_device_name(source)}, from {source} to {target}")
    results = []
    for shape_name in SHAPES if set(args.work) - {"runs"} else list(SHAPES)[:1]:
        case = Case(shape_name, source, target)
        for what in args.work:
            if what != "runs":
                results += sweep(case, what, source)
            elif shape_name == "llama-8b":
                results += runs(case, source)
        del case
    print(f"in use: push {PEER_SHAPE}, gather and scatter {LOCAL_SHAPE}")
    if args.output is not None:
        command = shlex.join(["python", *sys.argv])
        settings = {"page_size": PAGE, "shapes": SHAPES}
        measured = ["pd", "benchmarks/kv_copy.py"]
        write_report(args.output, command, results, measured=measured, settings=settings)


if __name__ == "__main__":
    main()
