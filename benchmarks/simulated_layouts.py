"""Replay a trace on simulated GPUs: real proxies and nodes, whose steps take as long as a GPU's.

    python benchmarks/simulated_layouts.py --trace FILE [--layouts split unified elastic] \\
        [--time-scales 3 2.5] [--window 900:918] [--slower 3] [--node-flags FLAG=VALUE ...] \\
        [--bursts 3 --slo 1000:25 --layouts elastic elastic-slo]

Everything is real except the forward pass, which computes nothing and returns when a GPU would be
done (`GPU`, fitted to steps of nodes under this load). KV is transferred, of a model with little of
it. You can thus try a policy without a GPU, but figures are predictions. `--slower N` makes all
times N times as long, for a host too slow for so many processes, and reported times are divided by
it. Layouts run alone, one after the other.

With `--bursts S` requests arrive only every S seconds, as in many traces. `--slo TTFT:TPOT` judges
requests by these milliseconds and tells them to the proxy of the layout `elastic-slo`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from pd.core.step_cost import StepCost, StepShape, chunk_pairs  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd.engine.engine import Engine
    from pd.engine.forward_item import ForwardItem
    from pd.engine.sampler import PreparedDraws, SampledToken, Samples

# Llama-3.1-8B's shape in bfloat16 on one H200, as `pd-bench engine --work mixed:…` finds it.
GPU = StepCost(
    base=4.3e-3,
    middle=18e-6,
    rest=20e-6,
    pair=1.05e-9,
    context=40e-9,
    stream=5e-6,
    graphs=1024,
)
# How long the host is busy with launching a step: kernel by kernel, or as a graph, which there are
# of so many tokens.
LAUNCH_SECONDS, GRAPH_SECONDS = 0.02, 0.002
LAYOUTS = {
    "split": (("prefill", "decode"), []),
    "unified": (("unified", "unified"), []),
    "unified-1024": (("unified", "unified"), ["--chunked-prefill-size", "1024"]),
    "elastic": (("prefill", "decode"), ["--elastic", "auto"]),
    "elastic-slo": (("prefill", "decode"), ["--elastic", "auto"]),
}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


class _SimulatedGPU:
    """Steps queue here, one after the other, as on a stream of a GPU."""

    def __init__(self, engine: Engine, slower: float) -> None:
        self._engine, self._slower = engine, slower
        self._free = 0.0
        self._sample = engine.sampler.launch_draws
        engine.runner.forward = self.forward  # type: ignore[method-assign]
        engine.sampler.launch_draws = self.launch_draws  # type: ignore[method-assign]
        engine.runner.mixed_graphs = SimpleNamespace(sizes=(GPU.graphs,))  # type: ignore[assignment]

    def forward(
        self,
        items: Sequence[ForwardItem],
        on_layers_done: Callable[[int, int], None] | None = None,
        previous_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens = streams = context = 0
        pairs = 0.0
        for item in items:
            count = len(item.token_ids)
            if count == 1:
                streams += 1
                context += item.start + 1
            else:
                tokens += count
                pairs += chunk_pairs(item.start, count)
        seconds = GPU.predict_seconds(StepShape(tokens, pairs, streams, context)) * self._slower
        now = time.monotonic()
        host = (LAUNCH_SECONDS if tokens > GPU.graphs else GRAPH_SECONDS) * self._slower
        self._free = max(max(self._free, now) + seconds, now + host)
        time.sleep(host)
        if on_layers_done is not None:
            on_layers_done(0, self._engine.model_config.num_layers)
        return torch.zeros(sum(item.num_logits for item in items), _CONFIG["vocab_size"])

    def launch_draws(self, logits: torch.Tensor, prepared: PreparedDraws, masks: Any = None) -> Any:
        return _Later(self._sample(logits, prepared, masks), self._free)


class _Later:
    """Samples that are known from a time on."""

    def __init__(self, samples: Samples, ready: float) -> None:
        self._samples, self._ready = samples, ready
        self.tokens = samples.tokens

    @property
    def is_ready(self) -> bool:
        return time.monotonic() >= self._ready

    def read_tokens(self) -> list[SampledToken]:
        time.sleep(max(0.0, self._ready - time.monotonic()))
        return self._samples.read_tokens()


def node(argv: list[str]) -> int:
    """Run a node of this program: ``pd-launch`` with another engine."""
    from pd import cli
    from pd.engine.engine import Engine
    from pd.scheduling import calibration

    slower, build = float(argv.pop(0)), Engine.build
    calibration.SECONDS *= slower

    def simulated(*args: Any, **kwargs: Any) -> Engine:
        engine = build(*args, **kwargs)
        _SimulatedGPU(engine, slower)
        return engine

    Engine.build = simulated  # type: ignore[method-assign]
    return cli.launch(argv)


@contextmanager
def process(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        running = subprocess.Popen([sys.executable, *words], stdout=output, stderr=output, cwd=ROOT)
    try:
        yield running
    finally:
        running.terminate()
        running.wait()


def wait_ready(url: str) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            if httpx.get(f"{url}/readiness", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise SystemExit(f"{url} is not ready")


@contextmanager
def layout(args: argparse.Namespace, name: str, directory: Path) -> Iterator[str]:
    """Run a layout; yields its proxy's URL."""
    roles, own = LAYOUTS[name]
    port = args.port
    with ExitStack() as stack:
        words = []
        for index, role in enumerate(roles):
            port += 2
            flags = [*(f"--{flag}" for flag in args.node_flags), *own]
            command = [__file__, "node", str(args.slower), role, "--model", str(directory)]
            command += ["--load-format", "dummy", "--device", "cpu", "--cpu-threads", "1"]
            command += (
                ["--overlap-schedule", "on", "--transfer-backend", "tcp"]
                if role != "unified"
                else ["--overlap-schedule", "on"]
            )
            command += ["--port", str(port), "--kv-cache-tokens", str(args.kv_cache_tokens)]
            if role == "prefill" or "--elastic" in own:
                command += ["--bootstrap-port", str(port + 1)]
            stack.enter_context(process(args.logs / f"{name}-{index}.log", *command, *flags))
            words += [f"--{role}", f"http://127.0.0.1:{port}"]
        url = f"http://127.0.0.1:{args.port}"
        command = ["-m", "pd.cli", "proxy", "--port", str(args.port), *words]
        command += [f"--{flag}" for flag in args.proxy_flags]
        if name == "elastic-slo":
            ttft, itl = (each * args.slower for each in args.slo)
            command += ["--slo-ttft-ms", str(ttft), "--slo-itl-ms", str(itl)]
        stack.enter_context(process(args.logs / f"{name}-proxy.log", *command))
        wait_ready(url)
        yield url


