"""Run the JSON Schema test suite (draft 2020-12, without its optional tests).

We refuse every schema by name, or compile it as a node does and then check the suite's instances.
Instances are written like output: with the separators of our JSON, properties in the schema's
order, and integers without a fraction. "unnamed" counts valid instances that are rejected because
they have properties that the schema neither names nor explicitly allows (`additionalProperties`).
Output never has such properties, on purpose. `format` is asserted here, so schemas of the suite
that treat it as an annotation are refused.

    python benchmarks/json_schema_suite.py --output benchmarks/results/json_schema_suite.json
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import xgrammar

from pd.bench.report import write_report
from pd.grammar.xgrammar_library import Compiler, accepts_text
from pd.structured.schema_check import find_unenforced
from pd.structured.schema_walk import walk_schemas

ROOT = Path(__file__).resolve().parent.parent
SUITE = ROOT / "tests" / "grammar" / "json_schema_suite"
COLUMNS = (
    *("schemas", "refused", "supported", "compiled"),
    *("valid", "unnamed", "accepted", "invalid", "invalid_accepted"),
)
# Larger whole numbers are not exact.
_MAX_WHOLE = 1 << 53


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="result file")
    args = parser.parse_args()
    found, complaints = ask()
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    command = (
        "python benchmarks/json_schema_suite.py --output benchmarks/results/" + args.output.name
    )
    write_report(args.output, command, found, measured=["pd", "benchmarks/json_schema_suite.py"])


def ask() -> tuple[list[dict[str, Any]], list[str]]:
    """Run the suite; returns counts by file, their sums, and all deviations from the suite."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(tokens, vocab_size=257, stop_token_ids=[256])
    rows, complaints = [], []
    total: Counter[str] = Counter()
    for path in sorted(SUITE.glob("*.json")):
        counts: Counter[str] = Counter()
        for group in json.loads(path.read_text()):
            complaints += [f"{path.name}: {each}" for each in ask_group(group, info, counts)]
        rows.append({"file": path.name, **{name: counts[name] for name in COLUMNS}})
        total += counts
    return [*rows, {"file": "all", **{name: total[name] for name in COLUMNS}}], complaints


def ask_group(group: dict[str, Any], info: Any, counts: Counter[str]) -> list[str]:
    """Count the results of one schema; returns its deviations."""
    schema = group["schema"]
    counts["schemas"] += 1
    if find_unenforced(schema) is not None:
        counts["refused"] += 1
        return []
    counts["supported"] += 1
    try:
        compiled = Compiler(info).compile_text("json_schema", json.dumps(schema))
    except ValueError as error:
        return [f"{json.dumps(schema)} does not compile: {error}"]
    counts["compiled"] += 1
    complaints = []
    for test in group["tests"]:
        text = json.dumps(written(test["data"], schema), ensure_ascii=False)
        accepted = accepts_text(compiled, text)
        counts["valid" if test["valid"] else "invalid"] += 1
        if accepted:
            counts["accepted" if test["valid"] else "invalid_accepted"] += 1
        elif test["valid"] and has_unnamed(schema, test["data"]):
            counts["unnamed"] += 1
            continue
        if accepted != test["valid"]:
            did = "accepts" if accepted else "does not accept"
            complaints.append(f"{json.dumps(schema)} {did} {text}")
    return complaints


def written(value: Any, schema: Any) -> Any:
    """Write an instance as output writes it."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_WHOLE:
        return int(value)
    if isinstance(value, list):
        return [written(each, schema) for each in value]
    if isinstance(value, dict):
        order = {name: number for number, name in enumerate(names(schema))}
        ordered = sorted(value.items(), key=lambda item: order.get(item[0], len(order)))
        return {name: written(each, schema) for name, each in ordered}
    return value


def names(schema: Any) -> list[str]:
    """List property names in the schema's order, from all its depths."""
    found: list[str] = []
    for _, part in walk_schemas(schema):
        if not isinstance(part, dict):
            continue
        found += part.get("properties", {})
        for value in (part.get("const"), *part.get("enum", ())):
            found += value if isinstance(value, dict) else ()
        found += part.get("required", ())
    return list(dict.fromkeys(found))


def has_unnamed(schema: Any, value: Any) -> bool:
    """Return whether an instance is valid only because it may have properties without a name in the
    schema."""
    closed = copy.deepcopy(schema)
    for _, part in walk_schemas(closed):
        if isinstance(part, dict) and part.get("properties"):
            part.setdefault("additionalProperties", False)
    return not jsonschema.Draft202012Validator(closed).is_valid(value)


if __name__ == "__main__":
    main()
