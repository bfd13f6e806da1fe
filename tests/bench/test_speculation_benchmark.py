"""Rows of ``benchmarks/speculation.py``, from results of `pd-bench engine` made by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from programs import import_program

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return import_program("benchmarks/speculation.py")


def settings(max_running: int, sizes: list[int] | None = None) -> dict[str, Any]:
    return {"max_running_requests": max_running, "cuda_graph_batch_sizes": sizes}


def test_the_largest_graph_of_drafts_has_the_most_tokens_of_a_step(program: ModuleType) -> None:
    assert program.largest_verified(settings(64), 3) == 256
    assert program.largest_verified(settings(256), 3) == 512
    assert program.largest_verified(settings(64, [1, 32]), 3) == 128
    assert program.largest_verified(settings(64, [0]), 3) == 0
    assert program.largest_verified(settings(64, []), 3) == 0


def test_verification_is_not_measured_where_no_graph_has_its_tokens(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With 64 sequences and 3 drafted tokens: 32 sequences of 5 tokens fit, 64 do not."""
    asked: list[str] = []

    def engine(_: list[str], work: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        asked.extend(work)
        rows = {
            name: {
                "context": 1024,
                "median_ms": 6.0 if name.endswith(":5") else 4.0,
                "tokens_per_s": 100.0,
                "acceptance_length": 2.88,
            }
            for name in work
        }
        return rows, settings(64)

    monkeypatch.setattr(program, "engine", engine)
    output = tmp_path / "speculation.json"
    monkeypatch.setattr(
        "sys.argv", ["speculation.py", "--batches", "32,64", "--output", str(output)]
    )
    assert program.main() == 0
    rows = json.loads(output.read_text())["results"]
    assert [(row["batch"], row["verify_ratio"]) for row in rows] == [(32, 1.5), (64, None)]
    assert [name for name in asked if name.startswith("verify")] == ["verify:32:1", "verify:32:5"]
