"""Measure how long a request waits for a grammar that is new to its node.

Schemas have 20 properties of mixed types and their own names. In `bounded` ones, one property in
ten on average is a string with a `maxLength` of 10, 20, 50 or 100. In `calls` the schema is that of
a function's parameters, in the structural tag of a required call. "first" is the first grammar of a
node, including the start of the compiling process. "new" is the median over many others, without
the first ten, because a process remembers parts that schemas have in common. "process MB" is the
memory of a compiling process before its first grammar and after its last. The vocabulary of 131,072
tokens is learned from the sources of installed Python packages.

    python benchmarks/grammar_compiling.py --output benchmarks/results/grammar_compiling.json
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401 - as every node has
from large_vocabulary import learn

from pd.bench.report import write_report
from pd.core.errors import PDError
from pd.core.grammar import Grammar
from pd.embedded import EMBEDDED_MODEL
from pd.grammar.compile_jobs import Vocabulary
from pd.grammar.compiler import CompileLimits
from pd.grammar.grammars import MAX_COMPILED_BYTES, Grammars
from pd.proxy.text.tools.families import HERMES
from pd.proxy.text.tools.functions import Function
from pd.proxy.text.tools.tags import make_grammar

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = CompileLimits(10.0, 1 << 30, MAX_COMPILED_BYTES)
LARGE = 131_072
_WARM_UP = 10
_LENGTHS = (10, 20, 50, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="result file")
    parser.add_argument("--count", type=int, default=100, help="schemas of each kind")
    parser.add_argument("--large-tokenizer", type=Path, help="tokenizer.json, instead of learning")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        large = args.large_tokenizer or learn(Path(directory) / "tokenizer.json", LARGE)
        for path, size in ((EMBEDDED_MODEL / "tokenizer.json", 2048), (large, LARGE)):
            vocabulary = Vocabulary(str(path), size, [2])
            rows += [measure(vocabulary, kind, args.count) for kind in KINDS]
    command = "python benchmarks/grammar_compiling.py --output benchmarks/results/"
    measured = ["pd", "benchmarks/grammar_compiling.py"]
    write_report(args.output, command + args.output.name, rows, measured=measured)


def measure(vocabulary: Vocabulary, schemas: str, count: int) -> dict[str, Any]:
    """Measure one row."""
    rng = random.Random(7)
    grammars = Grammars(vocabulary, LIMITS, 1 << 28)
    try:
        first = seconds(grammars, Grammar("regex", "a"))
        memory = [resident(grammars)]
        times = [
            seconds(grammars, KINDS[schemas](schema(rng, schemas != "unbounded")))
            for _ in range(count)
        ]
        memory.append(resident(grammars))
    finally:
        grammars.close()
    new = sorted(times[_WARM_UP:])
    return {
        "vocabulary": vocabulary.size,
        "schemas": schemas,
        "first_ms": round(first * 1e3),
        "new_ms": round(statistics.median(new) * 1e3, 1),
        "new_p95_ms": round(new[len(new) * 95 // 100] * 1e3, 1),
        "process_mb": f"{memory[0]} to {memory[1]}",
    }


def seconds(grammars: Grammars, grammar: Grammar) -> float:
    """Measure the time until a grammar can be used."""
    found: queue.Queue[object] = queue.Queue()
    began = time.monotonic()
    grammars.request_rules(grammar, found.put)
    answer = found.get(timeout=120)
    assert not isinstance(answer, PDError), answer
    return time.monotonic() - began


def resident(grammars: Grammars) -> int:
    """Read the memory of the largest compiling process."""
    sizes = []
    for compiler in grammars._compilers:
        child = compiler._child
        assert child is not None
        status = Path(f"/proc/{child.pid}/status").read_text()
        sizes.append(int(status.partition("VmRSS:")[2].split()[0]) >> 10)
    return max(sizes)


def schema(rng: random.Random, bounded: bool) -> dict[str, Any]:
    letters = "abcdefghijklmnopqrstuvwxyz_"
    names = [f"{''.join(rng.choices(letters, k=rng.randrange(3, 14)))}{i}" for i in range(20)]
    properties = {name: kind(rng, bounded) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required}


def kind(rng: random.Random, bounded: bool) -> dict[str, Any]:
    text = {"type": "string"}
    return rng.choice(
        [
            *(text, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}),
            {"enum": rng.sample(["red", "green", "blue", "one", "two", "three"], 3)},
            *({"type": "array", "items": text}, {"type": ["string", "null"]}),
            {**text, "maxLength": rng.choice(_LENGTHS)} if bounded else text,
            {"type": "string", "format": "date"},
            {"type": "object", "properties": {"a": text, "b": {"type": "integer"}}},
        ]
    )


def instance(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def call(schema: dict[str, Any]) -> Grammar:
    functions = [Function("function", schema, strict=True)]
    return make_grammar(HERMES.form.make_calls(functions, several=True), "tools")


KINDS: dict[str, Callable[[dict[str, Any]], Grammar]] = {
    "unbounded": instance,
    "bounded": instance,
    "calls": call,
}


if __name__ == "__main__":
    main()
