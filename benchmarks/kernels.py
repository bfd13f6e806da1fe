"""Compare the fused kernels with their torch references on one GPU.

    python benchmarks/kernels.py [--only NAME] [--output FILE]

Each figure is the device time of one call inside a CUDA graph of many calls. Each call has its own
weights or activations, so nothing is found in the L2 cache by accident. Bytes are the minimum to
move. ``layer`` is a decoder layer of Llama-3.1-8B without attention: norm, qkv, rotation and store,
output, norm, gate and up, down; its reference is the same in torch. ``prompts`` are bound by
operations. They come as one kernel (on Hopper GPUs) and as cuBLAS's product followed by SiLU·mul.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from pd.bench.report import ROOT, write_report
from pd.kernels import dispatch
from pd.kernels.activation import silu_and_mul
from pd.kernels.linear import gate_up_silu, linear
from pd.kernels.local_experts import LocalExperts
from pd.kernels.moe import moe_mlp, route_tokens
from pd.kernels.norm import add_rms_norm, rms_norm
from pd.kernels.rope import compute_rotations, inverse_frequencies, rotate_and_store
from pd.kernels.sampling import sample_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Streaming read of one H200, measured.
CEILING_GB_S = 4330
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
# More than the L2 cache by far.
DISTINCT_BYTES = 1 << 30
DEVICE = torch.device("cuda", 0)


@dataclass
class Case:
    """One kernel at one size.

    Attributes:
        num_bytes: bytes read and written by one call.
        calls: work on distinct memory, to be called in turn.
        operations: operations of one call's matrix product, if it is bound by them.
        has_reference: False if torch would wait for the GPU, or if another case has it.
    """

    kernel: str
    size: str
    num_bytes: int
    calls: list[Callable[[], Any]]
    has_reference: bool = True
    operations: int = 0


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Draw bfloat16 noise."""
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(0, scale)


