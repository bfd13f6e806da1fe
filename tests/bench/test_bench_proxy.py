"""``pd-bench proxy`` measures a real proxy in front of scripted nodes, and floors beside it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pd.bench.proxy import Streamed, added_seconds
from pd.bench.serve_client import BenchCompletion
from pd.cli import bench

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ["--rounds", "1", "--streams", "3", "--tokens", "6", "--step", "5", "--requests", "10"]


def test_every_work_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "proxy.json"
    assert bench(["proxy", *SMALL, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["results"]
    assert [(row["work"], row["system"]) for row in rows] == [
        ("request", "fastapi"),
        ("stream", "uvicorn"),
        ("stream", "transport"),
        ("request", "pd"),
        ("stream", "pd"),
        ("long text", "pd"),
        ("saturated", "pd"),
    ]
    for row in rows:
        assert row["cpu_us"] > 0
        if "added_p50_ms" in row:
            assert 0 < row["added_p50_ms"] <= row["added_p99_ms"] <= row["added_max_ms"]
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


def test_tokens_of_one_event_were_sent_one_after_the_other() -> None:
    answer = BenchCompletion(0.0, times=[1.0, 3.0], counts=[1, 2])
    found = Streamed([answer], ["r"], 0.0, 1.0, 3)
    assert added_seconds(found, {"r_0": [0.5, 1.5, 2.75]}) == [0.5, 1.5, 0.25]


@pytest.mark.parametrize("flag", ["--streams", "--tokens", "--requests", "--rounds", "--step"])
def test_nothing_to_measure_is_an_error(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["proxy", flag, "0"]) == 2
    assert "must be above 0" in capsys.readouterr().err
