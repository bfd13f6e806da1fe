"""The JSON Schema test suite: we accept no invalid instance, and nearly all valid ones."""

from __future__ import annotations

import json
from pathlib import Path

from programs import import_program

ROOT = Path(__file__).resolve().parents[2]


def test_the_suite_is_enforced_and_the_page_says_so() -> None:
    program = import_program("benchmarks/json_schema_suite.py")
    rows, complaints = program.ask()
    total = rows[-1]
    assert total["schemas"] == 368
    assert total["invalid_accepted"] == 0
    assert total["compiled"] >= 0.95 * total["supported"], complaints
    assert total["accepted"] >= 0.99 * (total["valid"] - total["unnamed"]), complaints
    result = ROOT / "benchmarks" / "results" / "json_schema_suite.json"
    assert json.loads(result.read_text())["results"] == rows, "run benchmarks/json_schema_suite.py"
