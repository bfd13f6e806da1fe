"""Measure how much sending KV slows the forward pass that computes it.

    python benchmarks/sending.py --output benchmarks/results/sending_gpu.json

A prompt of 32,768 tokens goes through Llama-3.1-8B with dummy weights on the first GPU, in chunks
of 8,192 and each time after a rest. Meanwhile KV is stored into the second GPU's memory as the
nvlink backend does it: by a copy engine for adjacent pages, or by the kernel for scattered ones.
Storing takes place, in random order: never; after every group of layers (all of it, or one token);
at the end of each chunk; and late, like the backend (``Sender.flops_per_byte``). We also list the
part that remains to store when the pass ends, and the clock and power of the first GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pd.bench.report import write_report
from pd.bench.shapes import model_directory
from pd.core.config import NodeConfig
from pd.engine.engine import Engine
from pd.engine.forward_item import ForwardItem
from pd.engine.model_runner import ModelRunner
from pd.kernels.paging import find_token_slots
from pd.prefill_node.outgoing import Chunk, OutgoingRoom, PromptCost
from pd.transfer.computed import Computed
from pd.transfer.nvlink.device import CudaLane
from pd.transfer.ranges import Block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.transfer.base import Sender
    from pd.transfer.nvlink.device import CudaTable

PAGE = 16
# As the backend has it when it saw 390 GB/s.
FLOPS_PER_BYTE = 1e15 / 390e9


class Way(NamedTuple):
    """One way of sending.

    Attributes:
        flops_per_byte: None to send nothing.
        scattered: the pages, in both pools.
        tokens: of each block, at most.
        whole: only all layers of a chunk together.
    """

    flops_per_byte: float | None
    scattered: bool = False
    tokens: int = 1 << 30
    whole: bool = False


WAYS = {
    "nothing": Way(None),
    "nothing, scattered": Way(None, scattered=True),
    "one token by layers": Way(0.0, tokens=1),
    "by layers": Way(0.0),
    "by layers, scattered": Way(0.0, scattered=True),
    "at the end of each chunk": Way(0.0, whole=True),
    "at the end of each chunk, scattered": Way(0.0, scattered=True, whole=True),
    "late": Way(FLOPS_PER_BYTE),
    "late, scattered": Way(FLOPS_PER_BYTE, scattered=True),
}


class Store:
    """A sender in place of a backend's, which launches a store for each block."""

    def __init__(
        self,
        lane: CudaLane,
        computed: Computed,
        table: CudaTable,
        peer: torch.Tensor,
        way: Way,
    ) -> None:
        self.flops_per_byte = way.flops_per_byte
        self._lane, self._computed = lane, computed
        self._table, self._peer, self._way = table, peer, way
        self._sent = self._launched = 0
        self._changed = threading.Condition()

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        stop = min(token_stop, token_start + self._way.tokens)
        block = Block(token_start, stop, layer_start, layer_stop)
        peer, columns = self._peer, slice(token_start, stop)

        def store(_: str) -> None:
            with self._changed:
                self._lane.store_block(self._table, columns, peer.data_ptr(), peer.shape[2], block)
                self._launched += 1
                self._changed.notify_all()

        self._sent += 1
        self._computed.call_when_done(store)

    def wait_launched(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._launched == self._sent, 60.0):
                raise RuntimeError("a store was not launched")


