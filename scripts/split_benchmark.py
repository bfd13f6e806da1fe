"""Compare a split over two GPUs with two unified nodes on the same GPUs, one after the other.

    python scripts/split_benchmark.py --output benchmarks/results/split_gpu.json

Nodes are real processes with dummy weights. For each transfer backend there are a prefill node on
the first device, a decode node on the second, and a proxy. Another proxy serves a unified node on
each device. All start together to save time, and are idle while others are measured. `pd-bench
serve` defines the measures. Every other unloaded prompt asks the prefill node for one token, so
nothing is handed over. The nodes' metrics say how long prefill took with and without sending KV,
and for how much of a transfer a request waits. Rows of vLLM come from another run
(`benchmarks/reference_vllm.json`).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from pd.bench.engine import REFERENCE  # noqa: E402
from pd.bench.report import write_report  # noqa: E402
from pd.bench.serve import (  # noqa: E402
    MixedLoad,
    Prompts,
    ask_one,
    measure_load,
    show_rows,
    timing_row,
    unloaded_rows,
)
from pd.bench.serve_client import BenchCompletion, Server  # noqa: E402
from pd.bench.shapes import NAMES, SHAPES, model_directory  # noqa: E402
from pd.commands.processes import Children, LaunchedProcess  # noqa: E402
from pd.core.errors import PDError, SetupError  # noqa: E402

BACKENDS = ("nvlink", "nixl", "tcp", "mooncake")
# Tokens of a prompt.
SHORT = 4096


@dataclass
class System:
    """One deployment; ``prefill`` is None where nodes are unified."""

    name: str
    nodes: list[LaunchedProcess]
    prefill: LaunchedProcess | None = None
    proxy: LaunchedProcess | None = None


class Deployments:
    """All systems' processes."""

    def __init__(self, args: argparse.Namespace, logs: Path) -> None:
        self._args = args
        self._children = Children(logs)

    def start(self) -> list[System]:
        """Start all processes and wait until they can serve. Raises SetupError."""
        systems = [self._start_nodes(name) for name in self._args.systems]
        self._wait([node for system in systems for node in system.nodes])
        for system in systems:
            system.proxy = self._start_proxy(system)
        self._wait([system.proxy for system in systems if system.proxy is not None])
        return systems

    def _start_nodes(self, name: str) -> System:
        args = self._args
        flags = ["--model", model_directory(args.model), "--port", 0, *shlex.split(args.node_flags)]
        flags += ["--kv-cache-tokens", args.kv_cache_tokens]
        flags += ["--load-format", "dummy"] if args.model in SHAPES else []
        if name == "unified":
            nodes = [
                self._children.start(f"unified {i}", "unified", "--device", device, *flags)
                for i, device in enumerate(args.devices)
            ]
            return System("unified x 2", nodes)
        flags += ["--transfer-backend", name]
        source, target = args.devices
        ports = ["--bootstrap-port", 0, "--device", source]
        prefill = self._children.start(f"prefill {name}", "prefill", *ports, *flags)
        decode = self._children.start(f"decode {name}", "decode", "--device", target, *flags)
        return System(f"split, {name}", [prefill, decode], prefill)

    def _start_proxy(self, system: System) -> LaunchedProcess:
        workers: list[str] = []
        for node in system.nodes:
            assert node.ready is not None
            workers += [f"--{node.ready.role}", node.url]
        tokenizer = ["--tokenizer", self._args.tokenizer] if self._args.tokenizer else []
        return self._children.start(
            f"proxy {system.name}", "proxy", "--port", 0, *tokenizer, *workers
        )

    def _wait(self, children: list[LaunchedProcess]) -> None:
        limit = self._args.start_timeout

        def check(seconds: float) -> None:
            if seconds > limit:
                raise SetupError(f"the processes were not ready within {limit:g} s")

        self._children.wait_ready(children, check)

    def check(self) -> None:
        """Raise SetupError if a process has ended."""
        self._children.check_alive()

    def stop(self) -> None:
        self._children.stop()


