"""Measure how often an answer continues differently after a failover, and in another batch.

    python benchmarks/failover_divergence.py --output FILE

One unified node with dummy weights answers every request undisturbed, all at once. Then we ask
again. In `other batch` only a few requests run at a time. In `failover` all run at once, and the
first tokens of the undisturbed answer follow the prompt, as the proxy sends them to another node.
Nothing is cached, so KV of these tokens comes from a prefill instead of single steps.

`diverged` is the share of answers that differ from the undisturbed one. `agree` is the number of
newly computed tokens before the first difference. In float32 nothing may differ (exit status 1). A
trained model is surer of its tokens than random weights, so it diverges less often.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from cluster import Cluster  # noqa: E402

from pd.bench.report import write_report  # noqa: E402
from pd.bench.shapes import NAMES, model_directory  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster import Pending

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
}
# For an answer on a machine that is busy with others.
PATIENCE_SECONDS = 1200.0
Answers = list[list[int]]


class Asker:
    """Sends the same prompts again and again."""

    def __init__(self, cluster: Cluster, prompts: Answers, tokens: int, sampling: str) -> None:
        self._cluster, self._prompts, self._tokens = cluster, prompts, tokens
        self._sampling = SAMPLINGS[sampling]

    def ask(self, at_once: int, produced: Answers | None = None) -> Answers:
        """Return all answers, with at most so many requests at a time and nothing cached."""
        found: Answers = []
        for first in range(0, len(self._prompts), at_once):
            self._cluster.wait_idle(60)
            self._cluster.unified[0].node.flush_cache()
            numbers = range(first, min(first + at_once, len(self._prompts)))
            sent = [self._send(number, produced[number] if produced else []) for number in numbers]
            found += [pending.tokens(PATIENCE_SECONDS) for pending in sent]
        return found

    def _send(self, number: int, produced: Sequence[int]) -> Pending:
        params = {"max_tokens": self._tokens, "seed": number, **self._sampling}
        prompt, nodes = self._prompts[number], self._cluster.unified
        return self._cluster.client.generate(prompt, nodes, produced=produced, **params)


def compare(right: Answers, found: Answers, known: int) -> dict[str, object]:
    """Compare answers after their first ``known`` tokens."""
    agree = []
    for one, other in zip(right, found, strict=True):
        assert len(one) == len(other)
        differs = [a != b for a, b in zip(one[known:], other[known:], strict=True)]
        if any(differs):
            agree.append(differs.index(True))
    quantiles = {
        f"agree p{share}": float(np.percentile(agree, share)) if agree else None
        for share in (10, 50, 90)
    }
    share = round(len(agree) / len(right), 3)
    return {"answers": len(right), "tokens": len(right[0]) - known, "diverged": share, **quantiles}


def measure(cluster: Cluster, args: argparse.Namespace) -> list[dict[str, object]]:
    rng, rows = random.Random(args.seed), list[dict[str, object]]()
    lengths = [rng.randrange(args.prompt // 2, args.prompt) for _ in range(args.requests)]
    prompts = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    for sampling in SAMPLINGS:
        asker = Asker(cluster, prompts, args.tokens, sampling)
        right = asker.ask(args.requests)

        def add(run: str, at_once: int, found: Answers, known: int) -> None:
            facts = {"sampling": sampling, "run": run, "at once": at_once, "failover after": known}  # noqa: B023
            rows.append(facts | compare(right, found, known))  # noqa: B023
            print(rows[-1], flush=True)

        add("same batch", args.requests, asker.ask(args.requests), 0)
        for at_once in args.batches:
            add("other batch", at_once, asker.ask(at_once), 0)
        for known in args.after:
            produced = [answer[:known] for answer in right]
            add("failover", args.requests, asker.ask(args.requests, produced), known)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help=f"a directory, or one of {', '.join(NAMES)}")
    add("--device", default="cuda")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--requests", type=int, default=64)
    add("--prompt", type=int, default=512, help="tokens of the longest prompt")
    add("--tokens", type=int, default=256, help="of each answer")
    add("--batches", type=int, nargs="+", default=[1, 8], help="other requests at once")
    add("--after", type=int, nargs="+", default=[1, 32, 128], help="tokens before the failover")
    add("--seed", type=int, default=0)
    add("--output", type=Path, required=True)
    args = parser.parse_args()
    if max(args.after) >= args.tokens:
        parser.error(f"--after {max(args.after)} must be below --tokens {args.tokens}")
    settings: dict[str, Any] = {
        "device": args.device,
        "dtype": args.dtype,
        "load_format": "dummy",
        "kv_cache_tokens": 2 * args.requests * (args.prompt + args.tokens),
    }
    with Cluster(Path(model_directory(args.model)), 0, 0, 1, **settings) as cluster:
        rows = measure(cluster, args)
    command = shlex.join(["python", "benchmarks/failover_divergence.py", *sys.argv[1:]])
    facts = {"model": args.model, "device": args.device, "dtype": args.dtype, "seed": args.seed}
    write_report(args.output, command, rows, measured=["pd"], settings=facts)
    return int(args.dtype == "float32" and any(row["diverged"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
