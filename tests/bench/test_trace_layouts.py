"""Rows of ``benchmarks/trace_layouts.py``, from runs made by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from programs import import_program

from pd.bench.load.records import Record, write_records

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return import_program("benchmarks/trace_layouts.py")


def answered(ttft: float, gap: float = 0.01) -> Record:
    times = [ttft, ttft + gap]
    return Record(
        session=0, first=times[0], second=times[1], last=times[1], end=times[1], times=times,
        tokens=[1, 1], output_tokens=2, prompt_tokens=10, cached_tokens=5,
    )  # fmt: skip


def window(directory: Path, records: list[Record], *, valid: bool = True) -> Path:
    """The files of one run that the benchmark reads."""
    directory.mkdir()
    write_records(directory / "requests.jsonl", records)
    client = {"send_lag_p99_ms": 1.0, "cpu_share": 0.1}
    (directory / "summary.json").write_text(json.dumps({"valid": valid, "client": client}))
    return directory


def row(program: Any, rounds: list[list[Path]]) -> dict[str, Any]:
    case = program.Case("split", "1")
    kept = program.valid({case: rounds})[case]
    found: dict[str, Any] = program.row(case, rounds, kept, "ttft:150,itl:50")
    return found


def test_a_failed_request_met_no_objective(program, tmp_path) -> None:
    failed = Record(session=1, status="error", error_kind="http 429", end=0.1)
    records = [answered(0.1), answered(0.2), answered(0.1, gap=0.06), failed]
    found = row(program, [[window(tmp_path / "w", records)]])
    assert (found["goodput_share"], found["failed"]) == (0.25, 1)
    assert (found["ttft_share"], found["itl_share"]) == (0.5, 0.5)


def test_windows_of_a_round_are_pooled_and_rounds_have_a_median(program, tmp_path) -> None:
    """A median of two windows' medians would weigh one slow request like 99 fast ones."""
    fast, slow = [answered(0.1)] * 99, [answered(1.0)]
    rounds = [
        [window(tmp_path / "0a", fast), window(tmp_path / "0b", slow)],
        [window(tmp_path / "1a", slow), window(tmp_path / "1b", fast)],
        [window(tmp_path / "2a", slow), window(tmp_path / "2b", slow)],
    ]
    found = row(program, rounds)
    assert (found["ttft_p50_ms"], found["ttft_share"]) == (pytest.approx(100), 0.99)
    assert (found["ttft_p99.9_ms"], found["requests"]) == (pytest.approx(910.9), 100)
    assert (found["runs"], found["void"], found["cached_share"]) == (3, 0, 0.5)


def test_a_round_with_a_void_window_does_not_count(program, tmp_path) -> None:
    good = [window(tmp_path / "0a", [answered(0.1)]), window(tmp_path / "0b", [answered(0.1)])]
    void = [
        window(tmp_path / "1a", [answered(9.0)]),
        window(tmp_path / "1b", [answered(9.0)], valid=False),
    ]
    found = row(program, [good, void])
    assert (found["runs"], found["void"], found["ttft_p50_ms"]) == (1, 1, pytest.approx(100))
    with pytest.raises(SystemExit, match="bottleneck in every round of split at 1"):
        program.valid({program.Case("split", "1"): [void]})