def in_bursts(trace: Path, every: float, target: Path) -> Path:
    """Write the trace with all times rounded down to multiples of so many seconds."""
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    for row in rows:
        row["timestamp"] = int(row["timestamp"] // (1e3 * every) * 1e3 * every)
    target.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return target


def ask(args: argparse.Namespace, url: str, scale: str, directory: Path) -> dict[str, Any]:
    trace, goodput = args.trace, f"ttft:{args.slower}s+{40 * args.slower}us,itl:{50 * args.slower}"
    if args.bursts:
        trace = in_bursts(trace, args.bursts / float(scale), directory.with_suffix(".jsonl"))
    if args.slo:
        ttft, tpot = (each * args.slower for each in args.slo)
        goodput = f"ttft:{ttft},tpot:{tpot}"
    flags = {
        "--url": url,
        "--endpoint": "/generate",
        "--dataset-name": "trace",
        "--dataset-path": str(trace),
        "--trace-window": args.window,
        "--trace-length-scale": "1",
        "--trace-output-scale": "1",
        "--trace-time-scale": str(float(scale) * args.slower),
        "--goodput": goodput,
        "--output-dir": str(directory),
    }
    words = [word for pair in flags.items() for word in pair]
    subprocess.run(
        [sys.executable, "-m", "pd.bench", "serve", *words],
        cwd=ROOT,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return dict(json.loads((directory / "summary.json").read_text()))


def slo(text: str) -> tuple[float, float]:
    """Parse objectives for the first token and for later ones, in milliseconds."""
    ttft, _, tpot = text.partition(":")
    return float(ttft), float(tpot)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--time-scales", nargs="+", default=["3"])
    parser.add_argument("--window", default="900:918")
    parser.add_argument("--bursts", type=float, default=0.0, help="seconds between arrivals")
    parser.add_argument("--slo", type=slo, help="milliseconds, such as 1000:25")
    parser.add_argument("--slower", type=float, default=3.0)
    parser.add_argument("--kv-cache-tokens", type=int, default=180_000)
    parser.add_argument("--node-flags", nargs="*", default=["chunked-prefill-size=8192"])
    parser.add_argument("--proxy-flags", nargs="*", default=[])
    parser.add_argument("--port", type=int, default=21000)
    parser.add_argument("--logs", type=Path)
    args = parser.parse_args()
    if "elastic-slo" in args.layouts and not args.slo:
        args.layouts.remove("elastic-slo")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        args.logs = args.logs or directory
        args.logs.mkdir(exist_ok=True, parents=True)
        (directory / "config.json").write_text(json.dumps(_CONFIG))
        for scale in args.time_scales:
            for name in args.layouts:
                with layout(args, name, directory) as url:
                    found = ask(args, url, scale, args.logs / f"run-{name}-{scale}")
                print(json.dumps(row(found, name, scale, args.slower)), flush=True)
    return 0


def row(found: dict[str, Any], name: str, scale: str, slower: float) -> dict[str, Any]:
    measures = found["measures"]
    row: dict[str, Any] = {"layout": name, "scale": scale, "valid": found["valid"]}
    row["failed"], row["good"] = measures["failed"], measures["goodput"]["share"]
    for latency, which in (
        ("ttft", ("p50", "p90", "p99")),
        ("itl", ("p50", "p99", "p99.9", "max")),
    ):
        for each in which:
            row[f"{latency}_{each}"] = round(measures[f"{latency}_ms"][each] / slower, 1)
    return row


if __name__ == "__main__":
    sys.exit(node(sys.argv[2:]) if sys.argv[1:2] == ["node"] else main())
