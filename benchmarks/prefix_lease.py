"""Measure what a prefix lease gives to a program that waits for a tool while others fill the cache.

A program sends a prompt, waits while other clients send prompts that together exceed the pool, and
sends a prompt that begins with the first one and its answer. Programs with and without a lease take
turns on one unified node of the embedded model. `cached_share` is the part of the second prompt's
tokens that was still cached, `ttft_ms` the time to its first token, `others_ttft_ms` the time to
the first token of the others' prompts meanwhile. All are medians over the programs.

    python benchmarks/prefix_lease.py --output benchmarks/results/prefix_lease.json
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from pd.bench.report import Row, add_output, check_output, write_report  # noqa: E402
from pd.core.config import NodeConfig  # noqa: E402
from pd.embedded import EMBEDDED_MODEL  # noqa: E402
from pd.launch import NodeServer  # noqa: E402
from pd.proxy.config import ProxyConfig  # noqa: E402
from pd.proxy.server import ProxyThread  # noqa: E402

POOL_TOKENS = 16_384
PROMPT_TOKENS, MORE_TOKENS = 1_024, 128
# The others' prompts of one wait exceed the pool.
OTHERS, OTHER_TOKENS = 20, 1_024
VOCABULARY = 2_000
LEASE_SECONDS = 60


class Client:
    """Sends prompts of token ids."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)

    def send(self, prompt: list[int], **fields: Any) -> tuple[list[int], float, float]:
        """Return the answer, the cached share of the prompt and the time to the first token in
        milliseconds."""
        sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling} | fields
        answer = self._http.post("/generate", json=body).raise_for_status().json()
        meta = answer["meta_info"]
        stages = meta["stages"]
        first = 1e3 * (stages["queue"] + stages["prefill"])
        return answer["output_ids"], meta["cached_tokens"] / len(prompt), first


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--programs", type=int, default=9, metavar="N", help="of each kind (default: 9)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--note", help="what else ran on the machine")
    add_output(parser)
    args = parser.parse_args()
    check_output(args.output)
    config = NodeConfig(
        role="unified",
        model=EMBEDDED_MODEL,
        device="cpu",
        kv_cache_tokens=POOL_TOKENS,
        transfer_backend="tcp",
    )
    node = NodeServer(config)
    node.start()
    try:
        with ProxyThread(ProxyConfig(port=0, unified=[node.url])) as proxy:
            rows = measure(Client(proxy.url), args.programs, random.Random(args.seed))
    finally:
        node.stop()
    for row in rows:
        print(row)
    if args.output is not None:
        command = shlex.join(["python", "benchmarks/prefix_lease.py", *sys.argv[1:]])
        measured = ["pd", "benchmarks/prefix_lease.py"]
        write_report(args.output, command, rows, measured=measured, note=args.note)
    return 0


def measure(client: Client, programs: int, rng: random.Random) -> list[Row]:
    """Run programs with and without a lease in turn."""
    results: dict[str, list[tuple[float, float, float]]] = {"no lease": [], "lease": []}
    for number in range(programs):
        for kind in sorted(results, reverse=bool(number % 2)):
            fields = {"prefix_lease": LEASE_SECONDS} if kind == "lease" else {}
            results[kind].append(run_program(client, rng, fields))
            print(f"{kind}: {results[kind][-1]}", file=sys.stderr)
    return [
        {
            "program": kind,
            "cached_share": median(share for share, _, _ in runs),
            "ttft_ms": median(first for _, first, _ in runs),
            "others_ttft_ms": median(others for _, _, others in runs),
        }
        for kind, runs in results.items()
    ]


def run_program(
    client: Client, rng: random.Random, fields: dict[str, Any]
) -> tuple[float, float, float]:
    """Return the second prompt's cached share and time to the first token, and the others' time."""
    prompt = draw_tokens(rng, PROMPT_TOKENS)
    answer, _, _ = client.send(prompt, **fields)
    others = [client.send(draw_tokens(rng, OTHER_TOKENS))[2] for _ in range(OTHERS)]
    _, share, first = client.send(prompt + answer + draw_tokens(rng, MORE_TOKENS))
    return share, first, median(others)


def draw_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, VOCABULARY) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main())
