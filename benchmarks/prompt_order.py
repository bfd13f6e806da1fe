"""Measure what the order of waiting prompts gives the prefix cache, and what bounds on it cost.

    python benchmarks/prompt_order.py --output FILE

All prompts of a batch wait at once. The queue, the scheduler and the prefix cache are the real
ones; computing is simulated, so the results are the same on every machine. `hit_rate` is the share
of prompt tokens that were cached, `best` that of an unlimited cache in the best order, and
`of_best` their ratio. The pool has a quarter of the distinct tokens, or room for the prompts that
run together if that is more. `policy` is `--schedule-policy`, or `objectives` for the order of an
elastic node. `running` is the number of prompts that run together, and `overtakes` is
`--max-overtakes`. Only the 128 oldest prompts are ordered; the others wait for a place among them.
Each row is the mean over the seeds.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "scheduling")]

from shared_prompts import KINDS, best_hit_rate, make_workload, serve_cached  # noqa: E402

from pd.bench.report import write_report  # noqa: E402

POLICIES = ("lpm", "dfs-weight", "objectives", "fcfs", "random")
UNLIMITED = 1 << 20
# Requests, prompts that run together, and overtakes: the theorem's case, what each bound costs
# alone, and the defaults of a node.
CASES = (
    (128, 1, UNLIMITED),
    (128, 1, 64),
    (128, 16, UNLIMITED),
    (512, 1, UNLIMITED),
    (512, 16, 64),
)


def measure_policy(
    policy: str, kind: str, case: tuple[int, int, int], seeds: int
) -> dict[str, Any]:
    count, running, overtakes = case
    rates, best = [], []
    for seed in range(seeds):
        prompts = make_workload(random.Random(seed), kind, count)
        best.append(best_hit_rate(prompts))
        by_due = policy == "objectives"
        rate, _ = serve_cached(
            prompts,
            "lpm" if by_due else policy,
            by_due=by_due,
            max_running=running,
            max_overtakes=overtakes,
        )
        rates.append(rate)
    hit_rate, optimum = statistics.mean(rates), statistics.mean(best)
    return {
        "workload": kind,
        "requests": count,
        "running": running,
        "overtakes": "any" if overtakes == UNLIMITED else overtakes,
        "policy": policy,
        "hit_rate": round(hit_rate, 4),
        "best": round(optimum, 4),
        "of_best": round(hit_rate / optimum, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for kind in KINDS:
        for case in CASES:
            for policy in POLICIES:
                rows.append(measure_policy(policy, kind, case, args.seeds))
                print(rows[-1], flush=True)
    command = shlex.join(["python", "benchmarks/prompt_order.py", *sys.argv[1:]])
    write_report(args.output, command, rows, measured=["pd", "tests/scheduling"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
