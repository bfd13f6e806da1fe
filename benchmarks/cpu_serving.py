"""Compare output tokens per second on a CPU: split, unified and transformers.generate.

16 concurrent requests have 128 random tokens and 128 greedy tokens each, for a Llama shape of 30M
parameters in float32. Nodes and proxy are real processes, asked over HTTP; transformers runs a
static batch of 16 on the same cores. The three alternate in rounds with new prompts, so noise hits
all alike and no cache helps. The ratio to transformers is the median of the rounds' ratios.

    python benchmarks/cpu_serving.py --output benchmarks/results/cpu_serving.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from pd.bench.report import write_report  # noqa: E402

SHAPE = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
REFERENCE = """
import json, sys, time, torch, transformers
torch.set_num_threads(int(sys.argv[2]))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    ids = torch.tensor(job["prompts"])
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=job["tokens"], min_new_tokens=job["tokens"])
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "outputs": out[:, ids.shape[1]:].tolist()}), flush=True)
"""


class Process:
    """A child process that says on its first line that it is ready."""

    def __init__(self, *command: str, stdin: bool = False) -> None:
        self.child = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.PIPE if stdin else None,
            text=True,
        )
        assert self.child.stdout is not None
        self.ready = self.child.stdout.readline().strip()
        if not self.ready:
            raise SystemExit(f"{' '.join(command)} did not start")

    @property
    def url(self) -> str:
        return str(json.loads(self.ready)["url"])

    def stop(self) -> None:
        self.child.terminate()
        self.child.wait(30)


class Served:
    """One deployment and its proxy."""

    def __init__(self, model: Path, *roles: str) -> None:
        self._processes: list[Process] = []
        flags: list[str] = []
        for role in roles:
            command = ["-m", "pd.cli", role, "--model", str(model), "--port", "0"]
            command += ["--kv-cache-tokens", "16384"]
            if role == "prefill":
                command += ["--bootstrap-port", "0"]
            process = Process(*command)
            self._processes.append(process)
            flags += [f"--{role}", process.url]
        proxy = Process("-m", "pd.cli", "proxy", "--port", "0", *flags)
        self._processes.append(proxy)
        limits = httpx.Limits(max_connections=64)
        self._client = httpx.Client(base_url=proxy.url, timeout=600, limits=limits)
        while self._client.get("/readiness").status_code != 200:
            time.sleep(0.1)

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Send all prompts at once; returns the seconds and their output ids."""

        def ask(prompt: list[int]) -> list[int]:
            params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": params}
            response = self._client.post("/generate", json=body)
            response.raise_for_status()
            return list(response.json()["output_ids"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            begin = time.perf_counter()
            outputs = list(pool.map(ask, prompts))
            return time.perf_counter() - begin, outputs

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.stop()


class Reference:
    """transformers.generate in a process of its own."""

    def __init__(self, model: Path, threads: int) -> None:
        self._process = Process("-c", REFERENCE, str(model), str(threads), stdin=True)

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        child = self._process.child
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        child.stdin.flush()
        answer = json.loads(child.stdout.readline())
        return answer["seconds"], answer["outputs"]

    def stop(self) -> None:
        self._process.stop()


def make_model(directory: Path) -> Path:
    """Make a random checkpoint of the shape, with weights that let greedy text vary."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = (0.5 if "embed" in name else 1.5) * parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(directory)
    print(f"model: {parameters / 1e6:.1f}M parameters", file=sys.stderr)
    return directory


def measure(args: argparse.Namespace, model: Path) -> dict[str, list[float]]:
    """Return output tokens per second of each round."""
    cores = len(os.sched_getaffinity(0))
    systems: dict[str, Any] = {
        "transformers": Reference(model, cores),
        "unified": Served(model, "unified"),
        "1P1D": Served(model, "prefill", "decode"),
    }
    rates: dict[str, list[float]] = {name: [] for name in systems}
    differing = {name: 0 for name in systems}
    try:
        for round_number in range(args.rounds + 1):
            rng = np.random.default_rng(round_number)
            shape = (args.requests, args.input_tokens)
            prompts = rng.integers(0, SHAPE["vocab_size"], shape).tolist()
            answers = {}
            for name, system in systems.items():
                seconds, answers[name] = system.run(prompts, args.output_tokens)
                rate = args.requests * args.output_tokens / seconds
                print(f"round {round_number} {name:14} {rate:8.1f} tok/s", file=sys.stderr)
                if round_number > 0:  # the first warms up
                    rates[name].append(rate)
            for name, outputs in answers.items():
                pairs = zip(outputs, answers["transformers"], strict=True)
                differing[name] += sum(ours != theirs for ours, theirs in pairs)
    finally:
        for system in systems.values():
            system.stop()
    print(f"requests whose tokens differ from transformers': {differing}", file=sys.stderr)
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--note", help="what else ran on the machine")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        rates = measure(args, make_model(Path(directory)))
    rows = [row(name, values, rates["transformers"]) for name, values in rates.items()]
    for each in rows:
        print(each)
    if args.output:
        write_report(
            args.output,
            shlex.join(["python", "benchmarks/cpu_serving.py", *sys.argv[1:]]),
            rows,
            measured=["pd", "benchmarks/cpu_serving.py"],
            machine={"load_average_before": round(busy, 2)},
            settings={k: v for k, v in vars(args).items() if k not in ("output", "note")}
            | {"shape": SHAPE},
            note=args.note,
        )
    return 0


def row(name: str, rates: list[float], reference: list[float]) -> dict[str, object]:
    """Make a row with the output tokens per second of one system."""
    ratios = [ours / theirs for ours, theirs in zip(rates, reference, strict=True)]
    return {
        "system": name,
        "unit": "output tokens/s",
        "best": round(max(rates), 1),
        "median": round(statistics.median(rates), 1),
        "ratio_to_transformers": round(statistics.median(ratios), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