def repeats(num_bytes: int, most: int = 64) -> int:
    """Return how many distinct copies of ``num_bytes`` of memory to make."""
    return max(2, min(most, DISTINCT_BYTES // num_bytes))


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Measure the device time of one call: the median of seven replays of a graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return sorted(times)[3]


def norms() -> Iterator[Case]:
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    for rows in (1, 8, 64, 8192):
        size = 2 * rows * HIDDEN
        some = [(draw(rows, HIDDEN), draw(rows, HIDDEN)) for _ in range(repeats(2 * size))]
        text = f"{rows} x {HIDDEN}"
        yield Case(
            "rms_norm", text, 2 * size, [lambda x=x: rms_norm(x, weight, 1e-5) for x, _ in some]
        )
        adds = [lambda x=x, r=r: add_rms_norm(r, x, weight, 1e-5) for x, r in some]
        yield Case("add_rms_norm", text, 4 * size, adds)


def activations() -> Iterator[Case]:
    for rows in (1, 64, 8192):
        size = 6 * rows * INTERMEDIATE
        some = [draw(rows, 2 * INTERMEDIATE) for _ in range(repeats(size))]
        calls = [lambda x=x: silu_and_mul(x) for x in some]
        yield Case("silu_and_mul", f"{rows} x {INTERMEDIATE}", size, calls)


def ropes() -> Iterator[Case]:
    frequencies = inverse_frequencies(HEAD_DIM, 500000.0).to(DEVICE)
    keys, values = (draw(16384, KV_HEADS, HEAD_DIM) for _ in range(2))
    weight = torch.ones(HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    for rows in (1, 64, 8192):
        cos_sin = compute_rotations(torch.arange(rows, device=DEVICE), frequencies)
        slots = torch.randperm(16384, device=DEVICE)[:rows]
        size = 2 * rows * HEAD_DIM * (2 * HEADS + 4 * KV_HEADS) + 4 * rows * HEAD_DIM
        some = [draw(rows, HEADS + 2 * KV_HEADS, HEAD_DIM) for _ in range(repeats(size, 16))]
        for name, weights in (("", ()), (", qk norm", (weight, weight, 1e-6))):
            calls = [
                lambda x=x, c=cos_sin, s=slots, w=weights: rotate_and_store(
                    x, HEADS, KV_HEADS, c, keys, values, s, *w
                )
                for x in some
            ]
            yield Case("rotate_and_store", f"{rows} tokens{name}", size, calls)


def products() -> Iterator[Case]:
    shapes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        "output": (HIDDEN, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
        "head": (VOCAB, HIDDEN),
    }
    for name, (outputs, inputs) in shapes.items():
        size = 2 * outputs * inputs
        weights = [draw(outputs, inputs, scale=0.02) for _ in range(repeats(size, 32))]
        for rows in (1, 2, 8, 16, 32):
            x = draw(rows, inputs)
            function = gate_up_silu if name == "gate_up" else linear
            moved = size + 2 * rows * (inputs + outputs // (2 if name == "gate_up" else 1))
            calls = [lambda x=x, w=w, f=function: f(x, w) for w in weights]
            yield Case(function.__name__, f"{name}, {rows} rows", moved, calls)


def prompts() -> Iterator[Case]:
    weights = [draw(2 * INTERMEDIATE, HIDDEN, scale=0.02) for _ in range(4)]
    for rows in (1024, 2048, 8192):
        x = draw(rows, HIDDEN)
        moved = 2 * (2 * INTERMEDIATE * HIDDEN + rows * (HIDDEN + INTERMEDIATE))
        operations = 4 * rows * INTERMEDIATE * HIDDEN
        kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "one kernel": lambda w, x=x: gate_up_silu(x, w),
            "two": lambda w, x=x: silu_and_mul(linear(x, w)),
        }
        for name, function in kinds.items():
            calls = [lambda w=w, f=function: f(w) for w in weights]
            text = f"{rows} rows, {name}"
            yield Case("gate_up_silu", text, moved, calls, name == "two", operations)


def mixtures() -> Iterator[Case]:
    """Make mixtures of experts of Qwen3-30B-A3B, for four of its 48 layers: whole, and as one of
    two ranks has them, half of each expert or half of the experts."""
    experts, hidden, top_k = 128, 2048, 8
    half = LocalExperts(0, experts)
    kinds = {"": (experts, 768, None), ", cut": (experts, 384, None), ", spread": (64, 768, half)}
    for name, (count, size, local) in kinds.items():
        layers = [
            (draw(count, 2 * size, hidden, scale=0.02), draw(count, hidden, size, scale=0.03))
            for _ in range(4)
        ]
        for tokens in (1, 16, 64, 256, 4096):
            x, logits = draw(tokens, hidden), draw(tokens, experts)
            chosen = route_tokens(logits, top_k, True)[1]
            used = len(chosen[chosen < count].unique())
            calls = [
                lambda x=x, m=logits, g=g, d=d, o=local: moe_mlp(
                    x, *route_tokens(m, top_k, True), g, d, local=o
                )
                for g, d in layers
            ]
            moved = used * 3 * size * hidden * 2 + 4 * tokens * hidden
            yield Case("moe_mlp", f"{tokens} tokens{name}", moved, calls, has_reference=False)


def samplers() -> Iterator[Case]:
    for rows in (1, 64, 256):
        logits = [draw(rows, VOCAB, scale=3.0).float() for _ in range(4)]
        temperatures = torch.full((rows,), 0.8, device=DEVICE)
        noise_at = torch.tensor([(7, row) for row in range(rows)], device=DEVICE)
        everything = torch.full((rows,), VOCAB, device=DEVICE)
        ones, zeros = torch.ones(rows, device=DEVICE), torch.zeros(rows, device=DEVICE)
        kinds: dict[str, tuple[Any, ...]] = {
            "greedy": (everything, ones, zeros, False, False),
            "random": (everything, ones, zeros, True, False),
            "min-p": (everything, ones, zeros + 0.05, True, True),
            "top-k": (everything.clamp(max=50), ones, zeros, True, True),
            "top-p": (everything, 0.9 * ones, zeros, True, True),
            "top-k and top-p": (everything.clamp(max=50), 0.9 * ones, zeros, True, True),
        }
        for name, arguments in kinds.items():
            calls = [
                lambda x=x, t=temperatures, k=noise_at, a=arguments: sample_rows(x, t, k, *a)
                for x in logits
            ]
            is_greedy = name == "greedy"
            yield Case("sample_rows", f"{rows} rows, {name}", 4 * rows * VOCAB, calls, is_greedy)


class Layer:
    """A decoder layer without attention."""

    def __init__(self) -> None:
        self.norms = [torch.ones(HIDDEN, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        self.qkv = draw((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, scale=0.02)
        self.output = draw(HIDDEN, HIDDEN, scale=0.02)
        self.gate_up = draw(2 * INTERMEDIATE, HIDDEN, scale=0.02)
        self.down = draw(HIDDEN, INTERMEDIATE, scale=0.02)

    def weights_bytes(self) -> int:
        weights = (self.qkv, self.output, self.gate_up, self.down)
        return sum(weight.numel() * weight.element_size() for weight in weights)

    def run(
        self,
        residual: torch.Tensor,
        before: torch.Tensor,
        cos_sin: torch.Tensor,
        pool: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Run the layer; returns its contribution to the residual.

        Args:
            before: contribution of the layer below.
        """
        x = add_rms_norm(residual, before, self.norms[0], 1e-5)
        qkv = linear(x, self.qkv).view(len(x), -1, HEAD_DIM)
        q, _, _ = rotate_and_store(qkv, HEADS, KV_HEADS, cos_sin, pool[0], pool[1], slots)
        # In place of attention, which makes its output contiguous.
        attended = q.flatten(1) if len(x) == 1 else x
        x = add_rms_norm(residual, linear(attended, self.output), self.norms[1], 1e-5)
        return linear(gate_up_silu(x, self.gate_up), self.down)


def layers() -> Iterator[Case]:
    stack = [Layer() for _ in range(8)]
    frequencies = inverse_frequencies(HEAD_DIM, 500000.0).to(DEVICE)
    pool = draw(2, 4096, KV_HEADS, HEAD_DIM)
    for rows in (1, 2, 4, 8, 16, 32, 64):
        residual, before = draw(rows, HIDDEN), draw(rows, HIDDEN, scale=0.01)
        slots = torch.arange(rows, device=DEVICE)
        cos_sin = compute_rotations(slots + 1000, frequencies)
        calls = [
            lambda each=each, r=residual, b=before, c=cos_sin, s=slots: each.run(r, b, c, pool, s)
            for each in stack
        ]
        yield Case("layer", f"{rows} rows", stack[0].weights_bytes(), calls)


KERNELS = {
    "norms": norms,
    "activations": activations,
    "ropes": ropes,
    "products": products,
    "prompts": prompts,
    "mixtures": mixtures,
    "samplers": samplers,
    "layers": layers,
}


def measure(case: Case) -> dict[str, Any]:
    """Measure one row of results."""
    us = microseconds(case.calls)
    reference = None
    if case.has_reference:
        with mock.patch.object(dispatch, "_has_triton", lambda: False):
            reference = round(microseconds(case.calls), 2)
    gb_s = case.num_bytes / us / 1e3
    return {
        "kernel": case.kernel,
        "size": case.size,
        "us": round(us, 2),
        "torch_us": reference,
        "bytes": case.num_bytes,
        "gb_s": round(gb_s),
        "share_of_ceiling": round(gb_s / CEILING_GB_S, 3),
        "tflops": round(case.operations / us / 1e6) or None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted(KERNELS), action="append", help="default: all")
    parser.add_argument("--output", type=Path, help="write the measurements as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    torch.manual_seed(0)
    print(f"{'kernel':<17}{'size':<26}{'us':>9}{'torch':>9}{'GB/s':>7}{'share':>7}{'TFLOPS':>8}")
    results = []
    for name in args.only or KERNELS:
        for case in KERNELS[name]():
            row = measure(case)
            results.append(row)
            torch_us = "-" if row["torch_us"] is None else f"{row['torch_us']:.2f}"
            print(
                f"{row['kernel']:<17}{row['size']:<26}{row['us']:>9.2f}{torch_us:>9}"
                f"{row['gb_s']:>7}{row['share_of_ceiling']:>7.2f}{row['tflops'] or '-':>8}",
                flush=True,
            )
        torch.cuda.empty_cache()
    if args.output is not None:
        write_report(
            args.output,
            shlex.join(["python", "benchmarks/kernels.py", *sys.argv[1:]]),
            results,
            measured=["pd/kernels", str(Path(__file__).relative_to(ROOT))],
            machine={"gpu": torch.cuda.get_device_name(DEVICE), "torch": torch.__version__},
        )


if __name__ == "__main__":
    main()
