"""Check whether one proxy process keeps up with a decode node, and two processes with two.

    python benchmarks/large_vocabulary.py /tmp/large --shape llama-3.1-8b
    python benchmarks/streams_of_nodes.py --model /tmp/large --devices cuda:0 cuda:1 \\
        --node-flags load-format=dummy attention-backend=triton --output FILE
    python benchmarks/streams_of_nodes.py --streams 8 --kv-cache-tokens 8192 --output FILE

Two layouts run at the same time and are asked in turn. `one` has a decode node and a proxy of one
process; `two` has two decode nodes, a proxy of two processes, and twice the streams. Each also has
a prefill node. While all streams run, we compare the time between two tokens, as clients see it,
with the time of the nodes' steps (from their counter `pd_steps`), and read the proxy's processor
time. The proxy turns each token into text and looks for a stop string in it. Numbers are medians of
the rounds.
"""

from __future__ import annotations

import argparse
import bisect
import re
import shlex
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from local_layouts import start_layouts  # noqa: E402

from pd.bench.proxy import median_row, start_load_processes  # noqa: E402
from pd.bench.proxy_load import Begun, Ended, Streams  # noqa: E402
from pd.bench.proxy_processes import Running, cpu_seconds  # noqa: E402
from pd.bench.report import Row, write_report  # noqa: E402
from pd.bench.shapes import model_directory  # noqa: E402

if TYPE_CHECKING:
    from local_layouts import LocalLayout

    from pd.bench.serve_client import BenchCompletion

_CLIENTS = 8
_STOP = "never said"
_PROMPT_TOKENS = 4096  # of the prefill nodes' pools
_READ_SECONDS = 0.25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded", help="a directory with a tokenizer")
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"], metavar="DEVICE")
    parser.add_argument("--streams", type=int, default=256, metavar="N", help="per decode node")
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="of each stream")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--kv-cache-tokens", type=int, default=160_000, help="of a decode node")
    parser.add_argument("--node-flags", nargs="*", default=[], metavar="FLAG=VALUE")
    parser.add_argument("--note", help="what else ran on the machine")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, start_load_processes(_CLIENTS) as clients:
        model, (shared, layouts) = str(model_directory(args.model)), plan_layouts(args)
        with start_layouts(model, shared, layouts, Path(scratch)) as running:
            rounds: list[list[Row]] = []
            for number in range(args.rounds + 1):
                print("warm-up" if number == 0 else f"round {number} of {args.rounds}", flush=True)
                measured: list[Row] = []
                for name, count in (("one", 1), ("two", 2)):
                    layout, streams = running.layouts[name], count * args.streams
                    answers, reads = run(name, layout, streams, args.tokens, clients)
                    # In the first round, kernels are compiled while nodes that have theirs go on.
                    if number:
                        measured.append(summary(name, answers, reads))
                rounds.append(measured)
                running.children.check_alive()
    rows = [median_row(rows) for rows in zip(*rounds[1:], strict=True)]
    for row in rows:
        print(row)
    command = shlex.join(["python", "benchmarks/streams_of_nodes.py", *sys.argv[1:]])
    paths = ["pd", "benchmarks/streams_of_nodes.py"]
    write_report(args.output, command, rows, measured=paths, note=args.note)
    return 0


