"""`scripts/split_benchmark.py` measures a split and unified nodes alike, in real processes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import split_benchmark

from pd.bench.serve import MixedLoad
from pd.bench.shapes import NAMES

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ["--model", NAMES[-1], "--devices", "cpu,cpu", "--node-flags", "--cpu-threads 1"]
LOAD = "streams=2,in=16,out=30,long=64,every=0.5,long_out=3,seconds=1"


@pytest.mark.full
def test_a_split_and_unified_nodes_are_asked_the_same(tmp_path: Path) -> None:
    output = tmp_path / "split.json"
    flags = ["--systems", "tcp,unified", "--kv-cache-tokens", "8192", "--unloaded", "48"]
    flags += ["--repeats", "2", "--load", LOAD, "--output", str(output)]
    assert split_benchmark.main([*SMALL, *flags]) == 0
    report = json.loads(output.read_text())
    assert set(report["settings"]) == {"start_s", "split, tcp", "unified x 2"}
    seen = {(row["system"], row["work"], row["metric"]) for row in report["results"]}
    for system in ("split, tcp", "unified x 2"):
        assert (system, "unloaded:48", "second token after the first") in seen
        assert (system, "load", "ITL of the streams") in seen
    assert ("prefill node alone", "unloaded:48", "first token") in seen
    for system in ("prefill node alone", "split, tcp"):
        assert (system, "unloaded:48", "prefill, as the node says") in seen
    assert ("split, tcp", "unloaded:48", "transfer that the second token waits for") in seen
    assert not any(row["system"].startswith("vLLM") for row in report["results"])


def test_rows_of_the_node_are_of_what_happened_between_two_looks() -> None:
    prefill, exposed = 'pd_stage_seconds_%s{stage="prefill"}', "pd_transfer_exposed_seconds_%s%s"
    nvlink, tcp = '{backend="nvlink"}', '{backend="tcp"}'

    def grown(seconds: float, waited: float) -> dict[str, float]:
        found = {prefill % "sum": seconds, prefill % "count": 1.0}
        found |= {exposed % ("sum", nvlink): waited, exposed % ("count", nvlink): 1.0}
        return found | {exposed % ("sum", tcp): 0.0, exposed % ("count", tcp): 0.0}

    prompts = [grown(0.1, 0.004), grown(0.1, 0.004), grown(0.4, 0.007), {}]
    rows = split_benchmark._node_rows("unloaded:8", prompts)
    assert [(r["metric"], r["count"], r["mean_ms"], r["p50_ms"], r["max_ms"]) for r in rows] == [
        ("prefill, as the node says", 3, 200.0, 100.0, 400.0),
        ("transfer that the second token waits for", 3, 5.0, 4.0, 7.0),
    ]
    assert split_benchmark._node_rows("unloaded:8", [{}]) == []


def test_reference_rows_stand_beside_the_same_load_alone() -> None:
    args: Any = split_benchmark.parse([])
    assert args.load == MixedLoad()
    assert {row["work"] for row in split_benchmark.reference(args)} == {
        "unloaded:1024",
        "unloaded:8192",
        "unloaded:32768",
        "load",
    }
    assert split_benchmark.reference(split_benchmark.parse(["--load", "streams=2"])) == []
    assert split_benchmark.reference(split_benchmark.parse(["--model", "embedded"])) == []


def test_wrong_systems_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        split_benchmark.parse(["--systems", "pigeons"])
    assert "--systems are backends or unified" in capsys.readouterr().err
