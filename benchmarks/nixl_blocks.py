"""Measure how fast NIXL writes blocks of different sizes, by which its backend chooses blocks.

    python benchmarks/nixl_blocks.py --output benchmarks/results/nixl_blocks_cpu.json
    python benchmarks/nixl_blocks.py --device cuda:0,cuda:1 \\
        --output benchmarks/results/nixl_blocks_gpu.json

One process writes scattered blocks into another's memory, as it would without staging. KV is that
of Llama-3.1-8B (8 KV heads of 128, bf16, 32 layers) in pages of 16 tokens. A pool ordered by layer
gives blocks of 32 KiB. If all layers of a page are adjacent, blocks have 2 MiB (128 KiB with pages
of one token). If KV is gathered first, a block fills a slot. `prepare` is the time to describe the
blocks to the library, which each room needs for its own pages. `write` is the writing alone, and
GB/s count both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pd.bench.report import write_report

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BLOCKS = {
    32 << 10: "a page of 16 tokens in one layer, K or V",
    128 << 10: "a page of 1 token in all layers",
    512 << 10: "a page of 256 tokens in one layer",
    2 << 20: "a page of 16 tokens in all layers",
    8 << 20: "a page of 64 tokens in all layers, a slot in host memory",
    128 << 20: "a slot in GPU memory",
}
SECONDS = 60.0


class Agent:
    """A NIXL agent with memory of its own registered."""

    def __init__(self, name: str, device: str, num_bytes: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        cuda = self.memory.is_cuda
        self.place = (self.memory.data_ptr(), self.memory.device.index if cuda else 0)
        self.kind = "VRAM" if cuda else "DRAM"
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.nixl = nixl_agent(name, config)
        address, index = self.place
        self._registered = self.nixl.register_memory([(address, num_bytes, index, "")], self.kind)

    def close(self) -> None:
        """Deregister; must be called before the memory is freed."""
        self.nixl.deregister_memory(self._registered)
        del self.nixl

    def blocks(self, place: tuple[int, int], kind: str, size: int, rng: Any) -> Any:
        """List all blocks of the remote memory in random order."""
        address, index = place
        offsets = rng.permutation(self.memory.numel() // size) * size
        return self.nixl.get_xfer_descs([(address + int(o), size, index) for o in offsets], kind)


def target(device: str, num_bytes: int, pipe: Connection) -> None:
    """Run the receiving process: name its memory, and report the end of each write."""
    agent = Agent("D", device, num_bytes)
    pipe.send((agent.nixl.get_agent_metadata(), agent.place, agent.kind))
    while pipe.recv() is not None:
        agent.memory.zero_()
        pipe.send(int(agent.memory[0]))
        while not agent.nixl.get_new_notifs():
            time.sleep(20e-6)
        pipe.send(int(agent.memory[:: 4 << 10].sum(dtype=torch.int64)))
    agent.close()


def measure(args: argparse.Namespace, num_bytes: int, pipe: Connection) -> list[dict[str, Any]]:
    metadata, place, kind = pipe.recv()
    agent = Agent("P", args.device[0], num_bytes)
    agent.memory.fill_(1)
    peer = agent.nixl.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer
    rng, rows = np.random.default_rng(0), []
    print(
        f"{'block':>10} {'blocks':>7} {'prepare ms':>11} {'write ms':>9} {'GB/s':>7} {'write':>7}"
    )
    for size, what in BLOCKS.items():
        if size > num_bytes:
            continue
        times = [once(agent, (peer, place, kind), size, rng, pipe) for _ in range(args.repeats + 1)]
        prepare, write = (median(column) for column in zip(*times[1:], strict=True))
        row = {"block_bytes": size, "what": what, "blocks": num_bytes // size}
        row |= {"prepare_ms": 1e3 * prepare, "write_ms": 1e3 * write}
        row |= {"gb_s": num_bytes / (prepare + write) / 1e9, "write_gb_s": num_bytes / write / 1e9}
        rows.append(row)
        print(
            f"{size >> 10:>6} KiB {row['blocks']:>7} {1e3 * prepare:>11.2f} {1e3 * write:>9.2f} "
            f"{row['gb_s']:>7.1f} {row['write_gb_s']:>7.1f}",
            flush=True,
        )
    agent.nixl.remove_remote_agent(peer)
    agent.close()
    return rows


def once(
    agent: Agent, peer: tuple[str, tuple[int, int], str], size: int, rng: Any, pipe: Connection
) -> tuple[float, float]:
    """Return the seconds to describe the blocks, and the seconds of the write by the library's
    report."""
    name, place, kind = peer
    pipe.send(size)
    pipe.recv()
    begun = time.perf_counter()
    ours = agent.blocks(agent.place, agent.kind, size, rng)
    theirs = agent.blocks(place, kind, size, rng)
    handle = agent.nixl.initialize_xfer("WRITE", ours, theirs, name, b"arrived")
    prepared = time.perf_counter()
    state = agent.nixl.transfer(handle)
    while state == "PROC" and time.perf_counter() < prepared + SECONDS:
        time.sleep(20e-6)
        state = agent.nixl.check_xfer_state(handle)
    written = time.perf_counter()
    if state != "DONE":
        raise RuntimeError(f"a write of blocks of {size} bytes ended as {state}")
    agent.nixl.release_xfer_handle(handle)
    if pipe.recv() != agent.memory[:: 4 << 10].numel():
        raise RuntimeError("not everything arrived")
    return prepared - begun, written - prepared


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--device", type=lambda text: text.split(","), default=["cpu"], metavar="P[,D]")
    add("--mib", type=int, default=0, help="bytes to move (default: 1,024 MiB on GPUs, else 256)")
    add("--repeats", type=int, default=5)
    add("--output", type=Path, required=True)
    args = parser.parse_args()
    ours, theirs = args.device[0], args.device[-1]
    num_bytes = (args.mib or (256 if ours == "cpu" else 1024)) << 20
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=target, args=(theirs, num_bytes, far), daemon=True)
    process.start()
    far.close()  # so that its end is noticed
    try:
        rows = measure(args, num_bytes, near)
        near.send(None)
        process.join(10.0)
    finally:
        process.kill()
    for row in rows:
        row["device"] = ours if ours == theirs == "cpu" else f"{ours},{theirs}"
    command = shlex.join(["python", "benchmarks/nixl_blocks.py", *sys.argv[1:]])
    write_report(args.output, command, rows, measured=["benchmarks/nixl_blocks.py"])
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # NOTE: with memory on a GPU the library ends a Python that ends with a segmentation fault.
    os._exit(status)
