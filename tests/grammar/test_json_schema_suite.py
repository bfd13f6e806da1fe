"""The JSON Schema test suite: nothing that is invalid is accepted, nearly all that is valid is."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "json_schema_suite.py"


def test_the_suite_is_enforced_and_the_page_says_so() -> None:
    spec = util.spec_from_file_location("json_schema_suite", PROGRAM)
    assert spec is not None and spec.loader is not None
    program = util.module_from_spec(spec)
    spec.loader.exec_module(program)
    rows, complaints = program.ask()
    total = rows[-1]
    assert total["schemas"] == 368
    assert total["invalid_accepted"] == 0
    assert total["compiled"] >= 0.95 * total["supported"], complaints
    assert total["accepted"] >= 0.99 * (total["valid"] - total["unnamed"]), complaints
    result = ROOT / "benchmarks" / "results" / "json_schema_suite.json"
    assert json.loads(result.read_text())["results"] == rows, "run benchmarks/json_schema_suite.py"
