"""Count the forward passes of documents under a JSON schema, with jump-forward and without.

    python benchmarks/jump_forward.py [--devices cuda:0 cuda:1] --output FILE [-- FLAGS]

The embedded model writes one document at a time at temperature 1. Proxy, prefill node and decode
node are real processes. Passes are the decode node's, which computes every token but the first. A
model of this size writes little sense, but the schema forces the same names and punctuation on any
model. Flags after `--` go to both nodes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from acceptance import counters, deployment  # noqa: E402

from pd.bench.report import write_report  # noqa: E402

_WORD = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {"first_name": _WORD, "last_name": _WORD, "age": {"type": "integer", "maximum": 120}},
    "weather": {
        "location": _WORD,
        "temperature_celsius": {"type": "number", "minimum": -50, "maximum": 50},
        "conditions": {"enum": ["sunny", "partly cloudy", "overcast", "rain", "snow"]},
        "warning_issued": {"type": "boolean"},
    },
    "list": {"items": {"type": "array", "items": _WORD, "minItems": 3, "maxItems": 6}},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=20, help="of each schema")
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"], metavar="DEVICE")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for jump_forward in (False, True):
        flags = [*args.flags, *(["--grammar-jump-forward"] if jump_forward else [])]
        with deployment("none", "off", args.devices, flags) as (proxy, decode):
            for name, properties in SCHEMAS.items():
                rows.append(measure(proxy, decode, name, properties, args.documents))
                rows[-1] |= {"jump_forward": jump_forward}
                print(json.dumps(rows[-1]), flush=True)
    command = shlex.join(["python", "benchmarks/jump_forward.py", *sys.argv[1:]])
    write_report(args.output, command, rows, measured=["pd", "benchmarks/jump_forward.py"])
    return 0


def measure(
    proxy: str, decode: str, name: str, properties: dict[str, Any], documents: int
) -> dict[str, Any]:
    """Return means over the documents of one schema."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    before, tokens, characters = counters(decode), 0, 0
    for seed in range(documents):
        sampling = {"max_new_tokens": 400, "sampling_seed": seed, "json_schema": schema}
        body = {"text": f"A {name} as JSON:", "sampling_params": sampling}
        response = httpx.post(f"{proxy}/generate", json=body, timeout=600)
        response.raise_for_status()
        json.loads(response.json()["text"])
        tokens += response.json()["meta_info"]["completion_tokens"]
        characters += len(response.json()["text"])
    after = counters(decode)
    passes, forced = (
        after[metric] - before[metric]
        for metric in ("pd_steps_total", "pd_grammar_forced_tokens_total")
    )
    return {
        "schema": name,
        "characters": characters / documents,
        "tokens": tokens / documents,
        "forced_tokens": forced / documents,
        "passes": passes / documents,
    }


if __name__ == "__main__":
    sys.exit(main())
