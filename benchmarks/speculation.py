"""Compare speculative decoding with none on the same GPU: tokens per second of a stream, by batch.

    python benchmarks/speculation.py [--batches 1,8,32,64] --output FILE [-- FLAGS]

Each row is a batch of `pd-bench engine`: the Llama-3.1-8B shape with an EAGLE-3-shaped head, dummy
weights, a context of 1,024 tokens on average, greedy, chains of `--drafted` tokens. Drafting and
verifying do their full work, and then as many tokens count as accepted as `--acceptance` says.

- `speedup`: tokens per second of a stream by those without speculation, from another process of the
  same run.
- `resting_ratio`: the same for a head whose drafts are all wrong, with adaptive draft lengths.
- `verify_ratio`: time of a step with 5 tokens per sequence by that of a plain step. It is null if
  the step exceeds the largest CUDA graph with drafts (`--drafted` + 1 tokens for each of
  `--max-running-requests`, at most 512), because its launches then take all the time.

Flags after `--` go to every `pd-bench engine`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from pd.bench.report import write_report  # noqa: E402
from pd.engine.step_graphs import MAX_VERIFIED  # noqa: E402

# Tokens of each sequence in a step whose time `verify_ratio` compares with a plain one.
VERIFIED = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--drafted", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=2.88)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    head = ["--speculative-algorithm", "eagle"]
    head += ["--speculative-draft-model", "llama-3.1-8b-eagle3"]
    head += ["--speculative-num-draft-tokens", str(args.drafted)]
    spec = [f"spec:{batch}:{args.drafted}" for batch in batches]
    adaptive = ["--speculative-adaptive", "on", "--simulate-acceptance", "1"]
    fixed = ["--speculative-adaptive", "off", "--simulate-acceptance", str(args.acceptance)]
    plain, settings = engine(args.flags, [f"decode:{batch}" for batch in batches])
    captured = largest_verified(settings, args.drafted)
    fitting = [batch for batch in batches if batch * VERIFIED <= captured]
    verify = [f"verify:{batch}:{tokens}" for batch in fitting for tokens in (1, VERIFIED)]
    drafting, _ = engine([*args.flags, *head, *fixed], [*spec, *verify])
    resting, _ = engine([*args.flags, *head, *adaptive], spec)
    rows = []
    for batch, name in zip(batches, spec, strict=True):
        none, with_head = plain[f"decode:{batch}"], drafting[name]
        rows.append(
            {
                "batch": batch,
                "context": with_head["context"],
                "none_ms": none["median_ms"],
                "step_ms": with_head["median_ms"],
                "acceptance_length": with_head["acceptance_length"],
                "none_tokens_per_s": round(none["tokens_per_s"] / batch, 1),
                "tokens_per_s": round(with_head["tokens_per_s"] / batch, 1),
                "speedup": with_head["tokens_per_s"] / none["tokens_per_s"],
                "resting_ratio": resting[name]["tokens_per_s"] / none["tokens_per_s"],
                "verify_ratio": verify_ratio(drafting, batch),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    command = shlex.join(["python", "benchmarks/speculation.py", *sys.argv[1:]])
    write_report(args.output, command, rows, measured=["pd", "benchmarks/speculation.py"])
    return 0


def largest_verified(settings: dict[str, Any], drafted: int) -> int:
    """Return the number of tokens of the largest CUDA graph with drafts, for a node with these
    settings of a result of `pd-bench engine`; 0 without graphs."""
    sizes = settings["cuda_graph_batch_sizes"]
    largest = settings["max_running_requests"] if sizes is None else max(sizes, default=0)
    return min(MAX_VERIFIED, largest * (drafted + 1))


def verify_ratio(rows: dict[str, Any], batch: int) -> float | None:
    """Divide the time of a step with several tokens per sequence by that of a plain step; None if
    either is missing."""
    several = rows.get(f"verify:{batch}:{VERIFIED}")
    if several is None:
        return None
    return float(several["median_ms"] / rows[f"verify:{batch}:1"]["median_ms"])


def engine(flags: list[str], work: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run `pd-bench engine`; returns its rows by work, and its settings. Ends the program if it
    fails."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "engine.json"
        program = "import sys; from pd.cli import bench; sys.exit(bench())"
        script = Path(directory) / "pd_bench.py"
        script.write_text(f'if __name__ == "__main__":\n    {program}\n')
        command = [sys.executable, str(script), "engine", "--model", "llama-3.1-8b"]
        command += [*flags, "--work", *work, "--output", str(output)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise SystemExit(f"failed: {shlex.join(command)}")
        report = json.loads(output.read_text())
        return {row["work"]: row for row in report["results"]}, report["settings"]


if __name__ == "__main__":
    sys.exit(main())
