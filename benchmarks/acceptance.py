"""Measure the acceptance length of every drafter in a running split, greedy and at temperature 1.

    python benchmarks/acceptance.py [--devices cuda:0 cuda:1] --output FILE [-- FLAGS]

We ask the embedded model questions of its held-out sets over HTTP. Proxy, prefill node and decode
node are real processes. Every drafter drafts as many tokens as it may: `tokens`, with at most
`topk` guesses for one position. The acceptance length is the mean number of tokens that a verified
draft brings, `1 + accepted / drafts` by the decode node's metrics. Steps without a draft do not
count. Sampled requests have seeds, so every drafter faces the same tokens. Flags after `--` go to
both nodes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "training")]

from embedded.heldout import evaluation_set  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from pd.bench.report import write_report  # noqa: E402
from pd.embedded import EMBEDDED_MODEL  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SETS = ("faq", "extraction", "arithmetic", "recall-2k")
MODELS = EMBEDDED_MODEL.parent
READY_SECONDS = 120
# Algorithm, checkpoint, tokens of a draft, guesses at a place.
DRAFTERS: dict[str, tuple[str, str, int, int]] = {
    "ngram": ("ngram", "", 4, 1),
    "draft": ("draft", "embedded-draft", 4, 1),
    "eagle": ("eagle", "embedded-eagle", 4, 1),
    "eagle3": ("eagle", "embedded-eagle3", 4, 1),
    "eagle3, tree": ("eagle", "embedded-eagle3", 8, 3),
}


class Node:
    """A process of pd-launch, which has said that it is ready."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pd.cli", *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        if not ready:
            raise SystemExit(f"{' '.join(command)} did not start")
        self.url = str(json.loads(ready)["url"])

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=24, help="of each set")
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"], metavar="DEVICE")
    parser.add_argument("--drafters", nargs="+", default=[*DRAFTERS], choices=[*DRAFTERS])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    rows = [
        row
        for name in args.drafters
        for row in measure(name, args.examples, args.devices, args.flags)
    ]
    command = shlex.join(["python", "benchmarks/acceptance.py", *sys.argv[1:]])
    write_report(args.output, command, rows, measured=["pd", "benchmarks/acceptance.py"])
    return 0


@contextmanager
def deployment(
    name: str, adaptive: str, devices: Sequence[str], more: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Run a split whose nodes have the drafter ``name``, or "none", and the flags ``more``. Yields
    the URLs of the proxy, when it is ready, and of the decode node."""
    flags = ["--model", str(EMBEDDED_MODEL), "--port", "0", "--kv-cache-tokens", "32768", *more]
    if name != "none":
        algorithm, checkpoint, tokens, topk = DRAFTERS[name]
        flags += ["--speculative-algorithm", algorithm, "--speculative-adaptive", adaptive]
        flags += ["--speculative-num-draft-tokens", str(tokens), "--speculative-topk", str(topk)]
        if checkpoint:
            flags += ["--speculative-draft-model", str(MODELS / checkpoint)]
    with ExitStack() as nodes:
        prefill = Node("prefill", *flags, "--device", devices[0], "--bootstrap-port", "0")
        nodes.callback(prefill.stop)
        decode = Node("decode", *flags, "--device", devices[1])
        nodes.callback(decode.stop)
        proxy = Node("proxy", "--port", "0", "--prefill", prefill.url, "--decode", decode.url)
        nodes.callback(proxy.stop)
        deadline = time.monotonic() + READY_SECONDS
        while (answer := httpx.get(f"{proxy.url}/readiness")).status_code != 200:
            if time.monotonic() > deadline:
                raise SystemExit(f"{name}: not ready in {READY_SECONDS} s: {answer.text}")
            time.sleep(0.1)
        yield proxy.url, decode.url


def measure(
    name: str, examples: int, devices: Sequence[str], more: Sequence[str]
) -> list[dict[str, Any]]:
    """Measure the rows of one drafter."""
    _, _, tokens, topk = DRAFTERS[name]
    rows = []
    with deployment(name, "off", devices, more) as (proxy, decode):
        for temperature in (0.0, 1.0):
            for each in SETS:
                before = counters(decode)
                ask_all(proxy, questions_of(each, examples), temperature)
                after = counters(decode)
                drafts, accepted = (
                    after.get(metric, 0.0) - before.get(metric, 0.0)
                    for metric in ("pd_speculative_drafts_total", "pd_speculative_accepted_total")
                )
                row = {
                    "drafter": name,
                    "tokens": tokens,
                    "topk": topk,
                    "temperature": temperature,
                    "set": each,
                    "acceptance_length": 1 + accepted / drafts if drafts else None,
                }
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


def questions_of(each: str, examples: int) -> list[list[dict[str, str]]]:
    """Return messages up to the first question of some examples of a set."""
    return [
        [
            *({"role": message.role, "content": message.content} for message in example.before),
            {"role": "user", "content": example.turns[0].question},
        ]
        for example in evaluation_set(each)[:examples]
    ]


def ask_all(url: str, asked: list[list[dict[str, str]]], temperature: float) -> None:
    """Ask a few at a time."""

    def ask(numbered: tuple[int, list[dict[str, str]]]) -> None:
        seed, messages = numbered
        body = {"messages": messages, "max_tokens": 64, "temperature": temperature, "seed": seed}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
        response.raise_for_status()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, enumerate(asked)))


def counters(url: str) -> dict[str, float]:
    """Sum a node's counters over their labels, by name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


if __name__ == "__main__":
    sys.exit(main())
