"""Measure attention over the paged pool with every backend: decode steps, chunks, trees and drafts.

    python benchmarks/attention.py [--backends triton,flashinfer] [--steps decode,verify]
        [--fp8] [--latent 16]
        [--decode-tile 16,64,4,1,4,2] [--chunk-tile 128,128,8,5,1,4] [--tree-tile 16,64,4,1,4,2,8]
        [--output FILE]

Heads and head size are those of Llama-3.1-8B (32 query heads, 8 KV heads, 128), in bf16, with pages
of 16 tokens in random order. Every layer has its own K and V, so no launch finds them in a cache. A
CUDA graph replays the layers of a step, so figures are the GPU's time without launches. The host's
time for one plan is listed separately.

With ``--fp8`` the pool is in fp8. With ``--latent`` it has DeepSeek's rows of 512 + 64 numbers,
which this many heads share (``triton`` alone attends to them): decode steps in the absorbed form,
and chunks with K and V of 192 and 128 numbers a head, of which TFLOP/s counts the products.

Verifying attends to several new tokens of each sequence, "tree" to trees of them. Drafting attends
to one new token per row, at a position known only to the GPU. A backend without a graph for
verifying plans the step without one; a backend without a graph for drafting is left out.

You can try other tile shapes of the ``triton`` backend: query rows, keys, warps, stages, programs
per multiprocessor, key tiles of the smallest split, rows merged at a time.

TB/s counts K and V of every sequence, or its rows, once. TFLOP/s counts two matrix products over
the keys that a query may see.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from pd.bench.report import write_report
from pd.core.node_info import KVLayout, Plane
from pd.engine.kv_pool import KVPool
from pd.kernels.attention import AttentionBatch, LatentShape, make_attention_backend
from pd.kernels.latent import LatentHeads

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from pd.kernels.attention import AttentionBackend, PlannedAttention
    from pd.kernels.attention.triton_kernels import TileShape

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
RANK, NOPE_DIM, ROPE_DIM, VALUE_DIM = 512, 128, 64, 128
POOL_BYTES = 9 << 30
MEASURED = ("pd/kernels", "benchmarks/attention.py")


@dataclass(frozen=True)
class Step:
    """``shapes``: (tokens in the pool, new tokens) of each sequence. ``graph``: the kind of graph
    that a backend is asked for: "decode", "verify", "draft", or none."""

    name: str
    shapes: list[tuple[int, int]]
    graph: str = ""
    has_trees: bool = False

    @property
    def keys(self) -> int:
        return sum(start + length for start, length in self.shapes)

    def count_flops(self, latent_heads: int) -> int:
        pairs = sum(n * s + n * (n + 1) // 2 for s, n in self.shapes)
        if latent_heads:
            return 2 * pairs * latent_heads * (NOPE_DIM + ROPE_DIM + VALUE_DIM)
        return 4 * pairs * HEADS * HEAD_DIM


def decode(rows: int, context: int) -> Step:
    return Step(f"decode {rows} x {context}", [(context - 1, 1)] * rows, "decode")


def verify(sequences: int, tokens: int, context: int, *, tree: bool = False) -> Step:
    name = f"verify {sequences} x {tokens} after {context}" + ", tree" * tree
    return Step(name, [(context, tokens)] * sequences, "verify", tree)


def draft(rows: int, context: int) -> Step:
    return Step(f"draft {rows} x {context}", [(context - 1, 1)] * rows, "draft")


def ragged(rows: int, context: int) -> Step:
    """Draw contexts from an eighth to twice the given one, the same in every run."""
    contexts = np.random.default_rng(0).integers(context // 8, 2 * context, rows)
    return Step(f"decode {rows} ragged ~{context}", [(int(n), 1) for n in contexts], "decode")


STEPS = [
    decode(1, 1024),
    decode(1, 32768),
    decode(8, 1024),
    decode(32, 1024),
    decode(64, 1024),
    decode(64, 2048),
    decode(64, 8192),
    ragged(64, 2048),
    decode(128, 1024),
    decode(128, 4096),
    decode(256, 1024),
    verify(1, 4, 1020),
    verify(1, 4, 32764),
    verify(8, 4, 1020),
    verify(64, 4, 1020),
    verify(64, 4, 1020, tree=True),
    verify(1, 64, 960, tree=True),
    verify(8, 16, 1008, tree=True),
    draft(1, 1024),
    draft(8, 1024),
    draft(64, 1024),
    Step("chunk 1024", [(0, 1024)]),
    Step("chunk 8192", [(0, 8192)]),
    Step("chunk 8192 after 24576", [(24576, 8192)]),
    Step("chunk 512 after 32256", [(32256, 512)]),
    Step("chunk 16 after 32752", [(32752, 16)]),
    Step("chunks 16 x 512", [(0, 512)] * 16),
    Step("chunk 2048 + 64 x 1024", [(0, 2048), *[(1023, 1)] * 64]),
]


class Bench:
    """A pool with random K and V, and random queries."""

    def __init__(
        self,
        device: torch.device,
        decode: TileShape | None = None,
        chunk: TileShape | None = None,
        tree: TileShape | None = None,
        latent_heads: int = 0,
        *,
        fp8: bool = False,
    ) -> None:
        """Fill a pool for the backends.

        Args:
            decode, chunk, tree: tile shapes that replace the triton backend's own.
            latent_heads: heads that share rows of latents; 0 for K and V.
        """
        self.device, self._fp8, self._latent_heads = device, fp8, latent_heads
        self._tiles = {"decode": decode, "chunk": chunk, "tree": tree}
        self.random = np.random.default_rng(0)
        torch.manual_seed(0)

    def measure(self, step: Step, backend_name: str) -> dict[str, Any] | None:
        """Return the measurements, or None if the backend cannot do the step."""
        heads, width = self._latent_heads or HEADS, 1 if self._fp8 else 2
        per_token = 2 * KV_HEADS * HEAD_DIM * width
        latent = None
        if self._latent_heads:
            per_token = (RANK + ROPE_DIM) * width
            key_dim = NOPE_DIM + ROPE_DIM
            latent = LatentShape(RANK, key_dim**-0.5, key_dim, VALUE_DIM)
        layers = max(2, min(32, POOL_BYTES // (step.keys * per_token)))
        plane = Plane(
            "model",
            layers,
            1 if latent else KV_HEADS,
            RANK + ROPE_DIM if latent else HEAD_DIM,
            "bfloat16",
            vectors=1 if latent else 2,
            ranks="copied" if latent else "divided",
        )
        if self._fp8:
            scales = (1.0,) * (layers * plane.vectors)
            plane = msgspec.structs.replace(plane, scales=scales)
        counts = [-(-(start + length) // PAGE_SIZE) for start, length in step.shapes]
        pool = KVPool(KVLayout((plane,), PAGE_SIZE), sum(counts) + 1, self.device)
        for layer in range(layers):
            for part in {id(x): x for x in (pool.get_keys(layer), pool.get_values(layer))}.values():
                part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=self.device))
        order = self.random.permutation(sum(counts)).astype(np.int32)
        pages = np.split(order, np.cumsum(counts)[:-1])
        starts, lengths = np.array(step.shapes, np.int64).T
        backend = make_attention_backend(backend_name, pool, heads, latent)
        if backend_name == "triton" and any(self._tiles.values()):
            backend = type(backend)(pool, heads, latent, **self._tiles)
        trees = [self._tree(length) for _, length in step.shapes] if step.has_trees else None
        found = self._plan(backend, step, AttentionBatch(starts, lengths, pages, trees))
        if found is None:
            return None
        planned, plan = found
        seconds = self._time(planned, layers, int(lengths.sum()), step)
        started = time.perf_counter()
        for _ in range(10):
            plan()
        plan_seconds = (time.perf_counter() - started) / 10
        return {
            "backend": backend.name,
            "step": step.name,
            "layer_us": seconds * 1e6,
            "tb_s": step.keys * per_token / seconds / 1e12,
            "tflop_s": step.count_flops(self._latent_heads) / seconds / 1e12,
            "plan_us": plan_seconds * 1e6,
            "layers": layers,
        }

    def _tree(self, length: int) -> npt.NDArray[np.bool_]:
        """Make a binary tree."""
        tree = np.eye(length, dtype=np.bool_)
        for token in range(1, length):
            tree[token] |= tree[(token - 1) // 2]
        return tree

    def _plan(
        self, backend: AttentionBackend, step: Step, batch: AttentionBatch
    ) -> tuple[PlannedAttention, Callable[[], None]] | None:
        """Return a planned backend, and a function that plans it again."""
        rows = int(batch.lengths.sum())
        longest = max(32768, int((batch.starts + batch.lengths).max()))
        graph, arguments = None, ()
        if step.graph == "decode":
            graph = backend.make_decode_graph(rows, longest)
            arguments = (batch.starts, batch.pages)
        elif step.graph == "verify":
            graph = backend.make_verify_graph(rows, longest)
            arguments = (batch.starts, batch.lengths, batch.pages, batch.trees)
        elif step.graph == "draft":
            graph = backend.make_draft_graph(rows, longest)
            if graph is None:
                return None
            arguments = (batch.starts + 1, batch.pages)
            for tensor in (graph.places, graph.bases):
                tensor.copy_(torch.from_numpy(batch.starts))
            graph.masks.fill_(1)
        planned: PlannedAttention = backend if graph is None else graph
        if graph is None:
            arguments = (batch,)

        def plan() -> None:
            planned.plan(*arguments)
            if step.graph == "draft":
                planned.locate_slots()

        plan()
        return planned, plan

    def _time(self, planned: PlannedAttention, layers: int, tokens: int, step: Step) -> float:
        """Return the median seconds of one layer."""
        attend = self._prepare_call(planned, tokens, step)
        attend(0)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(layers):
                attend(layer)
        times = []
        for _ in range(13):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / layers)
        return statistics.median(times[3:])

    def _prepare_call(
        self, planned: PlannedAttention, tokens: int, step: Step
    ) -> Callable[[int], object]:
        """Return a function that attends in a layer with random queries."""

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

        if not self._latent_heads:
            q, k, v = (draw(tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            return lambda layer: planned.attend(layer, q, k, v)
        heads, rows = self._latent_heads, draw(tokens, 1, RANK + ROPE_DIM)
        if step.graph:
            q = draw(tokens, heads, RANK + ROPE_DIM)
            return lambda layer: planned.attend(layer, q, rows, rows[..., :RANK])
        weight = draw(heads * (NOPE_DIM + VALUE_DIM), RANK) * RANK**-0.5
        weights = LatentHeads(weight, heads, NOPE_DIM)
        q = draw(tokens, heads, NOPE_DIM + ROPE_DIM)
        return lambda layer: planned.attend_latents(layer, q, rows, weights)


def tile_shape(text: str) -> TileShape:
    from pd.kernels.attention.triton_kernels import TileShape

    return TileShape(*map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backends", default="flashinfer,triton", help="(default: flashinfer,triton)")
    add("--decode-tile", type=tile_shape, help="of the Triton kernel for single tokens")
    add("--chunk-tile", type=tile_shape, help="of the Triton kernel for chunks")
    add("--tree-tile", type=tile_shape, help="of the Triton kernel for trees")
    add("--steps", default="", help="only steps whose names begin so, such as verify,draft")
    add("--fp8", action="store_true", help="keep the pool in fp8")
    add("--latent", type=int, default=0, metavar="HEADS", help="heads that share rows of latents")
    add("--output", type=Path, help="write the measurements as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    tiles = arguments.decode_tile, arguments.chunk_tile, arguments.tree_tile
    device = torch.device("cuda:0")
    bench = Bench(device, *tiles, arguments.latent, fp8=arguments.fp8)
    wanted = tuple(arguments.steps.split(","))
    results = []
    print(f"{'step':31} {'backend':10} {'µs/layer':>9} {'TB/s':>6} {'TFLOP/s':>8} {'plan µs':>8}")
    for step in STEPS:
        if not step.name.startswith(wanted):
            continue
        for backend in arguments.backends.split(","):
            row = bench.measure(step, backend)
            if row is None:
                continue
            results.append(row)
            print(
                f"{step.name:31} {backend:10} {row['layer_us']:9.1f} {row['tb_s']:6.2f} "
                f"{row['tflop_s']:8.1f} {row['plan_us']:8.0f}",
                flush=True,
            )
            torch.cuda.empty_cache()
    if arguments.output:
        write_report(
            arguments.output,
            "python benchmarks/attention.py " + " ".join(sys.argv[1:]),
            results,
            measured=MEASURED,
            machine={"gpu": torch.cuda.get_device_name(), "torch": torch.__version__},
        )


if __name__ == "__main__":
    main()
