"""Measure how often a proxy knows exactly how much of a prompt a node has cached.

    python benchmarks/prefix_predictions.py --output FILE

Two proxies send conversations of their own to a node's prefix cache, together more than its pool
holds. `reports` is the share of one proxy's prompts with exactly the expected number of cached
tokens, if the node reports insertions and evictions. `guess` is the same if the proxy knows only
its own requests, as with nodes that report nothing. `cached` is the share of prompt tokens that
were cached.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "proxy")]

from predicted_prefixes import predict  # noqa: E402

from pd.bench.report import write_report  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        shares = {name: round(v, 4) for name, v in predict(args.requests, seed)._asdict().items()}
        rows.append({"seed": seed, "requests": args.requests} | shares)
        print(rows[-1], flush=True)
    command = shlex.join(["python", "benchmarks/prefix_predictions.py", *sys.argv[1:]])
    write_report(args.output, command, rows, measured=["pd", "tests/proxy/predicted_prefixes.py"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
