"""Write a trace of equal requests at even intervals that share no prefixes.

    python benchmarks/even_trace.py --input 8000 --output 2 --every 0.16 --requests 100 p.jsonl
    python benchmarks/even_trace.py --input 128 --output 400 --every 0.08 --requests 200 d.jsonl
    python benchmarks/trace_layouts.py --trace p.jsonl --layouts elastic unified split …

The format is that of Mooncake's traces, which `benchmarks/trace_layouts.py` reads. Use it for work
that is nearly all prefill or nearly all decode.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

# Tokens that one id of the format stands for.
_BLOCK = 512


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a trace of equal requests.")
    parser.add_argument("--input", type=int, required=True, help="tokens of a prompt")
    parser.add_argument("--output", type=int, required=True, help="tokens of an answer")
    parser.add_argument("--every", type=float, required=True, help="seconds between requests")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    blocks = -(-args.input // _BLOCK)
    with args.file.open("w") as file:
        for number in range(args.requests):
            row = {
                "timestamp": int(1000 * args.every * number),
                "input_length": args.input,
                "output_length": args.output,
                "hash_ids": list(range(number * blocks, (number + 1) * blocks)),
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