class Prefill:
    """Runs forward passes of prompts and measures them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._tokens, self._chunk = args.tokens, args.chunk
        config = NodeConfig(
            role="prefill",
            model=model_directory(args.model),
            device="cuda:0",
            load_format="dummy",
            page_size=PAGE,
            kv_cache_tokens=2 * args.tokens,
            chunked_prefill_size=args.chunk,
        )
        self._engine = Engine.build(config)
        self._pool = self._engine.pool.planes[0].buffer
        self._peer = torch.empty_like(self._pool, device="cuda:1")
        self._peer[0, 0, :1].copy_(self._pool[0, 0, :1])  # opens peer access
        adjacent = np.arange(args.tokens // PAGE, dtype=np.int32)
        self._pages = [adjacent, np.random.default_rng(0).permutation(adjacent)]
        self._lane = CudaLane(self._engine.pool)
        self._computed = Computed(self._pool.device, "nvlink")
        self._tables = [
            self._lane.make_table(np.stack(2 * [_slots(pages, args.tokens)]))
            for pages in self._pages
        ]
        layout, model = self._engine.layout, self._engine.model_config
        self._cost = PromptCost(
            layout.num_layers, layout.token_bytes, model.token_flops, model.pair_flops
        )

    def run(self, way: Way) -> tuple[float, float]:
        """Return milliseconds of the pass, and of the stores left at its end."""
        runner = self._engine.runner
        assert isinstance(runner, ModelRunner)
        table = self._tables[way.scattered]
        store = Store(self._lane, self._computed, table, self._peer, way)
        request: Any = None  # needed for the times of a real hand-off only
        outgoing = OutgoingRoom(request, self._cost)
        if way.flops_per_byte is not None:
            outgoing.sender = _as_sender(store)
        begin, end, stored = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        rng = np.random.default_rng()
        begin.record()
        for start in range(0, self._tokens, self._chunk):
            stop = min(start + self._chunk, self._tokens)
            chunk = Chunk(outgoing, start, stop, self._tokens)
            ids = rng.integers(0, 2000, stop - start).astype(np.int32)
            last = int(stop == self._tokens)
            item = ForwardItem(ids, start, self._pages[way.scattered], last)
            runner.forward([item], _whole(chunk) if way.whole else chunk.layers_done)
        end.record()
        store.wait_launched()
        stored.record(self._lane.stream)
        torch.cuda.synchronize()
        return begin.elapsed_time(end), max(0.0, end.elapsed_time(stored))


def _as_sender(store: Any) -> Sender:
    return store


def _whole(chunk: Chunk) -> Any:
    layers = chunk.outgoing.cost.num_layers

    def layers_done(first: int, stop: int) -> None:
        if stop == layers:
            chunk.layers_done(0, stop)

    return layers_done


def _slots(pages: Any, num_tokens: int) -> Any:
    """Return int32 slots of the tokens of one sequence."""
    return find_token_slots(pages, np.arange(num_tokens), PAGE).astype(np.int32)


class Gauge:
    """Samples clock (MHz) and power (W) of the first GPU with nvidia-smi."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float, float]] = []

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        query = "--query-gpu=clocks.sm,power.draw.instant --format=csv,noheader,nounits -lms 20"
        with subprocess.Popen(
            ["nvidia-smi", "-i", "0", *query.split()], stdout=subprocess.PIPE, text=True
        ) as process:
            reader = threading.Thread(target=self._read, args=(process,))
            reader.start()
            try:
                yield
            finally:
                process.terminate()
                reader.join()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            clock, power = line.split(",")
            self._seen.append((time.monotonic(), float(clock), float(power)))

    def between(self, start: float, stop: float) -> list[tuple[float, float]]:
        return [(clock, power) for at, clock, power in self._seen if start <= at <= stop]


def measure(prefill: Prefill, args: argparse.Namespace) -> list[dict[str, Any]]:
    rng, gauge = random.Random(args.seed), Gauge()
    for way in WAYS.values():
        prefill.run(way)  # compiles
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with gauge.reading():
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            for name in rng.sample(list(WAYS), len(WAYS)):
                time.sleep(args.rest)
                start = time.monotonic()
                samples[name].append(prefill.run(WAYS[name]))
                times[name].append((start, time.monotonic()))
    bases = [
        float(np.median([taken for taken, _ in samples[name]]))
        for name in ("nothing", "nothing, scattered")
    ]
    rows = []
    for name, found in samples.items():
        taken, left = np.array(found).T
        seen = np.array([pair for span in times[name] for pair in gauge.between(*span)])
        low, middle, high = np.percentile(taken, (25, 50, 75))
        base = bases[WAYS[name].scattered]
        row = {"sent": name, "count": len(found), "pass_ms": middle, "more_ms": middle - base}
        row |= {"q25_ms": low - base, "q75_ms": high - base, "left_ms": float(np.median(left))}
        row |= dict(zip(("clock_mhz", "power_w"), seen.mean(0) if len(seen) else (), strict=False))
        rows.append({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, help="result file (JSON)")
    add("--model", default="llama-3.1-8b")
    add("--tokens", type=int, default=32768)
    add("--chunk", type=int, default=8192)
    add("--rest", type=float, default=0.3, help="seconds before each prompt")
    add("--seconds", type=float, default=60.0, help="to measure for")
    add("--seed", type=int, default=0, help="of the order")
    args = parser.parse_args()
    if torch.cuda.device_count() < 2:
        parser.exit(1, "sending.py: needs two GPUs\n")
    rows = measure(Prefill(args), args)
    if args.output is not None:
        command = shlex.join(["python", *sys.argv])
        write_report(args.output, command, rows, measured=["pd", "benchmarks/sending.py"])


if __name__ == "__main__":
    main()