def plan_layouts(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags of every node, and both layouts."""
    first, second = args.devices
    flags = [flag.partition("=") for flag in args.node_flags]
    shared = {name: yaml.safe_load(value) for name, _, value in flags}
    if first == "cpu":
        shared["cpu-threads"] = 1

    def node(role: str, device: str, kv_cache_tokens: int) -> dict[str, Any]:
        own = {"kv-cache-tokens": kv_cache_tokens, "max-running-requests": args.streams * 5 // 4}
        return {"role": role, "device": device, "flags": own}

    def layout(workers: int, devices: list[str]) -> dict[str, Any]:
        decode = [node("decode", device, args.kv_cache_tokens) for device in devices]
        prefill = node("prefill", first, max(_PROMPT_TOKENS, 32 * args.streams))
        return {"nodes": [prefill, *decode], "proxy": {"workers": workers}}

    return shared, {"one": layout(1, [second]), "two": layout(2, [first, second])}


def run(
    name: str, layout: LocalLayout, streams: int, tokens: int, clients: list[Running]
) -> tuple[list[BenchCompletion], Reads]:
    """Run so many streams at a time to their ends; also returns all reads since the last one
    began."""
    names = [f"stream-{time.monotonic_ns()}-{number}" for number in range(streams)]
    parts = [names[number::_CLIENTS] for number in range(_CLIENTS)]
    fields = {"stop": [_STOP], "return_token_ids": False, "ignore_eos": True}
    for client, part in zip(clients, parts, strict=True):
        client.write_message(Streams(layout.proxy.url, part, tokens, fields))
    for client in clients:
        client.read_message(Begun)
    decode_urls = [node.url for role, node in layout.nodes if role == "decode"]
    reads = Reads(layout.proxy.process.pid, decode_urls)
    answers = [answer for client in clients for answer in client.read_message(Ended).answers]
    reads.stop()
    for answer in answers:
        if answer.error is not None:
            raise SystemExit(f"a stream of {name} failed: {answer.error}")
    return answers, reads


def summary(name: str, answers: list[BenchCompletion], reads: Reads) -> Row:
    """Make one row about the time from the start of the last stream to the end of the first."""
    first, last = reads.until(min(answer.times[-1] for answer in answers))
    seconds = last.at - first.at
    steps = [then - now for now, then in zip(first.steps, last.steps, strict=True)]
    step = mean(seconds / count for count in steps)
    itl = mean(token_seconds(answer, first.at, last.at) for answer in answers)
    return {
        "layout": name,
        "streams": len(answers),
        "seconds": seconds,
        "step_ms": 1e3 * step,
        "itl_mean_ms": 1e3 * itl,
        "itl_by_step": itl / step,
        "proxy_cores": (last.cpu - first.cpu) / seconds,
        "tokens_per_s": len(answers) / itl,
    }


class Read(NamedTuple):
    """What was read at a time, by ``time.perf_counter``.

    Attributes:
        cpu: processor time of the proxy, in seconds.
        steps: of each decode node.
    """

    at: float
    cpu: float
    steps: list[float]


class Reads(threading.Thread):
    """Reads again and again, from now until :meth:`stop`."""

    def __init__(self, proxy: int, nodes: list[str]) -> None:
        super().__init__(daemon=True)
        self._proxy, self._nodes = proxy, nodes
        self._over = threading.Event()
        self._reads: list[Read] = []
        self.start()

    def run(self) -> None:
        with httpx.Client() as client:
            while not self._over.wait(_READ_SECONDS):
                steps = [count_steps(client.get(f"{url}/metrics").text) for url in self._nodes]
                self._reads.append(Read(time.perf_counter(), cpu_seconds(self._proxy), steps))

    def stop(self) -> None:
        self._over.set()
        self.join()

    def until(self, end: float) -> tuple[Read, Read]:
        """Return the first read, and the last one before ``end``."""
        reads = [read for read in self._reads if read.at < end]
        if len(reads) < 2:
            raise SystemExit("the streams ended too early; ask for more --tokens")
        return reads[0], reads[-1]


def count_steps(metrics: str) -> float:
    """Count the forward passes of a node."""
    found = re.search(r"^pd_steps_total (\S+)$", metrics, re.MULTILINE)
    assert found is not None
    return float(found[1])


def token_seconds(answer: BenchCompletion, begin: float, end: float) -> float:
    """Return the mean seconds per token of an answer between two times."""
    first = bisect.bisect_right(answer.times, begin)
    stop = bisect.bisect_right(answer.times, end)
    tokens = sum(answer.counts[first:stop])
    if not tokens:
        raise SystemExit("a stream stood still; give decode nodes more --kv-cache-tokens")
    return (answer.times[stop - 1] - answer.times[first - 1]) / tokens


if __name__ == "__main__":
    sys.exit(main())