class Measurement:
    """Rows of one system."""

    def __init__(self, args: argparse.Namespace, system: System) -> None:
        assert system.proxy is not None
        self._args, self._system = args, system
        self._server = Server(system.proxy.url, None)
        self._prompts = Prompts(args.vocab_size, args.seed)
        self.rows: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Measure everything; returns facts about the load in addition to its rows. Raises
        PDError."""
        args = self._args
        for length in args.unloaded:
            self._unloaded(length)
        if args.load is None:
            return {}
        # Kernels that are compiled when their shapes are first seen are compiled in this one.
        # NOTE: with streams of full length. Short ones end so often that the prefill node cannot
        # replace them fast enough for all of them ever to run at once.
        warm = dataclasses.replace(args.load, seconds=1.0)
        self._within(measure_load(self._server, self._prompts, warm))
        rows, facts = self._within(measure_load(self._server, self._prompts, args.load))
        self._add(rows, self._system.name)
        return {self._system.name: facts}

    def _unloaded(self, length: int) -> None:
        """Alternate prompts for the prefill node alone and for the split, each after a rest. Each
        kind follows either kind equally often, so both meet equally warm GPUs at equal clocks.
        Short prompts are repeated more often, because a millisecond of noise is a large share of
        their time."""
        name, prefill = self._system.name, self._system.prefill
        kinds = {name: self._args.outputs}
        if prefill is not None:
            kinds = {"prefill node alone": 1} | kinds
        answers: dict[str, list[BenchCompletion]] = {kind: [] for kind in kinds}
        stages: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        repeats = self._args.repeats * (3 if length < SHORT else 1)
        for repeat in range(repeats + 1):
            for kind, outputs in list(kinds.items())[:: 1 if repeat % 2 else -1]:
                before = totals(prefill)
                time.sleep(self._args.rest)
                answer = self._within(ask_one(self._server, self._prompts, length, outputs))
                if repeat:  # the first one warms up
                    answers[kind].append(answer)
                    after = totals(prefill)
                    stages[kind].append({s: t - before.get(s, 0.0) for s, t in after.items()})
        for kind in kinds:
            rows = unloaded_rows(length, answers[kind])
            self._add(rows + _node_rows(f"unloaded:{length}", stages[kind]), kind)

    def _add(self, rows: list[dict[str, Any]], name: str) -> None:
        print(f"--- {name}", flush=True)
        self.rows += [{"system": name, **row} for row in show_rows(rows)]

    def _within(self, work: Any) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(work, self._args.timeout)

        try:
            return asyncio.run(limited())
        except TimeoutError:
            raise SetupError(f"not measured within {self._args.timeout:g} s") from None


def totals(node: LaunchedProcess | None) -> dict[str, float]:
    """Sum and count the histograms of a node, by name and labels; empty without a node."""
    found: dict[str, float] = {}
    if node is not None:
        for line in httpx.get(f"{node.url}/metrics", timeout=10).text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.partition("{")[0].endswith(("_sum", "_count")):
                found[name] = float(value)
    return found


def _node_rows(work: str, prompts: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Make rows of the growth of the prefill node's metrics with each prompt."""
    kinds = {
        'pd_stage_seconds_sum{stage="prefill"}': "prefill, as the node says",
        "pd_transfer_exposed_seconds_sum": "transfer that the second token waits for",
    }
    rows = []
    for sums, metric in kinds.items():
        counts, seconds = sums.replace("_sum", "_count"), []
        for grown in prompts:
            count = sum(n for series, n in grown.items() if series.startswith(counts))
            if count > 0:
                total = sum(n for series, n in grown.items() if series.startswith(sums))
                seconds.append(total / count)
        if seconds:
            rows.append(timing_row(work, metric, seconds))
    return rows


def reference(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return results of vLLM with the same load, if they were measured on this machine."""
    known = json.loads(REFERENCE.read_text())
    alike = args.model == known["model"] and args.load in (None, MixedLoad())
    return [dict(row) for row in known["serve"]] if alike else []


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, help="result file (JSON)")
    add("--model", default="llama-3.1-8b", help=f"a directory or one of {', '.join(NAMES)}")
    add("--devices", default="cuda:0,cuda:1", type=_parts, help="of prefill and decode")
    add("--systems", default="nvlink,unified", type=_parts, help=f"{', '.join(BACKENDS)}, unified")
    add("--node-flags", default="", help="more flags of every node, as one argument")
    add("--kv-cache-tokens", type=int, default=200_000, help="of every node")
    add("--tokenizer", type=Path, help="for the proxies; without it they handle ids alone")
    add("--unloaded", default="1024,8192,32768", type=_lengths, help="empty for none")
    add("--outputs", type=int, default=16)
    add(
        "--repeats", type=int, default=7, help="of each unloaded prompt; short ones 3 times as many"
    )
    add("--rest", type=float, default=0.3, help="seconds before each unloaded prompt")
    add("--load", default="streams=48", type=_load, help="as for pd-bench serve; empty for none")
    add("--vocab-size", type=int, default=2000)
    add("--seed", type=int, default=0)
    add("--start-timeout", type=float, default=150.0, help="seconds until all processes serve")
    add("--timeout", type=float, default=90.0, help="seconds of one measurement")
    add("--logs", type=Path, help="keep the processes' logs in this directory")
    args = parser.parse_args(arguments)
    unknown = set(args.systems) - {*BACKENDS, "unified"}
    if unknown or len(args.devices) != 2:
        parser.error("--systems are backends or unified, --devices are two")
    return args


def _parts(text: str) -> list[str]:
    return text.split(",")


def _lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _load(text: str) -> MixedLoad | None:
    return MixedLoad.parse(text) if text else None


def measure(
    args: argparse.Namespace, directory: Path, rows: list[dict[str, Any]], facts: dict[str, Any]
) -> str:
    """Fill in rows and facts of all systems; returns the error, if any."""
    deployments = Deployments(args, directory)
    errors = []
    began = time.monotonic()
    try:
        systems = deployments.start()
        facts["start_s"] = round(time.monotonic() - began, 1)
        print(f"all processes serve after {facts['start_s']} s", flush=True)
        for system in systems:
            measurement = Measurement(args, system)
            try:
                facts |= measurement.run()
            except (PDError, httpx.HTTPError) as error:
                errors.append(f"{system.name}: {error}")
                print(f"FAILED: {errors[-1]}", flush=True)
            rows += measurement.rows
            deployments.check()
    except PDError as error:
        errors.append(error.message)
    finally:
        deployments.stop()
    return "; ".join(errors)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    args = parse(given)
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pd-split-") as name:
        error = measure(args, Path(name), rows, facts)
        for log in sorted(Path(name).glob("*.log")):
            if args.logs is not None:
                args.logs.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, args.logs)
            elif error:
                print(f"--- {log.name}", log.read_text()[-2000:], sep="\n", file=sys.stderr)
    if args.output is not None and rows:
        command = shlex.join(["python", "scripts/split_benchmark.py", *given])
        facts |= {"error": error} if error else {}
        every = rows + reference(args)
        write_report(args.output, command, every, measured=["pd", "scripts"], settings=facts)
    if error:
        print(f"FAILED: {error}", flush=True)
    return int(bool(error))


if __name__ == "__main__":
    sys.exit(main())
