"""Send requests to two prefill and two decode nodes while nodes are killed and requests aborted.

    python benchmarks/churn.py --output benchmarks/results/churn.json
    python benchmarks/churn.py --backend nvlink --devices cuda:0 --output FILE

Twelve requests per second go to a tiny random model, greedy and seeded. We compare their tokens
with those of one undisturbed node. Every second a request is aborted, its client disconnects, or a
node is killed (SIGKILL) and restarted.

`right` requests had all their tokens. `aborted` ones had the right tokens until they were aborted,
and `failed` ones got a proper error while a node was gone. `faults` are requests with any other
end, such as a wrong token, and nodes that ended by themselves. `grown` processes hold more
descriptors, threads or memory after the run than before. An outage lasts from a kill until all
nodes serve again. The exit status is 1 if there are faults, if a process has grown, or if there
were fewer than `--kills` kills. One GPU is enough for `nvlink`, because all nodes share it.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

import backends  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from churn import Outcome, make_cases, run_churn  # noqa: E402

from pd.bench.report import write_report  # noqa: E402
from pd.transfer.registry import check_backend  # noqa: E402

BACKENDS = {backend.name: backend for backend in (*backends.PROCESSES, backends.NVLINK)}
# A kill every five seconds, if nodes are back by then.
EVENTS_PER_KILL = 5
# On a GPU: as exact as the node that gave the expected tokens, and few graphs to capture.
GPU_FLAGS = ("--dtype", "float32", "--max-running-requests", "16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, default="tcp")
    parser.add_argument("--devices", nargs="+", default=["cpu"], help="dealt out to the nodes")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20, help="at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", help="what else ran on the machine")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    check_backend(BACKENDS[args.backend].flag)
    outcome = measure(args)
    for fault in outcome.faults:
        print(fault, file=sys.stderr)
    for name, (before, after) in outcome.grown.items():
        print(f"{name} grew: {asdict(before)}, then {asdict(after)}", file=sys.stderr)
    row: dict[str, object] = {"backend": args.backend, "requests": args.requests}
    row |= outcome.summary
    row |= {"faults": len(outcome.faults), "grown": len(outcome.grown)}
    print(row)
    if args.output is not None:
        command = shlex.join(["python", "benchmarks/churn.py", *sys.argv[1:]])
        measured = ["pd", "benchmarks/churn.py", "tests/e2e/churn.py"]
        write_report(args.output, command, [row], measured=measured, note=args.note)
    failed = outcome.faults or outcome.grown or outcome.summary["kills"] < args.kills
    return 1 if failed else 0


def measure(args: argparse.Namespace) -> Outcome:
    """Measure one run."""
    gpu = any(device.startswith("cuda") for device in args.devices)
    with tempfile.TemporaryDirectory() as directory:
        model = make_checkpoint("qwen3", Path(directory, "model"))
        logs = Path(directory, "logs")
        logs.mkdir()
        return run_churn(
            model,
            logs,
            make_cases(model, random.Random(args.seed)),
            BACKENDS[args.backend],
            args.requests,
            args.seed,
            devices=args.devices,
            node_flags=GPU_FLAGS if gpu else (),
            events_per_kill=EVENTS_PER_KILL,
        )


if __name__ == "__main__":
    sys.exit(main())
